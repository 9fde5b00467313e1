"""Checkpoints: all that a run needs to continue as if it had never stopped."""

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

import lightning
import torch

from fl_lightning.core import State, UserError, ensure, files, weights
from fl_lightning.core.frozen import constants, load_constants
from fl_lightning.engine import ENGINES
from fl_lightning.trainer import incidents
from fl_lightning.trainer.collectives import on_rank_zero
from fl_lightning.trainer.lock import check_unused
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
        if run.frozen and run.saved_rounds < 0:  # once in a process: a file that is lost or damaged is whole again
            files.save(run.folder.frozen, _on_cpu(constants(run.objective.net)))
        incidents.write(run.folder.incidents, run.incidents)  # first: a resumed run writes it again
        content = _on_cpu(_content(run, pin=path != run.folder.last))
        for logger in run.loggers:
            if isinstance(logger, RunLogger):
                logger.flush()  # a checkpoint never knows of more rounds than the log
        files.save(path, content)
        run.clients.saved()
    run.saved_rounds = run.rounds_done


def _content(run: Run, pin: bool) -> dict[str, Any]:
    objective, buffers = run.objective, run.objective.net_buffers
    values, net = objective.flat.split(run.global_model.cpu()), objective.net
    names = {p: name for name, p in net.named_parameters()}  # the first one of each that layers share
    trained = {name: values[names[p]] for name, p in net.named_parameters(remove_duplicate=False) if p.requires_grad}
    if buffers is not None:
        named = buffers.named(run.server.get("buffers", buffers.first))
        trained |= {name: v for name, v in named.items() if name in net.state_dict()}
    callbacks = zip(state_keys(run.callbacks), run.callbacks, strict=True)
    loggers = zip(state_keys(run.loggers), run.loggers, strict=True)
    return {
        # what LightningModule.load_from_checkpoint reads
        "pytorch-lightning_version": lightning.__version__,
        "hyper_parameters": dict(objective.hparams),
        "state_dict": {f"net.{name}": value.clone() for name, value in trained.items()},
        "frozen": run.frozen,
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
        content = files.load(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"ckpt_path = {path}: damaged, or not a checkpoint of fl_lightning ({error}); {REMEDY}"
        ) from None
    wrong = {name for name, right in FORM.items() if not (isinstance(content, dict) and _is(content.get(name), right))}
    ensure(
        not wrong, f"ckpt_path = {path}: not a whole checkpoint of fl_lightning ({', '.join(sorted(wrong))}); {REMEDY}"
    )
    return dict(content)


def state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Returns the whole state_dict of a checkpoint's net, frozen parameters included, by name in the net.

    Raises:
        UserError: If the file is not a checkpoint of this package, or the frozen parameters are not next to it.
    """
    found = weights.with_constants(load(path), path, "ckpt_path")
    return {name.removeprefix("net."): value for name, value in found.items()}


def _is(value: Any, form: Any) -> bool:
    """Whether a value has the form of `FORM`."""
    if isinstance(form, dict):
        return isinstance(value, dict) and all(_is(value.get(name), inner) for name, inner in form.items())
    return bool(isinstance(value, form) if isinstance(form, type | UnionType) else form(value))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_ids(value: Any) -> bool:
    fits = isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.ndim == 1
    return fits and bool((value >= 0).all()) and len(torch.unique(value)) == len(value)


def _are_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, torch.Tensor) for item in value.values())


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, int | float) for item in value.values())


ROWS: dict[str, Any] = {"row_bytes": _is_count, "ids": _are_ids, "positions": _are_ids, "stamps": torch.Tensor}
FORM: dict[str, Any] = {
    "state_dict": _are_tensors,
    "frozen": str,
    "kind": ("federated", "centralized").__contains__,
    "identity": dict,
    "round": _is_count,
    "engine": ENGINES.__contains__,
    "server": _are_tensors,
    "buffers": torch.Tensor | None,
    "clients": {
        "ids": _are_ids,
        "rows": _are_tensors,
        "w0": torch.Tensor,
        "file": lambda file: file is None or _is(file, ROWS),
    },
    "total_floats": _is_count,
    "elapsed": float,
    "metrics": _are_numbers,
    "training": dict,
    "callbacks": dict,
    "loggers": dict,
}
"""What a checkpoint holds: by name a type, a function that says whether a value is right, or a mapping of these."""
REMEDY = "take an older one from a run's checkpoints folder, or start again"


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
    frozen = {"model.net (its frozen parameters)": content["frozen"]}
    if resume:
        _check_identity(path, frozen, dict.fromkeys(frozen, run.frozen))
    elif content["frozen"] != run.frozen:
        rest = {name: v for name, v in state_dict(path).items() if f"net.{name}" not in content["state_dict"]}
        load_constants(run.objective.net, rest, f"ckpt_path = {path}")
        run.frozen = content["frozen"]
    ensure(
        not resume or content["round"] <= run.max_rounds,
        f"trainer.max_rounds = {run.max_rounds}: {path} has done {content['round']}; take at least as many",
    )
    if resume or path.parent.name == RunFolder.CHECKPOINTS:
        run.folder = RunFolder.of_checkpoint(path)
    _check_state(path, run, content, clients)
    folder = RunFolder(path.parent.parent)
    if resume:
        on_rank_zero(run.fabric, lambda: check_unused(folder.path))  # else the rows may be newer than the checkpoint
    if clients and run.fabric.is_global_zero:
        run.clients.load_state_dict(content["clients"], folder.clients)
    run.checkpoint, run.restored = path, {name: value for name, value in content.items() if name != "clients"}
    run.server = State({name: value.to(w0) for name, value in content["server"].items()})
    run.clients.w0 = content["clients"]["w0"].to(w0)
    if buffers is not None:
        buffers.first = content["buffers"].to(w0)
    run.rounds_done, run.total_floats, run.metrics = content["round"], content["total_floats"], content["metrics"]
    run.incidents = content["incidents"]


def _check_state(path: Path, run: Run, content: Mapping[str, Any], same_data: bool) -> None:
    """Checks that the tensors fit the run."""
    clients, kept = content["clients"], run.clients
    ids = torch.cat([clients["ids"], *([clients["file"]["ids"]] if clients["file"] else [])])
    shapes = {name: tuple(value.shape) for name, value in content["server"].items()}
    rows = {name: (len(clients["ids"]), *shape) for name, shape in kept.shapes.items()} if len(clients["ids"]) else {}
    for what, fits in (
        ("server", shapes == {name: tuple(value.shape) for name, value in run.server.items()}),
        ("clients.w0", clients["w0"].shape == kept.w0.shape),
        ("clients.ids", len(torch.unique(ids)) == len(ids) and not (same_data and (ids >= run.data.num_clients).any())),
        ("clients.rows", not same_data or {n: tuple(value.shape) for n, value in clients["rows"].items()} == rows),
        ("buffers", (content["buffers"] is None) == (run.objective.net_buffers is None)),
    ):
        ensure(fits, f"ckpt_path = {path}: its {what} does not fit this run; {REMEDY}")


def _identity(run: Run) -> dict[str, Any]:
    """What must be the same when a run is resumed, by config key."""
    return {
        **_model_identity(run),
        "model (its client state)": sorted(run.clients.inits),
        "trainer.seed": run.seed,
        "trainer.precision": run.settings.precision,
        "trainer.privacy": run.aggregation.identity,
        "data": run.data.fingerprint(),
    }


def _model_identity(run: Run) -> dict[str, Any]:
    flat = run.objective.flat
    return {
        "model": type(run.objective).__name__,
        "model.net (its parameters)": [(n, list(s)) for n, s in zip(flat.names, flat.shapes, strict=True)],
        "model (its server state)": sorted(run.objective.server_inits()),
    }


def _check_identity(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    for key, value in here.items():
        ensure(
            saved.get(key) == value,
            f"ckpt_path = {path}: made with {key} = {saved.get(key)!s:.60}, this run has {value!s:.60}; "
            "resume with the run's own config.yaml",
        )
