"""Figures of loss landscapes and Hessian spectra, for print.

Figures are as wide as one or two columns of a paper, no text is below 7 pt at that size, and colour is never the only
difference. Each function returns a ``matplotlib`` figure; `fl_lightning.core.figures.save_figure` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fl_lightning.core import (
    COLORMAP,
    COLORS,
    COLUMN,
    PAGE,
    SPAN,
    Axes,
    Figure,
    label_lines,
    log_levels,
    marked_style,
    new_figure,
    place_legend,
    require,
    scale_axis,
    wrapped,
)

if TYPE_CHECKING:  # a report draws spectra without torch
    from fl_lightning.flatness.values import Array, Interpolation, Perturbation, Surface


def plot_surface(
    surfaces: Mapping[str, Surface],
    kind: Literal["contour", "3d"] = "contour",
    *,
    labels: tuple[str, str] = ("$x$ (filter norms)", "$y$ (filter norms)"),
) -> Figure:
    """Draws surfaces of one or more models and data sets, a panel each, with common colours and levels.

    Contours also show the models and trajectories that a surface holds.

    Args:
        surfaces: The surfaces by the model's name, with the same data sets.
        kind: Filled contours with labelled lines, or a surface in three dimensions.
        labels: Labels of the two axes.

    Raises:
        UserError: If there is no surface, their data sets differ, or no value is finite.
    """
    require(len(surfaces) > 0, "surfaces", "none", "give at least one")
    sets = list(next(iter(surfaces.values())).loss)
    require(all(list(s.loss) == sets for s in surfaces.values()), "surfaces", "other data sets", "give the same ones")
    scale = Scale.of([s.loss[name] for s in surfaces.values() for name in sets])
    columns = len(surfaces) if len(sets) > 1 else min(len(surfaces), 4)
    rows = len(sets) if len(sets) > 1 else -(-len(surfaces) // columns)
    side = panel_side(columns, bars=1)
    with new_panels(rows, columns, side, bottom=0.3) as figure:
        panels: list[Axes] = []
        for name in sets:
            for label, surface in surfaces.items():
                axes = figure.add_subplot(rows, columns, len(panels) + 1, projection="3d" if kind == "3d" else None)
                draw = draw_3d if kind == "3d" else draw_contour
                drawn = draw(axes, surface, scale.clip(surface.loss[name]), scale)
                if kind == "contour" or len(panels) // columns == rows - 1:
                    axes.set(xlabel=labels[0], ylabel=labels[1])
                axes.set_title(wrapped(label if len(sets) == 1 else f"{label}, {name}", side))
                panels.append(axes)
        if kind == "contour":
            place_legend(figure, always=True)
            label_outer(panels, columns)
        scale.bar(figure, drawn, panels, "loss")
    return figure


def plot_plane(
    surface: Surface,
    *,
    total: bool = False,
    labels: tuple[str, str] = ("$u$ (weight units)", "$v$ (weight units)"),
) -> Figure:
    """Draws a plane through models, with their places and trajectories: a panel and its own colours per data set.

    Both axes have the same scale, unless the plane is more than twice as long as wide.

    Args:
        surface: The loss over the plane; its ``models`` are drawn.
        total: Add a panel: the sum of the losses, each scaled to [0, 1] (FedGMT Fig. 6c).
        labels: Labels of the two axes.

    Raises:
        UserError: If no value is finite.
    """
    grids = {name: (loss, "loss") for name, loss in surface.loss.items()}
    if total:
        grids["sum"] = (surface.normalized_sum(), "sum of scaled losses")
    columns, rows = min(len(grids), 2), -(-len(grids) // 2)
    with new_panels(rows, columns, panel_side(columns, bars=columns) * min(aspect(surface), 1.0), bottom=0.6) as figure:
        panels = list[Axes]()
        for i, (name, (grid, label)) in enumerate(grids.items(), start=1):
            axes = figure.add_subplot(rows, columns, i, title=name, xlabel=labels[0], ylabel=labels[1])
            scale = Scale.of([grid], SPAN if name in surface.loss else np.inf)
            scale.bar(figure, draw_contour(axes, surface, scale.clip(grid), scale), [axes], label)
            panels.append(axes)
        label_outer(panels, columns)
        place_legend(figure, always=True)
    return figure


def plot_interpolation(results: Mapping[str, Interpolation], ends: tuple[str, str] = ("$w_b$", "$w_a$")) -> Figure:
    """Draws loss, and accuracy if there is one, on lines between two models; the legend holds the barriers.

    Args:
        results: The interpolations by name; the name of a single one is not shown.
        ends: Names of the models at γ = 0 and γ = 1.
    """
    lines = [(label, name, r) for label, r in results.items() for name in r.loss]
    with_accuracy = any(np.isfinite(r.accuracy[name]).any() for r in results.values() for name in r.accuracy)
    with new_panels(1, 2 if with_accuracy else 1) as figure:
        loss = figure.add_subplot(1, 2 if with_accuracy else 1, 1, ylabel="loss")
        accuracy = figure.add_subplot(1, 2, 2, ylabel="accuracy (%)") if with_accuracy else None
        for style, (label, name, r) in zip(line_styles(), lines, strict=False):
            text = name if len(results) == 1 else f"{label}, {name}"
            style["markevery"] = max(len(r.gammas) // 12, 1)
            loss.plot(r.gammas, r.loss[name], label=f"{text} (barrier {r.barrier(name):.3g})", **style)
            if accuracy is not None:
                accuracy.plot(r.gammas, 100 * r.accuracy[name], **style)
        scale_axis(loss.yaxis, np.concatenate([losses for r in results.values() for losses in r.loss.values()]))
        for axes in filter(None, (loss, accuracy)):
            axes.set_xlabel("$\\gamma$")
            for end in (0, 1):
                axes.axvline(end, color="0.5", linewidth=0.6, zorder=0)
        place_legend(figure, always=True, title=f"γ = 0: {ends[0]}, γ = 1: {ends[1]}")
    return figure


def plot_perturbation(results: Mapping[str, Perturbation]) -> Figure:
    """Draws loss against the length of a perturbation, along the gradient and random directions (mean ± deviation).

    Args:
        results: The curves by the model's name.
    """
    lines = [(label, name, r) for label, r in results.items() for name in r.loss]
    several = len({name for _, name, _ in lines}) > 1
    with new_panels(1, 2) as figure:
        steepest = figure.add_subplot(1, 2, 1, title="along the gradient", xlabel="$r$ (weight units)", ylabel="loss")
        k = len(next(iter(next(iter(results.values())).loss.values()))) - 1
        random = figure.add_subplot(1, 2, 2, title=f"{k} random directions", xlabel="$r$ (filter norms)")
        for style, (label, name, r) in zip(line_styles(), lines, strict=False):
            style["markevery"] = max(len(r.radii) // 8, 1)
            mean, spread = r.mean(name), r.spread(name)
            steepest.plot(r.radii, r.along_gradient(name), label=f"{label}, {name}" if several else label, **style)
            random.plot(r.radii, mean, **style)
            random.fill_between(r.radii, mean - spread, mean + spread, color=style["color"], alpha=0.2, linewidth=0)
        kind = type(next(iter(results.values())))
        for axes, drawn in ((steepest, kind.along_gradient), (random, kind.mean)):
            scale_axis(axes.yaxis, np.concatenate([drawn(r, name) for r in results.values() for name in r.loss]))
        place_legend(figure, always=True)
    return figure


def plot_spectrum(eigenvalues: Mapping[str, ArrayLike]) -> Figure:
    """Draws eigenvalues, largest first; logarithmic, and linear around zero if some are not positive.

    Args:
        eigenvalues: ``(k,)`` by the model's name, in any order.
    """
    from matplotlib.ticker import MaxNLocator

    spectra = {label: np.sort(np.asarray(values, dtype=np.float64))[::-1] for label, values in eigenvalues.items()}
    longest = max(map(len, spectra.values()))
    with new_panels(1, 1) as figure:
        title = wrapped(next(iter(spectra)), 2.6) if len(spectra) == 1 else ""
        axes = figure.add_subplot(title=title, xlabel="index $i$", ylabel="eigenvalue $\\lambda_i$")
        for style, (label, values) in zip(line_styles(), spectra.items(), strict=False):
            style["markevery"] = max(len(values) // 60, 1)
            axes.plot(np.arange(1, len(values) + 1), values, label=label, **style)
        values = np.concatenate(list(spectra.values()))
        if values.min() <= 0:
            axes.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(max(np.abs(values).max(), 1e-12)) - 3))
            axes.axhline(0, color="0.5", linewidth=0.6, zorder=0)
        else:
            scale_axis(axes.yaxis, values)
        ticks = MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]).tick_values(1, longest)
        axes.set_xticks(sorted({max(tick, 1) for tick in ticks if tick <= longest}))
        place_legend(figure)
    return figure


def plot_density(densities: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Figure:
    """Draws the density of eigenvalues, logarithmic, over six decades.

    Args:
        densities: By the model's name the eigenvalues ``(n,)`` and the density there ``(n,)``.
    """
    with new_panels(1, 1) as figure:
        title = wrapped(next(iter(densities)), 2.6) if len(densities) == 1 else ""
        axes = figure.add_subplot(title=title, xlabel="eigenvalue $\\lambda$", ylabel="density", yscale="log")
        values = np.concatenate([np.ravel(density) for _, density in densities.values()])
        top = float(np.max(values, where=np.isfinite(values), initial=0.0))
        for style, (label, (at, density)) in zip(line_styles(), densities.items(), strict=False):
            axes.plot(at, density, label=label, **{**style, "marker": None})
        if top > 0:  # a matrix that is not finite has no density
            axes.set_ylim(top * 1e-6, top * 2)
        place_legend(figure)
    return figure


# Parts of the figures: scales, panels, lines


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

    norm: Any
    fill: Array
    lines: Array
    log: bool
    cut: bool

    @classmethod
    def of(cls, grids: Sequence[Array], span: float = SPAN) -> Scale:
        """Returns the scale of one or more grids.

        Args:
            grids: The grids.
            span: Values whose ratio of largest to smallest exceeds this have a logarithmic scale.

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
        log = low > 0 and high > span * low
        lines = np.asarray(log_levels(low, high)) if log else np.asarray(MaxNLocator(7).tick_values(low, high))
        return cls(
            norm=(LogNorm if log else Normalize)(low, high),
            fill=(np.geomspace if log else np.linspace)(low, high, 65),
            lines=lines[(lines > low) & (lines < high)],
            log=log,
            cut=high < values[~np.isnan(values)].max(),
        )

    @cached_property
    def form(self) -> str:
        """The format of the levels: with as many digits as tell them apart."""
        tolerance = 0.01 * np.diff(self.lines).min(initial=np.inf)
        digits = range(6, 18)
        return next(f for n in digits if all(abs(float((f := f"%.{n}g") % v) - v) <= tolerance for v in self.lines))

    def clip(self, grid: Array) -> Array:
        """Returns the values, those beyond the scale replaced by its ends; NaN stays."""
        return np.asarray(np.clip(grid, self.fill[0], self.fill[-1]))

    def bar(self, figure: Figure, drawn: Any, panels: list[Axes], label: str) -> None:
        """Adds a colour bar at the right of the panels."""
        from matplotlib.ticker import FormatStrFormatter, NullLocator

        bar = figure.colorbar(drawn, ax=panels, ticks=self.lines, format=FormatStrFormatter(self.form), pad=0.02)
        bar.set_label(f"{label}, cut at {self.fill[-1]:.2g}" if self.cut else label)
        bar.ax.yaxis.set_minor_locator(NullLocator())


