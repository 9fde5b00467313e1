"""What every package uses: flat vectors, named state, contexts, random streams, errors."""

from fl_lightning.core.errors import DivergenceError, UserError, ensure, require
from fl_lightning.core.figures import (
    COLORMAP,
    COLORS,
    COLUMN,
    DASHES,
    MARKERS,
    PAGE,
    SPAN,
    STYLE,
    Axes,
    Figure,
    drawing,
    figure_files,
    line_style,
    log_levels,
    new_figure,
    place_legend,
    render,
    save_figure,
    scale_axis,
    style,
    wrapped,
)
from fl_lightning.core.files import make_folder, parse_json, read_json, write_atomically, write_together, writing
from fl_lightning.core.flat import EPS, FlatNet, FlatSpec, accumulator_dtype, is_finite, norm, to_device, to_radius
from fl_lightning.core.forward import Autocast, eval_mode, forward_at, unchanged, variance_needed
from fl_lightning.core.losses import enlarged, kl_to_teacher, not_true
from fl_lightning.core.options import (
    LATER,
    Checked,
    Divisor,
    Fraction,
    Interval,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Probability,
    Size,
    Threads,
    UnitInterval,
    WeightDecay,
    fits,
)
from fl_lightning.core.rng import generator, global_generator, numpy_generator, seeded
from fl_lightning.core.state import ClientContext, Draws, Init, RoundContext, State, Upload, Uploads, Weighting
