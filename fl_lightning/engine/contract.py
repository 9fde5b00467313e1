"""One dry step before round 1: each hook returns what its signature promises, and changes nothing in place."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from inspect import getmembers, isfunction, signature
from itertools import product
from typing import Any, get_args, get_origin, get_type_hints
from warnings import catch_warnings, warn

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.hooks import Hooks
from fl_lightning.algorithms.parts import Direction, LocalOptimizer, Part, through
from fl_lightning.core import (
    ClientContext,
    Draws,
    FlatNet,
    Logs,
    RoundContext,
    State,
    Upload,
    Uploads,
    UserError,
    Watched,
    class_of,
    contents_kept,
    described,
    ensure,
    named_tensors,
)
from fl_lightning.engine.base import Engine
from fl_lightning.engine.sequential import SequentialEngine


@dataclass(frozen=True)
class Exchange:
    """What a dry step has shown of a phase: shapes and dtypes, in tensors without memory.

    Attributes:
        passes: Forward and backward passes of a local step.
        bits: The bits that a client receives and uploads.
        sent: What it receives.
        upload: What it uploads, as it travels.
        arrived: What the server takes it for.
        client: What it keeps.
    """

    passes: tuple[int, int]
    bits: tuple[int, int]
    sent: Upload
    upload: Upload
    arrived: Upload
    client: Upload


def dry_step(engine: Engine, server: State, w0: Tensor, classes: int, ctx: RoundContext) -> dict[int, Exchange]:
    """Calls all hooks of two rounds, in their order: one client takes one step in each, along a made gradient.

    The hooks are those of a copy of the objective, so that nothing is left of it.

    Args:
        engine: An engine of the objective.
        server: The server's state.
        w0: The initial model, ``(d,)``.
        classes: Number of classes, of each of which the client has one sample.
        ctx: The context of the first round.

    Returns:
        What the second round has shown, by phase; the phase in which clients train by themselves is the last one.

    Raises:
        UserError: If a hook returns something else than the base class says, or changes a tensor in place that it gets.
    """
    contract, attributes = _two_rounds(engine, server, w0, classes, ctx)
    if attributes and not w0.is_meta:  # what is the same for another model is a cache
        with catch_warnings(action="ignore"):
            _, others = _two_rounds(engine, server.replace(w=server.w / 2), w0 / 2, classes, ctx)
        for name in (name for name, value in attributes.items() if described(value) != described(others.get(name))):
            warn(
                f"{name} is set once, from what a hook gets in its first round: a resumed run sets it anew; "
                "declare it in client_state or server_state",
                stacklevel=2,
            )
    return contract


def _two_rounds(
    engine: Engine, server: State, w0: Tensor, classes: int, ctx: RoundContext
) -> tuple[dict[int, Exchange], dict[str, Any]]:
    """Does what `dry_step` says, and leaves no trace; returns also the attributes that only the first round has set."""
    original = engine.objective
    with contents_kept(original.configured):
        objective = held(original)
        begun, added = Watched(objective.configured), list[dict[str, Any]]()
        contract = dict[int, Exchange]()
        for exchanges in _rounds(objective, copy(engine), server, w0, classes, ctx):
            contract |= exchanges
            added.append({f"{class_of(owner).__name__}.{name}": getattr(owner, name) for owner, name in begun.added()})
    return contract, {name: value for name, value in added[0].items() if added[1].get(name) is value}


def _rounds(
    objective: LocalObjective, dry: Engine, server: State, w0: Tensor, classes: int, ctx: RoundContext
) -> Iterator[dict[int, Exchange]]:
    """Calls the hooks of two rounds; yields what each shows."""
    dry.objective, name, passes = objective, type(objective).__name__, 0
    owners = objective.configured
    contract = dict[int, Exchange]()
    client = State.initial(objective.client_inits(), w0, server.w)
    scratch = State.initial(objective.scratch_inits(), w0, server.w)
    counts = w0.new_ones(classes) if objective.uses_class_counts else None
    phases = [*range(objective.phases)]

    def total(function: Callable[[State], Tensor]) -> Tensor:
        return function(objective.seen_state(server.w, client, State({"w": server.w}))[0])

    def evaluate(v: Tensor, losses: object) -> tuple[Tensor, Tensor]:
        ensure(v.shape == w0.shape, f"{name}: grad(v) gets v as {_form(v)}; give it w's shape, {tuple(w0.shape)}")
        nonlocal passes
        passes += 1
        return torch.arange(len(v), device=v.device).cos().to(v) / len(v) ** 0.5, v.new_ones(())

    for t, phase in product((0, min(1, ctx.rounds - 1)), [len(phases)] * objective.trains_alone + phases):
        passes, round_ctx = 0, replace(ctx, t=t, phase=phase % len(phases))
        lr, draws = objective.lr(round_ctx), Draws([(0, t, phase, 0)], w0.device, together=False)
        client_fields = {"phase": phase, "lr": lr, "K": 1, "k_lr": lr, "class_counts": counts, "draws": draws}
        client_ctx = ClientContext(**{**vars(round_ctx), **client_fields})
        if not phase:
            before = server
            server = objective.round_start(server, total, round_ctx)
        watched = Watched(owners)
        sent = objective.begin_phase(server, round_ctx)
        carry, fixed = dry.begin(client | scratch, sent, client_ctx, w0)
        carry = dry.step(carry, fixed, evaluate)
        upload, client, logs = dry.finish(carry, fixed)
        _check_logs(logs)
        watched.warn_of_clients()
        again = [partial(objective.begin_phase, state, round_ctx) for state in (server.replace(w=server.w / 2), server)]
        _warn_unless_repeated(f"{name}.broadcast", watched, sent, *again)
        arrived = through((part.arrived for part in objective.parts if part.packs), upload, sent, client_ctx)
        bits = objective.bits(sent, up=False), objective.bits(arrived, up=True)
        shapes = [{key: v.to("meta") for key, v in values.items()} for values in (sent, upload, arrived, client)]
        contract[phase] = Exchange((len(fixed.teachers) + passes, passes), bits, *shapes)
        del carry, fixed
        if phase == len(phases):
            continue
        watched, logs = Watched(owners), Logs(objective.all_logs)
        round_ctx = replace(round_ctx, logs=logs)
        uploads = (_averages(objective, client_ctx, arrived, factor, w0) for factor in (1, 0.5, 1))
        step, *again = (partial(objective.finish_phase, server, sent, averages, round_ctx) for averages in uploads)
        server = stepped = step()
        _check_logs(logs)
        if phase == phases[-1]:
            server = objective.survey(server, total, round_ctx) if objective.surveys else server
            server = objective.finish_round(server, before, round_ctx)
        watched.warn_of_server(numbers=False)
        _warn_unless_repeated(f"{name}.server_step", watched, stepped, *again)
        client = objective.finish_client(client, server)
        if phase == phases[-1]:
            objective.client_model(server.w, client)
            yield contract


def _averages(objective: LocalObjective, ctx: ClientContext, arrived: Upload, factor: float, like: Tensor) -> Uploads:
    """Returns the averages of one client's upload with its model times a factor."""
    averages = Uploads(objective.wire[1], objective.weighting, [ctx], like)
    averages.add({name: value * factor if name == "w" else value for name, value in arrived.items()}, 1)
    return averages


