"""The comparison of runs: groups by seeds, the table and its directions, curves over seeds."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from math import nan, sqrt
from pathlib import Path
from statistics import stdev

import pytest

from fl_lightning import UserError
from fl_lightning.core import COLORS, COLUMN, PAGE, save_figure
from fl_lightning.core.figures import render, style
from fl_lightning.results.compare import compare, find_runs, of_run, rounded, shown
from fl_lightning.results.configs import telling
from fl_lightning.results.curves import all_timed, curve, draw_curves, plot_curves, plot_tradeoff, read
from fl_lightning.results.metrics import mode_of, write_table
from fl_lightning.results.summary import summarise
from fl_lightning.results.table import Markup, cell, columns, is_best, label, latex, names, row, tex
from fl_lightning.results.varied import pivot
from tests.results.folders import configured, write
from tests.results.test_pivot import sweep
from tests.runs import cli, run

GRID = {(lr, rho, 8): [lr + rho, lr + 0.1] for lr in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7) for rho in (0.01, 0.02)}


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Returns FedAvg with three seeds, another method with two, one of which never gets as far as FedAvg."""
    root = tmp_path / "runs"
    return [
        configured(root / "FedAvg" / "version_0", {3: 0.5, 6: 0.5}, engine="sequential"),
        configured(root / "FedAvg" / "version_1", {3: 0.5, 6: 0.75}, seed=1, engine="graphed"),
        configured(root / "FedAvg" / "version_2", {3: 0.5, 6: 1.0}, data_seed=1, name="x"),
        configured(root / "my_method" / "rho_0.1_seed_0" / "version_0", {3: 0.8, 6: 0.9}, units=4, lr=0.2),
        configured(root / "my_method" / "rho_0.1_seed_1" / "version_0", {3: 0.5, 6: 0.5}, units=4, lr=0.2, seed=1),
    ]


def test_groups_by_hand(runs: list[Path]) -> None:
    average, mine = compare(runs, last=1, reference=runs[1])
    assert (average.name, mine.name) == ("FedAvg", "rho_0.1")
    assert average.seeds == [(0, 0), (1, 0), (0, 1)] and mine.folders == runs[3:]
    assert average.values("mean") == [0.5, 0.75, 1.0]
    assert {run.target for run in (*average.runs, *mine.runs)} == {0.75}  # what FedAvg reaches
    assert average.values("target_round") == [6, 6] and mine.values("target_round") == [3]
    last, *_, transmissions, cost = columns([average, mine], average)
    assert cell(average, last) == "0.7500 ± 0.2500"
    assert cell(mine, transmissions) == "12 (1 of 2)"
    assert cell(mine, cost) == "1.00 (1 of 2)"  # half the rounds, twice the models
    (never,) = compare(runs[4:], target=0.9)
    assert cell(never, transmissions) == "×"


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    """One folder may hold different configs; the same name may lie in different folders; a run may have no config."""
    folders = [
        configured(tmp_path / "a" / "FedAvg" / "version_0", {6: 0.5}),
        configured(tmp_path / "a" / "FedAvg" / "version_1", {6: 0.5}, lr=0.2),
        configured(tmp_path / "a" / "FedSAM" / "version_0", {6: 0.5}, lr=0.3),
        configured(tmp_path / "b" / "FedSAM" / "version_0", {6: 0.5}, lr=0.4),
        write(tmp_path / "b" / "Mine" / "version_0", {6: 0.5}),
    ]
    names = [group.name for group in compare(folders)]
    assert names == ["FedAvg/version_0", "FedAvg/version_1", "a/FedSAM", "b/FedSAM", "Mine"]


def test_what_cannot_be_compared(runs: list[Path], tmp_path: Path) -> None:
    twin = configured(tmp_path / "again" / "version_0", {6: 0.5}, threads=1)
    with pytest.raises(UserError, match=r"runs = .*again/version_0: the same .* as .*FedAvg/version_0; leave"):
        compare([*runs, twin])
    with pytest.raises(UserError, match="reference = elsewhere: none of the runs"):
        compare(runs, reference="elsewhere")
    with pytest.raises(UserError, match="nothing"):
        compare("nothing")  # one folder, not its letters
    with pytest.raises(UserError, match=r"runs = \[\]: give"):
        compare([])
    segmentation = write(tmp_path / "segmentation" / "version_0", {6: 0.5}, name="miou")
    with pytest.raises(UserError, match="metric = server/test/acc: not in"):
        compare([*runs, segmentation])


