"""Figures of loss landscapes and Hessian spectra, for print.

Figures are as wide as one or two columns of a paper, no text is below 7 pt at that size, and colour is never the only
difference. Each function returns a ``matplotlib`` figure; `fl_lightning.core.figures.save_figure` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import ArrayLike

from fl_lightning.core import require, style
from fl_lightning.flatness.drawing import (
    Scale,
    aspect,
    draw_3d,
    draw_contour,
    draw_models,
    head,
    label_outer,
    legend,
    line_styles,
    new_figure,
    panel_side,
    scale_y,
    wrapped,
)
from fl_lightning.flatness.values import Interpolation, Perturbation, Surface

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_surface(
    surfaces: Mapping[str, Surface],
    kind: Literal["contour", "3d"] = "contour",
    *,
    labels: tuple[str, str] = ("$x$ (filter norms)", "$y$ (filter norms)"),
) -> Figure:
    """Surfaces of one or more models and data sets, a panel each, with common colours and levels.

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
    with style():
        names = 0.25 if len(sets) > 1 else 0.0  # those of the rows take width from the panels
        figure = new_figure(rows, columns, side - names, bottom=0.3 + names)
        panels: list[Axes] = []
        for name in sets:
            for surface in surfaces.values():
                place = (rows, columns, len(panels) + 1)
                if kind == "3d":
                    axes = figure.add_subplot(*place, projection="3d")
                    drawn = draw_3d(axes, surface, scale.clip(surface.loss[name]), scale)
                else:
                    axes = figure.add_subplot(*place)
                    drawn = draw_contour(axes, surface, scale.clip(surface.loss[name]), scale)
                    draw_models(axes, surface)
                if kind == "contour" or len(panels) // columns == rows - 1:
                    axes.set(xlabel=labels[0], ylabel=labels[1])
                panels.append(axes)
        if len(sets) > 1:
            head(panels, list(surfaces), sets, side)
        else:
            for axes, label in zip(panels, surfaces, strict=True):
                axes.set_title(wrapped(label, side))
        if kind == "contour":
            legend(figure, panels[0])
            label_outer(panels, columns)
        scale.bar(figure, drawn, panels, "loss")
    return figure


