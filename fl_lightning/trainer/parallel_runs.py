"""Several runs of one config as one batched program: other seeds, or other values of a setting."""

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import MADE, ensure
from fl_lightning.data import FederatedDataModule
from fl_lightning.trainer.callbacks import Progress, Trajectory
from fl_lightning.trainer.loop import seconds_left, train
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.trainer import FederatedTrainer, check_fit

PARTS = ("", "ascent", "optimizer", "loss", "net")
"""Parts of an objective that local training uses."""
SERVER = ("server_update", "averaging", "metrics", "_scores", "_hparams")
"""Attributes of an objective that local training does not use."""
TORCHS = vars(nn.Module()).keys() - {"training", "_buffers", "_parameters"}
"""Attributes of a module that torch makes, but for its tensors."""
OF_FUNCTIONS = (
    "__code__",
    "__defaults__",
    "__kwdefaults__",
    "__closure__",
    "cell_contents",
    "__self__",
    "func",
    "args",
    "keywords",
)


def fit(
    trainers: Sequence[FederatedTrainer],
    models: Sequence[LocalObjective],
    datamodule: FederatedDataModule,
    ckpt_path: str | None = None,
) -> list[Run]:
    """Trains all runs in parallel: the local steps of all their cohorts are one program of the engine.

    Each run is what it would be alone, up to rounding, in a folder of its own. One that diverges ends, and the others
    continue. The live progress is that of the first one.

    Args:
        trainers: One for each run, alike except for the seed; with different names, "last" resumes each of them.
        models: Their local objectives, alike except for numbers.
        datamodule: The clients' data, shared by all.
        ckpt_path: "last" to continue the newest run of each name.

    Returns:
        The runs.

    Raises:
        UserError: As ``FederatedTrainer.fit``; if the runs differ in more than that; and at the end, if some of them
            broke off.
    """
    with trainers[0].environment():
        runs = start(trainers, models, datamodule, [ckpt_path] * len(trainers))
        broken = train(runs)
        for run in runs:  # the net of the first one was the engine's
            run.hand_over_model()
    if broken:
        run, error = next(iter(broken.items()))
        raise type(error)(f"{len(broken)} of {len(runs)} runs broke off; {run.folder.path}: {error}")
    return runs


def start(
    trainers: Sequence[FederatedTrainer],
    models: Sequence[LocalObjective],
    datamodule: FederatedDataModule,
    ckpt_paths: Sequence[str | None],
) -> list[Run]:
    """Makes runs before their next round; nothing is written. Arguments as for `fit`, with a checkpoint for each.

    Raises:
        UserError: If they cannot be one program.
    """
    first = trainers[0]
    ensure(
        first.fabric.world_size <= 1,
        f"trainer.devices: {first.fabric.world_size} processes; parallel runs take one, set it to 1",
    )
    ensure(
        len({(trainer.dtype, trainer.precision) for trainer in trainers}) <= 1,
        "trainer.precision: parallel runs must have the same; start them one by one",
    )
    ensure(
        all(trainer.asynchronous is None for trainer in trainers),
        "trainer.asynchronous: parallel runs step together; start them one by one",
    )
    callbacks = [callback for trainer in trainers for callback in trainer.callbacks]
    stateful = [getattr(c, "inner", c) for c in callbacks if c.overrides("state_dict") or isinstance(c, Trajectory)]
    shared = {type(c).__name__ for c in stateful if sum(c is other for other in stateful) > 1}
    ensure(
        not shared,
        f"trainer.callbacks: parallel runs share one {', '.join(sorted(shared))}, which would mix what it has seen of "
        "them; give each trainer one of its own",
    )
    for model in models:
        model.optimizer.check_batched("parallel runs")
    names, runs = differing(models), list[Run]()
    for trainer, model, ckpt_path in zip(trainers, models, ckpt_paths, strict=True):
        varied = {name: float(attrgetter(name)(model)) for name in names}
        own_callbacks = [c for c in trainer.callbacks if trainer is first or not isinstance(c, Progress)]
        runs.append(trainer.start(model, datamodule, ckpt_path, varied=varied, callbacks=own_callbacks))
    ensure(
        len({run.frozen for run in runs}) <= 1,
        "model.net: its frozen parameters differ between the runs, and one program has one net; start them one by one",
    )
    for run in runs:
        check_fit(run)
    return runs


