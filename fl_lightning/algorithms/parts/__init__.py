"""Parts that algorithms are composed of: ascent, local and server optimizers, averaging, drift corrections."""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
