"""A round: broadcast, local training, aggregation. It changes nothing of its run until it is applied."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from fl_lightning.core import DivergenceError, Logs, State, Watched, wait_for
from fl_lightning.engine import Engine, Job, LocalResult
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.participation import LINES, Attendance, failure_lines
from fl_lightning.trainer.received import (
    Arrivals,
    average,
    check_finite,
    diverged,
    divergences,
    total_over,
)
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import collectives


class Round:
    """One round of a cohort. One that is never applied is a dry run: of measurements, and of the choice of an engine.

    Every process calls its methods, in the same order.

    Args:
        run: The run; it stays as it is.
        cohort: The clients of the first phase.
        on_result: Called with each local result of this process, of every phase.
        perturb: Whether the model that is sent may be perturbed, as some algorithms do; otherwise it is the server's.

    Attributes:
        server: The server's state after the phases so far.
        rows: The new states of this process's clients, by id.
        rows_before: Those before clients have last trained by themselves.
        losses: Training loss of each client whose upload was accepted, ``(clients,)``.
        failed: Clients whose upload was not finite ("refused"), and those of the run's other kinds of failure.
        diverged: Why the round has no finite result, if the run goes on nonetheless.
        aggregated: Metrics of the rule that combines the uploads, of the last phase.
        logged: Numbers that hooks have logged.
        attended: Who has answered in each phase.
        arrivals: What has arrived since the server's last step.
        bits: Bits that went over the wire.
        steps: Local steps of the clients whose uploads have arrived.
        passes: Their forward and backward passes.
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
        self.server, self.rows, self.rows_before = run.server, dict[int, State](), dict[int, State]()
        self.losses = torch.zeros(0)
        self.failed: dict[str, list[int]] = {"refused": [], **{kind: [] for kind in run.failure_kinds}}
        self.diverged: DivergenceError | None = None
        self.aggregated, self.logged = dict[str, float](), dict[str, float]()
        self.attended, self.arrivals = list[Attendance](), list[Arrivals]()
        self.bits = self.steps = self.passes = 0
        self.training_s = 0.0
        self._watch = Stopwatch(run)

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
            phase.receive(engine.train(phase.send()))
            phase.step()
        return self

    def phases(self) -> Iterator[Phase]:
        """Yields the phases, until one diverges: each starts from the server's state that the one before has left.

        The first one may be that in which clients train by themselves (`Cohort.alone`).
        """
        own_part = self.run.objective.own_part
        for cohort in self.cohort.waves or (self.cohort,):
            if own_part is not None and own_part.trains_alone:
                yield Phase(self, cohort.alone(self.run, own_part.epochs_alone))
            for number in range(self.run.objective.phases):
                if self.diverged:
                    return
                cohort = cohort.next_phase(self.run) if number else cohort
                yield (phase := Phase(self, cohort))
                cohort = phase.cohort

    def leave(self, why: DivergenceError | None = None) -> None:
        """Leaves server and clients as they were before the round.

        Args:
            why: The reason, if clients have answered.
        """
        self.server, self.rows, self.losses = self.run.server, {}, torch.zeros(0)
        self.diverged = why or self.diverged

    def apply(self) -> None:
        """Makes this round's result the state of the run, and prints which clients were refused."""
        run = self.run
        for line in failure_lines(run.state.failures, self.cohort.t, self.failed["refused"]):
            run.fabric.print(line)
        if self.diverged and run.metrics.get("client/diverged", 0) < LINES:
            run.fabric.print(f"left out: {self.diverged}")
        training, flight = None, self.cohort.flight
        if flight is not None:
            training = flight.after(run.objective.begin_phase(run.server, run.round_context(flight.t)))
        run.apply(run.state.after_round(self.server, self.bits, self.failed, training), self.rows)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the applied round; its time is that since it was made, without callbacks."""
        run = self.run
        loss = {"client/train/loss": float(self.losses.mean())} if len(self.losses) else {}
        return {
            **loss,
            **self.aggregated,
            **self.logged,
            **{f"client/{kind}": len(clients) for kind, clients in self.failed.items()},
            **divergences(run, self.diverged is not None),
            **(run.timing.metrics(run.metrics, self.attended) if run.timing else {}),
            **(self.cohort.flight.metrics() if self.cohort.flight else {}),
            **self._watch.spent(self.cohort, self.bits, self.steps, self.passes, self.training_s),
        }


class Stopwatch:
    """Measures the time of rounds of a run, from when it is made, without callbacks."""

    def __init__(self, run: Run) -> None:
        self.run, self._callback_s = run, run.callback_s
        self._started, self._cpu_started = time.perf_counter(), time.process_time()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done within it, by no callback, does not count."""
        started, cpu_started = time.perf_counter(), time.process_time()
        yield
        self._started += time.perf_counter() - started
        self._cpu_started += time.process_time() - cpu_started

    def spent(
        self, cohort: Cohort, bits: int, steps: int, passes: int, training_s: float, rounds: int = 1
    ) -> dict[str, float]:
        """Returns the metrics of the effort of a round that has been applied.

        Args:
            cohort: The round's clients.
            bits: Bits that went over the wire.
            steps: Local steps.
            passes: Their forward and backward passes.
            training_s: Seconds of local training of all rounds since it was made.
            rounds: Rounds since it was made, which share its time.
        """
        run = self.run
        wait_for(run.fabric.device)
        seconds = (time.perf_counter() - self._started - (run.callback_s - self._callback_s)) / rounds
        cpu_seconds = (time.process_time() - self._cpu_started) / rounds
        models = bits / (max(cohort.asked, 1) * 8 * run.server.w.nbytes)
        return {
            "client/lr": run.objective.lr(run.round_context(cohort.t)),
            "client/steps": run.metrics.get("client/steps", 0) + steps,
            "client/passes": run.metrics.get("client/passes", 0) + passes,
            "comm/total_bits": run.state.total_bits,
            "comm/transmissions": run.metrics.get("comm/transmissions", 0.0) + models,
            "time/round_s": seconds,
            "time/cpu_s": cpu_seconds,
            "time/orchestration_s": seconds - training_s / rounds,
            "time/clients_per_s": len(cohort.clients) / seconds,
            "time/steps_per_s": steps / seconds,
        }