def test_latex(runs: list[Path]) -> None:
    groups = compare([*runs[:3], runs[4]], target=0.8, last=1)
    tables = [text.splitlines() for text in latex(groups, columns(groups)).split("\n\n")]
    heads, first, second = [], [], []
    for lines in tables:  # each repeats the setting that tells the groups apart, and is as wide as a column
        cells = [lines[i].removesuffix(r" \\").split(" & ") for i in (2, 4, 5)]
        assert [row.pop(0) for row in cells] == ["lr", "0.1", "0.2"]
        assert lines[0] == rf"\begin{{tabular}}{{l{'r' * len(cells[0])}}}"
        assert [lines[i] for i in (1, 3, 6, 7)] == [r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}"]
        heads, first, second = heads + cells[0], first + cells[1], second + cells[2]
    ours = r"75.00 $\pm$ 25.00 & 75.00 & 75.00 & 3.00 & 0.000 & "  # 25 points are its deviation
    assert " & ".join(first) == ours + "6 (1 of 3) & 3.00 (1 of 3) & 0.000 (1 of 3) & 12 (1 of 3)"
    assert " & ".join(second) == "50.00 & 50.00 & 50.00 & 3.00 & 0.000" + 4 * r" & $\times$"
    assert len(tables) > 1 and len(set(heads)) == len(heads) == 9
    assert heads[0] == r"last 1 $\uparrow$" and r"\shortstack[r]{rounds to \\ 0.8 $\downarrow$}" in heads


def test_only_what_is_clearly_better_is_bold(tmp_path: Path) -> None:
    """It is by more than the interval of the paired differences; as printed for one seed; equal values never are."""

    def bold(*seeds: list[float], first: int = 0) -> list[int]:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        for i, values in enumerate(seeds):
            for seed, value in enumerate(values):
                configured(folder / f"{i}_{seed}", {6: value}, lr=0.1 * i, seed=seed + first * i)
        groups = compare([folder])
        column = next(column for column in columns(groups) if column.key == "best")
        return [i for i, group in enumerate(groups) if is_best(group, column, groups)]

    cases: list[tuple[tuple[list[float], ...], list[int]]] = [
            (([0.8], [0.9]), [1]), (([0.9], [0.9]), []), (([0.9], [0.90001]), []), (([0.8, 0.9], [0.9, 1.0]), [1]),
            (([0.7, 0.9], [0.8, 1.0]), [1]), (([0.8, 0.8], [0.7, 1.0]), []), (([0.5], [0.9], [0.9]), []),
            (([0.7, 0.8, 0.9], [0.71, 0.82, 0.93]), []), (([0.7, 0.8, 0.9], [0.72, 0.82, 0.93]), [1]),
            (([0.7, 0.8, 0.9], [0.72, 0.82, 0.93], [0.2, 1.0, 0.9]), [1]), (([0.7], [0.9], [0.9]), []),
    ]  # fmt: skip
    for seeds, expected in cases:
        assert bold(*seeds) == expected
    assert bold([0.7, 0.9], [0.8, 1.0], first=5) == [] and bold([0.7, 0.7], [0.8, 0.8], first=5) == [1]
    groups = compare([tmp_path / "0"])
    measured = [replace(group, runs=[replace(group.runs[0], flatness={"lambda_max": 1.0})]) for group in groups]
    (column,) = (column for column in columns(measured) if column.key == "lambda_max")
    measured[1].runs[0].flatness["lambda_max"] = 0.5
    assert is_best(measured[1], column, measured) and not is_best(measured[1], column, [groups[0], measured[1]])