def pays(runs: Sequence[Run]) -> bool:
    """Returns whether the runs are faster as one program than one after another; a round of both is measured."""
    going = [run for run in runs if not run.finished]
    return len(going) > 1 and seconds_left(going) < len(going) * seconds_left(going[:1])


def differing(models: Sequence[LocalObjective]) -> list[str]:
    """Returns the names of the numbers that differ between objectives, such as ``ascent.rho``.

    The clients of all runs train by the first one's objective, with these numbers of their own.

    Raises:
        UserError: If the objectives differ in more than numbers.
    """
    names, remedy, nets = [], "parallel runs must have the same; start them one by one", [model.net for model in models]
    pairs = (pair for net in nets[1:] for pair in zip(nets[0].parameters(), net.parameters(), strict=False))
    seen = {(id(one), id(other)): (one, other) for one, other in pairs}
    ensure(len({(*model.flat.names, *model.flat.shapes) for model in models}) <= 1, f"model.net: {remedy}")
    for part in PARTS:
        owners = [getattr(model, part) if part else model for model in models]
        ensure(len({type(owner) for owner in owners}) <= 1, f"model.{part or 'class_path'}: {remedy}")
        if owners[0] is None:
            continue
        all_attributes = [*map(_attributes, owners)]
        for name in dict.fromkeys(name for attributes in all_attributes for name in attributes):
            values = [attributes.get(name) for attributes in all_attributes]
            if (not part and name in (*PARTS, *SERVER)) or all(_alike(values[0], v, {**seen}) for v in values[1:]):
                continue
            path = f"{part}.{name}".lstrip(".")
            ensure(
                all(isinstance(value, bool | int | float | str | None) for value in values),
                f"model.{part if name.startswith('_') else path}: {remedy}",
            )
            ensure(
                part not in ("loss", "net") and all(type(v) in (int, float) for v in values),
                f"model.{path} = {', '.join(map(str, values))}: parallel runs may differ in numbers of the "
                "objective, its ascent and its optimizer; start them one by one",
            )
            names.append(path)
    return names


def _attributes(owner: Any) -> dict[str, Any]:
    """Returns an object's attributes; those of a module with its submodules and its parameters."""
    modules = dict(owner.named_children()) if isinstance(owner, nn.Module) else {}
    left_out = {MADE, *(TORCHS if isinstance(owner, nn.Module) else ())}
    return {**{name: v for name, v in vars(owner).items() if name not in left_out}, **modules}


def _alike(one: Any, other: Any, seen: dict[tuple[int, int], tuple[Any, Any]]) -> bool:
    """Returns whether two values have the same content, as far as they can be looked into.

    Args:
        one: A value.
        other: Another one.
        seen: Pairs that count as alike, by identity: each run has its own weights. Those compared so far are added, and
            so stay alive: another object could get the identity of one that is gone.
    """
    if one is other or (id(one), id(other)) in seen:
        return True
    seen[id(one), id(other)] = one, other
    if type(one) is not type(other):
        return False
    equal = partial(_alike, seen=seen)
    if isinstance(one, ReferenceType):  # of an LSTM to its weights
        return equal(one(), other())
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and equal([*one.values()], [*other.values()])
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, FunctionType | MethodType | CellType | partial):
        return all(equal(getattr(one, name, None), getattr(other, name, None)) for name in OF_FUNCTIONS)
    if hasattr(one, "__dict__") and not isinstance(one, type | ModuleType):
        return equal(_attributes(one), _attributes(other))
    return bool(np.all(one == other)) if np.shape(one) == np.shape(other) else False
