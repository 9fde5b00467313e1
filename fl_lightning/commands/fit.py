"""``fl-lightning fit``, one run or a grid of them; and ``centralized``, ``validate`` and ``test``."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from rich.markup import escape

from fl_lightning import FederatedDataModule, FederatedTrainer, LocalObjective
from fl_lightning.commands.shared import FederatedCLI, build_trial, check_trial, seeds_of, to_continue, without
from fl_lightning.core import require
from fl_lightning.results import average, deviation, filled, say, show_table, shown, title
from fl_lightning.sweeps.parameters import combinations
from fl_lightning.sweeps.trials import (
    NAMED,
    PLACE,
    Outcome,
    Trial,
    check_alone,
    complain,
    last_metrics,
    name_of,
    run_trials,
    short,
)


def run(
    cli: FederatedCLI, ckpt_path: str | None = None, seeds: str | None = None, values: list[str] | None = None
) -> None:
    """Trains for ``max_rounds`` rounds; with seeds or values, a run for each combination.

    Args:
        cli: Builds the runs.
        ckpt_path: A checkpoint to continue in its own run folder; "last" for the newest run of this name; or "auto" for
            the newest one with these settings, and for a new run if there is none.
        seeds: Values of trainer.seed, such as 0,1,2: a run for each, in a folder of its own.
        values: Values of another setting, such as model.rho=0.02,0.05; several times, a grid of them.
    """
    objects, grid = cli.build(), _grid(seeds, values or [])
    if not grid:
        with objects.trainer.environment():
            objects.trainer.fit(
                objects.model, objects.data, to_continue(objects.trainer, objects.model, objects.data, ckpt_path)
            )
        return
    require(ckpt_path in (None, "last"), "ckpt_path", ckpt_path, "several runs continue with last")
    check_alone(objects.trainer.fabric.world_size)
    name = objects.trainer.run_name(objects.model, objects.data)
    args = without(cli.args, "seeds", "values", "ckpt_path", "trainer.name", "trainer.default_root_dir")
    trials = [
        Trial(f"{name}/{name_of(point)}", (*args, *(f"--{key}={value}" for key, value in point.items())), "fit", point)
        for point in combinations(grid)
    ]
    for trial in trials:
        check_trial(trial)
    root = objects.trainer.default_root_dir
    _show([*run_trials(trials, root, build_trial, resume=ckpt_path == "last", check=check_trial)])


def _show(outcomes: Sequence[Outcome]) -> None:
    """Prints the last metrics of each trial, and over seeds mean and standard deviation.

    Raises:
        UserError: If a trial failed.
    """
    metrics = {outcome.trial.name: last_metrics(outcome.folder) for outcome in outcomes}
    names = shown(dict.fromkeys(name for last in metrics.values() for name in last))
    keys = list(dict.fromkeys(key for outcome in outcomes for key in outcome.trial.settings))
    heads, rows = [*(key.rpartition(".")[2] for key in keys), *map(title, names)], []
    for outcome in outcomes:
        cells, last = [escape(short(outcome.trial.settings.get(key, ""))) for key in keys], metrics[outcome.trial.name]
        if outcome.error:
            cells[-1] += " (broke off)"
        rows.append([*cells, *(f"{last[name]:.4f}" if name in last else "" for name in names)])
    finished = [metrics[outcome.trial.name] for outcome in outcomes if not outcome.error]
    if len(finished) > 1 and keys == ["trainer.seed"]:
        values = [[last[name] for last in finished if name in last] for name in names]
        means = [f"{average(v):.4f} ± {deviation(v):.4f}" if len(v) > 1 else "" for v in values]
        rows.append(["mean ± sd", *means])
    show_table(filled(heads, rows, len(heads), title=f"{len(outcomes)} runs"), len(keys) or 1)
    for folder in filter(None, (outcome.folder for outcome in outcomes)):
        say(f"results: {folder}")
    complain(outcomes)


def _grid(seeds: str | None, values: list[str]) -> dict[str, list[Any]]:
    """Returns the values to try, by the key of their setting."""
    grid: dict[str, list[Any]] = {}
    for axis in values:
        key, equals, listed = axis.partition("=")
        require(bool(equals), "values", axis, "give a setting and its values, as in model.rho=0.02,0.05")
        require(key not in grid, "values", axis, f"{key} is there twice; give all its values at once")
        require(key not in PLACE, "values", axis, NAMED)
        grid[key] = texts = re.split(r",(?![^\[{]*[]}])", listed)  # a value may be a list: [1],[2]
        several = len(texts) > 1 or not listed.startswith("[")
        require(several, "values", axis, "list them without brackets, as in model.rho=0.02,0.05")
        require(all(texts) and len(set(texts)) == len(texts), "values", listed, "give different values, such as 0,1,2")
    if seeds is not None:
        require("trainer.seed" not in grid, "seeds", seeds, "values has trainer.seed; give the seeds once")
        grid["trainer.seed"] = seeds_of(seeds)
    return grid


def centralized(
    trainer: FederatedTrainer, model: LocalObjective, data: FederatedDataModule, ckpt_path: str | None = None
) -> None:
    """Trains on the union of the clients' data under ``lightning.Trainer``; ``max_rounds`` counts epochs.

    Args:
        trainer: The trainer.
        model: A local objective without federated state.
        data: The data.
        ckpt_path: A checkpoint to continue in its own run folder; "last" or "best" for the newest run of this name; or
            "auto" for the newest one with these settings, and for a new run if there is none.
    """
    trainer.centralized(model, data, ckpt_path)


def _evaluation(evaluate: Callable[..., Any]) -> Callable[..., None]:
    """Returns the function of a subcommand that evaluates by a method of the trainer."""

    def run(
        trainer: FederatedTrainer, model: LocalObjective, data: FederatedDataModule, ckpt_path: str | None = None
    ) -> None:
        """Evaluates the global model.

        Args:
            trainer: The trainer.
            model: The local objective.
            data: The data.
            ckpt_path: The checkpoint, or "last"; by default the net's initial weights.
        """
        evaluate(trainer, model, data, ckpt_path)

    return run


validate, test = _evaluation(FederatedTrainer.validate), _evaluation(FederatedTrainer.test)
