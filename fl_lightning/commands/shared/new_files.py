"""Folders and files that a command writes for its user."""

from collections.abc import Mapping
from pathlib import Path

from fl_lightning.core import UserError, ensure, write_atomically


def make_folder(path: str | Path, argument: str = "out") -> Path:
    """Creates a folder, if it is not there, and returns it.

    Args:
        path: The folder.
        argument: The argument that names another one.

    Raises:
        UserError: If it cannot be created.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{argument} = {path}: cannot create this folder ({error.strerror}); choose another one"
        ) from None
    return folder


def write_new(folder: str, files: Mapping[str, str]) -> None:
    """Writes files into a folder, which is created, and prints their paths.

    Args:
        folder: The folder.
        files: The texts, by file name.

    Raises:
        UserError: If the folder has one of them already, or cannot be written to; nothing is written then.
    """
    target = make_folder(folder, "folder")
    for name in files:
        ensure(not (target / name).exists(), f"folder = {folder}: has a {name} already; choose another folder")
    for name, text in files.items():
        write_atomically(target / name, text)
        print(target / name)
