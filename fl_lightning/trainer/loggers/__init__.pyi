from .base import About as About
from .base import RunLogger as RunLogger
from .csv import CSVLogger as CSVLogger
from .tensorboard import TensorBoardLogger as TensorBoardLogger
from .wandb import WandbLogger as WandbLogger
