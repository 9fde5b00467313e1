"""``fl-lightning sweep``: a sweep in W&B's format, without account or server."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.markup import escape

from fl_lightning.commands.shared import build_trial, check_trial, find_config, seeds_of
from fl_lightning.core import PositiveInt, UserError, checked
from fl_lightning.results import command, console, filled, fitting, say, short_names
from fl_lightning.sweeps.controller import Controller
from fl_lightning.sweeps.file import Sweep
from fl_lightning.sweeps.trials import complain, last_metrics, short

SHOWN = 30
"""Maximum number of trials in the live table."""


@checked
def run(
    file: str, /, jobs: PositiveInt = 1, seeds: str = "0", seed: int = 0, out: str = "runs", loggers: bool = False
) -> None:
    """Runs the trials of a sweep; called again, it goes on where it was.

    Args:
        file: The sweep's file, or its name, such as sweeps/digits.
        jobs: Number of processes.
        seeds: Values of trainer.seed, such as 0,1,2: each setting runs with all of them, and their mean counts.
        seed: Seed of the draws of random and bayes.
        out: Folder in which the sweep's own one, named after it, lies.
        loggers: Whether the runs have their config's loggers, such as W&B; every run writes metrics.csv.
    """
    seed_values, sweep = seeds_of(seeds), Sweep.read(find_config(file, "file"))
    sweep = sweep if loggers else replace(sweep, args=(*sweep.args, "--trainer.loggers=[]"))
    controller = Controller(sweep, Path(out) / sweep.name, seed_values, seed)

    screen = console()
    say(f"sweep {sweep.name}: {controller.search.about}; folder: {controller.folder}")
    render = partial(_table, controller, SHOWN, screen.width)
    live = Live(get_renderable=render, console=screen, refresh_per_second=1, transient=True)
    with live if screen.is_terminal else nullcontext():
        for outcome in controller.run(build_trial, jobs, check_trial):
            value = controller.objective.value(outcome.folder)
            number = "not measured" if value is None else f"{value:.4g}"
            text = outcome.error or f"{'kept' if outcome.kept else 'finished'}, {controller.objective.name} {number}"
            say(f"{outcome.trial.name}: {text}")
    screen.print(_table(controller, len(controller.trials), screen.width))
    if (best := controller.best()) is not None:
        settings, trials, value = best
        description = ", ".join(f"{key} = {chosen}" for key, chosen in settings.items())
        mean = f"mean of {len(trials)} seeds " if len(trials) > 1 else ""
        say(f"best: {description}; {controller.label}: {mean}{value:.4g}")
        for doubt in controller.doubts():
            say(f"  {doubt}")
        say(f"its config: {controller.folder / 'best.yaml'}")
    say(f"results: {controller.folder / 'sweep.csv'}")
    varied = list(dict.fromkeys(key for trial in controller.trials for key in trial.settings if key != "trainer.seed"))
    if len(varied) == 2:
        words = ["fl-lightning", "compare", str(controller.folder), "--pivot", ",".join(short_names(varied))]
        if (metric := sweep.objective) is not None:
            words += ["--metric", metric.column, "--mode", "min" if metric.sign > 0 else "max"]
        print(command(*words, before="its pivot: "))
    outcomes = list(controller.outcomes.values())
    complain(outcomes)
    for outcome in outcomes[:1] if best is None else ():
        measured = ", ".join(last_metrics(outcome.folder)) or "nothing"
        raise UserError(f"metric.name = {controller.objective.name}: no run has measured it; choose from {measured}")


def _table(controller: Controller, limit: int, width: int) -> Group:
    """Returns the table of the trials, those that run first."""
    keys = [*dict.fromkeys(key for trial in controller.trials for key in trial.settings)]
    states = [(trial, *controller.state(trial)) for trial in controller.trials]
    order = ("running", "failed", "finished", "waiting")
    shown = states if len(states) <= limit else sorted(states, key=lambda row: order.index(row[1]))[:limit]
    rows = [
        [
            *(escape(short(trial.settings.get(key, ""))) for key in keys),
            state,
            str(done or ""),
            "" if value is None else f"{value:.4f}",
        ]
        for trial, state, done, value in shown
    ]
    heads = [*(key.rpartition(".")[2] for key in keys), "state", "round", controller.label]
    caption = f"and {len(states) - limit} more" if len(states) > limit else None
    return Group(*fitting(filled(heads, rows, len(keys) + 1, box=None, caption=caption), width, len(keys) or 1))
