"""The pages hold what the package says of itself, their links lead somewhere, and their commands run."""

from __future__ import annotations

import inspect
import re
import runpy
import shlex
from pathlib import Path

import pytest

from fl_lightning import algorithms
from fl_lightning.algorithms import catalogue
from fl_lightning.trainer.trainer import FederatedTrainer
from tests.runs import cli

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "algorithms"
TEXTS = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
BLOCK = re.compile(r"<!-- catalogue -->\n(.*?)<!-- /catalogue -->", re.DOTALL)


def blocks(language: str) -> list[str]:
    """The code of the pages of the algorithms: every line of ``sh``, every block of ``yaml``."""
    found = [
        block
        for page in sorted(PAGES.glob("*.md"))
        for block in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    return [line for block in found for line in block.splitlines()] if language == "sh" else found


@pytest.mark.parametrize("page", ["index.md", *sorted({e.page for e in catalogue.entries()})])
def test_page_holds_the_table_of_the_catalogue(page: str) -> None:
    found = BLOCK.findall((PAGES / page).read_text())
    renew = f"put the output of `python -m fl_lightning.algorithms.catalogue {page}` between its catalogue comments"
    assert found == [catalogue.markdown(page)], f"docs/algorithms/{page} is out of date: {renew}"


@pytest.mark.parametrize("name", algorithms.__all__)
def test_algorithm_has_a_page_that_names_it(name: str) -> None:
    page = PAGES / catalogue.Entry.of(getattr(algorithms, name)).page
    text = BLOCK.sub("", page.read_text())
    assert re.search(rf"--model {name}\b", text), f"{page.name} shows no command for {name}"


def test_pages_hold_the_measured_numbers() -> None:
    fill = runpy.run_path(str(ROOT / "benchmarks" / "digits_table.py"))["fill"]
    for page in PAGES.glob("*.md"):
        text = page.read_text()
        assert fill(text) == text, f"{page.name} is out of date: run `python benchmarks/digits_table.py --draw`"


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files(text: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text.read_text(), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]
    assert [t for t in targets if t and not (text.parent / t).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")]
    assert [page for page in pages if f": {page}\n" not in nav] == []


def test_architecture_quotes_fit() -> None:
    (quote,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    body = inspect.getsource(FederatedTrainer.fit).rpartition('"""')[2]
    assert inspect.cleandoc(quote) == inspect.cleandoc("\n" + body)


SHORT = [
    "--trainer.max_rounds=2",
    "--trainer.callbacks=[]",
    "--trainer.loggers=[]",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]


@pytest.mark.slow
@pytest.mark.parametrize("command", blocks("sh"))
def test_command_of_a_page_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *args = shlex.split(command, comments=True)
    assert program == "fl-lightning"
    cli(*args, *SHORT, f"--trainer.default_root_dir={tmp_path}")


@pytest.mark.slow
@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_of_a_page_runs_over_the_quickstart(text: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(text)
    files = [f"--config={ROOT / 'configs' / 'quickstart.yaml'}", f"--config={mine}"]
    cli("fit", *files, *SHORT, f"--trainer.default_root_dir={tmp_path}")
