"""One short LightningModule per method of the papers."""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
