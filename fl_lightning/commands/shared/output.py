"""Tables on the terminal."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fl_lightning.core import ensure, make_folder, write_atomically
from fl_lightning.results.terminal import TEXT, fitting


def console() -> Console:
    """Returns a console as wide as the terminal, or COLUMNS; without them, in a file or pipe, of 160 columns."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)


def show_table(table: Table, keys: int = 1, text: int = TEXT) -> None:
    """Prints a table, divided if it is too wide; see `fitting`."""
    screen = console()
    for part in fitting(table, screen.width, keys, text):
        screen.print(part)


def short_path(folder: Path) -> str:
    """Returns a path from the working folder on, if it lies there."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def write_new(folder: str, files: Mapping[str, str]) -> None:
    """Writes files into a folder, which is created, and prints their paths.

    Args:
        folder: The folder.
        files: The texts, by file name.

    Raises:
        UserError: If the folder is not empty (hidden files and __pycache__ do not count), or cannot be written to;
            nothing is written then.
    """
    target = make_folder(folder, "folder")
    there = sorted(path.name for path in target.iterdir() if not path.name.startswith((".", "__")))
    ensure(not there, f"folder = {folder}: not empty, it has {', '.join(there[:3])}; choose a new folder")
    for name, text in files.items():
        write_atomically(target / name, text)
        print(target / name)
