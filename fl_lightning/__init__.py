"""Federated learning with flat minima, on Lightning Fabric.

Every class that a config or a script needs can be imported from here. ``__init__.pyi`` lists them; a class is imported
on first use, so ``import fl_lightning`` is quick.
"""

import ast
from importlib import import_module
from pathlib import Path

__version__ = "0.2.0"

_LINES = ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
_ROOM_OF = {name.name: f".{line.module}" for line in _LINES if isinstance(line, ast.ImportFrom) for name in line.names}
__all__ = [*_ROOM_OF]


def __getattr__(name: str) -> object:
    if name in _ROOM_OF:
        return getattr(import_module(_ROOM_OF[name], __name__), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
