from .base import About as About
from .base import RunLogger as RunLogger
from .csv import CSVLogger as CSVLogger
from .programs import MLFlowLogger as MLFlowLogger
from .programs import TensorBoardLogger as TensorBoardLogger
from .programs import TrackioLogger as TrackioLogger
from .wandb import WandbLogger as WandbLogger
