"""The files of a run: folder, lock, checkpoints, clients' rows, provenance."""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
