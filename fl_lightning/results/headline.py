"""The headline of a run: the number of a metric that summary, W&B, compare, report, reproduce and sweep show."""

from collections.abc import Iterable
from pathlib import Path

from fl_lightning.core import read_json
from fl_lightning.results.configs import config_files, read_config
from fl_lightning.results.metrics import Pairs, average, read_run, rounds_done

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
    found = sorted(set(lasts))
    return f"last {found[0]} to {found[-1]}" if len(found) > 1 else f"last {found[0]}"


def window_of(folders: Iterable[Path]) -> str:
    """Returns the `window` of runs from their folders; empty if none has a round.

    Raises:
        UserError: If a file of a run is damaged.
    """
    done = [(rounds_done(read_run(folder)), eval_last_of(folder)) for folder in folders]
    lasts = [last_rounds(rounds, eval_last) for rounds, eval_last in done if rounds]
    return window(lasts) if lasts else ""


def eval_last_of(folder: Path) -> int:
    """Returns ``trainer.eval_last`` of a run from its config; of a run from Python, the window of its ``summary.json``.

    Raises:
        UserError: If the file is not readable.
    """
    if configs := list(config_files(folder).values()):
        trainer = read_config(configs[-1]).get("trainer")
        value = trainer.get("eval_last") if isinstance(trainer, dict) else None
    else:
        value = read_json(folder / SUMMARY, dict, {}).get("last")
    return value if isinstance(value, int) else 1


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
    recent = [value for at, value in pairs if at > rounds - (last or last_rounds(rounds, eval_last))]
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
