"""What every room uses: flat vectors, named state, contexts, random streams, errors."""

from fl_lightning.core import elementwise
from fl_lightning.core.buffers import unchanged, variance_needed
from fl_lightning.core.configs import config_names, configs_folder, find_config
from fl_lightning.core.errors import DivergenceError, UserError, ensure, require
from fl_lightning.core.features import with_features
from fl_lightning.core.figures import (
    COLORMAP,
    COLORS,
    COLUMN,
    DASHES,
    MARKERS,
    PAGE,
    SPAN,
    STYLE,
    line_style,
    log_levels,
    log_ticks,
    save_figure,
    style,
)
from fl_lightning.core.files import write_atomically, writing
from fl_lightning.core.flat import EPS, FlatNet, FlatSpec, accumulator_dtype, is_finite, norm, to_device, to_radius
from fl_lightning.core.forward import Autocast, logits
from fl_lightning.core.losses import enlarged, kl_to_teacher, not_true
from fl_lightning.core.modes import eval_mode
from fl_lightning.core.options import (
    LATER,
    Checked,
    Count,
    Decay,
    Divisor,
    Interval,
    NonNegative,
    Positive,
    Probability,
    Share,
    Size,
    Threads,
    Whole,
    fits,
)
from fl_lightning.core.rng import generator, global_generator, numpy_generator, seeded
from fl_lightning.core.signals import Interruption, check_interruption
from fl_lightning.core.state import ClientContext, Init, RoundContext, State, Upload, Uploads, Weighting
from fl_lightning.core.yaml_text import check_yaml, load_yaml

__all__ = [
    "COLORMAP",
    "COLORS",
    "COLUMN",
    "DASHES",
    "EPS",
    "LATER",
    "MARKERS",
    "PAGE",
    "SPAN",
    "STYLE",
    "Autocast",
    "Checked",
    "ClientContext",
    "Count",
    "Decay",
    "DivergenceError",
    "Divisor",
    "FlatNet",
    "FlatSpec",
    "Init",
    "Interruption",
    "Interval",
    "NonNegative",
    "Positive",
    "Probability",
    "RoundContext",
    "Share",
    "Size",
    "State",
    "Threads",
    "Upload",
    "Uploads",
    "UserError",
    "Weighting",
    "Whole",
    "accumulator_dtype",
    "check_interruption",
    "check_yaml",
    "config_names",
    "configs_folder",
    "elementwise",
    "enlarged",
    "ensure",
    "eval_mode",
    "find_config",
    "fits",
    "generator",
    "global_generator",
    "is_finite",
    "kl_to_teacher",
    "line_style",
    "load_yaml",
    "log_levels",
    "log_ticks",
    "logits",
    "norm",
    "not_true",
    "numpy_generator",
    "require",
    "save_figure",
    "seeded",
    "style",
    "to_device",
    "to_radius",
    "unchanged",
    "variance_needed",
    "with_features",
    "write_atomically",
    "writing",
]
