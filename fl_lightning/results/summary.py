"""Statistics of a run that the papers report, from its ``metrics.csv``."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fl_lightning.core import PositiveInt, checked, ensure, read_json
from fl_lightning.results.configs import config_of, setting_of
from fl_lightning.results.metrics import (
    CLOCK,
    FILE,
    Columns,
    Mode,
    Pairs,
    average,
    best_of,
    deviation,
    is_flatness,
    is_of_clients,
    mode_of,
    read_directions,
    read_metrics,
    read_run,
    rounds_done,
    tested,
)

SUMMARY = "summary.json"
"""In the run folder: the statistics of a run that has ended."""
MOST = 100
"""Most rounds of a window: ECCV 2022, FedGloSS and FedGF take 100, FedGMT 50."""
SUFFIX = "_headline"
"""Ending of the metric's name in W&B and in a sweep's file."""


def last_rounds(rounds: int, eval_last: int = 1) -> int:
    """Returns the number of rounds at the end of a run whose evaluations are averaged.

    This is ``trainer.eval_last`` if that is set (above 1) and at most half of the rounds; otherwise a tenth of the
    rounds, rounded up, and at most 100. So it never spans the whole training of a short run.

    Args:
        rounds: Rounds done.
        eval_last: The setting of the run.
    """
    return eval_last if 1 < eval_last <= rounds / 2 else min(MOST, -(-rounds // 10))


def window(lasts: Iterable[int]) -> str:
    """Returns the head of a column of headlines, such as ``last 20``; ``last 5 to 20`` where runs differ in the number.

    Args:
        lasts: `last_rounds` of each run, at least one.
    """
    lengths = sorted(set(lasts))
    return f"last {lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else f"last {lengths[0]}"


def window_of(folders: Iterable[Path]) -> str:
    """Returns the `window` of runs from their folders; empty if none has a round.

    Raises:
        UserError: If a file of a run is damaged.
    """
    done = [(rounds_done(read_run(folder)), eval_last_of(folder)) for folder in folders]
    lasts = [last_rounds(rounds, eval_last) for rounds, eval_last in done if rounds]
    return window(lasts) if lasts else ""


def eval_last_of(folder: Path) -> int:
    """Returns ``trainer.eval_last`` of a run from its config; without one, the window of its ``summary.json``.

    Raises:
        UserError: If the file is not readable.
    """
    if config := config_of(folder):
        eval_last = setting_of(config, "trainer.eval_last")
    else:
        eval_last = read_json(folder / SUMMARY, dict, {}).get("last")
    return eval_last if isinstance(eval_last, int) else 1


def values(metric: str, pairs: Pairs, rounds: int, eval_last: int, last: int | None = None) -> list[float]:
    """Returns the values of a metric whose mean is the headline.

    Evaluations count in the last rounds, see `last_rounds`; if there is none, the last evaluation counts. A measure of
    flatness counts with its last measurement, which belongs to the final model.

    Args:
        metric: Name of the metric.
        pairs: Its values by round, at least one.
        rounds: Rounds done.
        eval_last: ``trainer.eval_last`` of the run.
        last: Rounds at the end that count instead; None: as above.
    """
    if last is None and metric.startswith("flatness/"):
        return [pairs[-1][1]]
    start = rounds - (last or last_rounds(rounds, eval_last))
    recent = [value for round, value in pairs if round > start]
    return recent if recent or last else [pairs[-1][1]]


def headline(run: Path, metric: str, at: float | None = None) -> float | None:
    """Returns our number for a metric of a run.

    Args:
        run: The run folder.
        metric: Name of the metric.
        at: A round: the number is that of the first evaluation from there on, or of the last one.

    Returns:
        The mean of the values that count. None if the metric was not measured; NaN if one of the values is not finite,
        as after a divergence: such a run is never the best, and neither a mean nor a comparison fails because of it.

    Raises:
        UserError: If a file of the run is damaged.
    """
    columns = read_run(run)
    pairs = columns.get(metric)
    if not pairs:
        return None
    if at is not None:
        return next((value for t, value in pairs if t >= round(at)), pairs[-1][1])
    return average(values(metric, pairs, rounds_done(columns), eval_last_of(run)))


@dataclass(frozen=True)
class Summary:
    """Statistics of one run; None for what was not measured or never reached, NaN for what is not finite.

    Attributes:
        metric: Name of the metric, such as ``server/test/acc``.
        rounds: Rounds done.
        last: Rounds at the end whose evaluations count.
        evaluations: Number of these evaluations.
        mean: Mean over these evaluations: the headline.
        std: Sample standard deviation over them (n - 1), as FedGMT reports it; None for a single one.
        best: Best finite value of the whole run: the largest, or as `mode` says the smallest.
        best_round: The first round with that value.
        final: Value of the last evaluation.
        minutes: Minutes of all rounds: local training and aggregation, without evaluation and what callbacks measure.
        bits: Bits sent and uploaded in all.
        transmissions: Models sent and uploaded in all, per client of a cohort: 2 a round of FedAvg (FedGF, Table 3).
        device_s: Seconds that the rounds would take on the clients' devices (``trainer.clock``).
        target: The value to reach, if one was given.
        target_round: First evaluated round that is as good, not smoothed.
        target_minutes: Minutes up to and with that round.
        target_bits: Bits up to and with that round.
        target_transmissions: Transmissions up to and with that round.
        target_passes: Forward and backward passes of all clients up to and with that round.
        target_device_s: Seconds on the clients' devices up to and with that round.
        slow_uploads: Share of the uploads that come from the slowest tenth of the clients; with a deadline or without
            rounds.
        mode: Whether large (max) or small (min) values of the metric are good.
        flatness: Headline of each measure of flatness, by name.
        clients: Headline of each statistic over clients (``server/clients/...``, ``client/test/...``).
    """

    metric: str
    rounds: int
    last: int
    evaluations: int
    mean: float
    std: float | None
    best: float
    best_round: int
    final: float
    minutes: float | None
    bits: float | None
    transmissions: float | None
    target: float | None = None
    target_round: int | None = None
    target_minutes: float | None = None
    target_bits: float | None = None
    target_transmissions: float | None = None
    target_passes: float | None = None
    device_s: float | None = None
    target_device_s: float | None = None
    slow_uploads: float | None = None
    mode: Mode = "max"
    flatness: dict[str, float] = field(default_factory=dict)
    clients: dict[str, float] = field(default_factory=dict)


@checked
def summarise(
    run: str | Path,
    last: PositiveInt | None = None,
    target: float | None = None,
    metric: str | None = None,
    mode: Mode | None = None,
    eval_last: int | None = None,
) -> Summary:
    """Returns statistics of a run.

    Args:
        run: The run folder.
        last: Rounds at the end whose evaluations and measurements are averaged; None: those of the headline, see
            `fl_lightning.results.summary`.
        target: A value to be reached, in the unit of the metric, so accuracy is a fraction.
        metric: Name of the metric; None: what the data evaluate on the test set, accuracy or mIoU.
        mode: Whether large (max) or small (min) values of the metric are good; None: as `mode_of` says.
        eval_last: ``trainer.eval_last`` of the run; None: as its folder says.

    Raises:
        UserError: If there is no such run or metric, or no evaluation in the last rounds.
    """
    path = Path(run) / FILE
    ensure(path.is_file(), f"run = {run}: no {FILE} there; give the folder of a run")
    columns = read_metrics(path)
    metric = next(iter(tested(columns)), "server/test/acc") if metric is None else metric
    ensure(
        metric in columns,
        f"metric = {metric}: not in {path}, which has {', '.join(columns) or 'no rows'}; choose one of these",
    )
    evaluated, rounds = columns[metric], rounds_done(columns)
    mode = mode_of(metric, mode, read_directions(path.parent))
    eval_last = eval_last_of(path.parent) if eval_last is None else eval_last
    counted = {name: values(name, pairs, rounds, eval_last, last) for name, pairs in columns.items()}
    window = counted[metric]
    ensure(
        bool(window),
        f"last = {last}: no {metric} in the last {last} of {rounds} rounds of {path}; take more rounds",
    )
    sign = 1 if mode == "max" else -1
    best_round, best = best_of(evaluated, mode)
    as_good = (at for at, x in evaluated if target is not None and sign * x >= sign * target and math.isfinite(x))
    reached = next(as_good, None)
    headlines = {name: average(numbers) for name, numbers in counted.items() if numbers}

    def minutes(until: int) -> float | None:
        seconds = [value for at, value in columns.get("time/round_s", ()) if at <= until]
        return sum(seconds) / 60 if seconds else None

    def at(name: str, until: int | None) -> float | None:
        return None if until is None else dict(columns.get(name, ())).get(until)

    uploads = [at(f"clock/uploads_{tenth}", rounds) or 0.0 for tenth in range(1, 11)]
    return Summary(
        metric=metric,
        rounds=rounds,
        last=min(last or last_rounds(rounds, eval_last), rounds),
        evaluations=len(window),
        mean=headlines[metric],
        std=deviation(window),
        best=best,
        best_round=int(best_round),
        final=evaluated[-1][1],
        minutes=minutes(rounds),
        bits=at("comm/total_bits", rounds),
        transmissions=at("comm/transmissions", rounds),
        target=target,
        target_round=reached,
        target_minutes=None if reached is None else minutes(reached),
        target_bits=at("comm/total_bits", reached),
        target_transmissions=at("comm/transmissions", reached),
        target_passes=at("client/passes", reached),
        device_s=at(CLOCK, rounds),
        target_device_s=at(CLOCK, reached),
        slow_uploads=uploads[-1] / sum(uploads) if any(uploads) else None,
        mode=mode,
        flatness={name.removeprefix("flatness/"): x for name, x in headlines.items() if is_flatness(name)},
        clients={name: x for name, x in headlines.items() if is_of_clients(name)},
    )


LAMBDA, LOSS = "flatness/lambda_max", "client/train/loss"
TOLERANCE = 0.01
"""Relative difference of two lambda_max that says nothing: by default their residuals guarantee no more."""


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
    halved = next((round for round, loss in losses if loss <= start / 2), None)
    if halved is None:
        return f"no verdict, training loss fell from {start:.4g} to {min(loss for _, loss in losses):.4g}, not to half"
    earlier = [pair for pair in values[:-1] if pair[0] >= halved]
    if not earlier:
        return f"no verdict, one lambda_max since training loss had halved (round {halved})"
    peak_round, peak = max(earlier, key=lambda pair: pair[1])
    alike = math.isclose(end, peak, rel_tol=TOLERANCE)
    trend = "neither flatter nor sharper" if alike else "flatter" if end < peak else "sharper"
    return f"{trend}, lambda_max {end:.4g} (round {last}), from {peak:.4g} (round {peak_round})"