def test_differences_to_a_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are over common seeds, in text, CSV and LaTeX; the reference is the first row, or the one of that name."""
    for seed, (one, two) in enumerate([(0.5, 0.6), (0.6, 0.62), (0.7, 0.81)]):
        configured(tmp_path / "runs" / "one" / f"seed_{seed}", {6: one}, seed=seed)
        configured(tmp_path / "runs" / "two" / f"seed_{seed}", {6: two}, seed=seed, lr=0.2)
    configured(tmp_path / "runs" / "two" / "seed_7", {6: 0.9}, seed=7, lr=0.2)
    groups = compare([tmp_path])
    shown = columns(groups)
    (column,) = [column for column in shown if column.table == "differences"]
    middle, half = 0.23 / 3, 4.302653 * stdev([0.1, 0.02, 0.11]) / sqrt(3)
    expected = f"{middle:+.4f} [{middle - half:+.4f}, {middle + half:+.4f}] (3 of 4)"
    assert [cell(group, column, groups) for group in groups] == ["", expected]
    assert column.head == "last 1 − lr 0.1"
    record = row(groups[1], shown)
    assert record["mean_difference"] == pytest.approx(middle) and record["mean_difference_seeds"] == 3
    assert (record["mean_difference_low"], record["mean_difference_high"]) == pytest.approx(
        (middle - half, middle + half), abs=1e-6
    )
    assert f"$+${100 * middle:.2f} [$-${100 * (half - middle):.2f}, $+$" in latex(groups, shown)
    cli("compare", str(tmp_path), "--reference=two")
    assert "-0.0767" in capsys.readouterr().out
    assert of_run(groups, "0.2") is of_run(groups, "lr 0.2") is groups[1]
    with pytest.raises(
        UserError, match=r"reference = FedSAM: none of the runs; add it to them, or .*: lr 0.1; lr 0.2$"
    ):
        of_run(groups, "FedSAM")


def test_settings_that_differ_are_columns(runs: list[Path], tmp_path: Path) -> None:
    groups = compare(runs)
    assert names(groups) == ["lr"] and [label(group) for group in groups] == [["0.1"], ["0.2"]]
    assert row(groups[1], columns(groups))["lr"] == "0.2" and row(groups[1], columns(groups))["run"] == "rho_0.1"
    (alone,) = compare(runs[:3])
    assert names([alone]) == ["run"] and label(alone) == ["FedAvg"]
    mixed = compare([runs[0], write(tmp_path / "Mine", {6: 0.5})])  # a run from Python has no config
    assert names(mixed) == ["run"]


def test_a_setting_with_the_name_of_a_column_is_kept_beside_it(tmp_path: Path) -> None:
    """An example is data.mean."""
    for i, mean in enumerate((0.0, 0.5)):
        configured(tmp_path / f"run_{i}", {6: 0.1 * i}, mean=mean)
    groups = compare(tmp_path)
    records = [row(group, columns(groups)) for group in groups]
    assert [(record["setting mean"], record["mean"]) for record in records] == [("0", 0.0), ("0.5", 0.1)]


def test_a_reader_names_the_rows_and_chooses_columns(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli(
        "compare", *map(str, runs), "--names=Ours,FedSAM", "--columns=best,mean_difference", f"--out={tmp_path / 'out'}"
    )
    out = capsys.readouterr().out
    assert "Ours" in out and "lr 0.2" in out and "− Ours" in out and "final" not in out
    with (tmp_path / "out/compare.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["run"] for row in rows] == ["Ours", "FedSAM"] and [row["settings"] for row in rows] == [
        "lr 0.1",
        "lr 0.2",
    ]
    assert {"best", "mean_difference"} < {*rows[0]} and not {"mean", "final"} & {*rows[0]}
    tex = (tmp_path / "out/compare.tex").read_text()
    assert tex.startswith("\\begin{tabular}{l") and "FedSAM & lr 0.2 & " in tex
    assert "Ours" in (tmp_path / "out/curves.csv").read_text()
    for arg, said in {
        "--names=Ours": "names = Ours: give 2 different names, for these rows in order: lr 0.1; lr 0.2",
        "--names=Ours,Ours": "names = Ours,Ours: give 2 different names",
        "--columns=best,acc": "columns = acc: choose from mean, ",
    }.items():
        with pytest.raises(SystemExit, match=f"^error: {re.escape(said)}"):
            cli("compare", *map(str, runs), arg)


def test_settings_that_tell_configs_apart() -> None:
    """They are what all have, of the others what is needed, never seeds and execution; ends of keys are unique."""
    one = {"model": "FedAvg", "model.optimizer.lr": "0.1", "trainer.seed": "0", "trainer.engine": "graphed"}
    two = {**one, "model": "FedSAM", "model.rho": "0.1", "trainer.seed": "1", "trainer.engine": "batched"}
    assert telling([one, two]) == {"model": "model"} and telling([one, {**one, "trainer.seed": "3"}]) == {}
    three = {**two, "model.rho": "0.2"}
    assert telling([one, two, three]) == {"model": "model", "rho": "model.rho"}
    nested = {**two, "model.ascent.rho": "0.1"}
    deep = {**one, "model.net.model": "3"}  # a net of one's own may have an argument with this name
    assert telling([deep, {**two, "model.net.model": "4"}]) == {"model": "model", "net.model": "model.net.model"}
    both = [nested, {**nested, "model.rho": "1", "model.ascent.rho": "2"}]
    assert telling(both) == {"model.rho": "model.rho", "ascent.rho": "model.ascent.rho"}
    composed = {**one, "model.ascent": "SAM", "model.ascent.rho": "0.1"}
    assert telling([composed, two]) == {"model": "model", "ascent": "model.ascent"}
    assert telling([{**one, "model.ascent": "null"}, two]) == {"model": "model"}


def test_runs_that_have_not_ended_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended, short, row = (configured(tmp_path / str(seed), {6: 0.5}, seed=seed) for seed in range(3))
    lines = (short / "metrics.csv").read_text().splitlines(keepends=True)
    for folder in (short, row):
        (folder / "metrics.csv").write_text("".join(lines[:3]))
    (row / "row.json").write_text("{}")
    (ended / "summary.json").write_text("{}")
    compare([ended, short, row], reference=ended, metric="server/test/loss")
    warning = f"not ended: {short} has 2 of 6 rounds, and counts all the same\n"
    assert capsys.readouterr().err == warning
    (short / "summary.json").write_text("{}")  # by EarlyStopping, for instance
    compare([ended, short], metric="server/test/loss")
    assert not capsys.readouterr().err


def test_a_measure_that_some_seeds_lack_says_so(tmp_path: Path) -> None:
    runs = [
        configured(tmp_path / "a" / str(seed), {6: 0.5}, seed=seed, lambdas={6: 2.0} if seed < 2 else None)
        for seed in range(3)
    ]
    groups = compare(runs)
    (flatness,) = (column for column in columns(groups) if column.key == "lambda_max")
    assert cell(groups[0], flatness).endswith(" (2 of 3)")


def test_rows_of_single_seeds_are_drawn(tmp_path: Path) -> None:
    runs = [configured(tmp_path / str(k), {6: 0.5}, lr=k, lambdas={6: 1.0 + k}) for k in range(14)]
    save_figure(plot_tradeoff(compare(runs), "lambda_max"), tmp_path / "rows")


def test_points_of_each_group_look_different(tmp_path: Path) -> None:
    """They differ in colour and marker, for as many as are drawn as points."""
    runs = [configured(tmp_path / str(k), {6: 0.5}, lr=k, lambdas={6: 1.0 + k}) for k in range(12)]
    (axes,) = plot_tradeoff(compare(runs), "lambda_max").axes
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 12


def test_flatness_over_a_wide_range_is_logarithmic(tmp_path: Path) -> None:
    """This holds for points and for rows, as for its curves."""
    runs = [configured(tmp_path / str(k), {6: 0.5}, lr=k, lambdas={6: 10.0**k}) for k in range(13)]
    for groups in (compare(runs[:3]), compare(runs)):
        assert plot_tradeoff(groups, "lambda_max").axes[-1].get_xscale() == "log"


@pytest.mark.parametrize("values", [(0.0, 3.4e-4), (1e-7, 1e-5, 3e-3), (0.1, 1.0, 2.6)])
def test_ticks_of_flatness_stand_apart(tmp_path: Path, values: tuple[float, ...]) -> None:
    runs = [configured(tmp_path / str(k), {6: 5.0 * k}, lr=k, lambdas={6: v}) for k, v in enumerate(values)]
    figure = plot_tradeoff(compare(runs), "lambda_max")
    render(figure, svg={"Date": None})  # as a report does
    with style():
        figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [text.get_window_extent() for text in axes.get_xticklabels()]
    boxes = [box for box in boxes if axes.bbox.x0 <= (box.x0 + box.x1) / 2 <= axes.bbox.x1]
    assert len(boxes) > 1 and all(a.x1 + 5 < b.x0 for a, b in pairwise(boxes))


def test_numbers_of_a_run_that_diverged_are_short(tmp_path: Path) -> None:
    runs = [configured(tmp_path / str(k), {6: 4.9265e21 * k}, seed=k) for k in (1, 2)]
    group = compare(runs)[0]
    (mean,) = (column for column in columns([group]) if column.key == "mean")
    assert cell(group, mean) == "7.39e+21 ± 3.484e+21" and mean.number(0.5) == "0.5000"


@pytest.mark.parametrize(
    ("values", "error", "texts"),
    [
        ((0.8317, 0.0812), 0.0812, ["0.832", "0.081"]),
        ((0.00098584, 0.00075), 0.00075, ["0.00099", "0.00075"]),
        ((-0.2426, -0.4707, -0.01459), 0.228, ["-0.24", "-0.47", "-0.01"]),
        ((1234.5, 210.0), 210.0, ["1,234", "210"]),
        ((0.9996, 0.0996), 0.0996, ["1.000", "0.100"]),
        ((0.2391, 8.6e-6), 8.6e-6, ["0.2391", "8.6e-06"]),  # it would say more than four digits
        ((0.5, 0.0), 0.0, ["0.5", "0"]),
        ((7.39e21, 3.484e21), 3.484e21, ["7.39e+21", "3.484e+21"]),
        ((0.123456,), nan, ["0.1235"]),
    ],
)
def test_numbers_have_the_decimals_of_their_error(values: list[float], error: float, texts: list[str]) -> None:
    assert rounded(values, error) == texts


def test_a_legend_names_the_only_one_of_several_that_has_a_metric(tmp_path: Path) -> None:
    runs = [configured(tmp_path / str(k), {6: 0.5}, lr=k, lambdas={6: 1.0} if k else None) for k in range(2)]
    groups = compare(runs)
    name = "flatness/lambda_max"
    for figure in (plot_tradeoff(groups, "lambda_max"), plot_curves({g.name: g.metrics for g in groups}, [name])):
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["1"]
    assert not plot_curves({"1": groups[1].metrics}, [name]).legends


@pytest.mark.parametrize("rounds", [1, 2, 3, 400])
def test_rounds_are_whole(rounds: int) -> None:
    (axes,) = draw_curves({"run": [{"server/test/acc": [(t + 1, 0.5) for t in range(rounds)]}]}).axes
    assert all(tick.is_integer() for tick in axes.get_xticks().tolist())


def test_what_latex_reads_otherwise(tmp_path: Path) -> None:
    group = replace(compare([write(tmp_path / "run", {6: 0.5})])[0], name=r"a_b%{c}\d~e^f&g#h$i<j>|")
    name = latex([group], columns([group])).splitlines()[4].partition(" & ")[0]
    expected = r"a\_b\%\{c\}\textbackslash{}d\textasciitilde{}e\textasciicircum{}f\&g\#h\$i"
    assert name == expected + r"\textless{}j\textgreater{}\textbar{}"
    assert [tex(text) for text in ("[1, 2]", "*", "a*")] == ["{}[1, 2]", "{}*", "a*"]  # after \\\\ of the row before


def compiled(folder: Path, tables: list[str]) -> str:
    """Returns LaTeX's log of tables in a document of two columns; it names what is wider than a column."""
    body = "\n".join(tables).replace("\n\n", "\n\n\\noindent\n")
    start = r"\documentclass[twocolumn]{article}\usepackage{booktabs}\begin{document}\noindent"
    (folder / "paper.tex").write_text(f"{start}\n{body}\n\\end{{document}}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_hours_of_devices_without_a_clock(tmp_path: Path) -> None:
    """Nothing is known of a run that has reached the target; it is not one that never did."""
    clocked, plain = write(tmp_path / "clocked", {2: 0.2, 6: 0.5}), write(tmp_path / "plain", {2: 0.8, 6: 0.8})
    head, *rows = (clocked / "metrics.csv").read_text().splitlines()
    lines = [f"{head},clock/time_s", *(f"{row},{100 * t}" for t, row in enumerate(rows, 1))]
    (clocked / "metrics.csv").write_text("\n".join(lines) + "\n")
    groups = compare([clocked, plain], target=0.7)
    column = next(c for c in columns(groups) if c.key == "target_device_hours")
    assert [cell(group, column) for group in groups] == ["×", ""]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("pdflatex") is None
    or subprocess.run(["kpsewhich", "booktabs.sty"], capture_output=True).returncode != 0,
    reason="needs pdflatex and booktabs: apt-get install texlive-latex-recommended",
)
def test_tables_compile_and_fit_a_column(tmp_path: Path) -> None:
    """They have a setting that LaTeX reads otherwise, differences, targets, a negative number, and long heads."""
    for i, lr in enumerate((0.1, "a_b<%\\~^&#$é")):
        for seed in range(3):
            folder = tmp_path / "runs" / f"{i}_{seed}"
            configured(folder, {3: 0.7, 6: 0.5 + 0.1 * i}, seed=seed, lr=lr, lambdas={6: 1234.5 * (i + 1) + seed})
            text = (folder / "metrics.csv").read_text().splitlines()
            names = ("server/clients/acc", "server/clients/acc_std", "client/test/acc_gap", "flatness/discrepancy")
            text[0] += "," + ",".join(names)
            text[1:] = [f"{line},0.123456,0.23456,-0.123456,0.0123456" for line in text[1:]]
            (folder / "metrics.csv").write_text("\n".join(text) + "\n")
    groups = compare([tmp_path / "runs"], target=0.55)
    text = latex(groups, columns(groups, groups[0]))
    assert "$-$12.35" in text and text.count("tabular}{") > 4
    log = compiled(
        tmp_path, [text, str(pivot(compare([sweep(tmp_path / "grid", GRID)]), "rho,lr").files()["pivot.tex"])]
    )
    assert "Output written on paper.pdf" in log and "Overfull" not in log, log[-2000:]


