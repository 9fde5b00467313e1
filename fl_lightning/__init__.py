"""Federated learning with flat minima, on Lightning Fabric.

Every class that a config or a script needs can be imported from here. ``__init__.pyi`` lists them; a class is imported
on first use, so ``import fl_lightning`` is quick.
"""

from fl_lightning.core.errors import lazy

__version__ = "0.3.0"

__getattr__, __all__ = lazy(__name__, __file__)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
