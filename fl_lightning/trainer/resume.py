"""Saves the checkpoints of a run, and restores a run from one."""

import hashlib
import math
from collections.abc import Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from fl_lightning.algorithms.composed import same_setting
from fl_lightning.core import State, as_setting, below, constants, ensure, files, load_buffers, load_constants
from fl_lightning.engine import EngineName
from fl_lightning.results.configs import flatten
from fl_lightning.trainer.aggregation.noise import NoiseKey
from fl_lightning.trainer.flight import is_flight
from fl_lightning.trainer.participation.faults import write_failures
from fl_lightning.trainer.run import Callback, Run
from fl_lightning.trainer.runtime.collectives import all_gather_dict, exchange, on_rank_zero
from fl_lightning.trainer.storage import RunFolder, by_key, check_unused, checkpoint, provenance

BLOCK = 1 << 24
"""Numbers that rank 0 receives at once for a checkpoint, or one row."""


def save(run: Run, path: Path, stays: bool = True) -> None:
    """Writes a checkpoint; rank 0 writes. The file is whole, whenever the process dies.

    If other processes keep rows of clients, all must call, and rank 0 gets those that have changed.

    Args:
        run: The run, between two rounds.
        path: The file. Any but the run's last.ckpt stays valid when later ones are written.
        stays: Whether the file is neither replaced nor removed later, as last.ckpt and best.ckpt are.
    """
    if run.clients.shared:
        _fetch_rows(run)
        on_rank_zero(run.fabric, partial(_write, run, path, stays))
    else:
        _write(run, path, stays)
    run.clients.saved()
    run.saved_rounds = run.rounds_done


