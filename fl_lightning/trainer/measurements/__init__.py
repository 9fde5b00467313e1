"""Measures of flatness, which `FlatnessMonitor` and ``fl-lightning flatness`` take by name.

The functions are in `fl_lightning.flatness`; these classes choose the model and the data. Every number is a
`Measurement`, which carries its protocol.
"""

from fl_lightning.core.errors import lazy

__getattr__, __all__ = lazy(__name__, __file__)
