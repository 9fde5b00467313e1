"""Files of published data sets; errors name what is missing, the expected layout and the home page."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.core import UserError, require


def find_files(key: str, folder: str | Path, layout: Sequence[str], home: str) -> list[Path]:
    """Returns the paths of a data set's files or folders.

    Args:
        key: Config key of the folder.
        folder: Folder of the data set.
        layout: Files and folders that are expected there.
        home: Home page of the data set.

    Raises:
        UserError: If one of them is missing.
    """
    expected = f"expected there {', '.join(dict.fromkeys(layout))}, from {home}"
    for name in layout:
        require(Path(folder, name).exists(), key, f"'{folder}'", f"'{name}' is missing; {expected}")
    return [Path(folder, name) for name in layout]


def corrupt_file_error(key: str, path: str | Path, what: object, home: str) -> UserError:
    """Returns the error for a file that is not as published."""
    return UserError(f"{key} = '{path}': {' '.join(str(what).split())}; get it again from {home}")


def read_rows(path: Path, reader: Any, valid: Callable[[Any], bool], expected: str, home: str) -> list[Any]:
    """Returns the rows of a CSV file in ``data.data_dir``.

    Args:
        path: The file.
        reader: ``csv.reader`` or ``csv.DictReader``.
        valid: Whether a row is as it should be.
        expected: Columns of a row, for the message.
        home: Home page of the data set.

    Raises:
        UserError: If the file is not CSV in UTF-8, has no rows, or one that is not valid.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [(lines.line_num, row) for lines in [reader(file)] for row in lines]
    except (UnicodeDecodeError, csv.Error) as error:
        raise corrupt_file_error("data.data_dir", path, error, home) from None
    bad = next((f"line {number} is not {expected}" for number, row in rows if not valid(row)), None)
    if bad or not rows:
        raise corrupt_file_error("data.data_dir", path, bad or "no rows", home)
    return [row for _, row in rows]
