"""``fl-lightning export``, and the net of a run from Python."""

from functools import partial
from pathlib import Path

import torch
from torch import nn

from fl_lightning.core import checked, ensure, files, make_folder, write_atomically
from fl_lightning.results import config_of, is_private, say
from fl_lightning.trainer import Run, RunFolder
from fl_lightning.trainer.storage import checkpoint

HERE = (
    "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.strategy=auto",
    "--model.init_weights=null", "--trainer.loggers=null",
)  # fmt: skip
"""Settings for looking at the net of a run, in place of the run's."""


def run(ckpt: str, out: str, /, client: int | None = None) -> None:
    """Writes a file for ``net.load_state_dict(torch.load(OUT))``.

    Args:
        ckpt: The checkpoint, in its run folder.
        out: The file to write, such as net.pt.
        client: The client whose own model is written; null: the global one.
    """
    target = Path(out)
    ensure(not target.is_dir() and target.name != "", f"out = {out}: a folder; give the path of a file")
    ensure(
        not target.is_file() or _is_export(target),
        f"out = {out}: a file that no export has written; give the path of a new file",
    )
    path = Path(ckpt)
    ensure(
        client is None or not is_private(config_of(path if path.is_dir() else path.parent.parent)),
        f"client = {client}: a client's own model is not private, and this run is one under trainer.privacy; leave "
        "it out, or take it from fl_lightning.load_net, which writes no file",
    )
    net = load_net(ckpt, client)
    make_folder(target.parent)
    write_atomically(target, partial(torch.save, net.state_dict()))
    say(f"{type(net).__name__}, {sum(p.numel() for p in net.parameters()):,} weights: {out}")


def _is_export(path: Path) -> bool:
    """Returns whether a file holds a state_dict, and nothing that a run has marked as its own."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # torch's exceptions depend on what the file holds
        return False
    plain = isinstance(content, dict) and all(isinstance(value, torch.Tensor) for value in content.values())
    return plain and files.fault(path) == files.UNMARKED


@checked
def load_net(run_folder: str | Path, client: int | None = None) -> nn.Module:
    """Returns the net of a run, on the CPU, with the weights and running statistics of its last checkpoint.

    It is built from the run's ``config.yaml``. Statistics are those that evaluation uses: with ``model.buffers`` =
    average those of the checkpoint; with reset they are estimated on the training data, which must be there; with
    local there are none but the initial ones.

    Args:
        run_folder: The folder of the run, or one of its checkpoints.
        client: The client whose own model it is, with the statistics that it keeps; the data must be there. None: the
            global model.

    Raises:
        UserError: If there is no config or checkpoint, no such model, or the client has not trained.
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
        objects = FederatedCLI("test", "--config", str(config), *HERE).build()
        if client is None:
            objects.model.check_global_model("export; give --client k")
        reset = objects.model.net_buffers is not None and objects.model.net_buffers.policy == "reset"
        if reset or client is not None:
            with objects.trainer.environment():
                run = objects.trainer.load(objects.model, objects.data, str(path), clients=client is not None)
                run.load_statistics(run.global_model)
                if client is not None:
                    _load_own(run, client)
            weights |= objects.model.net.state_dict()
    net: nn.Module = objects.model.net
    ensure(
        weights.keys() == net.state_dict().keys(),
        f"ckpt = {path}: its weights are not those of the net in {config}; restore both",
    )
    net.to(weights[next(name for name, _ in net.named_parameters())].dtype)
    net.load_state_dict(weights)
    return net


def _load_own(run: Run, client: int) -> None:
    """Loads a client's own model into the net."""
    ensure(run.objective.personal, "client: clients of this run have no models of their own; leave it out")
    row = run.clients.row(client)
    ensure(row is not None, f"client = {client}: has not trained in this run; give one that has")
    assert row is not None
    run.net.move_to(run.objective.client_model(run.global_model, row))
    if run.objective.net_buffers is not None and "buffers" in row:
        run.objective.net_buffers.load(run.objective.net, row.buffers)
