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
        One sentence with both values, rounds and training losses, or why there is no comparison; nothing if lambda_max
        was not measured twice.
    """
    values, losses = ([pair for pair in columns.get(name, ()) if math.isfinite(pair[1])] for name in (LAMBDA, LOSS))
    if len(values) < 2 or not losses:
        return ""
    (_, start), (last, end) = losses[0], values[-1]
    halved = next((at for at, loss in losses if loss <= start / 2), None)
    if halved is None:
        lowest = min(loss for _, loss in losses)
        return f"no verdict: training loss has not halved, it was {start:.4g} at first and {lowest:.4g} at best"
    earlier = [pair for pair in values[:-1] if pair[0] >= halved]
    if not earlier:
        return f"no verdict: lambda_max was measured only once since training loss had halved in round {halved}"
    at, peak = max(earlier, key=lambda pair: pair[1])

    def point(round: float, value: float) -> str:
        loss = [loss for t, loss in losses if t <= round][-1]
        return f"{value:.4g} in round {round} (training loss {loss:.4g})"

    trend = "flatter" if end < peak else "sharper" if end > peak else "neither flatter nor sharper"
    text = (
        f"the global minimum got {trend}: lambda_max is {point(last, end)}; the highest before, since training loss "
        f"had halved in round {halved}, was {point(at, peak)}"
    )
    if gap := columns.get("flatness/discrepancy"):
        text += f"; local and global flatness differ by {gap[-1][1]:.4g}"
    return text
