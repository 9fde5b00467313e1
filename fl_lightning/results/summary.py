"""Statistics of a run that the papers report, from its ``metrics.csv``."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from fl_lightning.core import ensure, require
from fl_lightning.results.headline import eval_last_of, last_rounds, values
from fl_lightning.results.metrics import FILE, average, best_of, deviation, read_metrics, rounds_done
from fl_lightning.results.names import Mode, is_flatness, is_of_clients, mode_of, read_directions, tested


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
        target: The value to reach, if one was given.
        target_round: First evaluated round that is as good, not smoothed.
        target_minutes: Minutes up to and with that round.
        target_bits: Bits up to and with that round.
        target_transmissions: Transmissions up to and with that round.
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
    mode: Mode = "max"
    flatness: dict[str, float] = field(default_factory=dict)
    clients: dict[str, float] = field(default_factory=dict)


def summarise(
    run: str | Path,
    last: int | None = None,
    target: float | None = None,
    metric: str | None = None,
    mode: Mode | None = None,
    eval_last: int | None = None,
) -> Summary:
    """Returns statistics of a run.

    Args:
        run: The run folder.
        last: Rounds at the end whose evaluations and measurements are averaged; None: those of the headline, see
            `fl_lightning.results.headline`.
        target: A value to be reached, in the unit of the metric, so accuracy is a fraction.
        metric: Name of the metric; None: what the data evaluate on the test set, accuracy or mIoU.
        mode: Whether large (max) or small (min) values of the metric are good; None: as `mode_of` says.
        eval_last: ``trainer.eval_last`` of the run; None: as its folder says.

    Raises:
        UserError: If there is no such run or metric, or no evaluation in the last rounds.
    """
    require(last is None or last >= 1, "last", last, "at least 1 round")
    path = Path(run) / FILE
    ensure(path.is_file(), f"run = {run}: no {FILE} there; give the folder of a run")
    columns = read_metrics(path)
    if metric is None:
        metric = next(iter(tested(columns)), "server/test/acc")
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
    reached = None
    if target is not None:
        as_good = (at for at, value in evaluated if sign * value >= sign * target and math.isfinite(value))
        reached = next(as_good, None)
    headlines = {name: average(found) for name, found in counted.items() if found}

    def minutes(until: int) -> float | None:
        seconds = [value for at, value in columns.get("time/round_s", ()) if at <= until]
        return sum(seconds) / 60 if seconds else None

    def at(name: str, until: int | None) -> float | None:
        return None if until is None else dict(columns.get(name, ())).get(until)

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
        mode=mode,
        flatness={name.removeprefix("flatness/"): x for name, x in headlines.items() if is_flatness(name)},
        clients={name: x for name, x in headlines.items() if is_of_clients(name)},
    )
