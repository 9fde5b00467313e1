"""What every package uses: flat vectors, named state, contexts, random streams, errors."""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
