"""What the repository's files say of the code, and of measurements that are stored: ``make renew`` writes it anew.

A file is renewed by functions of its text. Each replaces what stands between its marks, or adds what is missing;
nothing is measured for it. ``tests/integration/test_docs.py`` compares the files with what they would be.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import groupby
from pathlib import Path

from torch import nn

from benchmarks import pages
from contest import __main__ as contest
from fl_lightning import algorithms
from fl_lightning.commands import main as cli
from fl_lightning.results.metrics import markdown
from fl_lightning.trainer import loop, program
from tests import catalogue, paper_tables
from tests.trainer import test_private_outputs

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = DOCS / "algorithms"
Renewal = Callable[[str], str]
LEDGER = ("agnews", "agnews_lora", "cifar10", "digits", "fashion", "fashion_published", "fashion_published_fedgloss")
"""The stores of rows, each with a page in docs/ledger; tests/studies compares them, and the page of claims."""


def between(start: str, end: str, content: Callable[[], str]) -> Renewal:
    """Replaces what stands between two marks."""
    block = re.compile(f"(?<={re.escape(start)}).*?(?={re.escape(end)})", re.DOTALL)
    return lambda text: block.sub(lambda _: content(), text)


def modules() -> list[str]:
    """Returns the modules of the algorithms."""
    return sorted({getattr(algorithms, name).__module__.rpartition(".")[2] for name in algorithms.__all__})


def references() -> str:
    """Returns the entries of the reference for the algorithms."""
    return "\n" + "".join(f"::: fl_lightning.algorithms.{name}\n" for name in modules()) + "\n"


def without_rounds() -> str:
    """Returns the algorithms that have a meaning without rounds."""
    models = {name: getattr(algorithms, name)(nn.Linear(2, 3)) for name in sorted(algorithms.__all__, key=str.lower)}
    return ", ".join(name for name, objective in models.items() if not objective.needs_rounds)


def program_needs() -> str:
    """Returns what a run needs for its rounds to be programs."""
    return "".join(f"- {need}\n" for need in program.NEEDS)


def navigation(text: str) -> str:
    """Returns the site's navigation; a page that it lacks goes after the last one of an algorithm."""
    entry = re.compile(r"^ +- .*: algorithms/(\w+)\.md\n", re.MULTILINE)
    ends = {match[1]: match.end() for match in entry.finditer(text)}
    last = max(end for name, end in ends.items() if name in modules())
    new = [page for page in sorted(PAGES.glob("*.md")) if page.stem not in ends]
    titles = [page.read_text().splitlines()[0].removeprefix("# ") for page in new]
    lines = [f"      - {title}: algorithms/{page.name}\n" for title, page in zip(titles, new, strict=True)]
    return text[:last] + "".join(lines) + text[last:]


CODE_BESIDE_BOX = re.compile(r"(<!-- code: (.*?) -->\n).*?(<!-- /code -->)", re.DOTALL)


def quoted(name: str) -> str:
    """Returns a function's source, without its docstring and the types in its signature.

    Args:
        name: Its dotted path below ``fl_lightning``.
    """
    text = inspect.cleandoc("\n" + inspect.getsource(pkgutil.resolve_name(f"fl_lightning.{name}")))
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    first = function.body[0]
    body = text.splitlines()[first.end_lineno if ast.get_docstring(function) else first.lineno - 1 :]
    return "\n".join([f"def {function.name}({ast.unparse(function.args)}):", *body])


def file_of(name: str) -> str:
    """Returns the file of a function."""
    return inspect.unwrap(pkgutil.resolve_name(f"fl_lightning.{name}")).__module__.replace(".", "/") + ".py"


def fences(names: list[str]) -> str:
    """Returns blocks of Markdown, one a file."""
    text = ""
    for title, group in groupby(names, file_of):
        classes = [(owner, [*methods]) for owner, methods in groupby(group, lambda name: name.split(".")[-2])]
        heads = [f"# of {owner}\n" if len(classes) > 1 else "" for owner, _ in classes]
        parts = ["\n\n\n".join(map(quoted, methods)) for _, methods in classes]
        code = "\n\n\n".join(head + part for head, part in zip(heads, parts, strict=True))
        text += f'```python title="{title}"\n{code}\n```\n'
    return text


def code_beside_boxes(text: str) -> str:
    """Returns a page with the package's lines beside the papers' boxes, between its comments.

    A page names what it shows, relative to ``fl_lightning``, in a comment, such as
    ``code: algorithms.fedsmoo.FedSMOO.local_step``. Annotations of types and docstrings are left out, since the box
    beside says what they say; the rest is the source.
    """
    return CODE_BESIDE_BOX.sub(lambda match: match[1] + fences(match[2].split()) + match[3], text)


