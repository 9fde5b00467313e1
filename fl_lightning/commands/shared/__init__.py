"""What several subcommands share."""

from fl_lightning.core.lazy import lazy

__getattr__, __all__ = lazy(__name__, __file__)
