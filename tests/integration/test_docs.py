"""The pages hold what the package says of itself, their links lead somewhere, and their commands run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

import fl_lightning
from fl_lightning import algorithms
from fl_lightning.commands.shared import prediction
from fl_lightning.commands.shared.arguments import find_config
from fl_lightning.core.rng import numpy_generator
from tests import catalogue, generated, renew
from tests.runs import cli

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "algorithms"
BOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
MADE = [ROOT / "docs" / "notebooks" / f"{book.stem}.md" for book in BOOKS]
"""Pages that `make docs` makes of the notebooks."""
KEPT = sorted({*ROOT.glob("docs/**/*.md")} - {*MADE})
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *KEPT]
FENCE = re.compile(r"^```(sh|yaml|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name(text: Path) -> str:
    return str(text.relative_to(ROOT))


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[pytest.mark.slow] * (file.name == "privacy.md")) for file in renew.renewals()
    ],  # it trains
    ids=name,
)
def test_file_says_what_the_code_says(file: Path) -> None:
    assert file.read_text() == renew.renewed(file), f"{name(file)} is out of date: run `make renew`"


@pytest.mark.parametrize("algorithm", algorithms.__all__)
def test_algorithm_has_a_page(algorithm: str) -> None:
    page = PAGES / catalogue.Entry.of(getattr(algorithms, algorithm)).page
    assert page.exists(), f"{algorithm} has no page {name(page)}: CONTRIBUTING.md shows one"
    text, overview = page.read_text(), (PAGES / "index.md").read_text()
    assert f"| [`{algorithm}`]({page.name}) |" in overview
    parts = {
        "command": rf"--model {algorithm}\b",
        "box": '<div class="box"',
        "code": "<!-- /code -->",
        "row of the digits": rf"\| {algorithm} \|",
    }
    missing = [part for part, pattern in parts.items() if not re.search(pattern, text)]
    assert not missing, f"{name(page)} has no {' and no '.join(missing)} of {algorithm}: CONTRIBUTING.md shows a page"


@pytest.mark.parametrize("text", TEXTS, ids=name)
def test_relative_links_lead_to_files(text: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`|\$[^$\n]*\$", "", text.read_text(), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]
    files = [text.parent / t for t in targets if t]
    assert [t for t in files if not t.exists() and t.resolve() not in MADE] == []
    home = ROOT / "docs" if ROOT / "docs" in text.parents else ROOT  # the site has no file from outside of docs
    assert [t for t in targets if not (text.parent / t).resolve().is_relative_to(home)] == []


def test_navigation_has_every_page_once() -> None:
    nav = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(nav) == sorted(str(page.relative_to(ROOT / "docs")) for page in [*KEPT, *MADE])


def test_every_class_stands_in_an_example() -> None:
    page, exported = (ROOT / "docs" / "classes.md").read_text(), {*fl_lightning.__all__} - {*algorithms.__all__}
    assert {name for name in exported if not re.search(rf"fl\.{name}\b|`{name}\b", page)} == set()


def test_site_asks_no_other_host() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)
    files = [ROOT / "docs" / file for key in ("extra_css", "extra_javascript") for file in site[key]]
    assert files and all(file.is_file() for file in files) and site["theme"]["font"] == "false"
    fonts = [(file.parent / url) for file in files for url in re.findall(r"url\(([^)]+woff2)\)", file.read_text())]
    assert len(fonts) > 10 and all(font.is_file() for font in fonts)


def test_citation_and_bibliography_name_what_the_references_have() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    references = (ROOT / "docs" / "references.md").read_text()
    addresses = [paper["url"] for paper in citation["references"]]
    assert len(addresses) == 5 and all(address in references for address in addresses)
    entries = re.split(r"^@", (ROOT / "docs" / "references.bib").read_text(), flags=re.MULTILINE)[1:]
    keys = [re.match(r"\w+\{(\w+),\n", entry)[1] for entry in entries]  # type: ignore[index]
    assert len(keys) == len({*keys}) and all("  title = {{" in entry and "  year = {" in entry for entry in entries)
    papers = {*re.findall(r"arxiv\.org/abs/([\d.]+)\)", references)}
    assert papers - {*re.findall(r"eprint = \{([\d.]+)\}", "".join(entries))} == set()


@pytest.mark.parametrize("book", BOOKS, ids=name)
def test_notebook_shows_its_pictures(book: Path) -> None:
    text = book.read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert "stderr" not in {output.get("name") for output in outputs}
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert len(text) < 300_000 and not re.search(r"/tmp/|/home/|/root/|site-packages", text)


# The batch script


SCRIPT = ROOT / "examples" / "slurm.sh"


@pytest.mark.parametrize(
    "args", [["configs/mine.yaml", "--model.rho=0.1"], ["sweep", "sweeps/digits"]], ids=["fit", "sweep"]
)
@pytest.mark.parametrize(
    ("code", "trained", "calls"),
    [
        (0, True, []),
        (1, True, []),
        (138, True, ["scontrol requeue 7", "sleep 60"]),
        (138, False, []),
        (143, True, ["sleep 600"]),
    ],
)
def test_batch_script_starts_again_when_the_time_limit_is_near(
    code: int, trained: bool, calls: list[str], args: list[str], tmp_path: Path
) -> None:
    """The programs note their arguments; test_slurm.py runs the script on a real SLURM."""
    for program in ("srun", "scontrol", "sleep"):
        ending = f"[ {trained:d} = 1 ] && touch -d '1 hour' $LAST; exit {code}" if program == "srun" else ""
        (tmp_path / program).write_text(f'#!/bin/sh\necho "{program} $@" >> calls\n{ending}\n')
        (tmp_path / program).chmod(0o755)
    last = tmp_path / "runs/mine/version_0/checkpoints/last.ckpt"
    last.parent.mkdir(parents=True)
    last.touch()
    os.utime(last, (0, 0))
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "LAST": str(last)}
    env |= {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_ID": "7"}
    process = subprocess.run(["bash", str(SCRIPT), *args], cwd=tmp_path, env=env)
    run, *commands = (tmp_path / "calls").read_text().splitlines()
    assert process.returncode == code and commands == calls
    fit = (
        "fit --config configs/mine.yaml --trainer.name mine --model.rho=0.1 --trainer.num_nodes 2 --trainer.devices 4 "
        "--trainer.strategy ddp --trainer.default_root_dir runs --ckpt_path auto"
    )
    assert run == f"srun fl-lightning {' '.join(args) if args[0] == 'sweep' else fit}"


# Every command and every block of code, page by page


NOT_RUN = {
    "sh": {
        "make": "it makes the environment that the tests run in, and runs them",
        "pre-commit": "the same",
        "pip": "nothing is installed by a test",
        "-m benchmarks": "they measure for minutes; tests run their functions",
        "-m contest": "the same",
        "examples/theory.py": "the same: test_theory.py",
        "torchrun": "several processes: test_processes.py",
        "flwr ": "it needs flwr, in an environment of its own: tests/flower/test_flower.py",
        "flower-super": "the same",
        "srun": "a cluster; the batch script is run above",
        "sbatch": "the same",
        "wandb": "it needs an account or a server",
        "tensorboard --logdir": "it serves pages",
        "corruptions": "tests/commands/test_corruptions.py has its files",
        "ledger/cifar10": "hours",
        "ledger/digits": "a study has filled it",
        "lora_agnews": "it needs texts of AG News: test_example.py makes some",
        "ledger/agnews_lora": "the same",
        "ledger/claims": "a study has filled it: tests/studies",
        "ledger/methods": "a quarter of an hour; its parts: tests/studies",
        "git worktree": "it needs a clone",
        ".ci/ledger": "the same",
    },
    "python": {
        "docs/architecture.md": "a quotation, held above",
        "docs/landscapes.md": "tests/flatness/test_landscape.py",
        "my_batches": "several processes: tests/flatness",
    },
    "yaml": {},
}
"""What is not run, by a part of the line, or the page, with the reason."""
SHORT = {
    "fit": ["--trainer.max_rounds=2", "--trainer.eval_every=1", "--trainer.eval_last=1"],
    "centralized": ["--trainer.max_rounds=1"],
    "landscape": ["--points=3", "--samples=50", "--directions=2"],
    "interpolate": ["--points=4", "--samples=50"],
    "flatness": [],
    "test": [],
    "validate": [],
    "plan": ["--trainer.max_rounds=2"],
    "reproduce": [
        "--rounds=0.0002",
        "--jobs=1",
        "--trainer.local_steps=1",
        "--trainer.clients_per_round=2",
        "--trainer.threads=1",
    ],
}
"""What makes a command quick; those that build no trainer are run as they are."""
HOURS = {
    "cifar10.npz": "1,000 rounds of CIFAR-10",
    "experiment/": "a paper's experiment",
    "reproduce": "all runs of a table",
}
"""What stays short where a page runs as it is written, by a part of the command, with the reason."""
WRITTEN = [
    "docs/adapters.md",
    "docs/coming.md",
    "docs/data.md",
    "docs/faq.md",
    "docs/index.md",
    "docs/own-data.md",
    "docs/partitions.md",
    "docs/planning.md",
    "docs/resume.md",
    "docs/start.md",
]
"""Pages whose commands `make test-slow` runs as they are written; `make test-long` has the others."""
MEASURED = 2
"""Rounds that an estimate of hours measures."""
COMMON = ["--trainer.loggers=[]", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto"]
BASH = """
fl-lightning() { printf '%s\\0' "$#" "$@" >&3; read -r code <&4; return "$code"; }
.venv/bin/fl-lightning() { fl-lightning "$@"; }
set -e
"""


def as_written(args: list[str]) -> list[str]:
    """Returns the arguments, shortened if they take hours, or several processes, which would end this one with them."""
    hours = args[0] in ("fit", "reproduce") and any(part in " ".join(args) for part in HOURS)
    several = "--trainer.strategy" in args
    return shortened(args) if several or (hours and not {"--dry-run", "debug/any"} & {*args}) else args


def shortened(args: list[str]) -> list[str]:
    """Returns arguments that take seconds at most."""
    command = args[0] if args else ""
    if command == "sweep" and "--help" not in args:
        return [command, short_sweep(args[1]), *args[2:]]
    if command == "reproduce":
        folder = f"--out=reproduced/{len([*Path().glob('reproduced/*')])}"
        fewer = ["--points=3"] if args[2].startswith("fig") else [] if "--rows" in args else ["--rows=FedAvg"]
        return [*args, *SHORT[command], folder, *fewer]
    if command not in SHORT or any("help" in arg or arg == "--print_config" for arg in args):
        return args
    return [*args, *SHORT[command], *COMMON, "--trainer.threads=1", "--trainer.enable_progress_bar=false"]


def short_sweep(file: str) -> str:
    """Writes a sweep with two rounds a trial, under the same name; with two values of each parameter but the first."""
    path = find_config(file)
    sweep = yaml.safe_load(path.read_text())
    for parameter in [*sweep["parameters"].values()][1:]:
        if "values" in parameter:
            del parameter["values"][2:]
    sweep["parameters"] |= {"trainer.max_rounds": {"value": 2}}
    short = Path("short") / path.name
    short.parent.mkdir(exist_ok=True)
    short.write_text(yaml.safe_dump(sweep))
    return str(short)


def run_commands(text: str, limit: int = 1000, arguments_of: Callable[[list[str]], list[str]] = shortened) -> int:
    """Runs a block: bash reads it, and each ``fl-lightning`` is carried out in this process. Returns their number.

    After ``limit`` commands it stops.
    """
    (arguments, ask), (answer, code) = os.pipe(), os.pipe()
    fds = f"exec 3>&{ask} 4<&{answer} {ask}>&- {answer}<&-\n"
    count = 0
    with subprocess.Popen(["bash", "-c", fds + BASH + text], pass_fds=(ask, answer)) as shell:
        os.close(ask)
        os.close(answer)
        with os.fdopen(arguments, "rb") as requests, os.fdopen(code, "w") as reply:
            try:
                while count < limit and (number := read_word(requests)):
                    args = [read_word(requests) for _ in range(int(number))]
                    with exits_well():
                        cli(*arguments_of(args))
                    count += 1
                    print(0, file=reply, flush=True)
            finally:
                if count == limit or sys.exc_info()[0]:
                    shell.kill()
    assert count == limit or shell.returncode == 0, f"a command of bash failed in:\n{text}"
    return count


@contextmanager
def exits_well() -> Iterator[None]:
    """Help ends a command, too."""
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise


def read_word(stream: Any) -> str:
    word = b""
    while (byte := stream.read(1)) not in (b"", b"\0"):
        word += byte
    return word.decode()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Makes a folder with what the pages expect: noise in the form of all data, and a few files."""
    home = tmp_path_factory.mktemp("pages")
    rng = numpy_generator(0, "pages")
    for entry in ("configs", "examples", "benchmarks", "docs"):
        (home / entry).symlink_to(ROOT / entry)
    (home / ".venv" / "bin").mkdir(parents=True)
    (home / ".venv" / "bin" / "activate").touch()
    x, y = rng.random((60, 1, 8, 8), np.float32), np.arange(60) % 10
    np.savez(home / "mine.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    (home / "split.json").write_text(json.dumps([list(range(k, 40, 3)) for k in range(3)]))
    (home / "trace.json").write_text("[[0, 1, 2], [3, 4], [0, 4]]")
    (home / "my.yaml").write_text("model: {init_args: {rho: 0.2}}")
    pixels, labels = rng.integers(0, 256, (1020, 32, 32, 3), dtype=np.uint8), np.arange(1020) % 10
    parts = {"x_train": pixels[:1000], "y_train": labels[:1000], "x_test": pixels[1000:], "y_test": labels[1000:]}
    np.savez(home / "cifar10.npz", **parts)
    for alpha in ("0.05", "0", "100.00"):
        split = [list(range(k, 1000, 100)) for k in range(100)]
        (home / f"cifar10_federated_train_alpha_{alpha}.json").write_text(json.dumps(split))
    for i in range(12):
        image = home / "pictures" / ("train" if i < 8 else "test") / "ab"[i % 2] / f"{i}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[i]).save(image)
    with pytest.MonkeyPatch.context() as monkeypatch:
        generated.everything(home / "data", monkeypatch)
        monkeypatch.chdir(home)
        for limit in ("FEWEST", "MOST"):
            monkeypatch.setattr(prediction, limit, MEASURED)
        for model in ("FedGloSS", "FedAvg --model.ascent null", "FedSAM"):  # runs that pages go on from
            run_commands(f"fl-lightning fit --config configs/quickstart.yaml --model {model}")
        yield home


@pytest.fixture
def folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns a page's own copy of it."""
    shared = [home / "data", home / "pictures"]  # no page writes there
    subprocess.run(["cp", "-a", *(entry for entry in home.iterdir() if entry not in shared), tmp_path], check=True)
    for entry in shared:
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = {*sys.modules}
    yield tmp_path
    for module in {*sys.modules} - before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[module]


def runs(text: Path) -> bool:
    return bool(FENCE.search(text.read_text()))


LONG = {
    "docs/experiments.md": -1,
    **dict.fromkeys(
        ["docs/cifar10.md", "docs/measuring.md", "docs/sweeps.md", "docs/gallery.md", "docs/guides/compare.md"], 0
    ),
}
"""Pages that take longest, and which of their blocks of commands is quick to begin."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not the .* of the published data set:UserWarning")
@pytest.mark.parametrize("page", LONG)
@pytest.mark.usefixtures("folder")
def test_a_command_of_a_long_page_runs(page: str) -> None:
    """`test_page_runs_in_small` and `test_page_runs_as_written` have the others."""
    blocks = [block for language, block in FENCE.findall((ROOT / page).read_text()) if language == "sh"]
    assert run_commands(blocks[LONG[page]], limit=1) == 1


SITE = [text for text in filter(runs, TEXTS) if text.parent != ROOT]
"""README has a test of its own, and CONTRIBUTING makes the environment of this one."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not the .* of the published data set:UserWarning")
@pytest.mark.parametrize("text", [text for text in SITE if name(text) not in {*LONG, *WRITTEN}], ids=name)
def test_page_runs_in_small(text: Path, folder: Path) -> None:
    """It runs from top to bottom, in one folder: commands, files that begin with their name, and Python."""
    run_page(text, folder, shortened)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not the .* of the published data set:UserWarning")
