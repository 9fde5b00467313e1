"""Files of published data sets; errors name what is missing, the expected layout and the home page."""

from collections.abc import Sequence
from pathlib import Path

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
