"""Whole rounds as functions of arrays: what the server sends, local training of its clients, and the server's step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.parts.base import Part
from fl_lightning.core import (
    ClientContext,
    Draws,
    Init,
    Logs,
    RoundContext,
    State,
    Upload,
    Uploads,
    accumulator_dtype,
    below,
    prefixed,
    to_device,
)
from fl_lightning.data.minibatches import Block, MinibatchTable
from fl_lightning.data.samples import SampleStore
from fl_lightning.engine.base import Carry, Fixed
from fl_lightning.engine.batched import BatchedEngine, by_client, mask_of_rows
from fl_lightning.engine.record import Tensors


@dataclass(frozen=True)
class Drawn:
    """What a round draws before anybody trains.

    Attributes:
        clients: Ids of its clients.
        contexts: Their contexts.
        receivers: Number of clients that receive the server's state; some of them may upload nothing.
        shares: Positions of the clients that each process trains, at least one of each.
    """

    clients: Sequence[int]
    contexts: Sequence[ClientContext]
    receivers: int
    shares: Sequence[Sequence[int]]

    def share(self, rank: int) -> Drawn:
        """Returns the part of the round that a process trains."""
        if len(self.shares) == 1:
            return self
        positions = self.shares[rank]
        clients, contexts = [self.clients[p] for p in positions], [self.contexts[p] for p in positions]
        return replace(self, clients=clients, contexts=contexts)

    def padded(self, width: int) -> Drawn:
        """Returns a round of ``width`` clients: its own, and the first one again."""
        padding = width - len(self.clients)
        return replace(
            self,
            clients=[*self.clients, *[self.clients[0]] * padding],
            contexts=[*self.contexts, *[self.contexts[0]] * padding],
        )


@dataclass(frozen=True)
class Trained:
    """The result of a round.

    Attributes:
        server: The server's state.
        numbers: 0, or NaN if something is not finite; the training loss of each client; for each name that hooks log
            the clients' numbers; and the server's. Clients beyond those of the round are padding.
        bits: Bits that went over the wire.
        training_s: Seconds of local training; of a recorded round, seconds of the whole round.
    """

    server: State
    numbers: Tensor
    bits: int
    training_s: float

    def split(self, clients: int, logs: int) -> tuple[Tensor, Sequence[Tensor], list[float]]:
        """Returns the losses of so many clients, and for each name that is logged their numbers, and the server's."""
        width = (len(self.numbers) - 1 - logs) // (1 + logs)
        losses, rows, server = torch.split(self.numbers[1:], [width, logs * width, logs])
        return losses[:clients], rows.view(logs, width)[:, :clients].unbind() if logs else (), server.tolist()