TUNED = "alpha 0.05"
"""The column of the digits whose rows stand on the algorithms' pages."""
COLUMNS = {
    "accuracy": "last 100 ↑",
    "accuracy − FedAvg": "last 100 − FedAvg",
    "λ_max": "lambda_max ↓",
    "Δ_F": "discrepancy all ↓",
}
"""Those of an algorithm's page, and their names in the ledger."""


@cache
def tuned_rows() -> dict[str, dict[str, str]]:
    """Returns the rows of the ledger's page, by the method's class, with what is added to it."""
    section = (DOCS / "ledger/digits.md").read_text().partition(f"## {TUNED}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0].replace("-", ""): dict(zip(head, row, strict=True)) for row in rows}


def tuned(text: str) -> str:
    """Returns a page with its methods' ledger rows between ``digits: names`` and ``/digits``, both HTML comments."""

    def table(match: re.Match[str]) -> str:
        rows = {name: tuned_rows().get(name) for name in match[2].split(", ")}
        lines = [
            [name, *((row[column] for column in COLUMNS.values()) if row else ["not measured yet", "", "", ""])]
            for name, row in rows.items()
        ]
        return match[1] + markdown([["tuned", *COLUMNS], *lines]) + match[3]

    return re.sub(r"(<!-- digits: (.*?) -->\n).*?(<!-- /digits -->)", table, text, flags=re.DOTALL)


def loop_quote(text: str) -> str:
    """Returns the page that quotes the loop."""
    rounds, one = (textwrap.dedent(inspect.getsource(f).rpartition('"""\n')[2]) for f in (loop.rounds, loop.one_round))
    return between("```python\n", "```", lambda: f"{rounds}\n# one_round(run)\n{one}")(text)


def renewals() -> dict[Path, Iterable[Renewal]]:
    """Returns all files that are renewed, but the index of the command line, and what renews each."""
    algorithm_pages = dict.fromkeys(sorted(PAGES.glob("*.md")), (code_beside_boxes, tuned))
    table = between("<!-- catalogue -->\n", "<!-- /catalogue -->", catalogue.markdown)
    batch = (ROOT / "examples/slurm.sh").read_text()
    return algorithm_pages | {
        PAGES / "index.md": (table,),
        DOCS / "architecture.md": (loop_quote,),
        DOCS / "benchmarks.md": (contest.fill,),
        DOCS / "clock.md": (
            between("<!-- hours -->\n", "<!-- end -->", pages.clock_table),
            between("<!-- without rounds -->\n", "\n<!-- /without rounds -->", without_rounds),
        ),
        DOCS / "compression.md": (between("<!-- compression -->\n", "<!-- /compression -->", pages.compression_table),),
        DOCS / "engines.md": (between("<!-- needs -->\n", "<!-- /needs -->", program_needs),),
        DOCS / "experiments.md": (paper_tables.renew,),
        **dict.fromkeys(sorted(DOCS.glob("experiments/*.md")), (paper_tables.renew,)),
        DOCS / "guides/cluster.md": (between("```bash\n#!", "```", partial(batch.removeprefix, "#!")),),
        DOCS / "privacy.md": (test_private_outputs.fill,),
        DOCS / "reference.md": (between("<!-- algorithms -->\n", "<!-- /algorithms -->", references),),
        DOCS / "theory.md": (between("<!-- theory -->\n", "<!-- /theory -->", pages.theory_table),),
        ROOT / "mkdocs.yml": (navigation,),
    }


def renewed(file: Path) -> str:
    """Returns the text that a file has when it is renewed."""
    text = file.read_text(encoding="utf-8")
    for renewal in renewals()[file]:
        text = renewal(text)
    return text


def ledger() -> None:
    """Writes the ledger's pages, with their figures, from its stores."""
    for name in LEDGER:
        cli.main(["study", "page", str(ROOT / "ledger" / name), "--out", str(DOCS / "ledger" / f"{name}.md")])
    cli.main(["study", "claims", str(ROOT / "ledger/claims.yaml"), "--out", str(DOCS / "ledger/claims.md")])


def main() -> None:
    # in a process of its own, since a help lists classes in the order in which they are imported
    subprocess.run([sys.executable, "-m", "tests.command_index"], cwd=ROOT, check=True)
    ledger()
    for file in renewals():
        if (text := renewed(file)) != file.read_text(encoding="utf-8"):
            file.write_text(text, encoding="utf-8")
            print(f"renewed: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
