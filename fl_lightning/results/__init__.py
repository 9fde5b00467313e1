"""What runs leave behind: summaries, comparisons, curves, and the papers' numbers."""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
