"""``fl-lightning export``, and the net of a run from Python."""

from functools import partial
from pathlib import Path

import torch
from torch import nn

from fl_lightning.core import ensure, files, make_folder, write_atomically
from fl_lightning.trainer import RunFolder
from fl_lightning.trainer.storage import checkpoint

SUMMARY = "Write the net of a checkpoint, weights and running statistics, as a state_dict."

HERE = (
    "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.strategy=auto",
    "--model.init_weights=null", "--trainer.loggers=null",
)  # fmt: skip
"""Settings for looking at the net of a run, in place of the run's."""


def run(ckpt: str, out: str, /) -> None:
    """Writes a file for ``net.load_state_dict(torch.load(OUT))``.

    Args:
        ckpt: The checkpoint, in its run folder.
        out: The file; no checkpoint.
    """
    target = Path(out)
    ensure(not target.is_dir() and target.name != "", f"out = {out}: a folder; give the path of a file")
    ensure(
        not target.is_file() or files.fault(target) == files.UNMARKED,
        f"out = {out}: a checkpoint or another file of a run; give the path of a new file",
    )
    net = load_net(ckpt)
    make_folder(target.parent)
    write_atomically(target, partial(torch.save, net.state_dict()))
    print(f"{type(net).__name__}, {sum(p.numel() for p in net.parameters()):,} weights: {out}")


def load_net(run_folder: str | Path) -> nn.Module:
    """Returns the net of a run, on the CPU, with the weights and running statistics of its last checkpoint.

    It is built from the run's ``config.yaml``. Statistics are those that evaluation uses: with ``model.buffers`` =
    average those of the checkpoint; with reset they are estimated on the training data, which must be there; with
    local there are none but the initial ones.

    Args:
        run_folder: The folder of the run, or one of its checkpoints.

    Raises:
        UserError: If there is no config or checkpoint.
    """
    from fl_lightning.commands.shared.cli import FederatedCLI

    path = Path(run_folder)
    path = RunFolder(path).last if path.is_dir() else path
    config = RunFolder(path.parent.parent).newest_config
    ensure(path.is_file(), f"ckpt = {path}: no such file; give a checkpoint, such as RUN/checkpoints/last.ckpt")
    ensure(
        config.is_file(),
        f"ckpt = {path}: no run's config.yaml lies two folders above it; give RUN/checkpoints/last.ckpt",
    )
    weights = checkpoint.state_dict(path)
    with torch.random.fork_rng(devices=[]):
        made = FederatedCLI("test", "--config", str(config), *HERE).build()
        if made.model.net_buffers is not None and made.model.net_buffers.policy == "reset":
            with made.trainer.environment():
                loaded = made.trainer.load(made.model, made.data, str(path))
                loaded.load_statistics(loaded.global_model)
            weights |= made.model.net.state_dict()
    net: nn.Module = made.model.net
    net.to(weights[next(name for name, _ in net.named_parameters())].dtype)
    net.load_state_dict(weights)
    return net
