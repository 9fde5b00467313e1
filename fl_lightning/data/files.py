"""Files of published data sets; errors name what is missing, the expected layout and the home page."""

import csv
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import UserError, each_once, ensure, folded, require


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


def hidden(*names: str) -> bool:
    """Returns whether one of the names is that of a hidden file or folder, or of what macOS adds: these are no data."""
    return any(name.startswith(".") or name == "__MACOSX" for name in names)


def visible(folder: Path, pattern: str = "*") -> list[Path]:
    """Returns what a folder has by a pattern, in the order of names, but for what is `hidden`."""
    return sorted(path for path in folder.glob(pattern) if not hidden(path.name))


def corrupt_file(key: str, path: str | Path, reason: object, home: str) -> str:
    """Returns the message of the error for a file that is not as published."""
    return f"{key} = '{path}': {folded(reason)}; get it again from {home}"


class Inert:
    """Stands for every class and function that a pickle names: it takes all arguments and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...


class PlainUnpickler(pickle.Unpickler):
    """Makes text, numbers, lists and mappings only, and runs nothing; CIFAR-100's file also has an array of pixels."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns `Inert`."""
        return Inert


def read_cifar(path: str | Path) -> dict[str, Any]:
    """Returns the entries of one of CIFAR's files, a pickle of Python 2, without its array of pixels."""
    with open(path, "rb") as file:
        entries: dict[bytes, Any] = PlainUnpickler(file, encoding="bytes").load()
    return {name.decode(): value for name, value in entries.items()}


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
        with path.open(newline="", encoding="utf-8-sig") as file:  # a spreadsheet puts a mark before the text
            rows = [(lines.line_num, row) for lines in [reader(file)] for row in lines]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(corrupt_file("data.data_dir", path, error, home)) from None
    bad = next((f"line {number} is not {expected}" for number, row in rows if not valid(row)), None)
    ensure(bool(rows) and bad is None, corrupt_file("data.data_dir", path, bad or "no rows", home))
    return [row for _, row in rows]


def read_json(path: Path, convert: Callable[[Any], Any], home: str) -> Any:
    """Returns the converted content of a JSON file in ``data.data_dir``.

    Args:
        path: The file.
        convert: Converts the content; it may raise a KeyError, ValueError, TypeError or AttributeError.
        home: Home page of the data set.

    Raises:
        UserError: If the file cannot be read, is not JSON in UTF-8, or cannot be converted.
    """
    try:
        return convert(json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=each_once))
    except KeyError as error:
        raise UserError(corrupt_file("data.data_dir", path, f"has no {error}", home)) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(corrupt_file("data.data_dir", path, error, home)) from None


def read_image(
    path: str | Path, key: str, size: tuple[int, int], resample: str = "BILINEAR", mode: str | None = "RGB"
) -> NDArray[Any]:
    """Returns the pixels of an image file, ``(H, W, 3)`` uint8 in mode RGB.

    Args:
        path: The file.
        key: Config key of its folder.
        size: Height and width, in pixels, to which the image is resized.
        resample: Method of resizing, a name in Pillow's ``Resampling``.
        mode: Pillow's mode to which the image is converted before; None keeps the mode of the file.

    Raises:
        UserError: If the file is not an image, or has more than 8 bits a channel and would be converted.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            deep = mode is not None and image.mode[0] in "IF"  # Pillow cuts these off at 255
            ensure(not deep, f"{key} = '{path}': has more than 8 bits a channel ({image.mode}); convert it to 8 bits")
            converted = image if mode is None else image.convert(mode)
            return np.asarray(converted.resize(size[::-1], Image.Resampling[resample]))
    except UserError:
        raise
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{key} = '{path}' is not a readable image ({error}); replace it") from None
