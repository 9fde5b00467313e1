"""What comes with the package: ``fl-lightning configs``, ``list``, and ``init``, a folder to start from."""

import shlex
from itertools import takewhile
from pathlib import Path

from fl_lightning.commands.shared import config_names, configs_folder, index
from fl_lightning.core import require
from fl_lightning.results import console, filled, say, show_table, write_new


def run(folder: str = "") -> None:
    """Prints name and description of every config, each in one line.

    Args:
        folder: Only those below this folder, such as experiment/fedgloss.
    """
    texts = {name: _description(name) for name in config_names() if name.startswith(folder)}
    require(bool(texts), "folder", folder, "no config there; leave it out to see all")
    width = max(map(len, texts))
    for name, text in texts.items():
        say(f"{name:{width}}  {text}".rstrip())


def _description(name: str) -> str:
    """Returns the first sentence of the comment at the head of a config."""
    lines = (configs_folder() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    return comment.partition(". ")[0].removesuffix(".")


def algorithms() -> None:
    """Prints the algorithms as a table."""
    table = index.index()["algorithms"]
    show_table(filled(table["heads"], table["rows"], len(table["heads"]), box=None))
    print()
    note = f"{table['note']} `ascent`, `server_update` and `averaging` combine with all that have none of their own."
    console().print(note, markup=False, highlight=False)


def init(folder: str, /) -> None:
    """Writes ``README.md``, ``config.yaml``, ``my_algorithm.py`` and ``sweep.yaml``.

    Args:
        folder: The folder, new or empty; it is created.
    """
    starter = Path(__file__).parent / "starter"
    write_new(folder, {file.name: file.read_text(encoding="utf-8") for file in sorted(starter.glob("*.*"))})
    say(f"start with: cd {shlex.quote(folder)} && fl-lightning fit --config config.yaml")
