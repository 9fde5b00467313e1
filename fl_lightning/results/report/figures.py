"""The figures of the page, as plotly's JSON: a dictionary of ``data`` and ``layout`` each."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from fl_lightning.core import COLORS, SPAN
from fl_lightning.results.compare import Group
from fl_lightning.results.metrics import Band

Spec = dict[str, Any]
Line = tuple[Sequence[float], Sequence[float | None]]
"""The x and y of a line; None is a gap."""
DASHES = ("solid", "dash", "dashdot", "dot", "longdash", "longdashdot", "5px,1px,1px,1px")
SVG = dict(zip(DASHES, ("none", "7,4", "7,3,2,3", "2,3", "11,4", "11,3,2,3", "5,1,1,1"), strict=True))
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")
TITLES = {
    "server/test/acc": "Test accuracy",
    "server/test/miou": "Test mIoU",
    "server/test/loss": "Test loss",
    "server/val/acc": "Validation accuracy",
    "server/val/loss": "Validation loss",
    "server/clients/acc": "Accuracy, mean of clients",
    "server/clients/acc_weighted": "Accuracy, mean of clients weighted by samples",
    "server/clients/acc_std": "Accuracy, deviation over clients",
    "server/clients/acc_worst_decile": "Accuracy, worst 10 % of clients",
    "server/clients/acc_worst": "Accuracy, worst client",
    "server/clients/loss": "Test loss, mean of clients",
    "client/train/loss": "Training loss of the clients",
    "flatness/lambda_max": "Hessian λ<sub>max</sub>",
    "flatness/discrepancy": "Flatness discrepancy Δ<sub>F</sub>",
    "flatness/sharpness_global": "Sharpness of the global model",
    "flatness/sharpness_local": "Sharpness of the local models",
}
CLIENTS = 100
"""Clients that a heat map shows."""
FILL = 0.18


def title(metric: str) -> str:
    """A metric's name for people."""
    return TITLES.get(metric, metric)


