"""Checks that the run that ``--ckpt_path last`` names is the one that the config describes."""

import re

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import UserError
from fl_lightning.data import FederatedDataModule
from fl_lightning.results.configs import differences, read_config
from fl_lightning.trainer.settings import Kind
from fl_lightning.trainer.storage import checkpoint
from fl_lightning.trainer.storage.run_folder import RunFolder
from fl_lightning.trainer.trainer import FederatedTrainer

OTHER_RUN = re.compile(r"(model|data|model\.ascent|model\.net(\..*)?|(.*\.)?(rho|seed)) = ")
"""Settings in which a resumed run must agree; a change of others, such as the number of rounds, is only shown."""


def check_last(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    ckpt_path: str | None,
    kind: Kind = "federated",
) -> None:
    """Prints the run that ``last`` names, its round, and the settings in which this config differs from that run's.

    Args:
        trainer: The trainer, with its resolved config.
        model: The local objective.
        data: The data.
        ckpt_path: As given; only "last" and "best" are checked.
        kind: Federated or centralized training.

    Raises:
        UserError: If there is no such run, or it is one of another seed, rho or net.
    """
    if ckpt_path not in ("last", "best"):
        return
    path = RunFolder.find_checkpoint(ckpt_path, trainer.default_root_dir, trainer.run_name(model, data, kind))
    run = RunFolder.of_checkpoint(path)
    if not run.config.is_file():
        return  # it was started from Python
    found = differences(read_config(run.newest_config), trainer.config)
    if other := [line for line in found if OTHER_RUN.match(line)]:
        raise UserError(
            f"ckpt_path = {ckpt_path}: the newest run, {run.path}, has {', '.join(other)}; name the run that you mean: "
            f"--ckpt_path {path}"
        )
    differing = f"; settings that differ: {', '.join(found)}" if found else ""
    trainer.fabric.print(f"{ckpt_path}: {run.path}, round {checkpoint.load(path)['round']}{differing}")