def _fetch_rows(run: Run) -> None:
    """Sends the rows that have changed since the last checkpoint to rank 0, in blocks."""
    store, fabric = run.clients, run.fabric
    changed = all_gather_dict(fabric, dict.fromkeys(store.unsaved, fabric.global_rank))
    clients, number = [*changed], max(1, BLOCK // sum(map(math.prod, store.shapes.values())))
    for start in range(0, len(clients), number):
        moves = {k: (changed[k], 0) for k in clients[start : start + number]}
        rows = {k: row for k in moves if store.owns(k) and (row := store.row(k))}
        store.stage({k: State(row) for k, row in exchange(fabric, moves, rows, store.shapes, store.w0).items()})


def _write(run: Run, path: Path, stays: bool) -> None:
    if run.fabric.is_global_zero:
        if run.frozen and run.saved_rounds < 0:  # once in a process: a file that is lost or damaged is whole again
            files.save(run.folder.frozen, {name: value.cpu() for name, value in constants(run.objective.net).items()})
        write_failures(run.folder.failures, run.state.failures)  # first: a resumed run writes it again
        about = _about(run, pin=path != run.folder.last and (stays or path))
        for logger in run.run_loggers:
            logger.flush()  # a checkpoint never knows of more rounds than the log
        checkpoint.save(path, run.state, about)


def _about(run: Run, pin: bool | Path) -> dict[str, Any]:
    objective, buffers, first = run.objective, run.objective.net_buffers, run.first_settings
    key = run.aggregation.noise_key
    values, net = objective.flat.split(run.global_model.cpu()), objective.net
    entries = net.state_dict()
    names = {p: name for name, p in net.named_parameters()}  # the first one of each that layers share
    trained = {name: values[names[p]] for name, p in net.named_parameters(remove_duplicate=False) if names[p] in values}
    if buffers is not None:
        named = buffers.named(run.server.get("buffers", buffers.first))
        trained |= {name: v for name, v in named.items() if name in entries}
    return {
        # what LightningModule.load_from_checkpoint reads
        "pytorch-lightning_version": provenance.versions()["lightning"],
        "state_dict": {f"net.{name}": value.clone() for name, value in trained.items()},
        "frozen": run.frozen,
        "kind": run.kind,
        "identity": _identity(run),
        "config": flatten(run.config),
        # those that have changed since the run was made: the first and the current value, by name
        "settings": {
            n: [first[n], current]
            for n, current in objective.named_settings().items()
            if n in first and not same_setting(first[n], current)
        },
        "engine": run.engine_name,
        "noise": None if key is None else {"key": key.secret.hex(), "settings": digest(run, run.engine_name)},
        "buffers": None if buffers is None else buffers.first,
        "constant_buffers": {name: b.clone() for name, b in net.named_buffers() if name not in entries},
        "clients": run.clients.state_dict(pin=pin),
        "elapsed": run.elapsed,
        "records": run.folder.checksums(run.rounds_done),
        "unsaved": [name for name, v in unsaved(run).items() if name not in run.unsaved or run.unsaved[name] != v],
        **states(run),
    }


def unsaved(run: Run) -> dict[str, Any]:
    """Returns the public numbers and text of those callbacks of one's own that have no ``state_dict``, by name."""
    kinds = {x: type(x) for x in run.callbacks if type(x).state_dict is Callback.state_dict}
    classes = {x: kind.__name__ for x, kind in kinds.items() if kind.__module__.partition(".")[0] != "fl_lightning"}
    named = {f"{name}.{key}": v for x, name in classes.items() for key, v in vars(x).items() if key[0] != "_"}
    return {name: v for name, v in named.items() if v is None or isinstance(v, bool | int | float | str)}


def states(run: Run) -> dict[str, Any]:
    """Returns the states of callbacks and loggers, and the model's hyperparameters, as a checkpoint has them.

    Raises:
        UserError: If one of them has something that no checkpoint takes.
    """
    sections = {
        "hyper_parameters": dict(run.objective.hparams),
        "callbacks": {key: x.state_dict() for key, x in by_key(run.callbacks).items()},
        "loggers": {key: x.state_dict() for key, x in by_key([*run.run_loggers]).items()},
    }
    for name, entries in sections.items():
        files.check_plain(f"{name} of the run", entries)
    return sections


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
    content, buffers, w0 = checkpoint.load(path), run.objective.net_buffers, run.server.w
    ensure(
        not resume or content["kind"] == run.kind,
        f"ckpt_path = {path}: of {content['kind']} training; continue it with `fl-lightning "
        f"{'fit' if content['kind'] == 'federated' else 'centralized'}`",
    )
    _ = run.config  # that of the settings that were given
    for name, (first, saved) in content["settings"].items():
        if same_setting(run.first_settings.get(name), first):  # else the user gives another one
            run.objective.change_setting(name, saved)
    _check_identity(path, content["identity"], _identity(run) if clients else _model_identity(run))
    frozen = {"model.net (its frozen parameters)": content["frozen"]}
    if resume:
        _check_identity(path, frozen, dict.fromkeys(frozen, run.frozen))
    elif content["frozen"] != run.frozen:
        rest = {
            name: v for name, v in checkpoint.state_dict(path).items() if f"net.{name}" not in content["state_dict"]
        }
        load_constants(run.objective.net, rest, f"ckpt_path = {path}")
    ensure(
        not resume or content["round"] <= run.max_rounds,
        f"trainer.max_rounds = {run.max_rounds}: {path} has done {content['round']}; take at least as many",
    )
    inside = resume or path.parent.name == RunFolder.CHECKPOINTS
    folder = RunFolder.of_checkpoint(path) if inside else RunFolder(path.parent.parent)
    _check_state(path, run, content, clients)
    if resume:
        on_rank_zero(run.fabric, lambda: check_unused(folder.path))  # else the rows may be newer than the checkpoint
    if clients:
        run.clients.load_state_dict(content["clients"], folder.clients)
    run.clients.w0 = content["clients"]["w0"].to(w0)
    load_buffers(run.objective.net, below("net", content["state_dict"]) | content["constant_buffers"])
    if buffers is not None:
        buffers.take(run.objective.net)
        buffers.first = content["buffers"].to(w0)
    _take_noise_key(run, path, content, resume)
    run.restored = {name: value for name, value in content.items() if name != "clients"}
    run.checkpoint, run.state, run.frozen = path, checkpoint.state_of(content, w0), content["frozen"]
    run.first_round = run.rounds_done
    if inside:
        run.folder = folder


def note_sources(run: Run) -> None:
    """Notes in a run under privacy what its sums depend on. What is edited while it goes on is not what it has read."""
    if run.private:
        run.sources = f"{run.data.content()} {provenance.digest_of_files(run.config)}"


def _take_noise_key(run: Run, path: Path, content: Mapping[str, Any], resume: bool) -> None:
    """Takes over the key of the noise where no other sum can get the noise of a round; else the run's is a new one."""
    rule, noise, last = run.aggregation, content["noise"], RunFolder(path.parent.parent).last
    if noise is None or not run.private:
        return
    engine = content["engine"] if run.settings.engine == "auto" else run.settings.engine
    same = not resume or (path.resolve() == last.resolve() and noise["settings"] == digest(run, engine))
    if run.fabric.broadcast(same):  # files of other nodes may differ, and the key may not
        rule.noise_key = NoiseKey(bytes.fromhex(noise["key"]))
    else:
        run.fabric.print(f"privacy: new noise and cohorts from round {content['round'] + 1} on")


def _check_state(path: Path, run: Run, content: Mapping[str, Any], same_data: bool) -> None:
    """Checks that the tensors fit the run."""
    clients, store = content["clients"], run.clients
    ids = torch.cat([clients["ids"], *([clients["file"]["ids"]] if clients["file"] else [])])
    shapes = {name: tuple(value.shape) for name, value in content["server"].items()}
    rows = {name: (len(clients["ids"]), *shape) for name, shape in store.shapes.items()} if len(clients["ids"]) else {}
    resumes = same_data and run.settings.asynchronous is not None and content["round"] > 0
    for what, fits in (
        ("server", shapes == {name: tuple(value.shape) for name, value in run.server.items()}),
        ("clients.w0", clients["w0"].shape == store.w0.shape),
        ("clients.ids", len(torch.unique(ids)) == len(ids) and not (same_data and (ids >= run.data.num_clients).any())),
        ("clients.rows", not same_data or {n: tuple(value.shape) for n, value in clients["rows"].items()} == rows),
        ("training", not resumes or is_flight(content["training"], run, content["round"], shapes)),
        ("buffers", (content["buffers"] is None) == (run.objective.net_buffers is None)),
    ):
        ensure(fits, f"ckpt_path = {path}: its {what} does not fit this run; {checkpoint.REMEDY}")


def _identity(run: Run) -> dict[str, Any]:
    """Returns what must be the same when a run is resumed, by config key."""
    return {
        **_model_identity(run),
        "model (its client state)": sorted(run.clients.inits),
        "trainer.seed": run.seed,
        "trainer.precision": run.settings.precision,
        "trainer.asynchronous": run.settings.asynchronous and type(run.settings.asynchronous).__name__,
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
        old, new = _apart(str(saved.get(key)), str(value))
        ensure(
            saved.get(key) == value,
            f"ckpt_path = {path}: made with {key} = {old}, this run has {new}; resume with the run's own config.yaml"
            + ", and put its files and partition back as they were" * (key == "data"),
        )


def _apart(*texts: str, length: int = 60) -> list[str]:
    """Returns texts at most ``length`` long: of longer ones what follows from the word in which they differ."""
    same = len([*takewhile(lambda letters: len({*letters}) == 1, zip(*texts, strict=False))])
    start = 0 if max(map(len, texts)) <= length else texts[0].rfind(" ", 0, same) + 1
    return [f"{'... ' * (start > 0)}{text[start:]:.{length}}" for text in texts]


LEFT_OUT = {
    "accelerator", "strategy", "devices", "num_nodes", "engine", "callbacks", "loggers", "enable_progress_bar",
    "default_root_dir",
}  # fmt: skip
"""Settings of which the digest has the outcome, whose objects change during a run, or that concern output."""


def digest(run: Run, engine: EngineName) -> str:
    """Returns a digest of settings as they are now, algorithm, `Run.sources`, versions and devices.

    Args:
        run: The run.
        engine: Its engine; "auto" says less than the one that was chosen.
    """
    config, data = run.settings.config, run.config["data"]  # arrays are described once in a run
    data_settings = {name: value for name, value in vars(run.data).items() if name in data.get("init_args", {})}
    parts = [
        engine,
        {name: v for name, v in as_setting(run.settings)["init_args"].items() if name not in LEFT_OUT},
        as_setting(run.objective),
        data,
        {name: value for name, value in data_settings.items() if isinstance(value, bool | int | float | str)},
        dict(run.objective.hparams),
        run.sources,
        config and {**config, "trainer": {**config["trainer"], "engine": None}},
        provenance.versions(),
        [run.fabric.device.type, run.fabric.world_size, torch.get_num_threads()],
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
