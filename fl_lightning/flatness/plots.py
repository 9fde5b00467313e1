"""Figures of loss landscapes and Hessian spectra, to be printed.

Widths are those of one or two columns of a paper, no text is below 7 pt at that size, and what colour tells, line
style, marker or a label tells as well. Each function returns a ``matplotlib`` figure; `fl_lightning.core.figures.save_figure` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fl_lightning.core.errors import require
from fl_lightning.core.figures import COLORMAP, COLORS, COLUMN, DASHES, MARKERS, PAGE, STYLE
from fl_lightning.flatness.landscape import Array, Interpolation, Perturbation, Surface

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

SPAN = 20.0
"""Losses whose largest is so many times the smallest are drawn on a logarithmic scale."""


def plot_surface(
    surfaces: Mapping[str, Surface],
    kind: Literal["contour", "3d"] = "contour",
    *,
    labels: tuple[str, str] = ("$x$ (filter norms)", "$y$ (filter norms)"),
) -> Figure:
    """Surfaces of one or more models and data sets, a panel each, all on one scale of colours and levels.

    Models that a surface holds are marked, trajectories drawn (in contours).

    Args:
        surfaces: The surfaces by the model's name, with the same data sets.
        kind: Filled contours with labelled lines, or a surface in three dimensions.
        labels: Of the two axes.

    Raises:
        UserError: If there is no surface, their data sets differ, or no value is finite.
    """
    require(len(surfaces) > 0, "surfaces", "none", "give at least one")
    sets = list(next(iter(surfaces.values())).loss)
    require(all(list(s.loss) == sets for s in surfaces.values()), "surfaces", "other data sets", "give the same ones")
    scale = _Scale.of([s.loss[name] for s in surfaces.values() for name in sets])
    columns = len(surfaces) if len(sets) > 1 else min(len(surfaces), 4)
    rows = len(sets) if len(sets) > 1 else -(-len(surfaces) // columns)
    with _style():
        figure = _figure(rows, columns, side=_side(columns, bars=1), bottom=0.3)
        panels: list[Axes] = []
        for name in sets:
            for label, surface in surfaces.items():
                place = (rows, columns, len(panels) + 1)
                title = label if len(sets) == 1 else f"{label}, {name}"
                if kind == "3d":
                    axes = figure.add_subplot(*place, projection="3d", title=title)
                    drawn = _draw_3d(axes, surface, scale.clip(surface.loss[name]), scale)
                else:
                    axes = figure.add_subplot(*place, title=title)
                    drawn = _draw_contour(axes, surface, scale.clip(surface.loss[name]), scale)
                    _draw_models(axes, surface)
                axes.set(xlabel=labels[0], ylabel=labels[1])
                panels.append(axes)
        if kind == "contour":
            _legend(figure, panels[0])
            _label_outer(panels, columns)
        scale.bar(figure, drawn, panels, "loss")
    return figure


def plot_plane(
    surface: Surface,
    *,
    total: bool = False,
    labels: tuple[str, str] = ("$u$ (weight units)", "$v$ (weight units)"),
) -> Figure:
    """A plane through models, with their places and trajectories: a panel for each data set, on its own colour scale.

    Both axes have one scale, unless the plane is more than twice as long as wide.

    Args:
        surface: The loss over the plane; its ``models`` are drawn.
        total: One more panel: the sum of the losses, each scaled to [0, 1] (FedGMT Fig. 6c).
        labels: Of the two axes.

    Raises:
        UserError: If no value is finite.
    """
    grids = {name: (loss, "loss") for name, loss in surface.loss.items()}
    if total:
        grids["sum"] = (surface.normalized_sum(), "sum of scaled losses")
    columns = min(len(grids), 3)
    rows = -(-len(grids) // columns)
    with _style():
        figure = _figure(rows, columns, side=_side(columns, bars=columns), bottom=0.5)
        panels: list[Axes] = []
        for i, (name, (grid, label)) in enumerate(grids.items(), start=1):
            axes = figure.add_subplot(rows, columns, i, title=name, xlabel=labels[0], ylabel=labels[1])
            scale = _Scale.of([grid])
            drawn = _draw_contour(axes, surface, scale.clip(grid), scale)
            _draw_models(axes, surface)
            scale.bar(figure, drawn, [axes], label)
            panels.append(axes)
        _label_outer(panels, columns)
        _legend(figure, panels[0])
    return figure


def plot_interpolation(results: Mapping[str, Interpolation], ends: tuple[str, str] = ("$w_b$", "$w_a$")) -> Figure:
    """Loss, and accuracy if there is one, on lines between two models; the legend tells the barriers.

    Args:
        results: The interpolations by name; the name of a lone one is not shown.
        ends: Names of the models at γ = 0 and γ = 1.
    """
    lines = [(label, name) for label, r in results.items() for name in r.loss]
    with_accuracy = any(np.isfinite(r.accuracy[name]).any() for r in results.values() for name in r.accuracy)
    with _style():
        figure = _figure(1, 2 if with_accuracy else 1)
        loss = figure.add_subplot(1, 2 if with_accuracy else 1, 1, ylabel="loss")
        accuracy = figure.add_subplot(1, 2, 2, ylabel="accuracy (%)") if with_accuracy else None
        for style, (label, name) in zip(_line_styles(), lines, strict=False):
            r = results[label]
            text = name if len(results) == 1 else f"{label}, {name}"
            style["markevery"] = max(len(r.gammas) // 12, 1)
            loss.plot(r.gammas, r.loss[name], label=f"{text} (barrier {r.barrier(name):.3g})", **style)
            if accuracy is not None:
                accuracy.plot(r.gammas, 100 * r.accuracy[name], **style)
        _scale_y(loss, [r.loss[name] for r in results.values() for name in r.loss])
        for axes in filter(None, (loss, accuracy)):
            axes.set_xlabel(f"$\\gamma$ (0: {ends[0]}, 1: {ends[1]})")
            for end in (0, 1):
                axes.axvline(end, color="0.5", linewidth=0.6, zorder=0)
        _legend(figure, loss)
    return figure


def plot_perturbation(results: Mapping[str, Perturbation]) -> Figure:
    """Loss against the length of a perturbation: along the gradient, and over random directions (mean ± deviation).

    Args:
        results: The curves by the model's name.
    """
    lines = [(label, name) for label, r in results.items() for name in r.loss]
    with _style():
        figure = _figure(1, 2)
        steepest = figure.add_subplot(1, 2, 1, title="along the gradient", xlabel="$r$ (weight units)", ylabel="loss")
        k = len(next(iter(next(iter(results.values())).loss.values()))) - 1
        random = figure.add_subplot(1, 2, 2, title=f"{k} random directions", xlabel="$r$ (filter norms)")
        for style, (label, name) in zip(_line_styles(), lines, strict=False):
            r = results[label]
            sets = {name for result in results.values() for name in result.loss}
            text = ", ".join(part for part, many in ((label, len(results) > 1), (name, len(sets) > 1)) if many)
            style["markevery"] = max(len(r.radii) // 8, 1)
            mean, spread = r.mean(name), r.spread(name)
            steepest.plot(r.radii, r.along_gradient(name), label=text or name, **style)
            random.plot(r.radii, mean, **style)
            random.fill_between(r.radii, mean - spread, mean + spread, color=style["color"], alpha=0.2, linewidth=0)
        _scale_y(steepest, [r.along_gradient(name) for r in results.values() for name in r.loss])
        _scale_y(random, [r.mean(name) for r in results.values() for name in r.loss])
        _legend(figure, steepest)
    return figure


def plot_spectrum(eigenvalues: Mapping[str, ArrayLike]) -> Figure:
    """Eigenvalues of the Hessian, largest first; logarithmic, and linear around zero if some are not positive.

    Args:
        eigenvalues: ``(k,)`` by the model's name, in any order.
    """
    from matplotlib.ticker import MaxNLocator

    spectra = {label: np.sort(np.asarray(values, dtype=np.float64))[::-1] for label, values in eigenvalues.items()}
    with _style():
        figure = _figure(1, 1)
        axes = figure.add_subplot(xlabel="index", ylabel="eigenvalue $\\lambda_i$")
        for style, (label, values) in zip(_line_styles(), spectra.items(), strict=False):
            style["markevery"] = max(len(values) // 25, 1)
            axes.plot(np.arange(1, len(values) + 1), values, label=label, **style)
        values = np.concatenate(list(spectra.values()))
        if values.min() <= 0:
            axes.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(max(np.abs(values).max(), 1e-12)) - 3))
            axes.axhline(0, color="0.5", linewidth=0.6, zorder=0)
        else:
            _scale_y(axes, [values])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, axes)
    return figure


def plot_density(densities: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Figure:
    """Density of the Hessian's eigenvalues, logarithmic, over six decades.

    Args:
        densities: By the model's name the eigenvalues ``(n,)`` and the density there ``(n,)``.
    """
    with _style():
        figure = _figure(1, 1)
        axes = figure.add_subplot(xlabel="eigenvalue $\\lambda$", ylabel="density", yscale="log")
        top = max(float(np.max(np.asarray(density))) for _, density in densities.values())
        for style, (label, (at, density)) in zip(_line_styles(), densities.items(), strict=False):
            axes.plot(at, density, label=label, **{**style, "marker": None})
        axes.set_ylim(top * 1e-6, top * 2)
        _legend(figure, axes)
    return figure


# Parts


@dataclass(frozen=True)
class _Scale:
    """Colours and levels that panels share."""

    norm: Normalize
    fill: Array
    lines: Array
    log: bool
    cut: bool

    @classmethod
    def of(cls, grids: Sequence[Array]) -> _Scale:
        from matplotlib.colors import LogNorm, Normalize
        from matplotlib.ticker import MaxNLocator

        values = np.concatenate([grid.ravel() for grid in grids])
        finite = values[np.isfinite(values)]
        require(len(finite) > 0, "loss", "not finite at any point", "measure on a smaller range")
        low, high = float(finite.min()), float(finite.max())
        if low > 0:  # a few points that blow up must not hide the rest
            high = min(high, 1000 * float(np.median(finite)))
            low = max(low, 1e-4 * high)
        if high <= low:
            low, high = low - 0.5 * abs(low) - 1e-12, high + 0.5 * abs(high) + 1e-12
        log = low > 0 and high > SPAN * low
        lines = _log_levels(low, high) if log else np.asarray(MaxNLocator(7).tick_values(low, high))
        return cls(
            norm=(LogNorm if log else Normalize)(low, high),
            fill=(np.geomspace if log else np.linspace)(low, high, 65),
            lines=lines[(lines > low) & (lines < high)],
            log=log,
            cut=high < values[~np.isnan(values)].max(),
        )

    def clip(self, grid: Array) -> Array:
        """Values beyond the scale become its ends; NaN stays."""
        clipped: Array = np.clip(grid, self.fill[0], self.fill[-1])
        return clipped

    def bar(self, figure: Figure, drawn: Any, panels: list[Axes], label: str) -> None:
        from matplotlib.ticker import FormatStrFormatter, NullLocator

        bar = figure.colorbar(drawn, ax=panels, ticks=self.lines, format=FormatStrFormatter("%g"), pad=0.02)
        bar.set_label(f"{label}, cut at {self.fill[-1]:.2g}" if self.cut else label)
        bar.ax.yaxis.set_minor_locator(NullLocator())


def _style() -> Any:
    import matplotlib

    return matplotlib.rc_context(STYLE)


def _figure(rows: int, columns: int, side: float = 1.9, bottom: float = 0.55) -> Figure:
    """As wide as one column of a paper, or as two; ``rows`` panels of height ``side``, and room for what is below."""
    from matplotlib.figure import Figure

    width = COLUMN if columns == 1 else PAGE
    return Figure(figsize=(width, rows * (side + 0.3) + bottom), layout="compressed")


def _side(columns: int, bars: int) -> float:
    """Width of a square panel, in inches, that leaves room for labels and colour bars."""
    return ((COLUMN if columns == 1 else PAGE) - 0.5 - 0.65 * bars) / columns - 0.1


def _label_outer(panels: Sequence[Axes], columns: int) -> None:
    """Labels at the left of a row and at the foot of a column only, also where the last row is not full."""
    for i, axes in enumerate(panels):
        if i % columns:
            axes.set_ylabel("")
            axes.tick_params(labelleft=False)
        if i + columns < len(panels):
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False)


def _line_styles() -> Iterator[dict[str, Any]]:
    """Colour, dashes and marker of one line after the other; no two of the first 49 are the same."""
    n = len(COLORS)
    for i in range(n * n):
        yield {"color": COLORS[i % n], "linestyle": DASHES[(i + i // n) % n], "marker": MARKERS[i % n]}


def _log_levels(low: float, high: float) -> Array:
    """Round numbers between two positive ones, ten or so, evenly spaced on a logarithmic scale."""
    from matplotlib.ticker import LogLocator

    ratio = high / low
    subs = (1, 1.5, 2, 3, 5, 7) if ratio < 30 else (1, 2, 5) if ratio < 2000 else (1, 3) if ratio < 1e5 else (1,)
    levels: Array = np.asarray(LogLocator(subs=subs, numticks=50).tick_values(low, high))
    return levels


def _scale_y(axes: Axes, values: Sequence[Array]) -> None:
    """A logarithmic axis if the values ask for one."""
    from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

    finite = np.concatenate(list(values))
    finite = finite[np.isfinite(finite)]
    if len(finite) and finite.min() > 0 and finite.max() > SPAN * finite.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(_log_levels(*axes.get_ylim()).tolist()))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(NullLocator())


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the panels, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1 or (handles and "barrier" in labels[0]):
        columns = 2 if figure.get_figwidth() == COLUMN else 4
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(handles), columns), frameon=False)


def _draw_contour(axes: Axes, surface: Surface, z: Array, scale: _Scale) -> Any:
    from matplotlib.ticker import MaxNLocator

    drawn = axes.contourf(surface.x, surface.y, z, levels=scale.fill, norm=scale.norm, cmap=COLORMAP)
    drawn.set_edgecolor("face")  # else a viewer shows the seams between the levels
    levels = scale.lines[(scale.lines > np.nanmin(z)) & (scale.lines < np.nanmax(z))]
    if len(levels):
        colors = ["white" if scale.norm(level) < 0.6 else "black" for level in levels]
        lines = axes.contour(surface.x, surface.y, z, levels=levels, colors=colors, linewidths=0.5)
        axes.clabel(lines, levels[:: 1 if len(levels) < 7 else 2], fmt="%g", fontsize=7, inline_spacing=2)
    wide, high = np.ptp(surface.x), np.ptp(surface.y)
    axes.set_box_aspect(high / wide if 0.5 <= high / wide <= 2 else 1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    return drawn


def _draw_3d(axes: Any, surface: Surface, z: Array, scale: _Scale) -> Any:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.ticker import MaxNLocator

    x, y = np.meshgrid(surface.x, surface.y)
    axes.plot_surface(
        x,
        y,
        np.log10(z) if scale.log else z,  # mplot3d knows no logarithmic axis
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
    axes.set_box_aspect((1, 1, 0.75), zoom=0.9)
    return ScalarMappable(scale.norm, COLORMAP)


def _draw_models(axes: Axes, surface: Surface) -> None:
    """Single models as markers; trajectories as lines with a large marker at their end."""
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.5}
    for style, (label, places) in zip(_line_styles(), surface.models.items(), strict=False):
        x, y = places.coordinates.T
        end = {"color": style["color"], "marker": style["marker"], "markersize": 6, "zorder": 4, **edge}
        if len(x) > 1:
            axes.plot(x, y, color="white", linewidth=2.2)
            axes.plot(x, y, label=label, **{**style, **edge, "markevery": max(len(x) // 8, 1)})
            axes.plot(x[-1:], y[-1:], **end)
        else:
            axes.plot(x, y, label=label, linestyle="none", **end)
