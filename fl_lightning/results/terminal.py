"""Tables and lines on the terminal: what is too wide is divided, and neither a number nor a word is cut."""

import copy
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fl_lightning.core import ensure, make_folder, write_atomically

TEXT = 30
"""Most characters in a line of a text, in a table that is too wide."""


CONTROL = re.compile(r"[\x01-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal takes for a command, as a name may hold it."""


def wrapped(text: str, stream: Any = None, joint: str = "") -> str:
    """Returns lines as a stream shows them: controls escaped; a terminal breaks those too long between words.

    Args:
        text: The lines.
        stream: The stream; None: the standard output.
        joint: What a broken line ends with.
    """
    text = visible(text)
    if not (stream or sys.stdout).isatty():
        return text
    width = shutil.get_terminal_size().columns - len(joint)
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"{joint}\n".join(wrapper.wrap(line)) for line in text.split("\n"))


def visible(text: str) -> str:
    """Returns a text with what a terminal takes for commands escaped."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def say(text: str, **options: Any) -> None:
    """Prints lines; see `wrapped`."""
    print(wrapped(text, options.get("file")), **options)


def command(*args: str, before: str = "") -> str:
    """Returns a command of the shell after a text; a terminal shows it in lines that can be copied together."""
    words = (shlex.quote(arg).replace(" ", "\0") for arg in args)
    return wrapped(f"{before}{' '.join(words)}", joint=" \\").replace("\0", " ")


def filled(heads: Sequence[str], rows: Iterable[Iterable[str]], left: int = 1, **options: Any) -> Table:
    """Returns a table.

    Args:
        heads: The heads of its columns.
        rows: The cells of its rows.
        left: Number of columns, from the first one on, that are flush left; the others are flush right.
        options: Those of rich's Table.
    """
    table = Table(*heads[:left], *(Column(head, justify="right") for head in heads[left:]), **options)
    for row in rows:
        table.add_row(*map(visible, row))
    return table


def fitting(table: Table, width: int, keys: int = 1) -> Iterator[Table]:
    """Yields the table; if it is too wide, tables of some of its columns each, to stand one below the other.

    Numbers, which are the columns flush right, stay whole; heads and long texts are wrapped. Several keys that take
    more than half of a line are shown once: the rows then have numbers, which each table repeats. A word of the keys is
    broken only where they would leave no room for a number.

    Args:
        table: The table; its cells are text.
        width: Characters of a line.
        keys: Columns at the left that each of the tables repeats.
    """
    natural, least, words = list[int](), list[int](), list[int]()
    for column in table.columns:
        head = [cell_len(word) for word in str(column.header).split()] or [0]
        body = max((_length(cell) for cell in column.cells), default=0)
        natural.append(max(cell_len(str(column.header)), body))
        number = column.justify == "right"
        least.append(max(*head, body) if number else min(max(*head, body), TEXT, width // (2 * keys)))
        words.append(min(max([*head, *map(cell_len, " ".join(map(str, column.cells)).split())]), TEXT))
    between, edge = (3, 1) if table.box else (2, 0)
    room = width - edge
    unbroken = [*map(max, least[:keys], words), *least[keys:]]
    least = unbroken if sum(unbroken[:keys]) + max(unbroken[keys:], default=0) + between * (keys + 1) <= room else least
    if sum(natural) + between * len(natural) <= room:
        yield table
        return
    if keys > 1 and sum(unbroken[:keys]) + between * keys > room / 2:
        numbers = filled(["#"], [[str(i + 1)] for i in range(table.row_count)], left=0).columns
        numbered = copy.copy(table)
        numbered.columns = [*numbers, *table.columns]
        yield from fitting(numbered, width, 1)
        return
    parts = divided([size + between for size in least], room, keys)
    for place, part in enumerate(parts):
        spare = room - sum(least[i] + between for i in part)
        narrow = copy.copy(table)
        narrow.columns = [copy.copy(table.columns[i]) for i in part]
        narrow.title, narrow.caption = None if place else table.title, None if part is not parts[-1] else table.caption
        for i, column in zip(part, narrow.columns, strict=True):
            extra = max(0, min(natural[i] - least[i], spare))
            column.width, column.overflow, column.no_wrap, spare = least[i] + extra, "fold", False, spare - extra
        yield narrow


def divided(widths: Sequence[float], room: float, keys: int) -> list[list[int]]:
    """Returns the places of columns in tables that are at most as wide as the room, if they have several columns.

    Args:
        widths: Width of each column.
        room: Width of a table.
        keys: Columns at the left that each of the tables repeats.
    """
    parts = [[*range(keys)]]
    for i in range(keys, len(widths)):
        if len(parts[-1]) > keys and sum(widths[j] for j in [*parts[-1], i]) > room:
            parts.append([*range(keys)])
        parts[-1].append(i)
    return parts


def _length(cell: object) -> int:
    return max(map(cell_len, Text.from_markup(str(cell)).plain.splitlines()), default=0)


def console() -> Console:
    """Returns a console as wide as the terminal, or COLUMNS; without them, in a file or pipe, of 160 columns."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)


def show_table(table: Table, keys: int = 1) -> None:
    """Prints a table, divided if it is too wide; see `fitting`."""
    screen = console()
    for part in fitting(table, screen.width, keys):
        screen.print(part)


def short_path(folder: Path) -> str:
    """Returns a path from the working folder on, if it lies there."""
    cwd = Path.cwd()
    return str(folder.relative_to(cwd) if folder.is_relative_to(cwd) else folder)


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
    existing = sorted(path.name for path in target.iterdir() if path.name[0] != "." and path.name != "__pycache__")
    ensure(not existing, f"folder = {folder}: not empty, it has {', '.join(existing[:3])}; choose a new folder")
    for name, text in files.items():
        write_atomically(target / name, text)
        print(target / name)
