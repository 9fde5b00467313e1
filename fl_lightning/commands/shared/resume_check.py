"""The checkpoint that ``--ckpt_path auto``, ``last`` or ``best`` names, and whether its run is the config's."""

import re
from pathlib import Path

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import UserError
from fl_lightning.data import FederatedDataModule
from fl_lightning.results.configs import differences, read_config
from fl_lightning.trainer.runtime.collectives import on_rank_zero
from fl_lightning.trainer.settings import Kind
from fl_lightning.trainer.storage import checkpoint
from fl_lightning.trainer.storage.run_folder import RunFolder
from fl_lightning.trainer.trainer import FederatedTrainer

OTHER_RUN = re.compile(r"(model|data|model\.ascent|model\.net(\..*)?|(.*\.)?(rho|seed)) = ")
"""Settings in which a resumed run must agree; a change of others, such as the number of rounds, is only shown."""


def to_continue(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    ckpt_path: str | None,
    kind: Kind = "federated",
) -> str | None:
    """Returns the checkpoint that a run continues from.

    Of ``auto``, ``last`` and ``best`` it prints run and round, and the settings in which this config differs from that
    run's.

    Args:
        trainer: The trainer, with its resolved config; its processes are launched for ``auto``.
        model: The local objective.
        data: The data.
        ckpt_path: As given. With ``auto`` it is that of the newest run of this name with the same settings, but for
            those that change no result; without one, None: a new run begins.
        kind: Federated or centralized training.

    Raises:
        UserError: If there is no such run, or it is one of another seed, rho or net.
    """
    name = trainer.run_name(model, data, kind)
    if ckpt_path == "auto":
        trainer.launch()
        # on a shared disk the processes may see different files
        found = on_rank_zero(trainer.fabric, lambda: _of_same_config(trainer, trainer.default_root_dir / name))
        if found is None:
            trainer.fabric.print(f"auto: no run of this config in {trainer.default_root_dir / name}; a new one begins")
            return None
        path = Path(found)
    elif ckpt_path in ("last", "best"):
        path = RunFolder.find_checkpoint(ckpt_path, trainer.default_root_dir, name)
    else:
        return ckpt_path
    run = RunFolder.of_checkpoint(path)
    if not run.config.is_file():
        return ckpt_path  # it was started from Python
    differ = differences(read_config(run.newest_config), trainer.config)
    if other := [line for line in differ if OTHER_RUN.match(line)]:
        raise UserError(
            f"ckpt_path = {ckpt_path}: the newest run, {run.path}, has {', '.join(other)}; name the run that you mean: "
            f"--ckpt_path {path}"
        )
    differing = f"; settings that differ: {', '.join(differ)}" if differ else ""
    trainer.fabric.print(f"{ckpt_path}: {run.path}, round {checkpoint.load(path)['round']}{differing}")
    return str(path)


def _of_same_config(trainer: FederatedTrainer, folder: Path) -> str | None:
    """Returns the last checkpoint of the newest run in a folder that has this config."""
    paths = folder.glob(f"version_*/{RunFolder.CHECKPOINTS}/last.ckpt")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        config = RunFolder.of_checkpoint(path).newest_config
        if config.is_file() and not differences(read_config(config), trainer.config):
            return str(path)
    return None
