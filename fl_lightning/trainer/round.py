"""A round: broadcast, local training, aggregation. It changes nothing of its run until it is applied."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fl_lightning.core import State, Uploads, UserError, accumulator_dtype, generator
from fl_lightning.data.minibatches import Minibatches
from fl_lightning.engine import Engine, Job, LocalResult
from fl_lightning.trainer import collectives
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.run import Run


class Round:
    """One round of a cohort. One that is never applied is a dry run: of measurements, and of the choice of an engine.

    Every process calls its methods, in the same order.

    Args:
        run: The run; it stays as it is.
        cohort: The clients.
        on_result: Called with each local result of this process, of every phase.
        perturb: Whether the model that is sent may be perturbed, as some algorithms do; otherwise it is the server's.

    Attributes:
        server: The server's state after the phases so far.
        rows: On rank 0 the clients' new states, by id.
        refused: Number of uploads that were not finite.
        floats: Numbers that went over the wire.
        training_s: Seconds of local training.
    """

    def __init__(
        self,
        run: Run,
        cohort: Cohort,
        on_result: Callable[[LocalResult], object] | None = None,
        perturb: bool = True,
    ) -> None:
        self.run, self.cohort, self.on_result, self.perturb = run, cohort, on_result, perturb
        self.server, self.rows = run.server, dict[int, State]()
        self.losses = torch.zeros(0)
        self.refused = self.floats = 0
        self.training_s = 0.0
        self._started, self._callback_s = time.perf_counter(), run.callback_s

    def start(self) -> None:
        """Calls the callbacks' `on_round_start`."""
        self.run.call("on_round_start", ctx=self.run.round_context(self.cohort.t), cohort=self.cohort.clients)

    def train(self, engine: Engine) -> Round:
        """Runs all phases.

        Args:
            engine: Runs local training.

        Returns:
            This round.

        Raises:
            UserError: If training diverges.
        """
        for phase in self.phases():
            phase.aggregate(engine.train(phase.jobs()))
        return self

    def phases(self) -> Iterator[Phase]:
        """The phases, one after another: a phase starts from the server's state that the one before has left."""
        for number in range(self.run.objective.phases):
            yield Phase(self, number)

    def apply(self) -> None:
        """Makes this round's result the state of the run."""
        self.run.client_losses = self.losses
        self.run.apply(self.server, self.rows, self.floats)

    def metrics(self) -> dict[str, float]:
        """Metrics of the round, after it was applied; its time is that since it was made, without callbacks."""
        run, cohort = self.run, self.cohort
        if run.fabric.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started - (run.callback_s - self._callback_s)
        models = self.floats / (len(cohort.clients) * run.objective.flat.d)
        return {
            "client/train/loss": float(self.losses.mean()),
            "client/refused": self.refused,
            "client/lr": cohort.contexts[0].lr,
            "comm/total_bits": run.total_floats * run.server.w.element_size() * 8,
            "comm/transmissions": run.metrics.get("comm/transmissions", 0.0) + models,
            "time/round_s": seconds,
            "time/orchestration_s": seconds - self.training_s,
            "time/clients_per_s": len(cohort.clients) / seconds,
        }