def _check_logs(logs: Logs) -> None:
    for name, value in logs.values.items():
        ensure(value.numel() == 1, f"ctx.log: '{name}' is {_form(value)}; log one number, as norm(v)")


def _warn_unless_repeated(name: str, watched: Watched, value: State, *again: Callable[[], State]) -> None:
    """Warns if a hook of the server gives another result when it is repeated, and no attribute has changed.

    On a CPU alone: on a GPU the order of sums may differ.

    Args:
        name: Its name.
        watched: The attributes before the first call.
        value: What it has returned.
        *again: Calls it with other arguments, and at last with the same.
    """
    if value.w.device.type != "cpu" or any(watched.changed()) or any(watched.added()):
        return
    repeated = [call() for call in again][-1]
    if any(not torch.equal(v, repeated[key]) and not bool(v.isnan().any()) for key, v in value.items()):
        warn(
            f"{name} gives another result when it is repeated: it draws random numbers elsewhere than from a generator "
            "seeded with ctx.t, or keeps something in a global variable; so does a resumed run",
            stacklevel=3,
        )


def contract_of(objective: LocalObjective, classes: int = 3) -> dict[int, Exchange]:
    """Returns what a dry step shows of an objective outside a run: without memory, unless a hook reads values."""
    try:
        return _contract(objective, deepcopy(objective.net).to("meta"), classes)
    except RuntimeError:  # of a tensor without values
        return _contract(objective, objective.net, classes)


def _contract(objective: LocalObjective, net: nn.Module, classes: int) -> dict[int, Exchange]:
    engine = SequentialEngine(objective, FlatNet(net), nullcontext)
    server = State({"w": engine.net.w, **State.initial(objective.server_inits(), engine.net.w, engine.net.w)})
    return dry_step(engine, server, engine.net.w, classes, RoundContext(t=0, rounds=1, m=1, flat=objective.flat))


