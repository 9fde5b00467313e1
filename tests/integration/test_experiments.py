"""The papers' experiments: every config is made and trains, and every cell of the tables is one of them with flags."""

from __future__ import annotations

import math
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fl_lightning import BernoulliSampler
from fl_lightning.commands.shared.cli import FederatedCLI
from fl_lightning.core import config_of
from fl_lightning.core.errors import UserError
from fl_lightning.results.papers import PAPERS, Cell, find
from fl_lightning.results.recipes import columns, figure, recipe, rows, source_of
from fl_lightning.sweeps.reproduction import figure_tasks, select, tasks
from tests import generated
from tests.paper_tables import BLOCK
from tests.runs import cli, last, metrics, newest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "experiment"
FILES = sorted(FOLDER.rglob("*.yaml"))
SPECIAL = {"Landmarks": "landmarks", "Cityscapes": "segmentation", "IDDA": "segmentation"}


def said(file: Path) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load(file.read_text())
    return settings


def kind(file: Path) -> tuple[str, ...]:
    """Returns command, data set and network."""
    settings = said(file)
    command = "centralized" if file.stem.startswith("centralized") else "fit"
    return command, settings["data"]["class_path"], settings["model"]["init_args"]["net"]["class_path"]


def small(file: Path) -> list[str]:
    """Returns arguments for an experiment under the debug overlays."""
    command, data, _ = kind(file)
    special = "centralized" if command == "centralized" else SPECIAL.get(data)
    overlays = ["any", special] if special else ["any"]
    return [f"--config={file}", *(f"--config={ROOT / 'configs' / 'debug' / name}.yaml" for name in overlays)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Makes a folder with noise in the form of all data sets, in ``data``."""
    home = tmp_path_factory.mktemp("experiments")
    with pytest.MonkeyPatch.context() as monkeypatch:
        generated.everything(home / "data", monkeypatch)
        yield home


@pytest.fixture(scope="module")
def parsed() -> FederatedCLI:
    """Builds model, data and trainer of many arguments, one after another, without a run."""
    return FederatedCLI("fit", "--model=FedAvg", "--model.net=DigitsMLP", "--data=Digits")


def path(file: Path) -> str:
    return str(file.relative_to(FOLDER))


@pytest.mark.sampled(quick=12, slow=2)
@pytest.mark.parametrize("file", FILES, ids=path)
def test_experiment_is_made(file: Path, parsed: FederatedCLI) -> None:
    objects, settings = parsed.make(*small(file)), said(file)
    assert objects.trainer.max_rounds == 2
    assert objects.model.optimizer.lr == settings["model"]["init_args"]["optimizer"]["init_args"]["lr"]
    assert objects.data.num_clients == settings["data"]["init_args"].get("num_clients", 1)
    config = config_of(objects.trainer, objects.model, objects.data)  # as a program has it that makes the same objects
    assert config == {**objects.trainer.config, "trainer": {**objects.trainer.config["trainer"], "callbacks": []}}


@pytest.mark.sampled(quick=27, slow=32, start=1)
@pytest.mark.parametrize("file", FILES, ids=path)
@pytest.mark.filterwarnings("ignore:.*not the .* of the published data set:UserWarning")
def test_experiment_trains(file: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    cli(kind(file)[0], *small(file), f"--trainer.default_root_dir={tmp_path}", "--trainer.enable_progress_bar=false")
    assert last(newest(tmp_path))["round"] == 2
    curves = metrics(newest(tmp_path))
    (metric,) = {"server/test/acc", "server/test/miou"} & set(curves)
    assert 0 <= curves[metric][-1][1] <= 1
    assert math.isfinite(curves["server/test/loss"][-1][1])


# The recipes, and the page that shows them

PAGE = ROOT / "docs" / "experiments.md"
PAPER_PAGES = [ROOT / "docs" / "experiments" / f"{paper}.md" for paper in PAPERS]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*not the .* of the published data set:UserWarning")
def test_row_of_silobn_trains(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its net is evaluated by the statistics of each batch."""
    monkeypatch.chdir(home)
    file = FOLDER / "fedsam" / "cityscapes_heterogeneous.yaml"
    (cell,) = find(
        paper="fedsam", table="8", dataset="Cityscapes", heterogeneity="heterogeneous", algorithm="SiloBN+SAM"
    )
    row = recipe(cell).row
    cli("fit", *small(file), *row, f"--trainer.default_root_dir={tmp_path}", "--trainer.enable_progress_bar=false")
    assert math.isfinite(metrics(newest(tmp_path))["server/test/loss"][-1][1])


UNKNOWN = "+SWA 100"
"""What the paper does not explain, so that there is no recipe."""
CELLS = [cell for cell in find() if cell.dataset and cell.heterogeneity and not cell.algorithm.endswith(UNKNOWN)]
"""All cells that are of a run; those without heterogeneity are times of a README's table."""
SOURCES = (*PAPERS, "FL-Simulator", "FL-SAM")
"""Papers, and READMEs of their codes, which have rows and columns of their own."""


Command = tuple[str, Path, tuple[str, ...]]


def commands() -> dict[Command, list[Cell]]:
    """Returns the cells by subcommand, file and settings, whatever their cohort."""
    cells = defaultdict(list)
    for cell in CELLS:
        cell_recipe = recipe(cell)
        cells[cell_recipe.command, ROOT / "configs" / f"{cell_recipe.config}.yaml", cell_recipe.row].append(cell)
    return cells


def test_every_cell_is_a_file_with_settings() -> None:
    cells = commands()
    assert sum(map(len, cells.values())) == len(CELLS) > 1900
    assert {file for _, file, _ in cells} == set(FILES)  # no file without a cell
    for paper in PAPERS:
        assert set(columns(paper).values()) == {file.stem for file in (FOLDER / paper).glob("*.yaml")}


def test_files_have_the_cohort_and_the_epochs_of_a_column() -> None:
    columns = defaultdict(set)
    for (_, file, _), cells in commands().items():
        columns[file] |= {(cell.participation, cell.epochs) for cell in cells if cell.participation and cell.epochs}
    for file, pairs in columns.items():
        trainer, data = said(file)["trainer"], said(file)["data"]["init_args"]
        pair = f"{trainer.get('clients_per_round')}/{data.get('num_clients')}", str(trainer.get("local_epochs"))
        assert pair in pairs or not pairs, file
    assert sum(map(bool, columns.values())) > 40


def test_every_row_is_of_use() -> None:
    used = {
        (source_of(c), name) for c in CELLS for name in (c.algorithm, *(f"+{p}" for p in c.algorithm.split("+")[1:]))
    }
    used |= {(source_of(c), c.algorithm.split("+")[0].split(" ")[0]) for c in find()}
    for source in SOURCES:
        files = [text.split(" ")[0] for text in columns(source).values()]
        for row in rows(source):
            assert all((source, name) in used for name in row.names), (source, row)
            assert any(fnmatchcase(file, glob) for glob in row.over for file in files), (source, row)


def test_what_has_no_recipe_says_so() -> None:
    (cell,) = find(paper="fedgf", table="3", algorithm="FedGF", metric="models_per_client")
    with pytest.raises(UserError, match=r"^table = 3: our copy of the paper names no data set for this number"):
        recipe(cell)
    with pytest.raises(UserError, match=r"^table = FL-SAM: no config for CIFAR10, FLSAMCNN, ; see docs/experiments.md"):
        recipe(find(paper="fedgmt", table="FL-SAM", metric="seconds_per_round")[0])
    for cell in find(paper="fedsam", table="7"):
        if cell.algorithm.endswith(UNKNOWN):
            with pytest.raises(
                UserError,
                match=r"^algorithm = Fed.*\+SWA 100: our copy of the paper has no settings of it over landmarks",
            ):
                recipe(cell)
    with pytest.raises(
        UserError, match=r"^algorithm = FedFoo: our copy of the paper has no settings of it over cifar10_alpha0"
    ):
        recipe(replace(find(paper="fedgloss", table="8")[0], algorithm="FedFoo"))


@pytest.mark.parametrize(
    ("paper", "table", "column", "algorithm", "expected"),
    [
        ("fedgloss", "3", "CIFAR10, ResNet18GN, alpha=0.05", "FedSMOO",
         "--model FedSMOO --model.rho 0.01 --model.beta 10"),
        ("fedgloss", "3", "CIFAR100, HsuCNN, alpha=0", "FedSMOO", "--model FedSMOO --model.rho 0.1 --model.beta 100"),
        ("fedgloss", "5/10", "Landmarks, MobileNetV2GN, users", "FedSpeed",
         "--model FedSpeed --model.rho 0.05 --model.alpha 0.95 --model.beta 100"),
        ("fedgmt", "4", "CIFAR10, FLSAMCNN, Path(2)", "FedGMT gamma=0.5",
         "--model FedGMT --model.gamma 1 --model.tau 3 --model.ema_alpha 0.95 --model.beta 10 --model.gamma=0.5"),
        ("fedgf", "5", "CIFAR100, HsuCNN, alpha=0", "FedGF c=0",
         "--model FedGF --model.rho 0.02 --model.T_D 0.2 --model.W 30 --model.c=0"),
        ("fedsam", "7", "Landmarks, MobileNetV2GN, users", "FedAvg+SWA 75", "--config compositions/swa"),
        ("fedsam", "2", "CIFAR10, HsuCNN, alpha=0", "FedASAM+SWA",
         "--model FedASAM --model.rho 0.7 --model.eta 0.2 --config compositions/swa"),
        ("fedgmt", "FL-SAM", "CIFAR10, ResNet18GN, IID", "FedSAM",
         "--config presets/flsam/common --config presets/flsam/images --model FedSAM --model.rho 0.01"),
    ],
)  # fmt: skip
def test_recipes_by_hand(paper: str, table: str, column: str, algorithm: str, expected: str) -> None:
    dataset, model, heterogeneity = column.split(", ")
    cell, *_ = find(
        paper=paper, table=table, dataset=dataset, model=model, heterogeneity=heterogeneity, algorithm=algorithm
    )
    assert " ".join(recipe(cell).row) == expected


def settings_of(paper: str, table: str, algorithm: str) -> dict[str, dict[str, str]]:
    """Returns the settings of a row by file."""
    settings = {}
    for cell in find(paper=paper, table=table, algorithm=algorithm):
        words = shlex.split(" ".join(recipe(cell).row).replace("=", " "))
        settings[recipe(cell).config] = dict(zip(words[::2], words[1::2], strict=True))
    return settings


def test_fedgf_without_its_server_part_has_the_radius_of_fedsam() -> None:
    """The paper's numbers of c = 0 are those of FedSAM in Table 1, to the last digit."""
    fedsam = settings_of("fedgf", "1", "FedSAM")
    for file, settings in settings_of("fedgf", "5", "FedGF c=0").items():
        assert settings["--model.rho"] == fedsam[file]["--model.rho"], file
    fedgf_cells, fedsam_cells = (
        find(paper="fedgf", table="5", algorithm="FedGF c=0"),
        find(paper="fedgf", table="1", algorithm="FedSAM"),
    )
    values = {(c.dataset, c.heterogeneity, c.participation): c.value for c in fedsam_cells}
    assert [values[c.dataset, c.heterogeneity, c.participation] for c in fedgf_cells] == [c.value for c in fedgf_cells]


def test_fedgloss_without_admm_differs_in_its_dual_alone() -> None:
    with_dual = settings_of("fedgloss", "9", "FedGloSS+SAM")
    for file, settings in settings_of("fedgloss", "9", "FedGloSS+SAM without ADMM").items():
        assert settings.pop("--model.use_dual") == "false"
        del with_dual[file]["--model.beta"]
        assert settings == with_dual[file], file


# The configs beside the papers' texts

CNN = {"epochs": 1, "batch": 64, "lr": 0.01, "momentum": 0.0, "weight_decay": 4e-4}
GMT = {"epochs": 5, "batch": 50, "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5, "rounds": 500, "crop": 2}
SMOO = {"epochs": 5, "batch": 50, "lr": 0.1, "momentum": 0.0, "weight_decay": 1e-3, "rounds": 800, "lr_decay": 0.998}
TEXTS: dict[str, dict[str, float | str]] = {
    "fedsam/cifar10_*": {**CNN, "rounds": 10_000},
    "fedsam/cifar100_alpha*": {**CNN, "rounds": 20_000},
    "fedgf/cifar10_*": {**CNN, "rounds": 10_000},
    "fedgf/cifar100_*": {**CNN, "rounds": 20_000},
    "fedgloss/cifar10_alpha*": {**CNN, "rounds": 10_000, "granularity": "sample"},  # random crops and random flips
    "fedgloss/cifar100_alpha*": {**CNN, "rounds": 20_000, "granularity": "sample"},
    "fedgloss/*_resnet18": {**CNN, "momentum": 0.7, "weight_decay": 1e-5, "rounds": 10_000, "granularity": "sample"},
    "fedgloss/landmarks": {**CNN, "epochs": 5, "lr": 0.1, "weight_decay": 4e-5, "rounds": 1300},
    "fedsmoo/cifar10_*": SMOO,
    "fedsmoo/cifar100_*": {**SMOO, "epochs": 2, "batch": 20},
    "fedgmt/cifar10_*": {**GMT, "granularity": "sample"},
    "fedgmt/cifar100_*": {**GMT, "epochs": 2, "batch": 20, "granularity": "sample"},
    "fedgmt/cinic10_*": {**GMT, "rounds": 1000, "batch": 100, "granularity": "sample"},
    "fedgmt/agnews_*": {name: GMT[name] for name in GMT if name != "crop"} | {"rounds": 1000, "lr": 0.1},
}
"""Hyperparameters of the experiments, typed from the papers' texts, not from the configs."""
PROGRAMS: dict[str, dict[str, float]] = {"fedsmoo/*": {"clip": 10.0}, "fedgmt/*": {"lr_decay": 0.998}}
"""Those that the texts do not mention and the authors' programs have, as docs/fidelity.md lists them."""


@pytest.mark.sampled(quick=7)
@pytest.mark.parametrize("pattern", TEXTS)
def test_config_has_the_values_of_the_text(pattern: str, parsed: FederatedCLI) -> None:
    files = [file for file in FILES if fnmatchcase(path(file).removesuffix(".yaml"), pattern)]
    assert files
    silent = {
        name: value for glob, values in PROGRAMS.items() if fnmatchcase(pattern, glob) for name, value in values.items()
    }
    expected = {"lr_decay": 1.0, "clip": None, **TEXTS[pattern], **silent}
    for file in files:
        small = ["debug/landmarks"] if file.stem == "landmarks" else []
        with torch.device("meta"):  # no weights are drawn
            objects = parsed.make(f"--config={file}", *(f"--config={name}" for name in small))
        optimizer, augment = objects.model.optimizer, objects.data.augment
        actual = {name: getattr(optimizer, name) for name in ("lr", "momentum", "weight_decay", "lr_decay", "clip")}
        actual |= {name: getattr(augment, name) for name in ("crop", "granularity") if augment is not None}
        actual |= {
            "rounds": objects.trainer.max_rounds,
            "epochs": objects.trainer.local_epochs,
            "batch": objects.data.batch_size,
        }
        assert {name: actual[name] for name in expected} == expected, file


def test_presets_have_the_augmentation_of_the_programs(parsed: FederatedCLI) -> None:
    for experiment, preset in (("fedgmt/cifar10_path2", "flsam"), ("fedgloss/cifar10_alpha0", "fedgloss_repo")):
        objects = parsed.make(f"--config=experiment/{experiment}", f"--config=presets/{preset}/images")
        augment = objects.data.augment
        assert (augment.crop, augment.flip, augment.granularity) == (4, True, "batch")


ROWS = {"SAM": "FedSAM", "ASAM": "FedASAM", **dict.fromkeys(("SGD", "SWA", "Mixup", "Cutout", "SiloBN"), "FedAvg")}
"""Rows that are not named after an algorithm."""


def check(parsed: FederatedCLI, command: Command, cell: Cell) -> None:
    _, file, settings = command
    cohort, _, clients = cell.participation.partition("/")
    overlay = [f"--config={ROOT / 'configs' / 'debug' / 'landmarks.yaml'}"] if file.stem == "landmarks" else []
    with torch.device("meta"):  # no weights are drawn
        objects = parsed.make(f"--config={file}", *overlay, *settings, *recipe(cell).column)
    base, *added = re.split(r" |\+", cell.algorithm)[0], *cell.algorithm.split("+")[1:]
    assert type(objects.model).__name__ == ROWS.get(base, base), cell
    assert (objects.model.averaging is not None) == ("SWA" in cell.algorithm), cell
    for part in ("Mixup", "Cutout"):
        assert bool(getattr(objects.data.augment, part.lower(), 0)) == (part in cell.algorithm), cell
    for ascent in {"SAM", "ASAM"} & {word for part in added for word in part.split(" ")}:
        assert type(objects.model.ascent).__name__ == ascent, cell
    if clients:
        sampler = objects.trainer.sampler
        mean = sampler.p * int(clients) if isinstance(sampler, BernoulliSampler) else sampler.clients_per_round
        assert (mean, objects.data.num_clients) == (int(cohort), int(clients))
        assert type(objects.model.net).__name__ == cell.model
    if source_of(cell) != cell.paper:  # the numbers of the README
        assert objects.trainer.max_rounds == (1000 if "1000 rounds" in cell.note else 500)
        assert objects.data.batch_size == (25 if "batches of 25" in cell.note else 50)


@pytest.mark.slow
@pytest.mark.sampled(slow=40)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("paper", PAPERS)
def test_every_cell_is_made(paper: str, part: int, parsed: FederatedCLI) -> None:
    cases = [(command, cells[-1]) for command, cells in commands().items() if cells[0].paper == paper]
    for command, cell in cases[part::8]:
        check(parsed, command, cell)
    assert len(cases) > 50


def test_page_holds_tables_and_rows() -> None:
    pages = {path: path.read_text() for path in (PAGE, *PAPER_PAGES)}
    blocks = [(kind, subject) for page in pages.values() for kind, subject, _ in BLOCK.findall(page)]
    expected = {("tables", paper) for paper in PAPERS}
    expected |= {("rows", source) for source in SOURCES}
    assert len(blocks) == len({*blocks}) and {*blocks} == expected | {("known", "cells"), ("known", "figures")}


def test_code_of_the_page(
    capsys: pytest.CaptureFixture[str], parsed: FederatedCLI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    page = PAGE.read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block, {})
    cell, row = capsys.readouterr().out.splitlines()
    assert cell == "83.9 0.4 5/100"
    assert row == "experiment/fedgloss/cifar10_alpha0 --model FedGloSS --model.rho 0.15"
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.replace("\\\n", "").splitlines()]
    fits = [words for words in lines if words[1] == "fit"]
    assert len(fits) == 4 and len(lines) == 11
    built = [parsed.make(*words[2:]) for words in fits]
    assert [type(objects.model).__name__ for objects in built[:2]] == ["FedSAM", "FedASAM"]
    for words in lines:
        if words[1] == "reproduce":
            config = FederatedCLI(*words[1:]).config
            if config.table.startswith("fig"):
                assert all(map(figure_tasks, figure(config.paper, config.table.removeprefix("fig")))), words
                continue
            names = [text.split(",") if text else [] for text in (config.rows, config.columns)]
            assert tasks(select(config.paper, config.table, *names))[0], words
