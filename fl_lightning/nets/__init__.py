"""Networks of the federated learning papers, as plain modules."""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
