"""Federated learning with flat minima, on Lightning Fabric.

Everything that a user needs has its name here; a name is imported on first use, so ``import fl_lightning`` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fl_lightning.algorithms import *  # noqa: F403
    from fl_lightning.ascent import ASAM, SAM, Ascent
    from fl_lightning.averaging import SWA
    from fl_lightning.callbacks import Callback, Checkpoints, Curves, FlatnessMonitor, Progress, Trajectory
    from fl_lightning.data import *  # noqa: F403
    from fl_lightning.errors import UserError
    from fl_lightning.loggers import CSVLogger, WandbLogger
    from fl_lightning.nets import *  # noqa: F403
    from fl_lightning.objective import LocalObjective
    from fl_lightning.optim import SGD
    from fl_lightning.sampling import Bernoulli, Trace, Uniform
    from fl_lightning.server import Adam, Momentum, ServerUpdate
    from fl_lightning.trainer import FederatedTrainer

_MODULES = (
    "trainer",
    "algorithms",
    "data",
    "nets",
    "objective",
    "ascent",
    "server",
    "averaging",
    "optim",
    "sampling",
    "callbacks",
    "loggers",
    "errors",
)


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for module in _MODULES:
            found = getattr(import_module(f"{__name__}.{module}"), name, None)
            if found is not None and getattr(found, "__module__", "").startswith(__name__):
                return found
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
