"""The figures of the page on who is served."""

from collections.abc import Mapping, Sequence

from fl_lightning.core import SPAN
from fl_lightning.results.clients import SHARES, ClientTable, by_samples, sorted_curve, together
from fl_lightning.results.report.figures import Spec, layout, look, title

WORST = {"type": "rect", "xref": "x", "yref": "paper", "x0": 0, "x1": 10, "y0": 0, "y1": 1, "layer": "below"}
Tables = Mapping[str, tuple[int, Sequence[ClientTable]]]
"""The last evaluations of a group's runs with its place among all groups, by the group's name."""


def figures(tables: Tables) -> dict[str, Spec]:
    """The figures by title: sorted clients, global model and local models; and clients by number of samples."""
    if not tables:
        return {}
    metric = next(iter(tables.values()))[1][0].metric
    local = {name: (i, having) for name, (i, of) in tables.items() if (having := _having(of, f"local_{metric}"))}
    name = title(f"server/test/{metric}")
    return {
        f"{name} of each client, sorted": _sorted(tables, ""),
        f"{name} by number of samples": _by_samples(tables),
        **({f"{name} of local models, sorted": _sorted(local, f"local_{metric}")} if local else {}),
    }


def _having(tables: Sequence[ClientTable], column: str) -> list[ClientTable]:
    return [table for table in tables if column in table.columns and len(table.known(column)[1])]


def _sorted(tables: Tables, column: str) -> Spec:
    data = []
    for name, (i, of) in tables.items():
        color, dash, _ = look(i)
        data.append(
            {
                "name": name,
                "legendgroup": name,
                "x": (100 * SHARES).tolist(),
                "y": sorted_curve(of, column).tolist(),
                "mode": "lines",
                "line": {"color": color, "dash": dash, "width": 2, "shape": "hv"},
                "hovertemplate": "%{y:.4f} at %{x:.0f} % of the clients",
            }
        )
    made = layout("clients, the worst first (%)", "")
    made["xaxis"]["range"] = [0, 100]
    return {"data": data, "layout": {**made, "shapes": [{**WORST, "fillcolor": "#eceff1", "line": {"width": 0}}]}}


def _by_samples(tables: Tables) -> Spec:
    data: list[Spec] = []
    for name, (i, of) in tables.items():
        color, dash, symbol = look(i)
        samples, values = (column.tolist() for column in together(of))
        means = [column.tolist() for column in by_samples(of)]
        points = {"x": samples, "y": values, "mode": "markers", "marker": {"color": color, "size": 4, "opacity": 0.35}}
        line = {"color": color, "dash": dash, "width": 2}
        marker = {"color": color, "symbol": symbol, "size": 8}
        joined = {"x": means[0], "y": means[1], "mode": "lines+markers", "line": line, "marker": marker}
        hover = "%{y:.4f}, %{x:.0f} samples"
        data.append({"legendgroup": name, "showlegend": False, "hovertemplate": f"{hover}<extra></extra>", **points})
        data.append({"name": name, "legendgroup": name, "hovertemplate": f"mean {hover}", **joined})
    made, sizes = layout("training samples of a client", ""), [size for trace in data for size in trace["x"]]
    made["xaxis"]["type"] = "log" if max(sizes) > SPAN * min(sizes) else "linear"
    return {"data": data, "layout": made}
