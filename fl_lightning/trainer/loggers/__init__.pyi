from .base import About as About
from .base import CSVLogger as CSVLogger
from .base import RunLogger as RunLogger
from .programs import TensorBoardLogger as TensorBoardLogger
from .programs import WandbLogger as WandbLogger
