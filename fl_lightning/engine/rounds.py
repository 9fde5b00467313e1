"""Whole rounds, recorded: from the server's state to its next one without the Python code of hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TypeVar

import torch
from torch import Tensor

from fl_lightning.core import ClientContext, Draws, Init, RoundContext, State, Uploads, accumulator_dtype, to_device
from fl_lightning.data.minibatches import Block, Minibatches
from fl_lightning.engine.base import COLUMNS, Fixed
from fl_lightning.engine.batched import by_client, is_out_of_memory
from fl_lightning.engine.graphed import REFUSED, GraphedEngine, below, carry_of, named_tensors, prefixed
from fl_lightning.engine.record import CudaGraph, RecordedRound, Tensors, Values, loop, plain_settings, trace
from fl_lightning.engine.simplify import simplified

T = TypeVar("T")
FEWEST = 4
"""Rounds of one shape that are recorded together at least; two of them show whether the record is right."""


@dataclass(frozen=True)
class Training:
    """The local training of a round, but for what the server sends.

    Attributes:
        clients: Ids of the clients.
        contexts: Their contexts.
        minibatches: Their data.
        block: The same data, stacked and padded.
    """

    clients: Sequence[int]
    contexts: Sequence[ClientContext]
    minibatches: Sequence[Minibatches]
    block: Block


@dataclass(frozen=True)
class Trained:
    """What consecutive rounds end with.

    Attributes:
        server: The server's state.
        rows: States of the clients, by id.
        logs: For each round whether all is finite, and the clients' losses, ``(1 + clients,)``.
        bits: Bits of each round on the wire.
    """

    server: State
    rows: Mapping[int, State]
    logs: Sequence[Tensor] = ()
    bits: Sequence[int] = ()

    def then(self, later: Trained) -> Trained:
        """Returns what these rounds and later ones end with."""
        return replace(later, logs=[*self.logs, *later.logs], bits=[*self.bits, *later.bits])

    def equals(self, other: Trained) -> bool:
        """Returns whether the other rounds end with the same bits."""
        own, its = (
            [*x.server.values(), *(v for k in self.rows for v in x.rows[k].values()), *x.logs] for x in (self, other)
        )
        same = [((a == b) | (a.isnan() & b.isnan())).all() for a, b in zip(own, its, strict=True)]
        return self.bits == other.bits and bool(torch.stack(same).all())


def log_of(finite: Tensor, server: State, loss: Tensor) -> Tensor:
    """Returns one of `Trained.logs`."""
    return torch.cat([(finite.all() & server.finite())[None], loss]).to(accumulator_dtype(loss.device))


class _Record:
    """A function of named tensors to named tensors, recorded."""

    def __init__(
        self, function: Callable[[Tensors, ClientContext], Tensors], named: Tensors, ctx: ClientContext
    ) -> None:
        def values(named: Tensors, ctx: ClientContext) -> list[Tensor]:
            results = function(named, ctx)
            self.results = [*results]
            return [*results.values()]

        self.inputs, (self.held, graph) = [*named], trace(values, named, ctx)
        self.replay = simplified(graph).forward

    def __call__(self, named: Tensors) -> Tensors:
        return dict(zip(self.results, self.replay(*[named[n] for n in self.inputs]), strict=True))


class RecordedRounds:
    """Rounds of one shape as a function of tensors: three records, before, in and after the local steps.

    Args:
        engine: The engine.
        inits: Initial values of what a client keeps.
        clients: Number of clients.

    Attributes:
        right: Whether rounds have shown that the bits are those of the hooks; None: they have not been compared.
    """

    def __init__(self, engine: GraphedEngine, inits: Mapping[str, Init], clients: int) -> None:
        self.engine, self.inits, self.clients = engine, inits, clients
        self.right: bool | None = None
        self._graph, self._bits = CudaGraph(self._round), 0

    def record(self, named: Tensors, steps: Tensors, ctx: ClientContext) -> RecordedRound:
        """Records a round; returns in which rounds this holds.

        Args:
            named: Its tensors, by name.
            steps: Its minibatches, as for `loop`.
            ctx: The context of one of its clients.
        """
        engine, objective = self.engine, self.engine.objective
        shared = {id(v): v for v in (*objective.parameters(), *objective.buffers())}
        engine.objective = deepcopy(objective, shared)  # what a hook keeps on itself is left alone
        engine.train_mode()
        try:
            self._before = _Record(self._begin, _without(named, "t", "k_lr"), ctx)
            values = self._before(named)
            carried = {n: v for n, v in values.items() if n.partition(".")[0] in ("w", "loss", "state")}
            context = {n: v for n, v in named.items() if n.startswith("ctx.")}
            received = {n: v for n, v in values.items() if n.startswith("received.")}
            inputs = {**received, **context, **_without(values, "w", "loss", "state", "received"), "t": named["t"]}
            first = {n: v[0] for n, v in steps.items()}
            during, (self._step, _) = engine.find({**carried, **inputs, **first}, ctx)
            self._carried, self._inputs = [*carried], [*inputs]
            values |= self._steps({**named, **values}, steps)
            self._after = _Record(
                self._end,
                {**_without(named, "t", "fresh", "w0", "row"), **_without(values, "teacher", "constant")},
                ctx,
            )
            if plain_settings(engine.objective) != plain_settings(objective):
                raise TypeError("a hook keeps something on self")
        finally:
            engine.objective = objective
        self._before.held.guards += [*during.guards, *self._after.held.guards]
        return self._before.held

    def train(self, before: Trained, rounds: Sequence[Training], w0: Tensor) -> Trained:
        """Trains some rounds.

        Args:
            before: The state before them.
            rounds: The rounds, of the shape of the record.
            w0: The initial model.
        """
        ids, carried, fixed, now = self.tensors(before, rounds, w0)
        self._names = [*carried, *fixed, *now]
        self._changed, self._blocks = [*carried], [n for n in now if n.startswith("block.")]
        with torch.no_grad():
            if w0.is_cuda:
                now = {n: v if isinstance(v, Tensor) else torch.stack([*v]) for n, v in now.items()}
            run = self._graph if w0.is_cuda else partial(loop, self._round)
            values = run(*(tuple(each.values()) for each in (carried, fixed, now)))
        after = dict(zip(carried, values, strict=True))
        columns = {name: v.unbind() for name, v in below("store", after).items()}
        rows = {k: State({name: column[i] for name, column in columns.items()}) for i, k in enumerate(ids)}
        bits = [self.clients * self._bits] * len(rounds)
        return Trained(State(below("server", after)), {**before.rows, **rows}, after["logs"].unbind(), bits)

    def tensors(
        self, before: Trained, rounds: Sequence[Training], w0: Tensor
    ) -> tuple[list[int], Tensors, Tensors, dict[str, Sequence[Tensor] | Tensor]]:
        """Returns whose rows are stored, and by name the tensors that rounds change, the others, and those of each."""
        n, width, device = self.clients, len(rounds[0].block.y[0]), w0.device
        ids, seen = [*dict.fromkeys(k for each in rounds for k in each.clients)], {*before.rows}
        empty = State.initial(self.inits, w0, w0)
        stored = [before.rows.get(k, empty) for k in ids]
        if w0.is_cuda:  # of one shape in most programs: less is captured
            stored += [empty] * (min(rounds[0].contexts[0].m, n * len(rounds)) - len(ids))
        store = {name: torch.stack([row[name] for row in stored]) for name in empty}
        logs = torch.zeros(len(rounds), 1 + n, dtype=accumulator_dtype(device), device=device)
        place, fresh = {k: i for i, k in enumerate(ids)}, list[list[list[bool]]]()
        padded = [[*range(n), *[0] * (width - n)]] * len(rounds)
        for each in rounds:
            fresh.append([[each.clients[i] not in seen] for i in padded[0]])
            seen |= {*each.clients}
        table = [[[[getattr(each.contexts[i], name)] for i in padded[0]] for name in COLUMNS] for each in rounds]
        columns = zip(COLUMNS, to_device(table, device, w0.dtype).unbind(1), strict=True)
        now: dict[str, Sequence[Tensor] | Tensor] = {f"ctx.{name}": column for name, column in columns}
        if self.engine.objective.uses_class_counts:
            source = rounds[0].minibatches[0].source
            counts = {k: source.class_counts(k).to(w0) for k in ids}
            now["ctx.class_counts"] = [torch.stack([counts[each.clients[i]] for i in padded[0]]) for each in rounds]
        times = [float(each.contexts[0].t) for each in rounds]
        now["t"] = to_device(times, device, accumulator_dtype(device))
        now["k_lr"] = to_device([Uploads.k_lr(each.contexts) for each in rounds], device, w0.dtype)
        now["fresh"] = to_device(fresh, device)
        now["at"] = to_device([[place[each.clients[i]] for i in padded[0]] for each in rounds], device)
        now["index"] = torch.arange(len(rounds), device=device)[:, None]
        blocks = [self.engine.unrolled(each.block)[0] for each in rounds]
        now |= {name: [each[name] for each in blocks] for name in blocks[0]}
        return ids, {**prefixed("server", before.server), **prefixed("store", store), "logs": logs}, {"w0": w0}, now

    def _round(self, *values: Tensor) -> Values:
        """Takes one round, as a step of `loop`."""
        named = dict(zip(self._names, values, strict=True))
        store, at = below("store", named), named["at"]
        named |= {f"row.{name}": v.index_select(0, at) for name, v in store.items()}
        named |= self._before(named)
        named |= self._steps(named, {name: named[name] for name in self._blocks})
        new = self._after(named)
        for name, v in store.items():
            v.index_copy_(0, at[: self.clients], new[f"row.{name}"])
        named["logs"].index_copy_(0, named["index"], new["log"])
        return tuple(new[name] if name in new else named[name] for name in self._changed)

    def _steps(self, named: Tensors, steps: Tensors) -> Tensors:
        carried, inputs = (tuple(named[name] for name in names) for names in (self._carried, self._inputs))
        return dict(zip(self._carried, loop(self._step, carried, inputs, tuple(steps.values())), strict=True))

    def _begin(self, named: Tensors, ctx: ClientContext) -> Tensors:
        """Takes all hooks before the first local step."""
        engine, objective, fresh, w0 = self.engine, self.engine.objective, named["fresh"], named["w0"]
        sent = objective.begin_phase(State(below("server", named)), _of_server(ctx))
        self._bits = objective.bits(sent, up=False)
        first, scratch = (State.initial(inits, w0, sent.w) for inits in (self.inits, objective.scratch_inits()))
        rows = {
            n: torch.where(fresh.view(-1, *first[n].ndim * [1]), first[n], v) for n, v in below("row", named).items()
        }
        state = State({**rows, **{name: torch.stack([v] * len(fresh)) for name, v in scratch.items()}})
        carried, inputs = named_tensors(*engine.begin(state, sent, _of_client(ctx), sent.w.expand(len(fresh), -1)))
        return {**carried, **{name: v for name, v in inputs.items() if not name.startswith("ctx.")}}

    def _end(self, named: Tensors, ctx: ClientContext) -> Tensors:
        """Takes all hooks after the last local step, and the mean between them."""
        engine, objective, n = self.engine, self.engine.objective, self.clients
        server, sent, carry, its = (
            State(below("server", named)),
            State(below("received", named)),
            carry_of(named),
            _of_client(ctx),
        )
        start = named.get("start", sent.w)
        fixed = Fixed(sent, start, (), (), its, objective.optimizer.begin(objective.flat, start))
        upload, state = engine.ended(carry, fixed)
        steps, samples = named["ctx.K"][:n, 0].clamp(min=1), named["ctx.n_k"][:n, 0]
        finite, loss = engine.summary(steps.to(carry.loss), carry, upload, state)
        arrived = by_client(upload, n)
        uploads = Uploads.recorded(objective.wire[1], objective.weighting, samples, named["k_lr"])
        for each, number in zip(arrived, samples.unbind(), strict=True):
            uploads.add(each, number)
        after = objective.finish_phase(server, sent, uploads, _of_server(ctx))
        new = objective.finish_round(after, server, _of_server(ctx))
        self._bits += objective.bits(arrived[0], up=True)
        if {name: v.shape for name, v in new.items()} != {name: v.shape for name, v in server.items()}:
            raise TypeError("the server's state changes its shape")
        rows = {name: v[:n] for name, v in state.items()}
        return {**prefixed("server", new), **prefixed("row", rows), "log": log_of(finite, after, loss)[None]}


def train(
    engine: GraphedEngine,
    before: Trained,
    rounds: Sequence[Training],
    inits: Mapping[str, Init],
    w0: Tensor,
    by_hooks: Callable[[Trained, Sequence[Training]], Trained],
) -> Trained:
    """Trains rounds, recorded where that gives the bits of the hooks.

    Args:
        engine: The engine.
        before: The state before them.
        rounds: The rounds.
        inits: Initial values of what a client keeps.
        w0: The initial model, ``(d,)``.
        by_hooks: Trains rounds with the hooks: those that cannot be recorded, and the first two of each record.
    """
    done = before
    while len(done.logs) < len(rounds):
        part, record = _recorded(engine, done, rounds[len(done.logs) :], inits, w0)
        if record is None or record.right is False:
            done = done.then(by_hooks(done, part))
        elif record.right:
            done = done.then(record.train(done, part, w0))
        else:
            shown = by_hooks(done, part[:2])
            again = _attempt(partial(record.train, done, part[:2], w0))
            record.right = again is not None and shown.equals(again)
            done = done.then(shown)
    return done


def _recorded(
    engine: GraphedEngine, before: Trained, rounds: Sequence[Training], inits: Mapping[str, Init], w0: Tensor
) -> tuple[Sequence[Training], RecordedRounds | None]:
    """Returns the first rounds that are alike, and their record if there is one."""
    unrolled = engine.compile or w0.is_cuda

    def shape(each: Training) -> tuple[int, int]:
        return len(each.clients), len(each.block.y) * unrolled

    part, first = [*takewhile(lambda each: shape(each) == shape(rounds[0]), rounds)], rounds[0]
    if len(part) < FEWEST:
        return part, None
    objective, made = engine.objective, RecordedRounds(engine, inits, len(first.clients))
    _, carried, fixed, now = made.tensors(before, [first], w0)
    rows = {f"row.{name}": v[now["at"][0]] for name, v in below("store", carried).items()}
    named = {
        **_without(carried, "store", "logs"),
        **rows,
        **fixed,
        **{n: v[0] for n, v in now.items() if n not in ("at", "index")},
    }
    steps = {n: named.pop(n) for n in [*named] if n.startswith("block.")}
    settings = plain_settings(objective, objective.optimizer, objective.loss, *objective.all_parts)

    def make(named: Tensors, ctx: ClientContext) -> tuple[RecordedRound, RecordedRounds | None]:
        held = _attempt(lambda: made.record(_without(named, "block"), steps, ctx))
        return (held, made) if held is not None else (RecordedRound(ctx.t, None), None)

    sizes = {n: v[0] for n, v in steps.items()}
    held, record = engine.records.find({**named, **sizes}, first.contexts[0], (*settings, len(first.clients)), make)
    return [*takewhile(lambda each: held.hold(each.contexts[0].t), part)], record


def _attempt(function: Callable[[], T]) -> T | None:
    """Returns what a function of hooks returns, or None if it fails: then the hooks themselves show why."""
    try:
        return function()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None


def _without(named: Tensors, *prefixes: str) -> Tensors:
    return {name: v for name, v in named.items() if name.partition(".")[0] not in prefixes}


def _of_server(ctx: ClientContext) -> RoundContext:
    return RoundContext(ctx.t, ctx.rounds, ctx.m, ctx.flat, ctx.phase)


def _of_client(ctx: ClientContext) -> ClientContext:
    assert isinstance(ctx.lr, Tensor)
    return replace(ctx, draws=Draws([], ctx.lr.device, True, REFUSED))
