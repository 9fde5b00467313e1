"""Statistics over clients against numpy, the table they are read from, and what is drawn and compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

from fl_lightning import UserError
from fl_lightning.core import COLUMN, PAGE, save_figure
from fl_lightning.results.clients import (
    FILE,
    SHARES,
    ClientTable,
    by_samples,
    plot_clients,
    read_clients,
    sorted_curve,
    statistics,
)
from fl_lightning.results.compare import compare
from fl_lightning.results.metrics import Mode, mode_of
from fl_lightning.results.summary import summarise
from fl_lightning.results.table import columns, latex, row
from tests.results.folders import write

HEAD = "round,client,samples,acc,loss,local_acc,local_loss\n"


def table(values: list[float], samples: list[float] | None = None, mode: Mode = "max") -> ClientTable:
    sizes = np.array(samples or [10.0] * len(values))
    return ClientTable(5, "acc", mode, sizes, {"acc": np.array(values), "loss": np.zeros(len(values))})


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 1000)), min_size=1, max_size=45))
def test_statistics(clients: list[tuple[float, int]]) -> None:
    values, samples = (np.array(column, dtype=float) for column in zip(*clients, strict=True))
    actual, worst = statistics(values, samples), max(1, len(values) // 10)
    assert actual == pytest.approx(
        {
            "": np.mean(values),
            "_weighted": np.sum(values * samples) / np.sum(samples),
            "_std": np.sqrt(np.mean((values - np.mean(values)) ** 2)),
            "_worst_decile": np.mean(np.partition(values, worst - 1)[:worst]),
            "_worst": np.min(values),
        }
    )
    mirrored = statistics(-values, samples, "min")
    assert (
        mirrored["_worst_decile"] == pytest.approx(-actual["_worst_decile"]) and mirrored["_worst"] == -actual["_worst"]
    )


def test_a_client_without_a_value_leaves_no_statistic() -> None:
    """The worst one is not the worst of the others."""
    assert all(np.isnan(value) for value in statistics([0.5, np.nan, 0.9], [1, 1, 1]).values())


def test_the_table_of_the_last_round(tmp_path: Path) -> None:
    """The columns of two measures in one round go together; a line that a crash has cut short does not count."""
    assert read_clients(tmp_path) is None
    rows = ["5,0,30,0.5,1.5,,", "10,0,30,0.25,2.5,,", "10,7,20,,,,", "10,0,30,0.25,2.5,0.75,0.5", "11,0,30,0.5"]
    (tmp_path / FILE).write_text(HEAD + "\n".join(rows))
    clients = read_clients(tmp_path)
    assert clients is not None and (clients.round, clients.metric, clients.mode) == (10, "acc", "max")
    assert clients.samples.tolist() == [30, 20]
    assert [column.tolist()[0] for column in clients.columns.values()] == [0.25, 2.5, 0.75, 0.5]
    assert [column.tolist() for column in clients.known("acc")] == [[30], [0.25]]
    assert all(np.isnan(column[1]) for column in clients.columns.values())


@pytest.mark.parametrize("text", ["", "round,client\n1,2\n", HEAD, HEAD + "1,0,x,0,0,0,0\n", HEAD + "1,a,3,0,0,0,0\n"])
def test_a_damaged_table_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match=rf"^{tmp_path / FILE}: not a table of clients [^\n]*; restore the file"):
        read_clients(tmp_path)


def test_sorted_and_by_samples() -> None:
    values = [0.9, 0.1, 0.5, 0.7]
    curve = sorted_curve([table(values)])
    assert [curve[np.searchsorted(SHARES, share)] for share in (0, 0.1, 0.25, 0.5, 0.9, 1)] == [
        0.1,
        0.1,
        0.5,
        0.7,
        0.9,
        0.9,
    ]
    assert sorted_curve([table([0.2]), table([0.6])]).tolist() == pytest.approx([0.4] * 201)  # mean over seeds
    assert sorted_curve([table(values, mode="min")])[0] == 0.9
    samples, means = by_samples([table([k / 16 for k in range(16)], [*range(16, 0, -1)])])
    assert samples.tolist() == [1.5 + 2 * k for k in range(8)]
    assert means.tolist() == pytest.approx([(14.5 - 2 * k) / 16 for k in range(8)])


@pytest.mark.parametrize("skewed", [False, True])
def test_figure(skewed: bool, tmp_path: Path) -> None:
    """There is one panel where all clients have one size; nothing is off the paper or too small to read."""
    draw = np.random.default_rng(0)
    sizes = (10 ** draw.uniform(0, 3, 40)).tolist() if skewed else [30.0] * 40
    tables = {name: [table(draw.uniform(size=40).tolist(), sizes) for _ in range(2)] for name in ("FedAvg", "FedSAM")}
    figure = plot_clients(tables)
    save_figure(figure, tmp_path / "clients")
    assert len(figure.axes) == 1 + skewed and figure.get_figwidth() == (PAGE if skewed else COLUMN)
    assert len(figure.axes[0].lines) == 2 and figure.axes[0].get_xlim() == (0, 100)
    if skewed:
        assert figure.axes[1].get_xscale() == "log" and len(figure.axes[1].lines) == 4
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]  # type: ignore[attr-defined]
    assert {text.get_fontsize() >= 7 for text in texts} == {True}
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 > -0.01 and box.y0 > -0.01 and box.x1 < width + 0.01 and box.y1 < height + 0.01


def test_comparison(tmp_path: Path) -> None:
    """Means of the measurements in the last rounds, with directions, are columns of a table of their own."""
    folder = write(tmp_path / "run" / "version_0", {3: 0.5, 6: 0.7})
    names = ["server/clients/acc", "server/clients/acc_worst_decile", "server/clients/acc_std", "client/test/acc_gap"]
    head, *rows = (folder / "metrics.csv").read_text().splitlines()
    cells = {3: ",0.1,0.2,0.3,0.4", 6: ",0.5,0.4,0.1,-0.2"}
    lines = [row + cells.get(t, ",,,,") for t, row in enumerate(rows, 1)]
    (folder / "metrics.csv").write_text("\n".join([",".join([head, *names]), *lines]) + "\n")
    assert summarise(folder, last=6).clients == pytest.approx(dict(zip(names, (0.3, 0.3, 0.2, 0.1), strict=True)))
    groups = compare([folder], last=2)
    shown = {column.key: column for column in columns(groups) if column.table == "clients"}
    assert list(shown) == ["clients", "clients_std", "worst_decile", "local_gap"]
    assert [groups[0].values(column.statistic) for column in shown.values()] == [[0.5], [0.1], [0.4], [-0.2]]
    assert [column.mode for column in shown.values()] == ["max", "min", "max", None]
    head = r"\shortstack[r]{worst 10 \\ \% of \\ clients $\uparrow$}"
    assert head in latex(groups, columns(groups)) and "& 40.00 &" in latex(groups, columns(groups))
    known: dict[str, Mode] = {"mae": "min", "acc": "max"}
    for name, mode in (("mae", "min"), ("mae_worst_decile", "min"), ("mae_std", "min"), ("acc_worst", "max")):
        assert mode_of(f"server/clients/{name}", None, known) == mode
    assert mode_of("client/test/acc") == "max" and mode_of("client/test/loss") == mode_of("server/clients/acc_std")


@pytest.mark.parametrize("name", ["acc", "top_5", "mAP"])
def test_a_metric_of_any_name_has_each_of_the_columns(name: str, tmp_path: Path) -> None:
    """The local models' values of a metric with an underscore are not those of the global model in the CSV file."""
    ends = {"": 0.6, "_weighted": 0.61, "_std": 0.02, "_worst_decile": 0.3, "_worst": 0.2}
    server = {f"server/clients/{name}{end}": value for end, value in ends.items()}
    local = {f"client/test/{name}{end}": value for end, value in {"": 0.7, "_worst_decile": 0.4, "_gap": 0.1}.items()}
    values = {**server, "server/clients/loss": 1.0, **local}
    (tmp_path / "metrics.csv").write_text(f"round,{','.join(values)}\n1,{','.join(map(str, values.values()))}\n")
    groups = compare(tmp_path)
    assert groups[0].runs[0].metric == f"server/clients/{name}", "the headline of clients' own models"
    record = row(groups[0], columns(groups))
    client_keys = ("clients", "clients_weighted", "clients_std", "worst_decile", "worst_client")
    keys = (*client_keys, "local", "local_worst_decile", "local_gap")
    assert [record[key] for key in keys] == [*server.values(), *local.values()]
