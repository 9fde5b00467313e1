from ..run import Callback as Callback
from .checkpoints import Checkpoints as Checkpoints
from .defaults import with_defaults as with_defaults
from .flatness_monitor import FlatnessMonitor as FlatnessMonitor
from .progress import Progress as Progress
from .results import Curves as Curves
from .results import Results as Results
from .trajectory import Trajectory as Trajectory