def test_flatness_and_directions(runs: list[Path], tmp_path: Path) -> None:
    """Measures of flatness have columns; small ones are the best, in the table, as best value and as target."""
    sharp = configured(tmp_path / "sharp", {6: 0.9}, lr=1.0, lambdas={2: 9.0, 4: 6.0, 6: 4.0})
    flat = configured(tmp_path / "flat", {6: 0.8}, lr=2.0, lambdas={2: 3.0, 4: 1.0, 6: 2.0})
    groups = compare([sharp, flat, runs[0]], last=3)
    (column,) = [c for c in columns(groups) if c.key == "lambda_max"]
    assert column.head == "lambda_max, last 3 ↓" and column.statistic == "flatness/lambda_max"
    final = compare([sharp, flat])
    (at_end,) = [c for c in columns(final) if c.key == "lambda_max"]
    assert (at_end.head, [cell(g, at_end, final, Markup()) for g in final]) == ("lambda_max ↓", ["4", "2"])
    assert [cell(g, column, groups, Markup(best="<{}>")) for g in groups] == ["5", "<1.5>", ""]
    assert cell(groups[0], columns(groups)[0], groups, Markup(best="<{}>")) == "<0.9000>"
    one, two = compare([sharp, flat], target=3.0, metric="flatness/lambda_max", last=3)
    assert (one.runs[0].best, one.runs[0].target_round) == (4.0, None)
    assert (two.runs[0].best, two.runs[0].best_round, two.runs[0].target_round) == (1.0, 4, 2)
    (largest,) = compare([flat], target=3.0, metric="flatness/lambda_max", mode="max")
    assert (largest.runs[0].best, largest.runs[0].target_round) == (3.0, 2)


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("server/test/acc", "max"),
        ("server/test_unseen/miou", "max"),
        ("server/test/f1", "max"),
        ("server/test/loss", "min"),
        ("client/train/loss", "min"),
        ("flatness/discrepancy", "min"),
        ("time/round_s", "min"),
    ],
)
def test_direction(metric: str, mode: str) -> None:
    assert mode_of(metric) == mode and mode_of(metric, "max") == "max"


