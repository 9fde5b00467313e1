"""The report: one page that is valid, refers to nothing outside, holds the numbers of the tables, and looks right."""

from __future__ import annotations

import csv
import html
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from fl_lightning.commands.report import draw
from fl_lightning.results.compare import compare
from fl_lightning.results.metrics import read_measurements
from fl_lightning.results.report import Runs, densities, read_group, spectra
from fl_lightning.results.table import Column, cell, columns, label
from tests.results.folders import configured
from tests.runs import cli, run

VOID = {"meta", "br", "link", "img", "input", "hr"}
CELL = {"paper": "fedgloss", "table": "3", "dataset": "CIFAR10", "model": "HsuCNN", "heterogeneity": "alpha=0.05"}


class Page(HTMLParser):
    """The elements of a page, their attributes, and the texts of its tables; asserts that tags match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.last = ""
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.cells: list[list[str]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.last = dict(attrs).get("id") or tag
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts[self.last] = self.texts.get(self.last, "") + data
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data.strip().replace("\u00a0", " ")


def provenance(changes: str = "") -> dict[str, Any]:
    code = {"commit": "0123456789abcdef", "changes": "abc" if changes else None, "unknown_files": ["mine.py"]}
    machine = {"system": "Linux", "cpu": "CPU", "cores": 2, "threads": 1, "device": "cpu", "processes": 1}
    start = {"date": "2026-01-02T03:04:05+00:00", "round": 0, "command": "fl-lightning fit --x <y>", "machine": machine}
    start |= {"versions": {"python": "3.12"}, "engine": "graphed", "precision": "32-true"}
    again = {**start, "round": 3, "command": "fl-lightning fit --ckpt_path last"}
    starts = [{**entry, "code": {"working folder": None, "package": code}} for entry in (start, again)]
    return {"starts": starts, "changes": {"abc": changes} if changes else {}}


def measurement(name: str, value: float, **more: Any) -> dict[str, Any]:
    common = {"model": "global model", "data": "training data", "samples": 1000, "residual": None, "error": 0.5}
    return {"name": name, "value": value, **common, "iterations": 3, "settings": {"rho": 0.05}, "details": {}, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_folders(tmp_path / "runs")


def run_folders(root: Path) -> Path:
    """Writes two configs, one with two seeds, and everything that a run folder may hold."""
    one = configured(root / "FedAvg" / "version_0", {3: 0.5, 6: 0.5}, lambdas={3: 90.0, 6: 2.0})
    configured(root / "FedAvg" / "version_1", {3: 0.5, 6: 0.75}, seed=1, lambdas={3: 50.0, 6: 3.0})
    two = configured(root / "a <b> & c" / "version_0", {3: 0.8, 6: 0.9}, lr=0.2)
    (one / "provenance.json").write_text(json.dumps(provenance("--- a\n+++ </script><b>\n")))
    counts = [{"0": 3}, {"0": 1, "2": 5}]
    (one / "partition.json").write_text(json.dumps({"clients": 2, "classes": 3, "counts": counts}))
    rows = "".join(f"6,{k},{10 ** (k % 3 + 1)},0.{k},1.5,0.9,0.5\n" for k in range(10))
    (one / "client_evaluation.csv").write_text(f"round,client,samples,acc,loss,local_acc,local_loss\n{rows}")
    lines = [{"round": t, "seed": 0, **measurement("lambda_max", 9.0 / t)} for t in (3, 6)]
    (one / "flatness.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut sh')
    measurements = [measurement("lambda_1", 4.0, details={"eigenvalues": [1.0, 4.0]})]
    measurements += [measurement("density_mean", 0.1, details={"grid": [0, 1], "density": [1.0, 0.0], "sigma": [1]})]
    for name, content in (
        ("flatness/flatness.json", {"round": 6, "measurements": measurements}),
        ("reproduction.json", [{**CELL, "algorithm": "FedAvg", "metric": "acc", "fraction": 0.01}]),
    ):
        (one / name).parent.mkdir(exist_ok=True)
        (one / name).write_text(json.dumps(content))
    for kind in ("landscape", "interpolate"):
        (one / kind).mkdir()
        figure = Figure(figsize=(1, 1))
        figure.add_subplot().plot([1, 2])
        figure.savefig(one / kind / f"{kind}.png")
    (two / "reproduction.json").write_text(json.dumps([{**CELL, "algorithm": "FedSAM", "metric": "acc"}]))
    return root


def files(folder: Path) -> tuple[Runs, list[Column]]:
    groups = compare([folder], target=0.6, last=1)
    return [(group, read_group(group)) for group in groups], columns(groups)


def test_what_a_diverged_model_has_measured_is_read_and_not_drawn(folder: Path) -> None:
    diverged = folder / "FedAvg" / "version_0"
    details = {"eigenvalues": [math.nan, 1.0], "density": [math.inf], "grid": [math.nan]}
    line = {"round": 6, "seed": 0, **measurement("lambda_1", math.nan, details={**details, "clients": {"0": math.nan}})}
    (diverged / "flatness.jsonl").write_text(json.dumps(line) + "\n")
    (diverged / "flatness" / "flatness.json").unlink()
    runs = [run for _, members in files(folder)[0] for run in members]
    assert not spectra(runs) and not densities(runs)
    assert len(read_measurements(diverged)) == 1


def test_each_spectrum_of_a_run_has_its_own_line(folder: Path) -> None:
    run_folder = folder / "FedAvg" / "version_0"
    kinds = ({"operator": "fisher"}, {"operator": "fisher", "parameters": "head.*"}, {"merged": True})
    settings: list[dict[str, Any]] = [{"operator": "hessian", **kind} for kind in ({}, *kinds)]
    measurements = [
        measurement(f"{k}", 4.0, settings=setting, details={"eigenvalues": [k]}) for k, setting in enumerate(settings)
    ]
    test = measurement("4", 4.0, settings=settings[0], data="test set", details={"eigenvalues": [4]})
    path = run_folder / "flatness" / "flatness.json"
    path.write_text(json.dumps({"round": 6, "measurements": measurements}))
    runs = [run for _, members in files(folder)[0] for run in members]
    assert list(spectra(runs).values()) == [[0], [1], [2], [3]]
    ends = [label.removeprefix("FedAvg, seed 0") for label in spectra(runs)]
    assert ends == ["", ", fisher", ", fisher, head.*", ", merged"]
    path.write_text(json.dumps({"round": 6, "measurements": [*measurements, test]}))
    runs = [run for _, members in files(folder)[0] for run in members]
    assert [label.rpartition(", ")[2] for label in spectra(runs)] == [*["training data"] * 4, "test set"]


def test_runs_with_other_seeds_of_the_data_have_names_of_their_own(tmp_path: Path) -> None:
    """Otherwise one of two spectra, and its pictures, would stand in the place of the other's."""
    for seed in (0, 1):
        folder = configured(tmp_path / f"run_{seed}", {6: 0.5}, data_seed=seed)
        content = {"round": 6, "measurements": [measurement("lambda_1", 4.0, details={"eigenvalues": [1.0 + seed]})]}
        (folder / "flatness").mkdir()
        (folder / "flatness" / "flatness.json").write_text(json.dumps(content))
    (group,) = compare(tmp_path)
    runs = read_group(group)
    assert [run.label.partition(", ")[2] for run in runs] == ["seed 0, data seed 0", "seed 0, data seed 1"]
    assert [*spectra(runs).values()] == [[1.0], [2.0]]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the report of the folder that `reported` names."""
    out = tmp_path_factory.mktemp("report") / "out" / "report.html"
    out.parent.mkdir()
    cli("report", str(run_folders(reported(out))), "--target=0.6", "--last=1", f"--out={out.parent}")
    return out


def reported(page: Path) -> Path:
    return page.parents[1] / "runs"


@pytest.mark.slow
def test_valid_and_without_an_outside_address(page: Path) -> None:
    text = page.read_text()
    parsed = Page(text)
    assert len(parsed.ids) == len(set(parsed.ids)) and "spectra" in parsed.ids
    links = [value for name, value in parsed.attributes if name in ("href", "srcset", "action", "xlink:href")]
    links += re.findall(r"url\((.*?)\)", text)
    inside = [link for link in links if link and not link.startswith("data:image/png;base64,")]
    assert inside and {link[:1] for link in inside} == {"#"}
    assert {link[1:] for link in inside} <= {*parsed.ids}
    assert all(str(value).startswith("data:image/png;base64,") for name, value in parsed.attributes if name == "src")
    assert "http" not in text.replace("http-equiv", "") and "@import" not in text
    assert "default-src 'none'" in text  # the browser itself refuses all addresses
    assert len(text) < 1.5e6


@pytest.mark.slow
def test_numbers_are_those_of_the_tables(page: Path) -> None:
    parsed = Page(page.read_text())
    runs, shown = files(reported(page))
    with (page.parent / "curves.csv").open(newline="") as file:
        rows = {
            (row["run"], row["metric"], *(float(row[key]) for key in ("round", "mean"))) for row in csv.DictReader(file)
        }
    points = {
        (line.get_label(), name.replace("_", "/", 1 + name.startswith("server")), *point)
        for _, name, figure in draw(runs, shown)["curves"]
        for line in figure.axes[0].lines
        for point in line.get_xydata().tolist()
    }
    names = {name for _, name, _, _ in rows}
    assert {
        (run, next(n for n in names if n.replace("/", "_") == name.replace("/", "_")), *p) for run, name, *p in points
    } == rows
    assert rows
    for group, _ in runs:
        written = {column.head: cell(group, column) for column in shown}
        tables = [
            dict(zip(parsed.cells[i], row, strict=True))
            for i in (0, 3)
            for row in parsed.cells[i + 1 : i + 3]
            if row[: len(label(group))] == label(group)
        ]
        assert label(group) == [group.settings["lr"]]
        assert {k: v for table in tables for k, v in table.items() if k not in ("lr", "seeds")} == written


@pytest.mark.slow
def test_everything_a_run_folder_holds(page: Path) -> None:
    text = page.read_text()
    parsed = Page(text)
    labels = [value for name, value in parsed.attributes if name in ("aria-label", "alt")]
    titles = [title for title, *_ in chain.from_iterable(draw(*files(reported(page))).values())]
    pictures = [f"FedAvg, seed 0 · {kind}/{kind}.png" for kind in ("interpolate", "landscape")]
    assert {*titles, *pictures} <= {*labels} and {"Global model", "Local models", "test accuracy"} <= {*titles}
    assert text.count("<figure>") == len(titles) + len(pictures)
    assert {"per-client", "tradeoff", "spectra", "landscapes", "partitions"} <= {*parsed.ids}
    assert sum("clients: FedAvg, seed 0" in title for title in titles) == 1
    rows = {tuple(row[:3]): row for row in parsed.cells}
    paper = rows["FedAvg", "fedgloss", "3"]
    assert paper[5:8] == ["acc", "1 %", "62.50 ± 17.68"] and float(paper[9]) == pytest.approx(
        62.5 - float(paper[8].split()[0]), abs=0.01
    )
    assert rows["FedAvg, seed 0", "lambda_max", "1.5"][-1] == "during the run, after round 6"
    assert ["lr" in row[0] for row in parsed.cells if row[:1] == ["model.lr"]] == [True]
    assert "fl-lightning fit --x &lt;y&gt;" in text and "&lt;/script&gt;&lt;b&gt;" in text and "mine.py" in text
    assert sum(row[2:3] == ["3"] and "last" in row[-1] for row in parsed.cells) == 1  # the resumption


@pytest.mark.parametrize("name", ["provenance.json", "flatness/flatness.json", "flatness.jsonl", "reproduction.json"])
def test_a_broken_file_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    broken = folder / "FedAvg" / "version_0" / name
    broken.write_text("{nothing\n")
    with pytest.raises(SystemExit, match=rf"^error: {broken}: not readable [^\n]*; restore or remove it$"):
        cli("report", str(folder), f"--out={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It reports a real run, in a folder and in a file; what went wrong is one line, and nothing is written."""
    measured = "--trainer.callbacks.metrics=[LambdaMax, ClientEvaluation]"
    run("fit", "--trainer.callbacks+=FlatnessMonitor", measured, root=tmp_path / "runs")
    cli("report", str(tmp_path / "runs"), f"--out={tmp_path / 'mine.html'}", "--target=0.01", "--figures")
    assert "report: " in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert {"compare.csv", "compare.tex", "curves.csv", "partition_0.pdf", "server_test_acc.png"} <= names
    assert {"tradeoff_lambda_max.pdf", "flatness_lambda_max.pdf", "clients.pdf"} <= names
    parsed = Page((tmp_path / "mine.html").read_text())
    assert any("FedAvg-Digits" in row for row in parsed.cells) and {"provenance", "per-client", "clients"} <= {
        *parsed.ids
    }
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"^error: runs = .*empty: no run there[^\n]*$"):
        cli("report", str(tmp_path / "empty"), f"--out={tmp_path / 'none'}")
    assert not (tmp_path / "none").exists()


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FRAME = """<body style="margin:0">
<iframe id="frame" style="border:0;width:{width}px;height:5000px" srcdoc="{page}"></iframe>
<script>
const check = () => {{
  const view = document.getElementById("frame").contentWindow, root = view.document.documentElement;
  const drawings = [...view.document.querySelectorAll("figure > svg, figure > img")];
  const wide = drawings.map((one) => one.getBoundingClientRect()).map((box) => box.width > 100 && box.height > 50);
  const lines = [...view.document.querySelectorAll("svg .run-0")], chip = view.document.querySelector(".chips button");
  const visible = () => lines.filter((line) => line.getBoundingClientRect().width > 0).length;
  const seen = [visible()];
  for (let i = 0; i < 2; i++) {{ chip.click(); seen.push(visible()); }}
  console.log("CHECKED " + JSON.stringify([root.clientWidth, root.scrollWidth, wide, lines.length, seen]));
}};
setTimeout(check, 3000);
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [420, 1300])
def test_in_a_browser(width: int, page: Path, tmp_path: Path) -> None:
    """All figures are seen, the console is free of errors, and nothing but tables is wider than the window."""
    frame, picture = tmp_path / "frame.html", tmp_path / "page.png"
    frame.write_text(FRAME.format(width=width, page=html.escape(page.read_text())))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    options += [f"--window-size={max(width, 500)},5000", "--virtual-time-budget=20000", f"--screenshot={picture}"]
    command = [str(CHROMIUM), *options, f"--user-data-dir={tmp_path / 'profile'}", frame.as_uri()]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    console = re.findall(r"CONSOLE[:(]\d+\)?\] \"(.*)\", source", completed.stderr)
    assert len(console) == 1 and console[0].startswith("CHECKED "), completed.stderr
    inner, content, wide, lines, seen = json.loads(console[0].removeprefix("CHECKED ").replace('\\"', '"'))
    assert inner == content == width
    assert all(wide) and len(wide) == page.read_text().count("<figure>")
    assert lines and seen == [lines, 0, lines]  # the button of a run hides and shows its lines
    assert picture.read_bytes().startswith(b"\x89PNG")