def new_panels(rows: int, columns: int, side: float = 1.9, bottom: float = 0.55) -> AbstractContextManager[Figure]:
    """Makes a figure as wide as one column of a paper, or two; see `fl_lightning.core.figures.new_figure`.

    Args:
        rows: Rows of panels.
        columns: Columns of panels.
        side: Height of a panel, in inches.
        bottom: Height of what is below the panels, in inches.
    """
    return new_figure(COLUMN if columns == 1 else PAGE, rows * (side + 0.3) + bottom, "compressed")


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
    return map(marked_style, range(len(COLORS) ** 2))


def aspect(surface: Surface) -> float:
    """Returns height over width of a panel: that of the grid, or 1 if it is more than twice as long as wide."""
    ratio = float(np.ptp(surface.y) / np.ptp(surface.x))
    return ratio if 0.5 <= ratio <= 2 else 1.0


def draw_contour(axes: Axes, surface: Surface, z: Array, scale: Scale) -> Any:
    """Draws filled contours and models, and lines labelled unless paths would cross them; returns what a bar needs."""
    drawn = axes.contourf(surface.x, surface.y, z, levels=scale.fill, norm=scale.norm, cmap=COLORMAP)
    drawn.set_edgecolor("face")  # or viewers show seams between the levels
    levels = scale.lines[(scale.lines > np.nanmin(z)) & (scale.lines < np.nanmax(z))]
    if len(levels):
        colors = ["white" if scale.norm(level) < 0.6 else "black" for level in levels]
        lines = axes.contour(surface.x, surface.y, z, levels=levels, colors=colors, linewidths=0.5)
        if not any(len(places.coordinates) > 1 for places in surface.models.values()):
            label_lines(axes, lines, scale.form)
    axes.set_box_aspect(aspect(surface))
    axes.locator_params(nbins=5, steps=[1, 2, 5, 10])
    draw_models(axes, surface)
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
    ticks = scale.lines[:: -(-len(scale.lines) // 5) or 1]
    axes.set_zticks(np.log10(ticks) if scale.log else ticks, [scale.form % level for level in ticks])
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
