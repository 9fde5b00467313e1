"""Helpers of the commands that make many runs: building a trial, and the table of all trials."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rich.markup import escape

from fl_lightning.commands.shared.arguments import prepare
from fl_lightning.commands.shared.cli import FederatedCLI
from fl_lightning.commands.shared.index import ArgumentsError
from fl_lightning.commands.shared.messages import explain
from fl_lightning.core import UserError
from fl_lightning.results import average, deviation, filled, read_run, say, show_table, shown, title
from fl_lightning.sweeps.trials import Built, Outcome, Trial, check_alone, short
from fl_lightning.trainer.callbacks.defaults import Ending


def build(trial: Trial, folder: Path) -> Built:
    """Makes the run of a trial from its arguments; it prints nothing.

    Raises:
        UserError: If they are wrong.
    """
    own = [f"--trainer.default_root_dir={folder}", f"--trainer.name={trial.name}"]
    with _explained(trial.command):
        made = _cli(trial.command).make(*trial.args, *own, "--trainer.enable_progress_bar=false")
    made.trainer.callbacks = [callback for callback in made.trainer.callbacks if not isinstance(callback, Ending)]
    return Built(made.trainer, made.model, made.data)


def check(trial: Trial) -> dict[str, Any]:
    """Parses the arguments of a trial, and returns its resolved config.

    Raises:
        UserError: If they are wrong.
    """
    with _explained(trial.command):
        config = _config(trial.command, trial.args)
    devices, nodes = config["trainer"]["devices"], config["trainer"]["num_nodes"]
    check_alone(nodes * devices if isinstance(devices, int) else nodes)
    return config


@contextmanager
def _explained(command: str) -> Iterator[None]:
    """Raises what the parser of a subcommand refuses as one line."""
    try:
        yield
    except (ArgumentsError, ValueError) as error:
        if (line := explain(error, command=command)) is None:
            raise
        raise UserError(line) from None


@cache
def _config(command: str, args: tuple[str, ...]) -> dict[str, Any]:
    cli = _cli(command)
    cli.parse_arguments(cli.parser, prepare(args))
    return cli.resolved()


@cache
def _cli(command: str) -> FederatedCLI:
    """Returns a parser of a subcommand, whose construction takes longer than to parse the arguments of a trial."""
    return FederatedCLI(command, "--config", "quickstart")


def show(outcomes: Sequence[Outcome]) -> None:
    """Prints the last metrics of each trial, and over seeds mean and standard deviation.

    Raises:
        UserError: If a trial failed.
    """
    metrics = {o.trial.name: last_metrics(o.folder) for o in outcomes}
    names = shown(dict.fromkeys(name for found in metrics.values() for name in found))
    keys = list(dict.fromkeys(key for o in outcomes for key in o.trial.settings))
    heads, rows = [*(key.rpartition(".")[2] for key in keys), *map(title, names)], []
    for o in outcomes:
        cells, found = [escape(short(o.trial.settings.get(key, ""))) for key in keys], metrics[o.trial.name]
        if o.error:
            cells[-1] += " (broke off)"
        rows.append([*cells, *(f"{found[name]:.4f}" if name in found else "" for name in names)])
    whole = [metrics[o.trial.name] for o in outcomes if not o.error]
    if len(whole) > 1 and keys == ["trainer.seed"]:
        values = [[found[name] for found in whole if name in found] for name in names]
        means = [f"{average(v):.4f} ± {deviation(v):.4f}" if len(v) > 1 else "" for v in values]
        rows.append(["mean ± sd", *means])
    show_table(filled(heads, rows, len(heads), title=f"{len(outcomes)} runs"), len(keys) or 1)
    for folder in filter(None, (o.folder for o in outcomes)):
        say(f"results: {folder}")
    complain(outcomes)


def complain(outcomes: Sequence[Outcome]) -> None:
    """Raises the error of the first trial that failed.

    Raises:
        UserError: If one did.
    """
    if failed := [o for o in outcomes if o.error]:
        where = failed[0].folder or failed[0].trial.name
        raise UserError(f"{len(failed)} of {len(outcomes)} runs broke off; {where}: {failed[0].error}")


def last_metrics(folder: Path | None) -> dict[str, float]:
    """Returns the last value of each metric of a run; none without a run folder."""
    return {name: pairs[-1][1] for name, pairs in read_run(folder).items()}
