"""Parts of the figures of loss landscapes and spectra: scales, panels, lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.core import (
    COLORMAP,
    COLORS,
    COLUMN,
    MARKERS,
    PAGE,
    SPAN,
    line_style,
    log_levels,
    require,
)
from fl_lightning.flatness.values import Array, Surface

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Scale:
    """Colours and levels that panels share.

    Attributes:
        norm: Maps values to colours.
        fill: Levels of the filled contours, 65 from the smallest value to the largest.
        lines: Levels of the contour lines.
        log: Whether the scale is logarithmic.
        cut: Whether values exceed the scale.
    """

    norm: Normalize
    fill: Array
    lines: Array
    log: bool
    cut: bool

    @classmethod
    def of(cls, grids: Sequence[Array]) -> Scale:
        """Returns the scale of one or more grids.

        Raises:
            UserError: If no value is finite.
        """
        from matplotlib.colors import LogNorm, Normalize
        from matplotlib.ticker import MaxNLocator

        values = np.concatenate([grid.ravel() for grid in grids])
        finite = values[np.isfinite(values)]
        require(len(finite) > 0, "loss", "not finite at any point", "measure on a smaller range")
        low, high = float(finite.min()), float(finite.max())
        if low > 0:  # a few divergent points must not hide the rest
            high = min(high, 1000 * float(np.median(finite)))
            low = max(low, 1e-4 * high)
        if high <= low:
            low, high = low - 0.5 * abs(low) - 1e-12, high + 0.5 * abs(high) + 1e-12
        log = low > 0 and high > SPAN * low
        lines = np.asarray(log_levels(low, high)) if log else np.asarray(MaxNLocator(7).tick_values(low, high))
        return cls(
            norm=(LogNorm if log else Normalize)(low, high),
            fill=(np.geomspace if log else np.linspace)(low, high, 65),
            lines=lines[(lines > low) & (lines < high)],
            log=log,
            cut=high < values[~np.isnan(values)].max(),
        )

    def clip(self, grid: Array) -> Array:
        """Returns the values, those beyond the scale replaced by its ends; NaN stays."""
        return np.asarray(np.clip(grid, self.fill[0], self.fill[-1]))

    def bar(self, figure: Figure, drawn: Any, panels: list[Axes], label: str) -> None:
        """Adds a colour bar at the right of the panels."""
        from matplotlib.ticker import FormatStrFormatter, NullLocator

        bar = figure.colorbar(drawn, ax=panels, ticks=self.lines, format=FormatStrFormatter("%g"), pad=0.02)
        bar.set_label(f"{label}, cut at {self.fill[-1]:.2g}" if self.cut else label)
        bar.ax.yaxis.set_minor_locator(NullLocator())


def new_figure(rows: int, columns: int, side: float = 1.9, bottom: float = 0.55) -> Figure:
    """Returns a figure as wide as one column of a paper, or two.

    Args:
        rows: Rows of panels.
        columns: Columns of panels.
        side: Height of a panel, in inches.
        bottom: Height of what is below the panels, in inches.
    """
    from matplotlib.figure import Figure

    width = COLUMN if columns == 1 else PAGE
    return Figure(figsize=(width, rows * (side + 0.3) + bottom), layout="compressed")


def panel_side(columns: int, bars: int) -> float:
    """Returns the width of a square panel, in inches, with room for labels and colour bars."""
    return ((COLUMN if columns == 1 else PAGE) - 0.5 - 0.65 * bars) / columns - 0.1


def label_outer(panels: Sequence[Axes], columns: int) -> None:
    """Keeps axis labels only at the left of each row and at the bottom of each column."""
    for i, axes in enumerate(panels):
        if i % columns:
            axes.set_ylabel("")
            axes.tick_params(labelleft=False)
        if i + columns < len(panels):
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False)


def line_styles() -> Iterator[dict[str, Any]]:
    """Returns colour, dashes and marker of each line in turn; the first 49 all differ."""
    n = len(COLORS)
    for i in range(n * n):
        yield {**line_style(i), "marker": MARKERS[i % n]}


def aspect(surface: Surface) -> float:
    """Returns height over width of a panel: that of the grid, or 1 if it is more than twice as long as wide."""
    ratio = float(np.ptp(surface.y) / np.ptp(surface.x))
    return ratio if 0.5 <= ratio <= 2 else 1.0


def draw_contour(axes: Axes, surface: Surface, z: Array, scale: Scale) -> Any:
    """Draws filled contours with lines, labelled unless paths would cross them; returns what a bar is made from."""
    from matplotlib.ticker import MaxNLocator

    drawn = axes.contourf(surface.x, surface.y, z, levels=scale.fill, norm=scale.norm, cmap=COLORMAP)
    drawn.set_edgecolor("face")  # or viewers show seams between the levels
    levels = scale.lines[(scale.lines > np.nanmin(z)) & (scale.lines < np.nanmax(z))]
    if len(levels):
        colors = ["white" if scale.norm(level) < 0.6 else "black" for level in levels]
        lines = axes.contour(surface.x, surface.y, z, levels=levels, colors=colors, linewidths=0.5)
        crossed = any(len(places.coordinates) > 1 for places in surface.models.values())
        if not crossed:
            axes.clabel(lines, fmt="%g", fontsize=7, inline_spacing=2)
    axes.set_box_aspect(aspect(surface))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    return drawn


def draw_3d(axes: Any, surface: Surface, z: Array, scale: Scale) -> Any:
    """Draws a surface in three dimensions; returns what a colour bar is made from."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.ticker import MaxNLocator

    x, y = np.meshgrid(surface.x, surface.y)
    axes.plot_surface(
        x,
        y,
        np.log10(z) if scale.log else z,  # mplot3d has no logarithmic axis
        facecolors=colormaps[COLORMAP](scale.norm(z)),
        rcount=len(y),
        ccount=len(x[0]),
        shade=False,
        linewidth=0,
        antialiased=False,
        rasterized=True,
    )
    ends = scale.fill[[0, -1]]
    axes.set_zlim(*(np.log10(ends) if scale.log else ends))
    every = scale.lines[:: -(-len(scale.lines) // 5) or 1]
    axes.set_zticks(np.log10(every) if scale.log else every, [f"{level:g}" for level in every])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(2, steps=[1, 2, 5, 10]))
        axis.labelpad = -5
    axes.tick_params(pad=-3)
    axes.tick_params(axis="z", pad=0)
    axes.set_box_aspect((1, 1, 0.75), zoom=0.9)
    return ScalarMappable(scale.norm, COLORMAP)


def draw_models(axes: Axes, surface: Surface) -> None:
    """Draws single models as markers, and trajectories as lines with a large marker at their end."""
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.5}
    for style, (label, places) in zip(line_styles(), surface.models.items(), strict=False):
        x, y = places.coordinates.T
        end = {"color": style["color"], "marker": style["marker"], "markersize": 6, "zorder": 4, **edge}
        if len(x) > 1:
            axes.plot(x, y, color="white", linewidth=2.2)
            axes.plot(x, y, label=label, **{**style, **edge, "markevery": max(len(x) // 8, 1)})
            axes.plot(x[-1:], y[-1:], **end)
        else:
            axes.plot(x, y, label=label, linestyle="none", **end)
