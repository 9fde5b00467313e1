"""Whole rounds recorded as one function of arrays and replayed, without an object a client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fl_lightning.core import ClientContext, State, Uploads, Watched, accumulator_dtype, ensure, k_lr_sums, to_device
from fl_lightning.data.minibatches import MinibatchTable
from fl_lightning.data.samples import SampleStore
from fl_lightning.engine.base import COLUMNS
from fl_lightning.engine.batched import BatchedEngine
from fl_lightning.engine.graphed import GraphedEngine, known_of
from fl_lightning.engine.named import below, carry_of, prefixed, tensors_of, tensors_of_carry
from fl_lightning.engine.record import Numbers, Stage, Tensors, Values, alike, composed, stage
from fl_lightning.engine.replay import Replay, plain_settings
from fl_lightning.engine.rounds import Drawn, Rounds, Table, Trained
from fl_lightning.engine.simplify import Known, called_directly, simplified


@dataclass(frozen=True)
class RoundRecord:
    """A round that was recorded as three stages: what comes before, in and after the local steps.

    Attributes:
        stages: "send", "step" and "receive".
        inputs: Names of the inputs.
        example: Inputs of the steps.
        bits: Bits that a client receives, and that it uploads.
        known: What is known of its minibatches.
        replays: What replays a round with so many local steps: the tensors of ``inputs`` to the last stage's outputs.
    """

    stages: Mapping[str, Stage]
    inputs: Sequence[str]
    example: Tensors
    bits: tuple[int, int]
    known: Known
    replays: dict[int, Replay] = field(default_factory=dict)

    def serves(self, t: int, known: Known) -> bool:
        """Returns whether the record serves for round ``t``, of whose minibatches this is known."""
        return self.known == known and all(each.numbers.hold(t) for each in self.stages.values())


class RecordedRounds(Rounds):
    """Rounds as one recorded function each; those that cannot be recorded train as in `Rounds`, to the same bits.

    A record needs hooks that draw no random numbers, look at no values of tensors, and set nothing of their objects. A
    round of fewer clients than the widest one is padded, with clients that have no weight.
    """

    MOST = 8
    """Maximum number of records of one program."""
    COMPARED = (1, 10, 100, 1000)
    """Programs whose record is compared with a new one, of their last round."""

    engine: GraphedEngine

    def __init__(self, engine: GraphedEngine, w0: Tensor, seed: int) -> None:
        super().__init__(engine, w0, seed)
        self._records: dict[Any, list[RoundRecord]] = {}
        self._programs, self._refused, self._bits = 0, False, (0, 0)

    def train(
        self, rounds: Sequence[Drawn], minibatches: MinibatchTable, server: State, table: Table
    ) -> Iterator[Trained]:
        contexts = [drawn.contexts[0] for drawn in rounds]
        arrays = self._arrays(rounds, minibatches, table, server.w) if self._fit() else []
        records = self._recorded(contexts, arrays, server, table) if arrays else []
        if not records:
            yield from super().train(rounds, minibatches, server, table)
            return
        numbers = to_device(
            [
                [each.numbers.at(ctx.t) for each in record.stages.values()]
                for ctx, record in zip(contexts, records, strict=True)
            ],
            server.w.device,
            accumulator_dtype(server.w.device),
        )
        for drawn, record, named, inputs in zip(rounds, records, arrays, numbers.unbind(), strict=True):
            started, outputs = time.perf_counter(), record.stages["receive"].outputs
            rows, met = table.take(named["places"])
            ticks = dict(zip(record.stages, inputs.unbind(), strict=True))
            values = {
                **named,
                **prefixed("server", server),
                **prefixed("row", rows),
                "met": met,
                **prefixed("t", ticks),
            }
            with torch.no_grad():
                replay = self._replay(record, named, drawn.contexts[0])
                after = dict(zip(outputs, replay(*[values[name] for name in record.inputs]), strict=True))
            server = State({name: after[f"server.{name}"] for name in server})
            n, (down, up) = len(drawn.clients), record.bits
            table.put(named["places"][:n], {name: v[:n] for name, v in below("row", after).items()})
            bits = drawn.receivers * down + n * up
            yield Trained(server, after["numbers"], bits, time.perf_counter() - started)

    def _fit(self) -> bool:
        """Returns whether the rounds can be recorded, as far as one knows before."""
        return not (self._refused or self.bits_depend_on_values) and self.w0.device.type == "cpu"

    def _arrays(
        self, rounds: Sequence[Drawn], minibatches: MinibatchTable, table: Table, w: Tensor
    ) -> list[dict[str, Tensor]]:
        """Returns what each of the rounds draws, as tensors by name."""
        n = [len(drawn.clients) for drawn in rounds]
        width, device = self.engine.widened(max(n)), w.device
        padded = [drawn.padded(width) for drawn in rounds]
        blocks = minibatches.blocks(n, width)
        columns = [[[getattr(ctx, name) for ctx in drawn.contexts] for name in COLUMNS] for drawn in padded]
        samples = [float(sum(ctx.n_k for ctx in drawn.contexts)) for drawn in rounds]
        places = torch.stack([table.places(drawn.clients) for drawn in padded])
        there = to_device([[[place < its] for place in range(width)] for its in n], device)
        return [
            {
                "places": where,
                "samples": samples_of,
                "k_lr": k_lr,
                **{f"ctx.{name}": column for name, column in zip(COLUMNS, its.unbind(), strict=True)},
                **block.tensors(),
                **self._class_counts(drawn, minibatches.source, w),
                **({} if clients == width else {"there": own}),
            }
            for where, samples_of, k_lr, its, block, drawn, clients, own in zip(
                places.unbind(),
                to_device(samples, device, accumulator_dtype(device)).unbind(),
                to_device([k_lr_sums(drawn.contexts) for drawn in rounds], device, w.dtype).unbind(),
                to_device(columns, device, w.dtype)[..., None].unbind(),
                blocks,
                padded,
                n,
                there.unbind(),
                strict=True,
            )
        ]

    def _class_counts(self, drawn: Drawn, source: SampleStore, like: Tensor) -> dict[str, Tensor]:
        """Returns the clients' numbers of samples of each class by name, if the objective uses them."""
        counts = self.context(drawn, source, like).class_counts if self.objective.uses_class_counts else None
        return {} if counts is None else {"ctx.class_counts": counts}

    def _recorded(
        self, contexts: Sequence[ClientContext], arrays: Sequence[Tensors], server: State, table: Table
    ) -> list[RoundRecord]:
        """Returns a record for each round; none if they cannot be recorded."""
        rows, met = table.take(arrays[0]["places"])
        state = {**prefixed("server", server), **prefixed("row", rows), "met": met}
        first = {n: v for n, v in {**arrays[0], **state}.items() if n != "there"}
        shapes = tuple((n, v.shape[n[:6] == "block." :], v.dtype) for n, v in first.items())
        objects = self.objective, self.objective.optimizer, self.objective.loss, *self.objective.all_parts
        known = self._records.setdefault((shapes, plain_settings(objects, []), contexts[0].rounds, contexts[0].m), [])
        found, before, self._programs = list[RoundRecord](), len(known), self._programs + 1
        try:
            for ctx, named in zip(contexts, arrays, strict=True):
                facts = {**known_of(named), **({"there": (0.0, 1.0)} if "there" in named else {})}
                record = next((each for each in known if each.serves(ctx.t, facts)), None)
                if record is None:
                    if len(known) == before + self.MOST:
                        return self._refuse()
                    known.append(record := self._record({**named, **state}, ctx, facts))
                found.append(record)
            last = {**arrays[-1], **state}
            changed = self._changed(found[-1], last, contexts[-1]) if self._programs in self.COMPARED else []
        except Exception:  # of hooks: if the mistake is theirs, they raise it when they are called as they are
            return self._refuse()
        if changed and self._programs == 1:
            return self._refuse()
        for one, now in changed:
            self.engine.check_alike(one, now)
        self.engine.record_of(
            {**found[-1].example, **prefixed("block", below("block", last))}, contexts[-1], check=True
        )
        return found

    def _changed(self, record: RoundRecord, named: Tensors, ctx: ClientContext) -> list[tuple[Stage, Stage]]:
        """Returns the stages around the steps that are not what they are now, and these."""
        pairs = ((record.stages[name], now) for name, now in self._around(named, ctx)[0].items())
        return [(one, now) for one, now in pairs if not alike(one.text, now.text)]

    def _refuse(self) -> list[RoundRecord]:
        """Trains all rounds to come as in `Rounds`."""
        self._refused = True
        return []

    def _record(self, named: Tensors, ctx: ClientContext, facts: Known) -> RoundRecord:
        stages, example = self._around(named, ctx)
        stages = {
            "send": stages["send"],
            "step": self.engine.record_of(example, ctx).stage,
            "receive": stages["receive"],
        }
        inputs = [*(name for name in named if name != "places"), *(f"t.{name}" for name in stages)]
        return RoundRecord(stages, inputs, example, self._bits, facts)

    def _around(self, named: Tensors, ctx: ClientContext) -> tuple[dict[str, Stage], Tensors]:
        """Records what comes before and after the local steps of a round; returns it, and inputs of the steps.

        Raises:
            UserError: If hooks set attributes of their objects, which a record would not do; they are as before.
        """
        columns, t = prefixed("ctx", below("ctx", named)), {"t": named["samples"].new_zeros(Numbers.MOST)}
        server, rows = (prefixed(name, below(name, named)) for name in ("server", "row"))
        objects = self.objective, self.objective.optimizer, *self.objective.all_parts
        watched, before = Watched(objects), [{**vars(owner)} for owner in objects]
        first = {**server, **rows, "met": named["met"], **columns, **t}
        send = stage(self._send, first, ctx)
        with torch.no_grad():
            sent = dict(zip(send.outputs, send.graph(*first.values()), strict=True))
        of_all = {name: named[name] for name in ("samples", "k_lr", "there") if name in named}
        last = {**server, **sent, **columns, **t, **of_all}
        receive = stage(self._receive, last, ctx)
        changed = {name for _, name in watched.changed()}
        for owner, attributes in zip(objects, before, strict=True):
            new = vars(owner).keys() - attributes.keys()
            changed |= {name for name in new if not isinstance(getattr(type(owner), name, None), cached_property)}
            for name in new:  # even a cache may hold what was recorded
                del vars(owner)[name]
            vars(owner).update(attributes)
        ensure(not changed, f"hooks set {', '.join(sorted(changed))}")
        blocks = prefixed("block", below("block", named))
        return {"send": send, "receive": receive}, {**sent, **columns, **t, **blocks}

    def _replay(self, record: RoundRecord, named: Tensors, ctx: ClientContext) -> Replay:
        """Returns what replays a record with as many local steps as there are minibatches."""
        steps, send, receive = len(named["block.y"]), record.stages["send"], record.stages["receive"]
        if steps in record.replays:
            return record.replays[steps]
        if not self.engine.compile and steps <= self.engine.UNROLLED:
            order = [("t.send", send), *[("t.step", record.stages["step"])] * steps, ("t.receive", receive)]
            whole = composed(order, record.inputs, receive.outputs)
            replay: Replay = called_directly(simplified(whole, known=record.known)).forward
        else:
            replay = self._chained(record, named, ctx)
        record.replays[steps] = replay
        return replay

    def _chained(self, record: RoundRecord, named: Tensors, ctx: ClientContext) -> Replay:
        """Returns the replays of the stages one after another; that of the steps is the one of single rounds."""
        blocks = {name: v for name, v in named.items() if name.startswith("block.")}
        step, unroll = (
            self.engine.record_of({**record.example, **blocks}, ctx),
            self.engine.unrolled(len(blocks["block.y"])),
        )
        carried = len(step.stage.outputs)

        def steps(*values: Tensor) -> Values:
            rows = tuple(torch.unflatten(v, 0, (-1, unroll)) for v in values[-len(blocks) :])
            return step.replay(values[:carried], values[carried : -len(blocks)], rows)

        around = [called_directly(simplified(record.stages[name].graph)).forward for name in ("send", "receive")]
        functions: list[Replay] = [around[0], steps, around[1]]

        def chained(*values: Tensor) -> Values:
            known = dict(zip(record.inputs, values, strict=True))
            for (name, each), replay in zip(record.stages.items(), functions, strict=True):
                known["t"] = known[f"t.{name}"]
                known.update(zip(each.outputs, replay(*[known[name] for name in each.inputs]), strict=True))
            return tuple(known[name] for name in record.stages["receive"].outputs)

        return chained

    def _send(self, named: Tensors, ctx: ClientContext) -> Tensors:
        """`send` with named tensors."""
        ctx = self.engine.without_draws(ctx)
        _, carry, fixed = self.send(State(below("server", named)), below("row", named), named["met"], ctx)
        given = {name: v for name, v in tensors_of(fixed).items() if not name.startswith("ctx.")}
        carry = replace(carry, w=carry.w.contiguous()) if self.engine.compile else carry  # as in single rounds
        return {**tensors_of_carry(carry), **given}

    def _receive(self, named: Tensors, ctx: ClientContext) -> Tensors:
        """`receive` with named tensors."""
        carry, fixed, server = carry_of(named), self.engine.fixed_of(named, ctx), State(below("server", named))
        counts, there, width = named["ctx.n_k"], named.get("there"), len(carry.w)
        n = width if there is None else there.sum(dtype=named["samples"].dtype)
        counts = counts if there is None else torch.where(there, counts, 0)

        def average(upload: Tensors) -> Uploads:
            rows = {name: upload[name] for name in self.objective.wire[1]}
            return Uploads.of_rows(self.objective.weighting, rows, counts, n, named["samples"], named["k_lr"])

        after, rows, numbers, (down, up) = self.receive(server, fixed.received, carry, fixed, width, average, there)
        self._bits = down, up // width
        return {**prefixed("server", after), **prefixed("row", rows), "numbers": numbers}


def rounds_of(engine: BatchedEngine, w0: Tensor, seed: int) -> Rounds:
    """Returns what trains rounds with an engine, given the initial model ``(d,)`` and the seed of the run."""
    if isinstance(engine, GraphedEngine):
        return RecordedRounds(engine, w0, seed)
    return Rounds(engine, w0, seed)