def look(i: int) -> tuple[str, str, str]:
    """Colour, dashes and symbol of the i-th group, the same in all figures."""
    n = len(COLORS)
    return COLORS[i % n], DASHES[(i + i // n) % n], SYMBOLS[(i + i // n) % n]


def legend(i: int) -> dict[str, str]:
    """Colour and dashes of the i-th group, as SVG has them."""
    color, dash, _ = look(i)
    return {"color": color, "dashes": SVG[dash]}


def curves(metric: str, bands: Mapping[str, tuple[int, Band]]) -> Spec:
    """A metric by round: the mean of each group, and a band of one standard deviation over its seeds.

    Args:
        metric: Its name.
        bands: Place among all groups, and the curve, by the group's name.
    """
    data: list[Spec] = []
    for name, (i, found) in bands.items():
        color, dash, _ = look(i)
        if any(found.sd):
            ends = [[m + s * sd for m, sd in zip(found.mean, found.sd, strict=True)] for s in (1, -1)]
            data.append(
                {
                    "x": [*found.rounds, *found.rounds[::-1]],
                    "y": [*ends[0], *ends[1][::-1]],
                    "fill": "toself",
                    "fillcolor": _rgba(color),
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                    "showlegend": False,
                    "legendgroup": name,
                    "mode": "lines",
                }
            )
        data.append(
            {
                "name": name,
                "legendgroup": name,
                "x": found.rounds,
                "y": found.mean,
                "customdata": found.sd,
                "mode": "lines+markers" if len(found.rounds) < 30 else "lines",
                "line": {"color": color, "dash": dash, "width": 2},
                "marker": {"size": 5},
                "hovertemplate": "%{y:.4g} ± %{customdata:.2g} in round %{x:,.0f}",
            }
        )
    values = list(chain.from_iterable(found.mean for _, found in bands.values()))
    return {"data": data, "layout": layout("round", "", log=_is_log(metric.startswith("flatness/"), values))}


def tradeoff(groups: Sequence[Group], measure: str, metric: str) -> Spec:
    """Each run's metric against a measure of its flatness, both means of the last rounds."""
    data: list[Spec] = []
    for i, group in enumerate(groups):
        color, _, symbol = look(i)
        runs = [(run, seeds) for run, seeds in zip(group.runs, group.seeds, strict=True) if measure in run.flatness]
        if runs:
            data.append(
                {
                    "name": group.name,
                    "legendgroup": group.name,
                    "x": [run.flatness[measure] for run, _ in runs],
                    "y": [run.mean for run, _ in runs],
                    "text": [f"seed {seeds[0]}" if seeds else "" for _, seeds in runs],
                    "mode": "markers",
                    "cliponaxis": False,
                    "marker": {"color": color, "symbol": symbol, "size": 10, "line": {"color": "white", "width": 1}},
                    "hovertemplate": "%{x:.4g}, %{y:.4f}  %{text}",
                }
            )
    values = [run.flatness[measure] for group in groups for run in group.runs if measure in run.flatness]
    made = layout(f"{title(f'flatness/{measure}')} (smaller is flatter)", title(metric))
    made["xaxis"]["type"] = "log" if _is_log(True, values) else "linear"
    return {"data": data, "layout": made}


def partition(found: Mapping[str, Any]) -> Spec:
    """Samples by client and class, or another group of targets, white where there are none."""
    counts, unit, names = found["counts"][:CLIENTS], found.get("unit", "class"), found.get("names")
    z = [[row.get(str(c)) for row in counts] for c in range(found["classes"])]
    heat = {
        "type": "heatmap",
        "z": z,
        **({"y": names} if names else {}),
        "colorscale": [[0, "#d6e6f4"], [0.5, "#4a98c9"], [1, "#08306b"]],
        "zmin": 0,
        "colorbar": _colorbar("samples"),
        "hovertemplate": f"client %{{x}}, {unit} %{{y}}: %{{z}} samples<extra></extra>",
    }
    return {"data": [heat], "layout": layout("client", unit)}


def lines(series: Mapping[str, Line], x: str, y: str, log: bool = False) -> Spec:
    """Lines by name."""
    data = []
    for i, (name, (at, values)) in enumerate(series.items()):
        color, dash, _ = look(i)
        kept = [None if value is None or (log and value <= 0) else value for value in values]
        line = {"color": color, "dash": dash, "width": 2}
        mode = "lines+markers" if len(kept) < 60 else "lines"
        data.append({"name": name, "x": list(at), "y": kept, "mode": mode, "line": line, "marker": {"size": 5}})
    return {"data": data, "layout": layout(x, y, log=log)}


def density(series: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Spec:
    """Densities of eigenvalues over six decades."""
    spec = lines(series, "eigenvalue λ", "density", log=True)
    top = math.log10(max(value for _, values in series.values() for value in values))
    spec["layout"]["yaxis"]["range"] = [top - 6, top + 0.3]
    return spec


def landscape(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Spec]:
    """Figures of a file of ``landscape`` or ``interpolate`` by title: surfaces, or losses along lines."""
    first = next(iter(found.values()))
    if "x" in first:
        return _surfaces(found)
    names = [(label, data) for label, values in found.items() for data in values["loss"]]
    many = len(found) > 1
    if "gammas" in first:
        series = {
            f"{label}, {d}" if many else d: (found[label]["gammas"], found[label]["loss"][d]) for label, d in names
        }
        return {"Interpolation": lines(series, "γ", "loss")}
    steepest, random = {}, {}
    for label, data in names:
        name, values = (f"{label}, {data}" if many else data), found[label]
        steepest[name] = (values["radii"], values["loss"][data][0])
        random[name] = (values["radii"], _mean(values["loss"][data][1:]))
    return {
        "Along the gradient": lines(steepest, "radius (weight units)", "loss"),
        "Mean over random directions": lines(random, "radius (filter norms)", "loss"),
    }


def _surfaces(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Spec]:
    finite = [z for s in found.values() for grid in s["loss"].values() for row in grid for z in row if z is not None]
    if not finite:
        return {}
    log = _is_log(True, finite)
    low, high = (math.log10(end) if log else end for end in (min(finite), max(finite)))
    specs = {}
    for label, surface in found.items():
        for data, grid in surface["loss"].items():
            z = [[v if v is None else math.log10(v) if log else v for v in row] for row in grid]
            contour: Spec = {
                "type": "contour",
                "x": surface["x"],
                "y": surface["y"],
                "z": z,
                "customdata": grid,
                "zmin": low,
                "zmax": high,
                "ncontours": 20,
                "colorscale": "Viridis",
                "contours": {"coloring": "heatmap"},
                "line": {"width": 0.5, "color": "white"},
                "colorbar": _colorbar("log₁₀ loss" if log else "loss"),
                "hovertemplate": "loss %{customdata:.4g}<extra></extra>",
            }
            specs[f"{label}, {data}"] = {"data": [contour, *_models(surface)], "layout": layout("", "")}
    return specs


def _models(surface: Mapping[str, Any]) -> list[Spec]:
    traces = []
    for i, (name, places) in enumerate(surface.get("models", {}).items()):
        color, _, symbol = look(i)
        x, y = zip(*places["coordinates"], strict=True)
        marker = {"color": color, "symbol": symbol, "size": 9, "line": {"color": "white", "width": 1}}
        traces.append({"name": name, "x": list(x), "y": list(y), "mode": "lines+markers", "marker": marker})
    return traces


def _mean(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Means over the rows that are complete."""
    whole = [[v for v in row if v is not None] for row in rows]
    complete = [row for row, all_ in zip(whole, rows, strict=True) if len(row) == len(all_)]
    return [sum(column) / len(column) for column in zip(*complete, strict=True)] or [None] * len(rows[0])


def _is_log(allowed: bool, values: Iterable[float]) -> bool:
    values = list(values)
    return allowed and bool(values) and min(values) > 0 and max(values) > SPAN * min(values)


def layout(x: str, y: str, log: bool = False) -> Spec:
    """Titles of the axes, and their style; the y axis may be logarithmic."""
    axis = {
        "gridcolor": "#e6e8eb",
        "linecolor": "#9aa0a6",
        "zeroline": False,
        "ticks": "outside",
        "automargin": True,
        "exponentformat": "power",
    }
    return {
        "xaxis": {**axis, "title": {"text": x, "standoff": 8}},
        "yaxis": {**axis, "title": {"text": y, "standoff": 8}, "type": "log" if log else "linear"},
    }


def _colorbar(label: str) -> Spec:
    return {"title": {"text": label, "side": "right"}, "thickness": 12, "outlinewidth": 0}


def _rgba(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{FILL})"