class Table:
    """The states of the clients of some rounds, a row a client.

    Args:
        rows: The states, by id; None: a client that the server has never met.
        inits: Initial values of a client's state, by name.
        w0: The initial model, ``(d,)``.

    Attributes:
        columns: The states, ``(clients, ...)`` by name.
        met: Whether the server has met each client, ``(clients, 1)``.
    """

    def __init__(self, rows: Mapping[int, State | None], inits: Mapping[str, Init], w0: Tensor) -> None:
        first = State.initial(inits, w0, w0)
        known = [first if row is None else row for row in rows.values()]
        self.columns = {name: torch.stack([row[name] for row in known]) for name in inits}
        self.met = to_device([[row is not None] for row in rows.values()], w0.device)
        self._places = {client: place for place, client in enumerate(rows)}

    def places(self, clients: Sequence[int]) -> Tensor:
        """Returns the places of some clients, ``(clients,)``."""
        return to_device([self._places[k] for k in clients], self.met.device)

    def take(self, places: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the states at some places, and whether the server has met their clients."""
        return {name: v.index_select(0, places) for name, v in self.columns.items()}, self.met.index_select(0, places)

    def put(self, places: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Replaces the states at some places."""
        for name, values in rows.items():
            self.columns[name].index_copy_(0, places, values)
        self.met.index_fill_(0, places, True)

    def rows(self, clients: Sequence[int]) -> dict[int, State]:
        """Returns the states of some clients, by id."""
        columns = {name: v.unbind() for name, v in self.columns.items()}
        return {k: State({name: v[self._places[k]] for name, v in columns.items()}) for k in clients}


class Rounds:
    """Trains consecutive rounds of one phase, each in one block; the server averages the uploads by their mean.

    Several processes train their shares of a round, and exchange the results; then each makes the server's step.

    Args:
        engine: Trains the clients.
        w0: The initial model, ``(d,)``.
        seed: Seed of the run.
        fabric: The processes; every one calls.

    Attributes:
        agreed: Whether all processes leave the program by an error that one of them has met.
    """

    agreed = False

    def __init__(self, engine: BatchedEngine, w0: Tensor, seed: int, fabric: Fabric) -> None:
        self.engine, self.objective, self.w0, self.seed, self.fabric = engine, engine.objective, w0, seed, fabric

    def train(
        self, rounds: Sequence[Drawn], minibatches: MinibatchTable, server: State, table: Table
    ) -> Iterator[Trained]:
        """Yields the result of each round.

        Args:
            rounds: What they draw.
            minibatches: The minibatches of the clients of this process, one round after another.
            server: The server's state before the first.
            table: States of all clients; when a result is yielded, those after its round.
        """
        shares = [drawn.share(self.fabric.global_rank) for drawn in rounds]
        n = [len(share.clients) for share in shares]
        width = self.engine.widened(max(n))
        for drawn, share, block in zip(rounds, shares, minibatches.blocks(n, width), strict=True):
            started, padded = time.perf_counter(), share.padded(width)
            with self.on_all_processes():
                ctx = self.context(padded, minibatches.source)
                sent, carry, fixed = self.send(server, *table.take(table.places(padded.clients)), ctx)
                results = self.finish(self.engine.steps(carry, Block.of(block), fixed), fixed)
            results = self.together(drawn, results, len(drawn.clients))
            training_s = time.perf_counter() - started
            average = partial(self.average, drawn.contexts)
            server, rows, numbers, (down, up) = self.receive(server, sent, ctx, results, average)
            table.put(table.places(drawn.clients), rows)
            yield Trained(server, numbers, drawn.receivers * down + up, training_s)

    @contextmanager
    def on_all_processes(self) -> Iterator[None]:
        """Lets every process raise an error of memory or of torch that one of them meets within it."""
        try:
            yield
        except (RuntimeError, MemoryError):
            self.agreed = True
            self._any(True)
            raise
        if self._any(False):
            self.agreed = True
            raise MemoryError("another process could not train its clients")

    def _any(self, failed: bool) -> bool:
        """Returns whether one of several processes has failed; every one calls."""
        several = self.fabric.world_size > 1
        return several and bool(_of_all_processes(self.fabric, self.w0.new_full((1,), failed)).any())

    def together(self, drawn: Drawn, results: Tensors, n: int) -> Tensors:
        """Returns the first ``n`` rows of results of a round's clients, those of other processes included."""
        if self.fabric.world_size == 1:
            return {name: v[:n] for name, v in results.items()}
        widest = max(map(len, drawn.shares))
        padding = max(widest - len(results["loss"]), 0)
        rows = {name: torch.cat([v[:widest], v.new_zeros(padding, *v.shape[1:])]) for name, v in results.items()}
        places = {p: widest * rank + i for rank, share in enumerate(drawn.shares) for i, p in enumerate(share)}
        order = to_device([places.get(p, 0) for p in range(n)], self.w0.device)
        return {name: _of_all_processes(self.fabric, v).index_select(0, order) for name, v in rows.items()}

    def average(self, clients: Sequence[ClientContext], upload: Upload) -> Uploads:
        """Returns the averages of the clients' uploads, ``(clients, ...)`` by name."""
        averages = Uploads(self.objective.wire[1], self.objective.weighting, clients, self.w0)
        for row, client in zip(by_client(upload, len(clients)), clients, strict=True):
            averages.add(row, client.n_k)
        return averages

    def context(self, drawn: Drawn, source: SampleStore) -> ClientContext:
        """Returns the contexts of a round's clients as one, whose attributes that differ are ``(clients, 1)``."""
        keys = [(self.seed, ctx.stream, ctx.phase, k) for k, ctx in zip(drawn.clients, drawn.contexts, strict=True)]
        ctx = self.engine.together(drawn.contexts, self.w0, Draws(keys, self.w0.device, True))
        counts = self.class_counts(drawn, source) if self.objective.uses_class_counts else None
        return replace(ctx, class_counts=counts)

    def class_counts(self, drawn: Drawn, source: SampleStore) -> Tensor:
        """Returns the clients' numbers of samples of each class, ``(clients, classes)``."""
        return torch.stack([source.class_counts(k) for k in drawn.clients]).to(self.w0)

    def send(
        self, server: State, rows: Mapping[str, Tensor], met: Tensor, ctx: ClientContext
    ) -> tuple[State, Carry, Fixed]:
        """Calls the hooks of a round before the first local step.

        Args:
            server: The server's state.
            rows: States of the clients, ``(clients, ...)`` by name.
            met: Whether the server has met each client, ``(clients, 1)``.
            ctx: The clients' context.

        Returns:
            What the server sends, and the arguments of the first step.
        """
        objective, clients = self.objective, len(met)
        sent = objective.begin_phase(server, _of_server(ctx))
        from_w = {name for name, init in objective.client_inits().items() if isinstance(init, str) and init == "w"}
        rows = {name: torch.where(met, v, sent.w) if name in from_w else v for name, v in rows.items()}
        fresh = State.initial(objective.scratch_inits(), self.w0, sent.w)
        scratch = {name: v.expand(clients, *v.shape) for name, v in fresh.items()}
        return sent, *self.engine.begin(State({**rows, **scratch}), sent, ctx, sent.w.expand(clients, -1))

    def finish(self, carry: Carry, fixed: Fixed) -> Tensors:
        """Calls the hooks of the clients after the last local step.

        Args:
            carry: What the last step returned.
            fixed: The arguments of all steps.

        Returns:
            Uploads, states, losses, and what hooks log, ``(clients, ...)`` by name.
        """
        upload, state, logs = self.engine.finish(carry, fixed)
        width, steps = len(carry.w), cast(Tensor, fixed.ctx.K)  # (clients, 1)
        loss = carry.loss / steps.clamp(min=1)[:, 0]
        upload = {name: v if v.ndim > 1 else v.expand(width, -1) for name, v in upload.items()}
        rows = {name: v.expand_as(carry.state[name]) for name, v in state.items()}
        logged = {name: logs.row(name, width, loss) for name in logs.names}
        return {"loss": loss, **prefixed("upload", upload), **prefixed("state", rows), **prefixed("log", logged)}

    def receive(
        self,
        server: State,
        sent: State,
        ctx: ClientContext,
        results: Tensors,
        average: Callable[[Upload], Uploads],
        present: Tensor | None = None,
    ) -> tuple[State, dict[str, Tensor], Tensor, tuple[int, int]]:
        """Calls the hooks of the server after the last local step.

        Args:
            server: The server's state.
            sent: What it has sent.
            ctx: A context of the round.
            results: What `finish` returns of all clients.
            average: Averages uploads, ``(clients, ...)`` by name.
            present: Which of the clients take part, ``(clients, 1)``; the uploads and states of the others are 0. None:
                all.

        Returns:
            The server's next state; the states that clients keep, ``(clients, ...)`` by name; numbers as in `Trained`;
            and the bits that a client receives, and that all clients upload.
        """
        objective, n, loss = self.objective, len(results["loss"]), results["loss"]
        upload, state, logged = (below(group, results) for group in ("upload", "state", "log"))
        if present is not None:
            upload, state = (
                {name: torch.where(mask_of_rows(present, v), v, 0) for name, v in group.items()}
                for group in (upload, state)
            )
        logs = Logs((*logged,))
        server_ctx = replace(_of_server(ctx), logs=logs)
        after = objective.finish_phase(server, sent, average(upload), server_ctx)
        after = objective.finish_round(after, server, server_ctx)
        # infinity times 0 is NaN, which no sum loses
        zeros = [(v * 0).sum() for v in (*upload.values(), *state.values(), *after.values())]
        server_logs = [logs.row(name, 1, loss) for name in logs.names]
        numbers = torch.cat([torch.stack(zeros).sum()[None].to(loss), loss, *logged.values(), *server_logs])
        states = [objective.finish_client(State(row), after) for row in by_client(state, n)]
        rows = {name: torch.stack([row[name] for row in states]) for name in state}
        return after, rows, numbers.to(accumulator_dtype(loss.device)), self.bits(sent, upload, n)

    def bits(self, sent: State, upload: Upload, n: int) -> tuple[int, int]:
        """Returns the bits that a client receives, and those that ``n`` clients upload."""
        objective = self.objective
        up = [objective.bits(row, up=True) for row in by_client(upload, n)[: n if self.bits_depend_on_values else 1]]
        return objective.bits(sent, up=False), sum(up) * (n // len(up))

    @property
    def bits_depend_on_values(self) -> bool:
        """Whether the bits of an upload may depend on its values, not only on its shape."""
        inherited = all(type(part).bits is Part.bits for part in self.objective.all_parts)
        return not (inherited and type(self.objective).bits is LocalObjective.bits)


def _of_server(ctx: ClientContext) -> RoundContext:
    """Returns the context of the server's hooks."""
    return RoundContext(ctx.t, ctx.rounds, ctx.m, ctx.flat, ctx.phase)


def _of_all_processes(fabric: Fabric, rows: Tensor) -> Tensor:
    """Returns the rows of all processes, each of which has as many, contiguous."""
    gathered = [torch.empty_like(rows) for _ in range(fabric.world_size)]
    dist.all_gather(gathered, rows)
    return torch.cat(gathered)
