"""The papers' experiments: every config is made and trains, and every cell of the tables is one of them with flags."""

from __future__ import annotations

import math
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fl_lightning.commands.cli import FederatedCLI
from fl_lightning.results.papers import PAPERS, Cell, find
from tests import generated
from tests.paper_tables import markdown
from tests.runs import cli, last, metrics, newest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "experiment"
FILES = sorted(FOLDER.rglob("*.yaml"))
SPECIAL = {"Landmarks": "landmarks", "Cityscapes": "segmentation", "IDDA": "segmentation"}


def said(file: Path) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load(file.read_text())
    return settings


def kind(file: Path) -> tuple[str, ...]:
    """Command, data set and network."""
    settings = said(file)
    command = "centralized" if file.stem.startswith("centralized") else "fit"
    return command, settings["data"]["class_path"], settings["model"]["init_args"]["net"]["class_path"]


def small(file: Path) -> list[str]:
    """Arguments for an experiment under the debug overlays."""
    command, data, _ = kind(file)
    special = "centralized" if command == "centralized" else SPECIAL.get(data)
    overlays = ["any", special] if special else ["any"]
    return [f"--config={file}", *(f"--config={ROOT / 'configs' / 'debug' / name}.yaml" for name in overlays)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with noise in the form of all data sets, in ``data``."""
    home = tmp_path_factory.mktemp("experiments")
    with pytest.MonkeyPatch.context() as monkeypatch:
        generated.everything(home / "data", monkeypatch)
        yield home


class Parsed(FederatedCLI):
    """Model, data and trainer of many arguments, one after another, without a run."""

    def make(self, *args: str) -> Any:
        self.config = self.parser.parse_args(list(args))
        return self.build()


@pytest.fixture(scope="module")
def parsed() -> Parsed:
    return Parsed("fit", "--model=FedAvg", "--model.net=DigitsMLP", "--data=Digits")


def path(file: Path) -> str:
    return str(file.relative_to(FOLDER))


@pytest.mark.parametrize("file", FILES, ids=path)
def test_experiment_is_made(file: Path, parsed: Parsed) -> None:
    made, settings = parsed.make(*small(file)), said(file)
    assert made.trainer.max_rounds == 2
    assert made.model.optimizer.lr == settings["model"]["init_args"]["optimizer"]["init_args"]["lr"]
    assert made.data.num_clients == settings["data"]["init_args"].get("num_clients", 1)


SEEN: set[tuple[str, ...]] = set()
QUICK = [not (kind(file)[1:] in SEEN or SEEN.add(kind(file)[1:])) for file in FILES]  # type: ignore[func-returns-value]
"""Whether a file is the first one of its data set and network."""


@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=() if quick else pytest.mark.slow) for f, quick in zip(FILES, QUICK, strict=True)],
    ids=path,
)
@pytest.mark.filterwarnings("ignore:.*not the .* of the published data set:UserWarning")
def test_experiment_trains(file: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    cli(kind(file)[0], *small(file), f"--trainer.default_root_dir={tmp_path}", "--trainer.enable_progress_bar=false")
    assert last(newest(tmp_path))["round"] == 2
    found = metrics(newest(tmp_path))
    (measured,) = {"server/test/acc", "server/test/miou"} & set(found)
    assert 0 <= found[measured][-1][1] <= 1
    assert math.isfinite(found["server/test/loss"][-1][1])


# The page that says which cell is which file with which settings

PAGE = (ROOT / "docs" / "experiments.md").read_text()
BLOCK = re.compile(r"<!-- papers: (\S+) (\S+) -->\n(.*?)<!-- /papers -->", re.DOTALL)


class Rows:
    """The tables of files and of rows in a paper's section of the page."""

    def __init__(self, paper: str) -> None:
        (section,) = [part for part in PAGE.split("\n## ") if f"`configs/experiment/{paper}`" in part]
        lines = [line.strip("|").split("|") for line in BLOCK.sub("", section).splitlines() if line.startswith("| ")]
        cells = [[cell.strip() for cell in line] for line in lines]
        self.folder = FOLDER / paper
        self.files = {row[2]: row[0].strip("`") for row in cells if len(row) == 3 and row[0] != "file"}
        self.rows = [row for row in cells if len(row) == 4 and row[0] != "row"]

    def file(self, cell: Cell) -> Path:
        return self.folder / f"{self.files[f'{cell.dataset}, {cell.model}, {cell.heterogeneity}']}.yaml"

    def settings(self, name: str, file: Path) -> str | None:
        """What a row says of a file; None if there is no such row."""
        for names, over, settings, _ in self.rows:
            patterns = re.findall("`(.*?)`", over)
            if name in names.split(", ") and any(fnmatchcase(file.stem, pattern) for pattern in patterns):
                return settings.strip("`")
        return None

    def arguments(self, cell: Cell) -> list[str]:
        """The command line of a cell, without its cohort."""
        file = self.file(cell)
        name, _, value = cell.algorithm.partition("=")
        name, _, key = name.rpartition(" ") if value else (name, "", "")
        parts = name.split("+")
        ends = range(len(parts), 0, -1)
        end, first = next((e, s) for e in ends if (s := self.settings("+".join(parts[:e]), file)) is not None)
        rest = [self.settings(f"+{part}", file) for part in parts[end:]]
        assert None not in rest, cell
        more = [f"--model.{key}={value}"] if value else []
        return [word for part in (first, *rest) for word in shlex.split(part or "")] + more


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not the .* of the published data set:UserWarning")
def test_row_of_silobn_trains(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its net is evaluated by the statistics of each batch."""
    monkeypatch.chdir(home)
    file = FOLDER / "fedsam" / "cityscapes_heterogeneous.yaml"
    row = [*shlex.split(Rows("fedsam").settings("SiloBN", file) or ""), "--model.ascent=SAM"]
    cli("fit", *small(file), *row, f"--trainer.default_root_dir={tmp_path}", "--trainer.enable_progress_bar=false")
    assert math.isfinite(metrics(newest(tmp_path))["server/test/loss"][-1][1])


CELLS = [cell for cell in find() if cell.dataset and cell.table not in ("FL-Simulator", "FL-SAM")]
"""All cells of the papers' tables that are of a run, those of the codes' README files left out."""


Command = tuple[str, Path, tuple[str, ...]]


def commands() -> dict[Command, list[Cell]]:
    """Cells by subcommand, file and settings, whatever their cohort."""
    rows, found = {paper: Rows(paper) for paper in PAPERS}, defaultdict(list)
    for cell in CELLS:
        table = rows[cell.paper]
        command = "centralized" if cell.heterogeneity == "centralized" else "fit"
        found[command, table.file(cell), tuple(table.arguments(cell))].append(cell)
    return found


def test_every_cell_is_a_file_with_settings() -> None:
    found = commands()
    assert sum(map(len, found.values())) == len(CELLS) > 1500
    assert {file for _, file, _ in found} == set(FILES)  # no file without a cell
    for paper in PAPERS:
        table = Rows(paper)
        assert {f"{name}.yaml" for name in table.files.values()} == {file.name for file in table.folder.glob("*.yaml")}


def test_files_have_the_cohort_and_the_epochs_of_a_column() -> None:
    columns = defaultdict(set)
    for (_, file, _), cells in commands().items():
        columns[file] |= {(cell.participation, cell.epochs) for cell in cells if cell.participation and cell.epochs}
    for file, of in columns.items():
        trainer, data = said(file)["trainer"], said(file)["data"]["init_args"]
        own = f"{trainer.get('clients_per_round')}/{data.get('num_clients')}", str(trainer.get("local_epochs"))
        assert own in of or not of, file
    assert sum(map(bool, columns.values())) > 40


def test_every_row_is_of_use() -> None:
    used = {(c.paper, name) for c in CELLS for name in (c.algorithm, *(f"+{p}" for p in c.algorithm.split("+")[1:]))}
    used |= {(c.paper, c.algorithm.split("+")[0].split(" ")[0]) for c in find()}
    for paper in PAPERS:
        for names, *_ in Rows(paper).rows:
            assert all((paper, name) in used for name in names.split(", ")), (paper, names)


ROWS = {"SAM": "FedSAM", "ASAM": "FedASAM", **dict.fromkeys(("SGD", "SWA", "Mixup", "Cutout", "SiloBN"), "FedAvg")}
"""Rows that are not named after an algorithm."""


def check(parsed: Parsed, command: Command, cell: Cell) -> None:
    _, file, settings = command
    cohort, _, clients = cell.participation.partition("/")
    flags = [f"--trainer.clients_per_round={cohort}", f"--data.num_clients={clients}"] if clients else []
    overlay = [f"--config={ROOT / 'configs' / 'debug' / 'landmarks.yaml'}"] if file.stem == "landmarks" else []
    with torch.device("meta"):  # no weights are drawn
        made = parsed.make(f"--config={file}", *overlay, *settings, *flags)
    base, *added = re.split(r" |\+", cell.algorithm)[0], *cell.algorithm.split("+")[1:]
    assert type(made.model).__name__ == ROWS.get(base, base), cell
    assert (made.model.averaging is not None) == ("SWA" in cell.algorithm), cell
    for part in ("Mixup", "Cutout"):
        assert bool(getattr(made.data.augment, part.lower(), 0)) == (part in cell.algorithm), cell
    for ascent in {"SAM", "ASAM"} & {word for part in added for word in part.split(" ")}:
        assert type(made.model.ascent).__name__ == ascent, cell
    if clients:
        assert (made.trainer.sampler.clients_per_round, made.data.num_clients) == (int(cohort), int(clients))


@pytest.mark.slow
def test_a_cell_of_every_row_is_made(parsed: Parsed) -> None:
    seen = set()
    for command, cells in commands().items():
        row = cells[0].paper, cells[0].algorithm.partition("=")[0].removesuffix("+SWA")
        if row not in seen:
            seen.add(row)
            check(parsed, command, cells[0])
    assert len(seen) > 70


@pytest.mark.slow
def test_every_cell_is_made(parsed: Parsed) -> None:
    for command, cells in commands().items():
        check(parsed, command, cells[-1])


def test_page_holds_the_papers_numbers() -> None:
    blocks = BLOCK.findall(PAGE)
    assert {(paper, table) for paper, table, _ in blocks} == {(cell.paper, cell.table) for cell in find()}
    for paper, table, text in blocks:
        renew = f"put the output of `python -m tests.paper_tables {paper} {table}` between its comments"
        assert text == markdown(paper, table), f"docs/experiments.md is out of date: {renew}"


def test_code_of_the_page(capsys: pytest.CaptureFixture[str], parsed: Parsed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, {})
    assert capsys.readouterr().out == "83.9 0.4 5/100\n"
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    assert len(lines) == 3
    for line in lines:
        parsed.make(*shlex.split(line)[2:])
    assert type(parsed.make(*shlex.split(lines[0])[2:]).model).__name__ == "FedASAM"
