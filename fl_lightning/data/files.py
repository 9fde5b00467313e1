"""Files of published data sets: what is missing is named together with the layout and the home page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fl_lightning.core.errors import UserError


def located(key: str, folder: str | Path, layout: Sequence[str], home: str) -> list[Path]:
    """Files or folders of a data set.

    Args:
        key: Config key of the folder.
        folder: Where the data set lies.
        layout: What is expected there.
        home: Home page of the data set.

    Raises:
        UserError: If one of them is missing.
    """
    paths = [Path(folder, name) for name in layout]
    for name, path in zip(layout, paths, strict=True):
        if not path.exists():
            expected = ", ".join(dict.fromkeys(layout))
            raise UserError(f"{key} = '{folder}': '{name}' is missing; expected there {expected}, from {home}")
    return paths


def broken(key: str, path: str | Path, what: object, home: str) -> UserError:
    """The error of a file that is not as published."""
    return UserError(f"{key} = '{path}': {' '.join(str(what).split())}; get it anew from {home}")