def test_unknown_directions_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="metric = mine/number: set mode to max or min"):
        mode_of("mine/number")
    assert mode_of("mine/number", "min") == "min"


def test_runs_are_found_below_folders(runs: list[Path]) -> None:
    """Runs and groups of runs lie at different depths; nothing is searched below a run; numbers sort by their value."""
    root = runs[0].parents[1]
    (runs[0] / "checkpoints").mkdir()
    write(runs[0] / "inside", {6: 0.1})
    (root / "started").mkdir()
    (root / "started" / "metrics.csv").write_text("round\n")
    configured(root / "FedAvg" / "version_10", {6: 0.5}, seed=7)
    assert find_runs([root]) == [*runs[:3], root / "FedAvg" / "version_10", *runs[3:]]
    assert find_runs([runs[1], root])[0] == runs[1] and len(find_runs([runs[1], root])) == 6
    assert [group.name for group in compare([root])] == ["FedAvg", "rho_0.1"]
    assert compare([root], reference=root / "FedAvg", last=1)[0].runs[0].target == pytest.approx(2.75 / 4)


def test_of_twins_below_a_folder_the_last_counts(runs: list[Path]) -> None:
    root = runs[0].parents[1]
    later = configured(root / "FedAvg" / "version_3", {6: 0.9})
    average, _ = compare([root])
    assert average.left_out == [runs[0]] and average.folders == [*runs[1:3], later]
    average, _ = compare([root, runs[0]])
    assert average.left_out == [later] and average.folders == [runs[0], *runs[1:3]]  # what is named counts


