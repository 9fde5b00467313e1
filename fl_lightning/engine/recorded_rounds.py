"""Whole rounds recorded as one function of arrays and replayed, without an object a client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.core import (
    ClientContext,
    State,
    Uploads,
    Watched,
    accumulator_dtype,
    below,
    contents_kept,
    ensure,
    k_lr_sums,
    prefixed,
    to_device,
)
from fl_lightning.data.minibatches import MinibatchTable
from fl_lightning.engine.base import COLUMNS, Carry
from fl_lightning.engine.batched import BatchedEngine
from fl_lightning.engine.graphed import GraphedEngine, known_of
from fl_lightning.engine.record import Numbers, Stage, Tensors, Values, alike, composed, stage
from fl_lightning.engine.replay import Replay, plain_settings
from fl_lightning.engine.rounds import Drawn, Rounds, Table, Trained
from fl_lightning.engine.simplify import Known, called_directly, simplified


class Piece(NamedTuple):
    """A part of a round that is replayed at once.

    Attributes:
        inputs: Names of its inputs.
        outputs: Names of its outputs.
        replay: Replays it.
    """

    inputs: Sequence[str]
    outputs: Sequence[str]
    replay: Replay

    def update(self, values: dict[str, Tensor]) -> None:
        """Replays it with named tensors, and adds what it returns."""
        values.update(zip(self.outputs, self.replay(*[values[name] for name in self.inputs]), strict=True))


@dataclass(frozen=True)
class RoundRecord:
    """A round that was recorded in stages: before and in the local steps, at their end, and at the server.

    Attributes:
        stages: "send", "step", "finish" and "receive".
        example: Inputs of the steps.
        bits: Bits that a client receives, and that it uploads.
        known: What is known of its minibatches.
        pieces: What replays a round with so many local steps; the last piece has the outputs of "receive".
    """

    stages: Mapping[str, Stage]
    example: Tensors
    bits: tuple[int, int]
    known: Known
    pieces: dict[int, Sequence[Piece]] = field(default_factory=dict)

    def serves(self, t: int, known: Known) -> bool:
        """Returns whether the record serves for round ``t``, of whose minibatches this is known."""
        return self.known == known and all(stage.numbers.hold(t) for stage in self.stages.values())


class RecordedRounds(Rounds):
    """Rounds as one recorded function each; those that cannot be recorded train as in `Rounds`, to the same bits.

    A record needs hooks that draw no random numbers, look at no values of tensors, and set nothing of their objects. A
    round of fewer clients than the widest one is padded, with clients that have no weight.
    """

    MOST = 8
    """Maximum number of records of one program."""
    KEPT = 32
    """Maximum number of settings whose records are kept; the oldest are dropped first."""
    COMPARED = (1, 10, 100, 1000)
    """Programs whose record is compared with a new one, of their last round."""

    engine: GraphedEngine

    def __init__(self, engine: GraphedEngine, w0: Tensor, seed: int, fabric: Fabric) -> None:
        super().__init__(engine, w0, seed, fabric)
        self._records: dict[Any, list[RoundRecord]] = {}
        self._programs, self._refused, self._bits = 0, False, (0, 0)
        self._most = 0  # clients of a round, those of other processes included

    def train(
        self, rounds: Sequence[Drawn], minibatches: MinibatchTable, server: State, table: Table
    ) -> Iterator[Trained]:
        contexts = [drawn.share(self.fabric.global_rank).contexts[0] for drawn in rounds]
        # as far as one knows before
        fit = self.w0.device.type == "cpu" and not (self._refused or self.bits_depend_on_values)
        arrays = self._arrays(rounds, minibatches, table) if fit else []
        records = self._recorded(contexts, arrays, server, table) if arrays else []
        if not records:
            yield from super().train(rounds, minibatches, server, table)
            return
        numbers = to_device(
            [
                [stage.numbers.at(ctx.t) for stage in record.stages.values()]
                for ctx, record in zip(contexts, records, strict=True)
            ],
            server.w.device,
            accumulator_dtype(server.w.device),
        )
        n = [len(drawn.clients) for drawn in rounds]
        places = torch.split(table.places([k for drawn in rounds for k in drawn.clients]), n)
        per_round = zip(rounds, records, arrays, contexts, numbers.unbind(), places, strict=True)
        for drawn, record, tensors, ctx, inputs, positions in per_round:
            started, values = time.perf_counter(), {**tensors, **prefixed("server", server)}
            rows, values["met"] = table.take(tensors["places"])
            values |= {**prefixed("row", rows), **prefixed("t", dict(zip(record.stages, inputs.unbind(), strict=True)))}
            self._replay(drawn, record, values, ctx)
            server = State({name: values[f"server.{name}"] for name in server})
            table.put(positions, {name: v[: len(positions)] for name, v in below("row", values).items()})
            bits = drawn.receivers * record.bits[0] + len(positions) * record.bits[1]
            yield Trained(server, values["numbers"], bits, time.perf_counter() - started)

    def _arrays(self, rounds: Sequence[Drawn], minibatches: MinibatchTable, table: Table) -> list[dict[str, Tensor]]:
        """Returns what each of the rounds draws, as tensors by name."""
        shares = [drawn.share(self.fabric.global_rank) for drawn in rounds]
        n = [len(share.clients) for share in shares]
        width, device, by_class = self.engine.widened(max(n)), self.w0.device, self.objective.uses_class_counts
        self._most = max(self._most, *(len(drawn.clients) for drawn in rounds))
        cohort_width = width if self.fabric.world_size == 1 else self._most
        padded = [share.padded(width) for share in shares]
        columns = [[[getattr(ctx, name) for ctx in share.contexts] for name in COLUMNS] for share in padded]
        samples = [float(sum(ctx.n_k for ctx in drawn.contexts)) for drawn in rounds]
        counts = [[ctx.n_k for ctx in drawn.padded(cohort_width).contexts] for drawn in rounds]
        masks = [[place < len(drawn.clients) for place in range(cohort_width)] for drawn in rounds]
        places = table.places([k for share in padded for k in share.clients]).view(len(padded), width)
        return [
            {
                "places": positions,
                "samples": total,
                "n_k": sizes,
                "k_lr": k_lr,
                **{f"ctx.{name}": column for name, column in zip(COLUMNS, attributes.unbind(), strict=True)},
                **block,
                **({"ctx.class_counts": self.class_counts(share, minibatches.source)} if by_class else {}),
                **({} if len(drawn.clients) == cohort_width else {"there": mask}),
            }
            for drawn, share, positions, total, sizes, k_lr, attributes, block, mask in zip(
                rounds,
                padded,
                places.unbind(),
                to_device(samples, device, accumulator_dtype(device)).unbind(),
                to_device(counts, device, self.w0.dtype)[..., None].unbind(),
                to_device([k_lr_sums(drawn.contexts) for drawn in rounds], device, self.w0.dtype).unbind(),
                to_device(columns, device, self.w0.dtype)[..., None].unbind(),
                minibatches.blocks(n, width),
                to_device(masks, device)[..., None].unbind(),
                strict=True,
            )
        ]

    def _recorded(
        self, contexts: Sequence[ClientContext], arrays: Sequence[Tensors], server: State, table: Table
    ) -> list[RoundRecord]:
        """Returns a record for each round; none if they cannot be recorded."""
        rows, met = table.take(arrays[0]["places"])
        state = {**prefixed("server", server), **prefixed("row", rows), "met": met}
        first = {n: v for n, v in {**arrays[0], **state}.items() if n != "there"}
        shapes = tuple((n, v.shape[n[:6] == "block." :], v.dtype) for n, v in first.items())
        objects = self.objective.configured
        cached = self._records.setdefault((shapes, plain_settings(objects, []), contexts[0].rounds, contexts[0].m), [])
        if len(self._records) > self.KEPT:
            del self._records[next(iter(self._records))]
        records, cached_before, self._programs = list[RoundRecord](), len(cached), self._programs + 1
        try:
            for ctx, tensors in zip(contexts, arrays, strict=True):
                facts = {**known_of(tensors), **({"there": (0.0, 1.0)} if "there" in tensors else {})}
                record = next((candidate for candidate in cached if candidate.serves(ctx.t, facts)), None)
                if record is None:
                    if len(cached) == cached_before + self.MOST:
                        return self._refuse()
                    cached.append(record := self._record({**tensors, **state}, ctx, facts))
                records.append(record)
            last = {**arrays[-1], **state}
            changed = self._changed(records[-1], last, contexts[-1]) if self._programs in self.COMPARED else []
        except Exception:  # of hooks: if the mistake is theirs, they raise it when they are called as they are
            return self._refuse()
        if changed and self._programs == 1:
            return self._refuse()
        for old, new in changed:
            self.engine.check_alike(old, new)
        self.engine.record_of(
            {**records[-1].example, **prefixed("block", below("block", last))}, contexts[-1], check=True
        )
        return records

    def _changed(self, record: RoundRecord, tensors: Tensors, ctx: ClientContext) -> list[tuple[Stage, Stage]]:
        """Returns the stages around the steps that have changed, each with the new one."""
        pairs = ((record.stages[name], new) for name, new in self._around(tensors, ctx)[0].items())
        return [(old, new) for old, new in pairs if not alike(old, new)]

    def _refuse(self) -> list[RoundRecord]:
        """Trains all rounds to come as in `Rounds`."""
        self._refused = True
        return []

    def _record(self, tensors: Tensors, ctx: ClientContext, facts: Known) -> RoundRecord:
        stages, example = self._around(tensors, ctx)
        first = {"send": stages["send"], "step": self.engine.record_of(example, ctx).stage}
        return RoundRecord({**first, **stages}, example, self._bits, facts)

    def _around(self, tensors: Tensors, ctx: ClientContext) -> tuple[dict[str, Stage], Tensors]:
        """Records what comes before and after the local steps of a round; returns it, and inputs of the steps.

        Raises:
            UserError: If hooks set attributes of their objects, which a record would not do; they are as before.
        """
        columns, t = prefixed("ctx", below("ctx", tensors)), {"t": tensors["samples"].new_zeros(Numbers.MOST)}
        server, rows = (prefixed(name, below(name, tensors)) for name in ("server", "row"))
        objects = self.objective.configured
        first = {**server, **rows, "met": tensors["met"], **columns, **t}
        with contents_kept(objects):  # even a cache may hold what was recorded
            watched = Watched(objects)
            send = stage(self._send, first, ctx)
            sent = self._outputs(send, first)
            finish = stage(self._finish, inputs := {**sent, **columns, **t}, ctx)
            results = {
                name: v[:1].expand(len(tensors["n_k"]), *v.shape[1:])
                for name, v in self._outputs(finish, inputs).items()
            }
            cohort = {name: tensors[name] for name in ("samples", "n_k", "k_lr", "there") if name in tensors}
            received = prefixed("received", below("received", sent))
            receive = stage(self._receive, {**server, **received, **results, **t, **cohort}, ctx)
            changed = {name for _, name in (*watched.changed(), *watched.added())}
        ensure(not changed, f"hooks set {', '.join(sorted(changed))}")
        blocks = prefixed("block", below("block", tensors))
        return {"send": send, "finish": finish, "receive": receive}, {**sent, **columns, **t, **blocks}

    def _replay(self, drawn: Drawn, record: RoundRecord, values: dict[str, Tensor], ctx: ClientContext) -> None:
        """Replays a record of a round with named tensors, and adds what its stages return."""
        *local, last = self._pieces(record, values, ctx)
        with torch.no_grad():
            with self.on_all_processes():
                for piece in local:
                    piece.update(values)
            if self.fabric.world_size > 1:
                results = {name: values[name] for name in record.stages["finish"].outputs}
                values.update(self.together(drawn, results, len(values["n_k"])))
            last.update(values)

    def _pieces(self, record: RoundRecord, tensors: Tensors, ctx: ClientContext) -> Sequence[Piece]:
        """Returns what replays a record with as many local steps as there are minibatches."""
        steps, order = len(tensors["block.y"]), {name: [(f"t.{name}", stage)] for name, stage in record.stages.items()}
        if steps not in record.pieces:
            if self.engine.compile or steps > self.engine.UNROLLED:
                parts = [order["send"], [], order["finish"]]
            else:
                parts = [[*order["send"], *order["step"] * steps, *order["finish"]]]
            if self.fabric.world_size == 1:
                parts[-1] += order["receive"]
            else:
                parts.append(order["receive"])
            record.pieces[steps] = [
                self._piece(record, part) if part else self._steps(record, tensors, ctx) for part in parts
            ]
        return record.pieces[steps]

    def _piece(self, record: RoundRecord, part: Sequence[tuple[str, Stage]]) -> Piece:
        """Returns the replay of stages one after another; it returns what later stages need."""
        inputs, outputs = dict[str, None](), dict[str, None]()
        for t, recorded in part:
            names = [t if name == "t" else name for name in recorded.inputs]
            inputs |= dict.fromkeys(name for name in names if name not in outputs)
            outputs |= dict.fromkeys(recorded.outputs)
        stages = [*record.stages.values()]
        later = stages[stages.index(part[-1][1]) + 1 :]
        needed = {name for stage in later for name in stage.inputs} or {*stages[-1].outputs}
        kept = [name for name in outputs if name in needed]
        graph = composed(part, [*inputs], kept)
        return Piece([*inputs], kept, called_directly(simplified(graph, known=record.known)).forward)

    def _steps(self, record: RoundRecord, tensors: Tensors, ctx: ClientContext) -> Piece:
        """Returns the replay of the local steps of single rounds."""
        blocks = {name: v for name, v in tensors.items() if name.startswith("block.")}
        step = self.engine.record_of({**record.example, **blocks}, ctx)
        unroll = self.engine.unrolled(len(blocks["block.y"]))
        carried = len(step.stage.outputs)

        def steps(*values: Tensor) -> Values:
            rows = tuple(torch.unflatten(v, 0, (-1, unroll)) for v in values[-len(blocks) :])
            return step.replay(values[:carried], values[carried : -len(blocks)], rows)

        return Piece(["t.step" if n == "t" else n for n in step.stage.inputs], step.stage.outputs, steps)

    def _send(self, tensors: Tensors, ctx: ClientContext) -> Tensors:
        """Calls `send` with named tensors."""
        ctx = self.engine.without_draws(ctx)
        _, carry, fixed = self.send(State(below("server", tensors)), below("row", tensors), tensors["met"], ctx)
        arguments = {name: v for name, v in fixed.tensors().items() if not name.startswith("ctx.")}
        carry = replace(carry, w=carry.w.contiguous()) if self.engine.compile else carry  # as in single rounds
        return {**carry.tensors(), **arguments}

    def _finish(self, tensors: Tensors, ctx: ClientContext) -> Tensors:
        """Calls `finish` with named tensors."""
        return self.finish(Carry.of(tensors), self.engine.fixed_of(tensors, ctx))

    def _receive(self, tensors: Tensors, ctx: ClientContext) -> Tensors:
        """Calls `receive` with named tensors."""
        counts, present, width = tensors["n_k"], tensors.get("there"), len(tensors["n_k"])
        n = width if present is None else present.sum(dtype=tensors["samples"].dtype)
        counts = counts if present is None else torch.where(present, counts, 0)

        def average(upload: Tensors) -> Uploads:
            rows = {name: upload[name] for name in self.objective.wire[1]}
            return Uploads.of_rows(self.objective.weighting, rows, counts, n, tensors["samples"], tensors["k_lr"])

        server, sent = (State(below(name, tensors)) for name in ("server", "received"))
        after, rows, numbers, (down, up) = self.receive(server, sent, ctx, tensors, average, present)
        self._bits = down, up // width
        return {**prefixed("server", after), **prefixed("row", rows), "numbers": numbers}

    def _outputs(self, stage: Stage, tensors: Tensors) -> Tensors:
        """Returns the outputs of a stage by name."""
        with torch.no_grad():
            return dict(zip(stage.outputs, stage.graph(*tensors.values()), strict=True))


def rounds_of(engine: BatchedEngine, w0: Tensor, seed: int, fabric: Fabric) -> Rounds:
    """Returns what trains rounds with an engine; arguments as for `Rounds`."""
    if isinstance(engine, GraphedEngine):
        return RecordedRounds(engine, w0, seed, fabric)
    return Rounds(engine, w0, seed, fabric)
