"""Files that a command writes for its user into a new folder."""

from collections.abc import Mapping

from fl_lightning.core import ensure, make_folder, write_atomically


def write_new(folder: str, files: Mapping[str, str]) -> None:
    """Writes files into a folder, which is created, and prints their paths.

    Args:
        folder: The folder.
        files: The texts, by file name.

    Raises:
        UserError: If the folder is not empty (hidden files do not count), or cannot be written to; nothing is written
            then.
    """
    target = make_folder(folder, "folder")
    there = sorted(path.name for path in target.iterdir() if not path.name.startswith("."))
    ensure(not there, f"folder = {folder}: not empty, it has {', '.join(there[:3])}; choose a new folder")
    for name, text in files.items():
        write_atomically(target / name, text)
        print(target / name)