def test_a_finished_run_counts_before_its_interrupted_twin(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """It does whichever is later; a run without ``summary.json`` has ended with its last round."""
    root = runs[0].parents[1]
    broken = configured(root / "FedAvg" / "version_3", {1: 0.1})
    lines = (broken / "metrics.csv").read_text().splitlines(keepends=True)
    (broken / "metrics.csv").write_text("".join(lines[:2]))
    average, _ = compare([root])
    assert average.folders == runs[:3] and average.left_out == [broken] and not capsys.readouterr().err
    (broken / "summary.json").write_text("{}")  # by EarlyStopping, for instance
    average, _ = compare([root])
    assert average.folders == [*runs[1:3], broken] and average.left_out == [runs[0]]
    (broken / "summary.json").unlink()
    shutil.rmtree(runs[0])
    average, _ = compare([root])  # the only one of its seed
    assert average.folders == [*runs[1:3], broken] and "has 1 of 6 rounds" in capsys.readouterr().err


def test_values_show_as_many_digits_as_tell_them_apart(tmp_path: Path) -> None:
    for i, rho in enumerate((0.1, 0.10001, 0.100001, 1e-5)):
        configured(tmp_path / str(i), {6: 0.5 + i / 10}, lr=rho)
    assert [label(group) for group in compare(tmp_path)] == [["0.1"], ["0.10001"], ["0.100001"], ["1e-05"]]
    assert shown(["1.0", "1", "0.25"]) == {"1.0": "1", "1": "1", "0.25": "0.25"}  # equal values are one
    assert shown(["a.Net", "b.Net", None]) == {"a.Net": "a.Net", "b.Net": "b.Net", None: "–"}
    assert shown(["a.Net", "b.Mine", "0.33333333"]) == {"a.Net": "Net", "b.Mine": "Mine", "0.33333333": "0.3333"}


def test_files_of_other_programs_are_left_out_by_name(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """They are those of Lightning's CSVLogger below a folder, and runs that have not measured the metric."""
    root = runs[0].parents[1]
    for name, text in {"lightning": "epoch,step,loss\n0,1,0.5\n", "other": "round,client/lr\n1,0.1\n"}.items():
        (root / name).mkdir()
        (root / name / "metrics.csv").write_text(text)
    assert [group.name for group in compare([root])] == ["FedAvg", "rho_0.1"]
    lacks = {"lightning": "column named round", "other": "server/test/acc"}
    lines = [f"left out: {root / name}: its metrics.csv has no {what}" for name, what in lacks.items()]
    assert sorted(capsys.readouterr().err.splitlines()) == lines
    with pytest.raises(UserError, match=r"^metric = nothing: not in .*; choose one of these$"):
        compare([root], metric="nothing")


def test_folders_without_runs(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for wrong in (3, [3], None):
        with pytest.raises(UserError, match=r"^runs = .*: give text or Path, or a list"):
            compare(wrong)  # type: ignore[arg-type]
    for folder, problem in (("empty", "no run there"), ("nowhere", "no such folder")):
        with pytest.raises(UserError, match=rf"^runs = .*{folder}: {problem}.*; give [^\n]*$"):
            compare([runs[0], tmp_path / folder])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("round,server/test/acc\n1,0.5\n2,abc\n", "line 3: could not convert string to float: 'abc'"),
        ("round,server/test/acc\n1,0.5\nx,0.5\n", "line 3: invalid literal"),
        ("round,server/test/acc\n1,0.5\n2,0.5,7\n", "line 3: "),
        ("a,b\n1,2\n", "no column named round"),
        ("round,server/test/acc\n1,\xff\n", "line 2: "),
    ],
)
def test_broken_metrics(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(
        UserError, match=rf"^{tmp_path}/metrics\.csv: not a table of metrics \({problem}[^\n]*; restore"
    ):
        compare([tmp_path])


def test_band_over_seeds(tmp_path: Path) -> None:
    """It has the rounds that all seeds have, and means over parts of a long run, of each seed for itself."""
    one = write(tmp_path / "one", {1: 0.1, 2: 0.2, 4: 0.4}) / "metrics.csv"
    two = write(tmp_path / "two", {1: 0.3, 2: 0.6, 3: 0.9}) / "metrics.csv"
    columns = read({"both": [one, two]})["both"]
    band = curve(columns, "server/test/acc")
    assert band is not None and band.rounds == [1, 2]
    assert band.mean == pytest.approx([0.2, 0.4]) and band.sd == pytest.approx([sqrt(0.02), sqrt(0.08)])
    assert curve(columns, "flatness/lambda_max") is None
    long = [{"a": [(t, float(s * t)) for t in range(1, 201)]} for s in (1, 3)]
    assert curve(long, "a")[:2] == ([t + 0.5 for t in range(1, 200, 2)], [2 * (t + 0.5) for t in range(1, 200, 2)])  # type: ignore[index]


def test_one_colour_a_group(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / str(i), {1: i / 10, 6: i / 8}, lambdas={1: 1000.0, 6: i + 1.0}) / "metrics.csv"
        for i in range(3)
    ]
    figure = plot_curves({"pair": paths[:2], "single": paths[2]})
    assert figure.get_figwidth() == PAGE and len(figure.axes) == 3
    for axes in figure.axes:
        assert len(axes.lines) == 2 and len(axes.collections) == 1  # a mean each, and the band of the pair
        assert axes.lines[0].get_color() == COLORS[0] and axes.lines[1].get_color() == COLORS[1]
        assert axes.lines[0].get_linestyle() != axes.lines[1].get_linestyle()
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "linear", "log"]
    alone = plot_curves({"pair": paths[:2]}, ["flatness/lambda_max"])
    assert alone.get_figwidth() == COLUMN and len(alone.axes) == 1
    with pytest.raises(UserError, match="names = server/test/miou: no run has it; choose from server/test/acc"):
        plot_curves({"pair": paths[:2]}, ["server/test/miou"])


