"""``fl-lightning configs``: the configs that come with the package."""

from itertools import takewhile

from rich.table import Column, Table
from rich.text import Text

from fl_lightning.commands.shared import config_names, configs_folder
from fl_lightning.core import require
from fl_lightning.results import console

SUMMARY = "List the configs that come with the package; --config takes their names."


def run(folder: str = "") -> None:
    """Prints name and description of every config; into a pipe, each in one line.

    Args:
        folder: Only those below this folder, such as experiment/fedgloss.
    """
    texts = {name: _description(name) for name in config_names() if name.startswith(folder)}
    require(bool(texts), "folder", folder, "no config there; leave it out to see all")
    screen, width = console(), max(map(len, texts), default=0)
    table = Table.grid(Column(no_wrap=True, overflow="fold"), "", padding=(0, 2))
    for name, text in texts.items():
        table.add_row(name, Text(text))
        if not screen.is_terminal:
            print(f"{name:{width}}  {text}".rstrip())
    if screen.is_terminal:
        screen.print(table)


def _description(name: str) -> str:
    """Returns the first sentence of the comment at the head of a config."""
    lines = (configs_folder() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    return comment.partition(". ")[0].removesuffix(".")
