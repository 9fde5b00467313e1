"""In words: did a run end in a flatter minimum than it was in before?"""

import math

from fl_lightning.results.metrics import Columns

LAMBDA, LOSS = "flatness/lambda_max", "client/train/loss"


def flatness_verdict(columns: Columns) -> str:
    """Compares the last lambda_max with the highest one that was measured since the training loss had halved.

    Before that, the model is near its initial values and in no minimum: a small lambda_max there says nothing.

    Args:
        columns: Metrics by name, as (round, value) pairs.

    Returns:
        A line with both values, or why there is no comparison; nothing if lambda_max was not measured twice.
    """
    values, losses = ([pair for pair in columns.get(name, ()) if math.isfinite(pair[1])] for name in (LAMBDA, LOSS))
    if len(values) < 2 or not losses:
        return ""
    (_, start), (last, end) = losses[0], values[-1]
    halved = next((at for at, loss in losses if loss <= start / 2), None)
    if halved is None:
        return f"no verdict, training loss fell from {start:.4g} to {min(loss for _, loss in losses):.4g}, not to half"
    earlier = [pair for pair in values[:-1] if pair[0] >= halved]
    if not earlier:
        return f"no verdict, one lambda_max since training loss had halved (round {halved})"
    at, peak = max(earlier, key=lambda pair: pair[1])
    trend = "flatter" if end < peak else "sharper" if end > peak else "neither flatter nor sharper"
    return f"{trend}, lambda_max {end:.4g} (round {last}), before at most {peak:.4g} (round {at})"