def plot_plane(
    surface: Surface,
    *,
    total: bool = False,
    labels: tuple[str, str] = ("$u$ (weight units)", "$v$ (weight units)"),
) -> Figure:
    """A plane through models, with their places and trajectories: a panel per data set, each with its own colours.

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
    columns = min(len(grids), 2)
    rows = -(-len(grids) // columns)
    with style():
        side = panel_side(columns, bars=columns) * min(aspect(surface), 1.0)
        figure = new_figure(rows, columns, side, bottom=0.6)
        panels: list[Axes] = []
        for i, (name, (grid, label)) in enumerate(grids.items(), start=1):
            axes = figure.add_subplot(rows, columns, i, title=name, xlabel=labels[0], ylabel=labels[1])
            scale = Scale.of([grid])
            drawn = draw_contour(axes, surface, scale.clip(grid), scale)
            draw_models(axes, surface)
            scale.bar(figure, drawn, [axes], label)
            panels.append(axes)
        label_outer(panels, columns)
        empty = figure.add_subplot(rows, columns, rows * columns) if len(panels) < rows * columns else None
        legend(figure, panels[0], inside=empty)
    return figure


def plot_interpolation(results: Mapping[str, Interpolation], ends: tuple[str, str] = ("$w_b$", "$w_a$")) -> Figure:
    """Loss, and accuracy if there is one, on lines between two models; the legend holds the barriers.

    Args:
        results: The interpolations by name; the name of a single one is not shown.
        ends: Names of the models at γ = 0 and γ = 1.
    """
    lines = [(label, name) for label, r in results.items() for name in r.loss]
    with_accuracy = any(np.isfinite(r.accuracy[name]).any() for r in results.values() for name in r.accuracy)
    with style():
        figure = new_figure(1, 2 if with_accuracy else 1)
        loss = figure.add_subplot(1, 2 if with_accuracy else 1, 1, ylabel="loss")
        accuracy = figure.add_subplot(1, 2, 2, ylabel="accuracy (%)") if with_accuracy else None
        for look, (label, name) in zip(line_styles(), lines, strict=False):
            r = results[label]
            text = name if len(results) == 1 else f"{label}, {name}"
            look["markevery"] = max(len(r.gammas) // 12, 1)
            loss.plot(r.gammas, r.loss[name], label=f"{text} (barrier {r.barrier(name):.3g})", **look)
            if accuracy is not None:
                accuracy.plot(r.gammas, 100 * r.accuracy[name], **look)
        scale_y(loss, [r.loss[name] for r in results.values() for name in r.loss])
        for axes in filter(None, (loss, accuracy)):
            axes.set_xlabel("$\\gamma$")
            for end in (0, 1):
                axes.axvline(end, color="0.5", linewidth=0.6, zorder=0)
        legend(figure, loss, title=f"γ = 0: {ends[0]}, γ = 1: {ends[1]}")
    return figure


def plot_perturbation(results: Mapping[str, Perturbation]) -> Figure:
    """Loss against the length of a perturbation: along the gradient, and over random directions (mean ± deviation).

    Args:
        results: The curves by the model's name.
    """
    lines = [(label, name) for label, r in results.items() for name in r.loss]
    with style():
        figure = new_figure(1, 2)
        steepest = figure.add_subplot(1, 2, 1, title="along the gradient", xlabel="$r$ (weight units)", ylabel="loss")
        k = len(next(iter(next(iter(results.values())).loss.values()))) - 1
        random = figure.add_subplot(1, 2, 2, title=f"{k} random directions", xlabel="$r$ (filter norms)")
        for look, (label, name) in zip(line_styles(), lines, strict=False):
            r = results[label]
            sets = {name for result in results.values() for name in result.loss}
            text = f"{label}, {name}" if len(sets) > 1 else label
            look["markevery"] = max(len(r.radii) // 8, 1)
            mean, spread = r.mean(name), r.spread(name)
            steepest.plot(r.radii, r.along_gradient(name), label=text, **look)
            random.plot(r.radii, mean, **look)
            random.fill_between(r.radii, mean - spread, mean + spread, color=look["color"], alpha=0.2, linewidth=0)
        scale_y(steepest, [r.along_gradient(name) for r in results.values() for name in r.loss])
        scale_y(random, [r.mean(name) for r in results.values() for name in r.loss])
        legend(figure, steepest)
    return figure


def plot_spectrum(eigenvalues: Mapping[str, ArrayLike]) -> Figure:
    """Eigenvalues of the Hessian, largest first; logarithmic, and linear around zero if some are not positive.

    Args:
        eigenvalues: ``(k,)`` by the model's name, in any order.
    """
    from matplotlib.ticker import MaxNLocator

    spectra = {label: np.sort(np.asarray(values, dtype=np.float64))[::-1] for label, values in eigenvalues.items()}
    most = max(map(len, spectra.values()))
    with style():
        figure = new_figure(1, 1)
        title = wrapped(next(iter(spectra)), 2.6) if len(spectra) == 1 else ""
        axes = figure.add_subplot(title=title, xlabel="index $i$", ylabel="eigenvalue $\\lambda_i$")
        for look, (label, values) in zip(line_styles(), spectra.items(), strict=False):
            look["markevery"] = max(len(values) // 60, 1)
            axes.plot(np.arange(1, len(values) + 1), values, label=label, **look)
        values = np.concatenate(list(spectra.values()))
        if values.min() <= 0:
            axes.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(max(np.abs(values).max(), 1e-12)) - 3))
            axes.axhline(0, color="0.5", linewidth=0.6, zorder=0)
        else:
            scale_y(axes, [values])
        ticks = MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]).tick_values(1, most)
        axes.set_xticks(sorted({max(tick, 1) for tick in ticks if tick <= most}))
        if len(spectra) > 1:
            legend(figure, axes)
    return figure


def plot_density(densities: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Figure:
    """Density of the Hessian's eigenvalues, logarithmic, over six decades.

    Args:
        densities: By the model's name the eigenvalues ``(n,)`` and the density there ``(n,)``.
    """
    with style():
        figure = new_figure(1, 1)
        title = wrapped(next(iter(densities)), 2.6) if len(densities) == 1 else ""
        axes = figure.add_subplot(title=title, xlabel="eigenvalue $\\lambda$", ylabel="density", yscale="log")
        top = max(float(np.max(np.asarray(density))) for _, density in densities.values())
        for look, (label, (at, density)) in zip(line_styles(), densities.items(), strict=False):
            axes.plot(at, density, label=label, **{**look, "marker": None})
        axes.set_ylim(top * 1e-6, top * 2)
        if len(densities) > 1:
            legend(figure, axes)
    return figure