def held(objective: LocalObjective) -> LocalObjective:
    """Returns a copy of an objective whose hooks, those of its parts included, are held against their signatures."""
    checked: LocalObjective = _held_copy(objective, objective.flat.d)
    for name, part in vars(objective).items():
        if isinstance(part, Part | LocalOptimizer):
            object.__setattr__(checked, name, _held_copy(part, objective.flat.d))
    checked.parts = [_held_copy(part, objective.flat.d) for part in objective.parts]
    return checked


def _held_copy(owner: Any, d: int) -> Any:
    checked = copy(owner)
    for interface in (Hooks, Part, LocalOptimizer):
        for name, declared in getmembers(interface, isfunction) if isinstance(owner, interface) else ():
            if name[0] != "_":
                object.__setattr__(checked, name, _held(getattr(checked, name), declared, d))
    return checked


def _held(hook: Any, declared: Any, d: int) -> Any:
    """Returns a hook that is held, whenever it is called, against its declaration in the base class."""
    owner, (kind, parameters) = hook.__self__, _promised(declared)
    name, hint = f"{type(owner).__name__}.{hook.__name__}", "as the docstring of this hook in the base class says"
    promises_two = get_origin(kind) is tuple and ... not in get_args(kind)
    may_be_none = kind is type(None) or type(None) in get_args(kind)

    @wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [named_tensors(value, name) for name, value in zip(parameters, args, strict=False)]
        tensors = [(path, v) for values in given for path, v in values.items() if isinstance(v, Tensor)]
        versions = [v._version for _, v in tensors]
        value = hook(*args, **kwargs)
        changed = [argument for (argument, v), version in zip(tensors, versions, strict=True) if v._version != version]
        remedy = "in place; compute a new tensor, as v - x in place of v -= x"
        ensure(not changed, f"{name} changes {', '.join(changed)} {remedy}")
        returned = "None" if value is None else f"a {type(value).__name__}"
        is_pair = isinstance(value, tuple | list) and len(value) == 2
        ensure(is_pair or not promises_two, f"{name} returns {returned}; return two values, {hint}")
        ensure(may_be_none or value is not None, f"{name} returns None; return a value, {hint}")
        states = (v for v in args if isinstance(v, State))
        for part, expected in zip(value, get_args(kind), strict=True) if promises_two else ((value, kind),):
            if expected is State:
                _check_state(name, part, next(states))
            elif expected == Upload:
                _check_upload(name, part, {*owner.up}.union(*(v for v in args if isinstance(v, dict))))
            elif expected in (Tensor, Direction):
                for v in part if isinstance(part, tuple) else (part,):
                    right = isinstance(v, Tensor) and v.shape == (d,)
                    ensure(right, f"{name} returns {_form(v)}; return a vector of w's shape, ({d},)")
            elif expected == tuple[Tensor, ...]:
                right = isinstance(part, tuple | list) and all(isinstance(v, Tensor) for v in part)
                returned = f"{part!r:.40}" if isinstance(part, tuple | list) else _form(part)
                ensure(right, f"{name} returns {returned}; return a tuple of tensors, as (v,)")
            elif hook.__name__ == "bits":
                for wire, n in part.items():
                    right = isinstance(n, int) and n >= 0
                    ensure(right, f"model.parts: bits of {wire} = {n!r:.40}: give an int of at least 0")
        return value

    return call


@cache
def _promised(declared: Any) -> tuple[Any, list[str]]:
    """Returns the type of what a hook returns, and the names of its arguments."""
    return get_type_hints(declared)["return"], [*signature(declared).parameters][1:]


def _check_state(name: str, state: Any, before: State) -> None:
    ensure(isinstance(state, State), f"{name} returns {_form(state)}; return a State, as of replace(...)")
    for key, previous in before.items():
        value = state.get(key)
        right = isinstance(value, Tensor) and (value.shape, value.dtype) == (previous.shape, previous.dtype)
        ensure(right, f"{name} returns '{key}' as {_form(value)}; return {_form(previous)}, as it was")
    if undeclared := ", ".join(f"'{key}'" for key in state if key not in before):
        raise UserError(f"{name} returns {undeclared}, which nobody declares; declare it as state, or leave it out")


def _check_upload(name: str, upload: Any, declared: set[str]) -> None:
    shown = sorted(upload) if isinstance(upload, Mapping) else f"{_form(upload)}, no mapping of names"
    right = isinstance(upload, Mapping) and {*upload} == declared
    ensure(right, f"{name} uploads {shown}, but declares up = {sorted(declared)}")
    wrong = [f"{key} = {_form(v)}" for key, v in upload.items() if not isinstance(v, Tensor)]
    ensure(not wrong, f"{name} uploads {', '.join(wrong)}; upload tensors")


def _form(value: Any) -> str:
    """Returns the shape and dtype of a tensor, in words."""
    if not isinstance(value, Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