@pytest.mark.parametrize(
    "text",
    [pytest.param(text, marks=[pytest.mark.long] * (name(text) not in WRITTEN)) for text in SITE],
    ids=name,
)
def test_page_runs_as_written(text: Path, folder: Path) -> None:
    """It runs at the length at which the page has it."""
    run_page(text, folder, as_written)


def run_page(text: Path, folder: Path, arguments_of: Callable[[list[str]], list[str]]) -> None:
    variables = ""
    names: dict[str, Any] = {"__name__": "__main__"}
    for language, block in FENCE.findall(text.read_text()):
        if titled := re.match(r"# (\w+\.(?:py|yaml))\n", block):
            (folder / titled[1]).write_text(block)
        elif language == "sh":
            lines = re.sub(r" *\\\n *", " ", block).splitlines(keepends=True)
            commands = "".join(line for line in lines if not any(part in line for part in NOT_RUN["sh"]))
            run_commands(variables + commands, arguments_of=arguments_of)
            variables += "".join(re.findall(r'^[A-Z]\w*=(?:"[^"]*"|\S+)\n', commands, re.MULTILINE))
        elif language == "python" and not left_out(text, block):
            exec(compile(block, name(text), "exec"), names)


def left_out(text: Path, block: str) -> bool:
    return any(part in block or part == name(text) for part in NOT_RUN["python"])


def test_what_is_not_run_exists() -> None:
    everything = "".join(name(text) + text.read_text() for text in TEXTS)
    assert [part for parts in NOT_RUN.values() for part in parts if part not in everything] == []


def test_yaml_is_readable() -> None:
    """It is not run, but for that of an algorithm."""
    blocks = [block for text in TEXTS for language, block in FENCE.findall(text.read_text()) if language == "yaml"]
    assert blocks and all(yaml.safe_load(block) for block in blocks)


BLOCKS = [pair for text in sorted(PAGES.glob("*.md")) for pair in FENCE.findall(text.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for language, block in BLOCKS if language == "yaml"])
def test_yaml_of_an_algorithm_runs_over_the_quickstart(block: str, folder: Path) -> None:
    (folder / "mine.yaml").write_text(block)
    cli(*shortened(["fit", "--config=configs/quickstart.yaml", "--config=mine.yaml"]))
