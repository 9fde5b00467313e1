"""``fl-lightning fit``: one run, or several that differ in a number or in their seeds."""

from itertools import product
from typing import Any

from fl_lightning.commands.cli import FederatedCLI
from fl_lightning.commands.last import check_last
from fl_lightning.core import require
from fl_lightning.trainer import parallel_runs

SUMMARY = "Train for trainer.max_rounds rounds."


def run(cli: FederatedCLI, ckpt_path: str | None = None, seeds: str | None = None, values: str | None = None) -> None:
    """Trains for ``max_rounds`` rounds; with several seeds or values, several runs as one batched program.

    Args:
        cli: Builds the runs.
        ckpt_path: A checkpoint to go on from, in its own run folder; or "last" for the newest run of this name.
        seeds: Values of trainer.seed, such as 0,1,2: a run for each, in a folder of its own.
        values: Values of another number, such as model.rho=0.02,0.05: a run for each (and each seed).
    """
    runs = []
    for settings in _combinations(seeds, values):
        made = cli.build(settings)
        if settings:
            where = "_".join(f"{key.rpartition('.')[2]}_{value}" for key, value in settings.items())
            made.trainer.name = f"{made.trainer.run_name(made.model, made.data)}/{where}"
        check_last(made.trainer, made.model, made.data, ckpt_path)
        runs.append(made)
    first = runs[0]
    if seeds or values:
        parallel_runs.fit([made.trainer for made in runs], [made.model for made in runs], first.data, ckpt_path)
    else:
        first.trainer.fit(first.model, first.data, ckpt_path)


def _combinations(seeds: str | None, values: str | None) -> list[dict[str, Any]]:
    """Settings of each run, by key; none for a single run."""
    names: list[tuple[str, list[Any]]] = []
    if values is not None:
        key, _, listed = values.partition("=")
        remedy = "give a number of the model, as in model.rho=0.02,0.05"
        require(key.startswith("model.") and bool(listed), "values", values, remedy)
        names.append((key, numbers("values", listed, float)))
    if seeds is not None:
        names.append(("trainer.seed", numbers("seeds", seeds, int)))
    return [dict(zip([key for key, _ in names], chosen, strict=True)) for chosen in product(*(v for _, v in names))]


def numbers(key: str, listed: str, number: type) -> list[Any]:
    """Returns different numbers that are listed as in 0,1,2.

    Raises:
        UserError: If they are not.
    """
    try:
        found = [number(value) for value in listed.split(",")]
    except ValueError:
        found = []
    require(bool(found) and len(set(found)) == len(found), key, listed, "give different numbers, such as 0,1,2")
    return found
