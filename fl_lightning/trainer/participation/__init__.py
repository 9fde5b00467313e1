"""Which clients take part in a round, and how they fail."""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