def test_curves_by_device_hours() -> None:
    """Points are at the mean hours of the seeds, where each run has a clock."""
    runs = [
        {"server/test/acc": [(2, 0.5), (4, 0.7)], "clock/time_s": [(t, s * 3600.0 * t) for t in (1, 2, 3, 4)]}
        for s in (1, 3)
    ]
    (axes,) = draw_curves({"runs": runs}, hours=True).axes
    assert axes.lines[0].get_xdata().tolist() == [4, 8] and axes.get_xlabel() == "device hours"  # type: ignore[union-attr]
    assert all_timed({"runs": runs}) and not all_timed({"runs": [*runs, {"server/test/acc": [(2, 0.5)]}]})


def test_losses_beside_one_that_diverged() -> None:
    losses = [{"server/test/loss": [(1, 2.0), (2, 1.0), (3, end)]} for end in (0.5, 1e20)]
    for group, scale in ((losses[:1], "linear"), (losses, "log")):
        (axes,) = draw_curves({"runs": group}).axes
        assert axes.get_yscale() == scale and len(axes.get_yticks()) < 12


@pytest.mark.slow
def test_compare_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It compares real runs of two methods with two seeds each."""
    folders = [
        run("fit", f"--trainer.seed={seed}", root=tmp_path / "runs", model=model)
        for model in ("FedAvg", "FedSAM")
        for seed in (0, 1)
    ]
    where = tmp_path / "out"
    cli("compare", str(tmp_path / "runs"), "--target=0.01", f"--reference={folders[0]}", f"--out={where}")
    out = capsys.readouterr().out
    assert "FedAvg-Digits" in out and "cost in B" in out
    with (where / "compare.csv").open(newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"FedAvg-Digits", "FedSAM-Digits"} and rows["FedSAM-Digits"]["seeds"] == "2"
    for model, pair in (("FedAvg", folders[:2]), ("FedSAM", folders[2:])):
        row, means = rows[f"{model}-Digits"], [summarise(folder).mean for folder in pair]
        assert float(row["mean"]) == pytest.approx(sum(means) / 2)
        assert float(row["mean_sd"]) == pytest.approx(abs(means[0] - means[1]) / sqrt(2))
        assert float(row["target_cost"]) == pytest.approx(0.5) and row["reached"] == "2"  # round 1 of 2, as FedAvg
    assert r"\toprule" in (where / "compare.tex").read_text()
    assert (where / "curves.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(SystemExit, match=r"^error: runs = nowhere: no such folder; give [^\n]*$"):
        cli("compare", "nowhere")


def test_no_cell_is_a_formula(tmp_path: Path) -> None:
    """Names that a spreadsheet would calculate get a quote before them; numbers, also as text, do not."""
    write_table(
        tmp_path / "a.csv", ["=head"], [["=cmd|calc"], ["+1+1"], ["@x"], ["-a"], ["-0.5"], [-0.5], ["-1e-3"], ["b"]]
    )
    cells = (tmp_path / "a.csv").read_bytes().decode().split("\r\n")
    assert cells == ["'=head", "'=cmd|calc", "'+1+1", "'@x", "'-a", "-0.5", "-0.5", "-1e-3", "b", ""]
