"""Statistics of a run that the papers report, from its ``metrics.csv``."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, pstdev, stdev

from fl_lightning.core import ensure, require
from fl_lightning.results.metrics import (
    Mode,
    Pairs,
    is_flatness,
    is_of_clients,
    mode_of,
    read_directions,
    read_metrics,
)

LAST = 100
"""Rounds at the end whose evaluations are averaged: ECCV 2022, FedGloSS and FedGF take 100, FedGMT 50."""


@dataclass(frozen=True)
class Summary:
    """Statistics of one run; None for what was not measured or never reached.

    Attributes:
        metric: Its name, such as ``server/test/acc``.
        rounds: Rounds done.
        last: Rounds at the end whose evaluations count.
        evaluations: Their number.
        mean: Mean over these evaluations: the papers' headline.
        std: Sample standard deviation over them (n - 1), as FedGMT reports it; None for a single one.
        std_population: The same with n.
        best: Best value of the whole run: the largest, or as `mode` says the smallest.
        best_round: The first round with that value.
        final: Value of the last evaluation.
        minutes: Of all rounds: local training and aggregation, without evaluation and what callbacks measure.
        bits: Sent and uploaded in all.
        transmissions: Models sent and uploaded in all, per client of a cohort: 2 a round of FedAvg (FedGF, Table 3).
        target: The value to reach, if one was given.
        target_round: First evaluated round that is as good, not smoothed.
        target_minutes: Minutes up to and with that round.
        target_bits: Bits up to and with that round.
        target_transmissions: Transmissions up to and with that round.
        mode: Whether large (max) or small (min) values of the metric are good.
        flatness: Mean of each measure of flatness over its measurements in the last rounds, by name.
        clients: The same of the statistics over clients (``server/clients/...``, ``client/test/...``).
    """

    metric: str
    rounds: int
    last: int
    evaluations: int
    mean: float
    std: float | None
    std_population: float
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
    last: int = LAST,
    target: float | None = None,
    metric: str | None = None,
    mode: Mode | None = None,
) -> Summary:
    """Statistics of a run.

    Args:
        run: Its folder, or its ``metrics.csv``.
        last: Rounds at the end whose evaluations are averaged.
        target: A value to be reached; it is in the unit of the metric, so accuracy is a fraction.
        metric: Name of the metric; None: what the data evaluate on the test set, accuracy or mIoU.
        mode: Whether its large (max) or small (min) values are good; None: as `mode_of` knows.

    Raises:
        UserError: If there is no such file or metric, or no evaluation in the last rounds.
    """
    require(last >= 1, "last", last, "at least 1 round")
    path = Path(run)
    path = path / "metrics.csv" if path.is_dir() else path
    ensure(
        path.is_file(),
        f"run = {run}: no metrics.csv there; give the folder of a run",
    )
    columns = read_metrics(path)
    if metric is None:
        tested = [name for name in columns if name.startswith("server/test/") and name != "server/test/loss"]
        metric = tested[0] if tested else "server/test/acc"
    ensure(
        metric in columns,
        f"metric = {metric}: not in {path}, which has {', '.join(columns) or 'no rows'}; choose one of these",
    )
    evaluated, rounds = columns[metric], max(values[-1][0] for values in columns.values())
    mode, window = mode_of(metric, mode, read_directions(path.parent)), _since(evaluated, rounds - last)
    ensure(
        bool(window),
        f"last = {last}: no {metric} in the last {last} of {rounds} rounds of {path}; take more rounds",
    )
    sign = 1 if mode == "max" else -1
    best_round, best = max(evaluated, key=lambda pair: (sign * pair[1], -pair[0]))
    reached = None
    if target is not None:
        reached = next((at for at, value in evaluated if sign * value >= sign * target), None)
    recent = {name: values for name, pairs in columns.items() if (values := _since(pairs, rounds - last))}

    def minutes(until: int) -> float | None:
        seconds = [value for at, value in columns.get("time/round_s", ()) if at <= until]
        return sum(seconds) / 60 if seconds else None

    def at(name: str, until: int | None) -> float | None:
        return None if until is None else dict(columns.get(name, ())).get(until)

    return Summary(
        metric=metric,
        rounds=rounds,
        last=min(last, rounds),
        evaluations=len(window),
        mean=mean(window),
        std=stdev(window) if len(window) > 1 else None,
        std_population=pstdev(window),
        best=best,
        best_round=best_round,
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
        flatness={name.removeprefix("flatness/"): mean(of) for name, of in recent.items() if is_flatness(name)},
        clients={name: mean(of) for name, of in recent.items() if is_of_clients(name)},
    )


def _since(pairs: Pairs, round: int) -> list[float]:
    """Values after a round."""
    return [value for at, value in pairs if at > round]
