"""Packages whose names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

ROOMS = ("core", "data", "data.partition", "flatness", "algorithms", "algorithms.parts", "nets", "trainer",
         "trainer.callbacks", "trainer.loggers", "trainer.measurements", "trainer.participation", "trainer.runtime",
         "trainer.storage", "commands.shared")  # fmt: skip


@pytest.mark.parametrize("name", ["fl_lightning", *(f"fl_lightning.{room}" for room in ROOMS)])
def test_every_name_is_there_and_none_is_a_module(name: str) -> None:
    """A module of the same name would take its place once it is imported."""
    package = import_module(name)
    assert package.__all__ and all(getattr(package, attribute) is not None for attribute in package.__all__)
    assert not {*package.__all__} & {path.stem for path in Path(str(package.__file__)).parent.iterdir()}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(package, "nothing")  # noqa: B009