class Phase:
    """One exchange of a round: the cohort receives, trains and uploads.

    Args:
        of: The round.
        number: Number of the phase, from 0.

    Attributes:
        ctx: The phase's context.
        sent: What the clients receive.
    """

    def __init__(self, of: Round, number: int) -> None:
        self.round, self.run, self.cohort = of, of.run, of.cohort
        objective = self.run.objective
        self.ctx = self.run.round_context(of.cohort.t, number)
        self.contexts = [replace(ctx, phase=number) for ctx in of.cohort.contexts]
        self.last = number + 1 == objective.phases
        self.sent = objective.broadcast(of.server, self.ctx).only(objective.wire[0])
        if not of.perturb:
            self.sent = self.sent.replace(w=of.server.w)

    def jobs(self) -> list[Job]:
        """Local training of this process's clients. Rank 0 holds the clients' states and sends them."""
        run, cohort, fabric, like = self.run, self.cohort, self.run.fabric, self.sent.w
        mine = cohort.shares[fabric.global_rank]
        scratch, rows = run.objective.scratch_state, self.round.rows
        if fabric.world_size == 1:
            states = [run.clients.get(k, like, scratch, rows.get(k)) for k in cohort.clients]
        else:
            kept = []
            if fabric.is_global_zero:
                kept = [run.clients.get(k, like, {}, rows.get(k)) for k in cohort.clients]
            columns = {
                name: collectives.scatter(
                    fabric, torch.stack([k[name] for k in kept]) if kept else None, cohort.shares, shape, like
                )
                for name, shape in run.clients.shapes.items()
            }
            fresh = State.initial(scratch, run.clients.w0, like)
            states = [State({**{n: c[i] for n, c in columns.items()}, **fresh}) for i in range(len(mine))]
        jobs = [
            Job(
                cohort.clients[p],
                state,
                self.sent,
                self.contexts[p],
                self._minibatches(cohort, p),
                run.seed,
                run.varied,
            )
            for p, state in zip(mine, states, strict=True)
        ]
        self._read_ahead(jobs)
        return jobs

    def aggregate(self, results: Iterable[LocalResult]) -> None:
        """Takes the local results one by one, and makes the server's step.

        Args:
            results: Those of `jobs`, in their order. Each is taken while the net holds that client's buffers.

        Raises:
            UserError: If training diverges.
        """
        taken = [self._take(result) for result in self._clocked(results)]
        uploads, self.round.losses = self._average(taken)
        objective, server = self.run.objective, self.round.server
        after = objective.finish_phase(server, self.sent, uploads, self.ctx) if uploads.n else None
        if after is None or not after.finite():
            raise UserError(
                f"round {self.ctx.t + 1}: {'the new global state' if uploads.n else 'every upload'} is not finite, "
                "training has diverged; lower model.optimizer.lr or set model.optimizer.clip, or find where it "
                "begins with trainer.engine = debug"
            )
        self.round.server = objective.finish_round(after, self.run.server, self.ctx) if self.last else after
        uploaded = sum(math.prod(shape) for shape in self.run.upload_shapes[self.ctx.phase].values())
        self.round.floats += (sum(v.numel() for v in self.sent.values()) + uploaded) * len(self.contexts)
        self.round.refused += len(self.contexts) - uploads.n

    def _take(self, result: LocalResult) -> LocalResult:
        objective = self.run.objective
        if result.buffers is not None and objective.net_buffers is not None:
            objective.net_buffers.load(objective.net, result.buffers)  # for measurements of the local model
        if self.round.on_result is not None:
            self.round.on_result(result)
        return result

    def _clocked(self, results: Iterable[LocalResult]) -> Iterator[LocalResult]:
        iterator = iter(results)
        while True:
            before = time.perf_counter()
            result = next(iterator, None)
            self.round.training_s += time.perf_counter() - before
            if result is None:
                return
            yield result

    def _average(self, results: list[LocalResult]) -> tuple[Uploads, Tensor]:
        """Averages of the finite uploads, and each client's loss, ``(cohort,)``; the finite clients' rows are kept."""
        run, fabric, shares, like = self.run, self.run.fabric, self.cohort.shares, self.sent.w
        mine = shares[fabric.global_rank]
        shapes = self._upload_shapes(results)
        table = torch.zeros(2, len(self.contexts), dtype=accumulator_dtype(like.device), device=like.device)
        if results:  # is it finite, and its loss
            finite = torch.tensor([float(r.finite) for r in results], device=like.device)
            columns = torch.stack([finite, torch.stack([r.loss for r in results])])
            table[:, torch.tensor(mine, device=like.device)] = columns.to(table.dtype)
        collectives.all_reduce_sum(fabric, table)
        accepted = [bool(x) for x in table[0].tolist()]

        accepted_contexts = [ctx for ctx, yes in zip(self.contexts, accepted, strict=True) if yes]
        uploads = Uploads(run.objective.wire[1], run.objective.weighting, accepted_contexts, like)
        if run.settings.deterministic or fabric.world_size == 1:  # rank 0 sums all, in cohort order
            named = {
                name: collectives.gather(fabric, [r.upload[name] for r in results], shares, shape, like)
                for name, shape in shapes.items()
            }
            positions = list(range(len(self.contexts))) if fabric.is_global_zero else []
        else:
            named, positions = {name: [r.upload[name] for r in results] for name in shapes}, mine
        for i, position in enumerate(positions):
            if accepted[position]:
                uploads.add({name: column[i] for name, column in named.items()}, self.contexts[position].n_k)
        if accepted_contexts:
            collectives.reduce(fabric, uploads, shapes, like, run.settings.deterministic)

        states = {
            name: collectives.gather(fabric, [r.state[name] for r in results], shares, shape, like)
            for name, shape in run.clients.shapes.items()
        }
        if fabric.is_global_zero and states:
            for position, client in enumerate(self.cohort.clients):
                if accepted[position]:
                    self.round.rows[client] = State({name: column[position] for name, column in states.items()})
        return uploads, table[1]

    def _upload_shapes(self, results: list[LocalResult]) -> dict[str, list[int]]:
        """Shapes of an upload, by name; rank 0, which always trains a client, broadcasts them once a run."""
        known = self.run.upload_shapes
        if self.ctx.phase not in known:
            shapes = {name: list(v.shape) for name, v in results[0].upload.items()} if results else {}
            known[self.ctx.phase] = self.run.fabric.broadcast(shapes)
        return known[self.ctx.phase]

    def _minibatches(self, cohort: Cohort, position: int, phase: int | None = None) -> Minibatches:
        run, settings, client = self.run, self.run.settings, cohort.clients[position]
        phase = self.ctx.phase if phase is None else phase
        draw = generator(run.seed, "batches", cohort.t, phase, client)
        return run.data.client_batches(client, settings.local_epochs, settings.local_steps, draw, run.dtype)

    def _read_ahead(self, jobs: list[Job]) -> None:
        """Reads from disk, in threads, what this and the next phase need."""
        run, stream, rows = self.run, self.run.data.stream, self.run.clients.on_disk and self.last
        if not (stream or rows):
            return
        cohort: Cohort | None = self.cohort
        if self.last:
            cohort = Cohort.draw(run, self.ctx.t + 1) if self.ctx.t + 1 < run.max_rounds else None
        if stream:
            mine = [] if cohort is None else cohort.shares[run.fabric.global_rank]
            phase = 0 if self.last else self.ctx.phase + 1
            upcoming = [self._minibatches(cohort, p, phase) for p in mine] if cohort else []
            run.data.read_ahead([*(job.minibatches for job in jobs), *upcoming])
        if rows and cohort is not None:
            run.clients.read_ahead(cohort.clients)
