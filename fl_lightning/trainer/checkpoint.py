"""Checkpoints: all that a run needs to continue as if it had never stopped."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch

from fl_lightning.core import State, UserError, ensure, write_atomically
from fl_lightning.trainer import incidents
from fl_lightning.trainer.loggers import RunLogger
from fl_lightning.trainer.run import Run, state_keys
from fl_lightning.trainer.run_folder import RunFolder


def save(run: Run, path: Path) -> None:
    """Writes a checkpoint; rank 0 writes. The file is whole, whenever the process dies.

    Args:
        run: The run, between two rounds.
        path: The file. Any but the run's last.ckpt stays valid when later ones are written.
    """
    if run.fabric.is_global_zero:
        incidents.write(run.folder.incidents, run.incidents)  # first: a resumed run writes it again
        content = _on_cpu(_content(run, pin=path != run.folder.last))
        write_atomically(path, lambda file: torch.save(content, file))
        run.clients.saved()
    run.saved_rounds = run.rounds_done


def _content(run: Run, pin: bool) -> dict[str, Any]:
    objective, buffers = run.objective, run.objective.net_buffers
    weights = dict(objective.flat.split(run.global_model.cpu()))
    if buffers is not None:
        named = buffers.named(run.server.get("buffers", buffers.first))
        weights |= {name: v for name, v in named.items() if name in objective.net.state_dict()}
    callbacks = zip(state_keys(run.callbacks), run.callbacks, strict=True)
    loggers = zip(state_keys(run.loggers), run.loggers, strict=True)
    return {
        # what LightningModule.load_from_checkpoint reads
        "pytorch-lightning_version": lightning.__version__,
        "hyper_parameters": dict(objective.hparams),
        "state_dict": {f"net.{name}": value.clone() for name, value in weights.items()},
        "kind": run.kind,
        "identity": _identity(run),
        "round": run.rounds_done,
        "engine": run.engine_name,
        "server": dict(run.server),
        "buffers": None if buffers is None else buffers.first,
        "clients": run.clients.state_dict(pin=pin),
        "total_floats": run.total_floats,
        "elapsed": run.elapsed,
        "metrics": run.metrics,
        "incidents": run.incidents,
        "training": run.training_state(),
        "callbacks": {key: x.state_dict() for key, x in callbacks},
        "loggers": {key: x.state_dict() for key, x in loggers if isinstance(x, RunLogger)},
    }


def _on_cpu(value: Any) -> Any:
    """The same with all tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if type(value) is dict:
        return {key: _on_cpu(item) for key, item in value.items()}
    return [_on_cpu(item) for item in value] if type(value) is list else value


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU.

    Raises:
        UserError: If the file is not a checkpoint of this package.
    """
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"ckpt_path = {path}: not a readable checkpoint ({type(error).__name__}); take an older one, or start again"
        ) from None
    ensure(
        isinstance(content, dict) and {"server", "clients", "round", "identity", "kind"} <= content.keys(),
        f"ckpt_path = {path}: not a checkpoint of fl_lightning; give one from a run's checkpoints folder",
    )
    return dict(content)


def restore(run: Run, ckpt_path: str, resume: bool = True, clients: bool = True) -> None:
    """Restores a run from a checkpoint.

    Args:
        run: A new run.
        ckpt_path: The file, or "last" or "best" of the newest run of the same name.
        resume: Whether the run continues in the checkpoint's folder; otherwise it is only looked at.
        clients: Whether to restore the clients' state, too; the data must then be the same.

    Raises:
        UserError: If there is no such checkpoint, or it is of another model, and to be resumed, of other data, another
            seed or another kind of training.
    """
    run.fabric.barrier()  # rank 0 may still be writing it
    path = RunFolder.find_checkpoint(ckpt_path, run.settings.default_root_dir, run.name)
    content, buffers, w0 = load(path), run.objective.net_buffers, run.server.w
    if resume and content["kind"] != run.kind:
        command = "fit" if run.kind == "centralized" else "centralized"
        raise UserError(f"ckpt_path = {path}: of {content['kind']} training; continue it with `fl-lightning {command}`")
    _check_identity(path, content["identity"], _identity(run) if clients else _model_identity(run))
    ensure(
        not resume or content["round"] <= run.max_rounds,
        f"trainer.max_rounds = {run.max_rounds}: {path} has done {content['round']}; take at least as many",
    )
    if resume or path.parent.name == RunFolder.CHECKPOINTS:
        run.folder = RunFolder.of_checkpoint(path)
    if clients and run.fabric.is_global_zero:
        run.clients.load_state_dict(content["clients"], RunFolder(path.parent.parent).clients)
    run.checkpoint, run.restored = path, content
    run.server = State({name: value.to(w0) for name, value in content["server"].items()})
    run.clients.w0 = content["clients"]["w0"].to(w0)
    if buffers is not None:
        buffers.first = content["buffers"].to(w0)
    run.rounds_done, run.total_floats, run.metrics = content["round"], content["total_floats"], content["metrics"]
    run.incidents = content["incidents"]


def _identity(run: Run) -> dict[str, Any]:
    """What must be the same when a run is resumed, by config key."""
    return {
        **_model_identity(run),
        "trainer.seed": run.seed,
        "trainer.precision": run.settings.precision,
        "data": run.data.fingerprint(),
    }


def _model_identity(run: Run) -> dict[str, Any]:
    flat = run.objective.flat
    return {
        "model": type(run.objective).__name__,
        "model.net (its parameters)": [(n, list(s)) for n, s in zip(flat.names, flat.shapes, strict=True)],
        "model (its client state)": sorted(run.objective.client_inits()),
        "model (its server state)": sorted(run.objective.server_inits()),
    }


def _check_identity(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for key, value in here.items():
        ensure(
            saved.get(key) == value,
            f"ckpt_path = {path}: made with {key} = {saved.get(key)!s:.60}, this run has {value!s:.60}; "
            "resume with the run's own config.yaml",
        )