class Phase:
    """One exchange of a round: the cohort receives, trains and uploads.

    Args:
        round: The round.
        cohort: The clients whose uploads are to arrive in this phase.

    Attributes:
        ctx: The context of local training.
        now: The context of the server's step; of an asynchronous one it is later than that of local training.
        alone: Whether the clients train by themselves, before the round: nothing travels.
        sent: What the clients receive, or have received if the server has stepped since.
        current: What clients receive now.
    """

    def __init__(self, round: Round, cohort: Cohort) -> None:
        self.round, self.run, self.cohort = round, round.run, cohort
        objective = self.run.objective
        self.ctx = self.run.round_context(cohort.t, cohort.phase % objective.phases)
        self.alone = cohort.phase == objective.phases
        self.last = cohort.phase + 1 == objective.phases
        self.now = self.run.round_context(round.cohort.t, self.ctx.phase)
        if not cohort.phase:
            total = partial(total_over, self.run, round.server.w, cohort.clients, round.rows)
            round.server = objective.round_start(round.server, total, self.now)
        self.sent = self.current = objective.begin_phase(round.server, self.now)
        self.uploaded_bits = 0  # of the clients of this process
        if not round.perturb:
            self.sent = self.current = self.sent.replace(w=round.server.w)
        if self.ctx.t < self.now.t:
            saved = self.run.state.training["sent"][self.ctx.t]
            self.sent = State({name: value.to(round.server.w) for name, value in saved.items()})

    def send(self) -> list[Job]:
        """Returns this process's share of local training.

        The owners of other clients in it send their states.
        """
        run, cohort, store, like = self.run, self.cohort, self.run.clients, self.sent.w
        mine = {cohort.clients[p]: cohort.contexts[p] for p in cohort.shares[run.fabric.global_rank]}
        kept = [k for k in cohort.clients if store.owns(k) and (k in mine or k in cohort.moves)]
        rows = {k: store.get(k, like, self.round.rows.get(k)) for k in kept}
        received = collectives.exchange(run.fabric, cohort.moves, rows, store.shapes, like)
        rows |= {k: State(row) for k, row in received.items()}
        fresh = State.initial(run.objective.scratch_inits(), store.w0, like)
        jobs = [
            Job(k, rows[k] | fresh, self.sent, ctx, run.minibatches(k, ctx), run.seed, run.varied)
            for k, ctx in mine.items()
        ]
        self._read_ahead(jobs)
        return jobs

    def receive(self, results: Iterable[LocalResult]) -> None:
        """Takes the local results one by one.

        Args:
            results: Those of what `send` returned, in this order. Each is taken while the net holds that client's
                buffers. A client on another machine that has no result is dropped.

        Raises:
            UserError: If a client uploads another shape than the others.
        """
        arrived = [self._take(result) for result in self._clocked(results)]
        if len(arrived) < len(self.cohort.shares[self.run.fabric.global_rank]):
            self.cohort = self.cohort.only([result.client for result in arrived])
        arrivals = Arrivals(self.run, self.cohort, arrived, self.sent.w)
        self._count(arrivals.refused)
        if self.alone:
            self.round.rows_before, self.round.rows = self.round.rows, self.round.rows | arrivals.rows()
        else:
            self.round.arrivals.append(arrivals)

    def step(self) -> None:
        """Makes the server's step, if it waits for no more clients; nothing travels where clients train by themselves.

        Raises:
            UserError: If training diverges.
        """
        if self.alone:
            return
        arrivals = self.round.arrivals[-1]
        if self.cohort.waits:
            self._keep(arrivals)
            return
        try:
            self._step(arrivals)
        except DivergenceError as why:
            if self.run.settings.on_divergence == "stop":
                raise
            self.round.leave(why)

    def observe(self, results: Iterable[LocalResult]) -> None:
        """Takes the local results one by one and keeps none: a dry round without the server's step.

        Args:
            results: As for `receive`.
        """
        for result in self._clocked(results):
            self._take(result)

    def _step(self, arrivals: Arrivals) -> None:
        """Makes the server's step, and takes the clients' rows; if nobody has answered, everything stays as it was."""
        objective, round, rule = self.run.objective, self.round, self.run.aggregation
        logs = Logs(objective.all_logs)
        step_ctx = replace(self.now, logs=logs)
        waves, round.arrivals = round.arrivals, []
        if not self.cohort.clients and not rule.empty:
            return round.leave()
        refused, flight = sum(len(wave.refused) for wave in waves), round.cohort.flight
        finite = refused < sum(len(wave.accepted) for wave in waves) or rule.empty
        if flight is not None:
            flight.refused = 0 if finite else flight.refused + refused
        if not finite:
            if flight is not None and flight.refused < flight.slots:  # others still train
                return round.leave()
            raise diverged(self.run, step_ctx.t, f"every upload is not finite ({arrivals.reasons()})")
        known = objective.known(self.current) if rule.by_rows else {}
        watched = Watched((rule,))
        uploads = average(waves, round.server, known, step_ctx)
        round.aggregated = rule.metrics(uploads, known, round.server)
        after = rule.phase_end(objective.finish_phase(round.server, self.current, uploads, step_ctx), uploads)
        if self.last and objective.surveys:
            rows = {**round.rows, **arrivals.rows()}
            everyone = {*self.run.clients.seen, *rows}
            after = objective.survey(after, partial(total_over, self.run, round.server.w, everyone, rows), step_ctx)
        check_finite(self.run, after, step_ctx.t)
        round.server = objective.finish_round(after, self.run.server, step_ctx) if self.last else after
        watched.warn_of_server(numbers=True)
        self._keep(arrivals)
        round.losses = torch.cat([wave.losses for wave in waves])
        if logs.names:
            numbers = [torch.cat(parts) for parts in zip(*(wave.logged for wave in waves), strict=True)]
            round.logged |= Logs.means(logs.names, numbers, [float(logs.row(n, 1, round.server.w)) for n in logs.names])

    def _keep(self, arrivals: Arrivals) -> None:
        """Takes the clients' rows."""
        objective, round = self.run.objective, self.round
        if objective.trains_alone:  # who does not count keeps nothing of the training before the round
            round.rows = {k: row for k, row in round.rows.items() if k not in arrivals.refused}
            round.rows |= {k: row for k, row in round.rows_before.items() if k in arrivals.refused}
        round.rows |= {k: objective.finish_client(row, round.server) for k, row in arrivals.rows().items()}

    def _count(self, refused: list[int]) -> None:
        """Counts which clients failed, and the bits on the wire."""
        round, attendance = self.round, self.cohort.attendance
        round.failed["refused"] += refused
        steps = sum(ctx.K for ctx in self.cohort.contexts)
        round.steps += steps
        round.passes += steps * sum(self.run.contract[self.cohort.phase].passes)
        if self.alone:
            return
        round.attended.append(attendance)
        for kind in self.run.failure_kinds:
            round.failed[kind] += getattr(attendance, kind)
        sent = self.run.objective.bits(self.sent, up=False)
        round.bits += sent * attendance.receivers + collectives.total(self.run.fabric, self.uploaded_bits)

    def _take(self, result: LocalResult) -> LocalResult:
        objective = self.run.objective
        if result.buffers is not None and objective.net_buffers is not None:
            objective.net_buffers.load(objective.net, result.buffers)  # for measurements of the local model
        if self.round.on_result is not None:
            self.round.on_result(result)
        if self.alone:
            return result
        self.uploaded_bits += objective.bits(result.upload, up=True)
        known = State(objective.encoded(result.received))
        arrived = self.cohort.arrived(result, known, self.run.seed)
        recalled = {name: result.upload[name] for name in objective.recalled}  # it does not travel
        result = replace(arrived, upload={**arrived.upload, **recalled})
        rule, staleness = self.run.settings.asynchronous, self.now.t - self.ctx.t
        if rule is None or self.round.cohort.flight is None:
            return result
        current = objective.known(self.current)
        # statistics are no sum of updates, and a mix of variances is none below 0
        statistics = {name: v for name, v in current.items() if name == "buffers"}
        received = objective.known(self.sent) | statistics if staleness else current
        upload = {name: rule.seen(v, received[name], current[name], staleness) for name, v in result.upload.items()}
        return replace(result, upload=upload)

    def _clocked(self, results: Iterable[LocalResult]) -> Iterator[LocalResult]:
        iterator = iter(results)
        while True:
            started = time.perf_counter()
            result = next(iterator, None)
            self.round.training_s += time.perf_counter() - started
            if result is None:
                return
            yield result

    def _read_ahead(self, jobs: list[Job]) -> None:
        """Reads from disk, in threads, what this and the next phase need."""
        run, stream, rows = self.run, self.run.data.stream, self.run.clients.on_disk and self.last
        if not (stream or rows):
            return
        cohort: Cohort | None = None
        if not self.last:
            cohort = self.round.cohort if self.alone else self.cohort.next_phase(run)
        elif self.ctx.t + 1 < run.max_rounds and run.settings.asynchronous is None:
            cohort = Cohort.draw(run, self.ctx.t + 1)
        if stream:
            mine = cohort.shares[run.fabric.global_rank] if cohort else []
            upcoming = [run.minibatches(cohort.clients[p], cohort.contexts[p]) for p in mine] if cohort else []
            run.data.read_ahead([*(job.minibatches.indices for job in jobs), *(b.indices for b in upcoming)])
        if rows and cohort is not None:
            run.clients.read_ahead([k for k in cohort.clients if run.clients.owns(k)])
