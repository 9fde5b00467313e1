"""The clients of a round; of an asynchronous server: who trains, until when, and from which version of the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import ceil, inf
from statistics import fmean
from typing import Any, NamedTuple

from torch import Tensor

from fl_lightning.core import ClientContext, NonNegativeInt, State, ensure, fits
from fl_lightning.engine import LocalResult
from fl_lightning.trainer.experiment import Timing
from fl_lightning.trainer.participation import NO_FAULTS, Asynchronous, Attendance, Faults
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime.collectives import assign, owner

EVENTS = "events.csv"
"""In the run folder: a line for each event."""
COHORTS = 1000
"""Cohorts that are drawn at one moment until somebody can start."""
UPLOADS = 10_000
"""Most uploads of a period."""


class Task(NamedTuple):
    """A client's local training, from its download to its upload.

    Attributes:
        end: When the upload arrives, in seconds.
        number: How many tasks started before.
        client: The client.
        version: Server steps before its start.
        draw: The cohort that the client was drawn with.
        lost: Whether the upload does not arrive.
    """

    end: float
    number: int
    client: int
    version: int
    draw: int
    lost: bool


class Event(NamedTuple):
    """A line of ``events.csv``.

    Attributes:
        step: The server's step that follows, from 1.
        time_s: Seconds since the start.
        event: start, arrival, lost (its upload is), late (older than ``max_staleness``), absent, or step.
        client: The client; none in a step.
        version: The version of the model that the client has received; of a step, the one that it makes.
        staleness: Server steps between start and arrival; of a step their mean.
    """

    step: int
    time_s: float
    event: str
    client: int | None
    version: int | None = None
    staleness: float | None = None


class Flight:
    """What happens from one step of an asynchronous server to the next; no training changes it.

    At one moment uploads arrive first, in the order of their starts, with the steps that they cause. Then clients
    start.

    Args:
        run: The run; of its state nothing is read.
        rule: When the server steps.
        timing: The clock.
        t: Steps of the server so far.
        saved: What `after` has returned after the last one; empty before the first.

    Attributes:
        now: Seconds until the server's step.
        arrived: The tasks whose uploads are in it, in the order of their starts.
        started: Number of clients that have started since the last step.
        passed: Number of clients that were drawn while they trained.
        failed: Clients whose uploads are lost, late or that were absent, by kind.
        refused: Uploads that were not finite, since the last one that was.
        slots: Number of clients that train at once.
        events: The events since the last step.
    """

    def __init__(self, run: Run, rule: Asynchronous, timing: Timing, t: int, saved: Mapping[str, Any]) -> None:
        self.run, self.rule, self.timing, self.t, self.saved = run, rule, timing, t, saved
        self.now: float = saved.get("now", 0.0)
        self._tasks = [Task(*of) for of in saved.get("tasks", ())]
        self._drawn: int = saved.get("drawn", 0)
        self._waiting: list[int] = [*saved.get("waiting", ())]
        self._starts: int = saved.get("starts", 0)
        self.refused: int = saved.get("refused", 0)
        heapify(self._tasks)
        self.slots = rule.concurrency or max(len(run.drawn(0)), 1)
        self.arrived, self.events = list[Task](), list[Event]()
        self.started = self.passed = 0
        self.failed: dict[str, list[int]] = {"dropped": [], "late": []}
        self._advance()
        self.arrived.sort(key=lambda task: task.number)
        self.staleness = [self.t - task.version for task in self.arrived]
        self.events.append(Event(self.t + 1, self.now, "step", None, self.t + 1, fmean(self.staleness)))

    def _advance(self) -> None:
        """Goes on until the server steps."""
        while True:
            period, tick = self.rule.period_s, inf
            if period is not None and self.arrived:  # the first one after the first arrival
                tick = ceil(self.arrived[0].end / period) * period
                ensure(
                    len(self.arrived) <= UPLOADS,
                    f"trainer.asynchronous.period_s = {period:g}: more than {UPLOADS:,} uploads arrive in one period; "
                    "give fewer seconds",
                )
            if self._tasks and self._tasks[0].end <= self.now:
                self._arrive(heappop(self._tasks))
                if len(self.arrived) == self.rule.buffer:
                    return
            elif self.now >= tick:
                return
            else:
                self._start()
                ensure(
                    bool(self._tasks),
                    f"trainer.asynchronous: nobody can start in {COHORTS} cohorts of "
                    f"{type(self.run.settings.sampler).__name__}; check trainer.faults",
                )
                self.now = min(self._tasks[0].end, tick)

    def _arrive(self, task: Task) -> None:
        staleness, most = self.t - task.version, self.rule.max_staleness
        late = most is not None and staleness > most
        kind = "lost" if task.lost else "late" if late else "arrival"
        self.events.append(Event(self.t + 1, self.now, kind, task.client, task.version, staleness))
        if kind == "arrival":
            self.arrived.append(task)
        else:
            self.failed["dropped" if task.lost else "late"].append(task.client)

    def _start(self) -> None:
        """Starts clients until all slots are taken."""
        run, busy, until = self.run, {task.client for task in self._tasks}, self._drawn + COHORTS
        while len(self._tasks) < self.slots and (self._waiting or self._drawn < until):
            if not self._waiting:
                self._waiting, self._drawn = run.drawn(self._drawn), self._drawn + 1
                continue
            client, cohort = self._waiting.pop(0), self._drawn - 1
            if client in busy:
                self.passed += 1
                continue
            K = run.settings.asked(run.data, client)
            found = run.settings.faults.attendance([client], [K], cohort, 0, run.seed)
            self.events.append(Event(self.t + 1, self.now, "start" if found.receivers else "absent", client, self.t))
            if not found.receivers:
                self.failed["dropped"].append(client)
                continue
            end = self.now + sum(self.timing.spent(client, K))
            heappush(self._tasks, Task(end, self._starts, client, self.t, cohort, not found.steps))
            busy.add(client)
            until, self._starts, self.started = self._drawn + COHORTS, self._starts + 1, self.started + 1

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the step."""
        return {
            "client/staleness": fmean(self.staleness),
            "client/staleness_max": max(self.staleness),
            "client/started": self.started,
            "client/busy": self.passed,
            "clock/time_s": self.now,
        }

    def after(self, sent: State) -> dict[str, Any]:
        """Returns what the next step needs, for `RunState.training`.

        Args:
            sent: What the clients that have started since the last step have received.
        """
        before: Mapping[int, Mapping[str, Any]] = self.saved.get("sent", {})
        return {
            "now": self.now,
            "tasks": [tuple(task) for task in sorted(self._tasks)],
            "drawn": self._drawn,
            "waiting": self._waiting,
            "starts": self._starts,
            "refused": self.refused,
            "sent": {v: dict(sent) if v == self.t else before[v] for v in sorted({of.version for of in self._tasks})},
            "events": [tuple(event) for event in self.events],
        }


FORM = {
    "now": float, "drawn": NonNegativeInt, "waiting": list[NonNegativeInt], "starts": NonNegativeInt,
    "refused": NonNegativeInt,
    "tasks": list[tuple[float, NonNegativeInt, NonNegativeInt, NonNegativeInt, NonNegativeInt, bool]],
    "sent": dict[NonNegativeInt, dict[str, Tensor]], "events": list,
}  # fmt: skip
"""What `Flight.after` returns: annotations by name."""


def is_flight(saved: Mapping[str, Any], run: Run, steps: int, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns whether the `RunState.training` of a checkpoint is what an asynchronous run has left.

    Args:
        saved: It.
        run: The run that goes on.
        steps: Steps of its server so far.
        shapes: Shapes of the server's state.
    """
    names, m = run.objective.wire[0], run.data.num_clients
    return (
        fits(saved, FORM)
        and all(of.client < m and of.version in saved["sent"] for of in map(Task._make, saved["tasks"]))
        and max([*saved["waiting"], 0]) < m
        and max([*saved["sent"], 0]) < steps
        and all(
            {n: tuple(v.shape) for n, v in of.items()} == {n: shapes[n] for n in names} for of in saved["sent"].values()
        )
    )


@dataclass(frozen=True)
class Cohort:
    """The clients whose uploads arrive in a phase of a round, the same on every process.

    Attributes:
        t: The round, from 0.
        phase: The phase, from 0.
        asked: Number of clients drawn for the round; in a later phase, number of clients of the phase before.
        clients: Ids of the clients whose uploads arrive.
        contexts: Context that each client trains in.
        shares: Positions of the cohort that each process trains.
        attendance: Which other clients received the server's state, and which failed.
        faults: How clients fail.
        timing: The clock, if it decides who is too late.
        flight: Of a step of an asynchronous server: its clients, of which some may be there twice.
        waves: The same clients as cohorts that have received the same model, each client once.
        waits: Whether the server waits for another wave.
    """

    t: int
    phase: int
    asked: int
    clients: list[int]
    contexts: list[ClientContext]
    shares: list[list[int]]
    attendance: Attendance
    faults: Faults
    timing: Timing | None = None
    flight: Flight | None = None
    waves: tuple[Cohort, ...] = ()
    waits: bool = False

    @classmethod
    def draw(cls, run: Run, t: int) -> Cohort:
        """Returns the cohort of round ``t``, a function of (seed, t), or of a secret under privacy.

        Without rounds it is that of the server's next step, a function of the run's state.
        """
        rule, timing = run.settings.asynchronous, run.timing
        if rule is not None and timing is not None:
            return cls._landed(run, Flight(run, rule, timing, run.rounds_done, run.state.training), timing)
        return cls.of(run, run.drawn(t), t, run.settings.faults, timing=run.timing)

    @classmethod
    def _landed(cls, run: Run, flight: Flight, timing: Timing) -> Cohort:
        waves = list[list[Task]]()
        for task in flight.arrived:
            if not waves or waves[-1][0].version != task.version or task.client in [of.client for of in waves[-1]]:
                waves.append([])
            waves[-1].append(task)
        cohorts = list[Cohort]()
        for number, wave in enumerate(waves):
            of = cls.of(run, [task.client for task in wave], wave[0].version)
            contexts = [replace(ctx, drawn=task.draw) for ctx, task in zip(of.contexts, wave, strict=True)]
            times = {k: timing.spent(k, K) for k, K in of.attendance.steps.items()}
            attendance = replace(of.attendance, receivers=0, times=times, seconds=None)
            if not number:
                failed = flight.failed
                attendance = replace(
                    attendance, receivers=flight.started, dropped=failed["dropped"], late=failed["late"]
                )
            waits = number + 1 < len(waves)
            faults = run.settings.faults
            cohorts.append(replace(of, contexts=contexts, attendance=attendance, faults=faults, waits=waits))
        clients, contexts = [task.client for task in flight.arrived], [ctx for of in cohorts for ctx in of.contexts]
        whole = replace(cohorts[0], t=flight.t, asked=len(clients), clients=clients, contexts=contexts)
        return replace(whole, flight=flight, waves=tuple(cohorts))

    @classmethod
    def drawn(cls, run: Run, t: int) -> Cohort:
        """Returns all clients drawn for round ``t``, as if none failed; if nobody is drawn, the first client."""
        return cls.of(run, run.drawn(t) or [0], t)

    @classmethod
    def of(
        cls,
        run: Run,
        clients: Sequence[int],
        t: int,
        faults: Faults = NO_FAULTS,
        phase: int = 0,
        timing: Timing | None = None,
    ) -> Cohort:
        """Returns some clients as the cohort of round ``t``.

        Args:
            run: The run.
            clients: Their ids.
            t: The round, from 0.
            faults: How they fail; by default they do not.
            phase: The phase, from 0.
            timing: The clock that says who is too late; None: nobody is.
        """
        settings, data = run.settings, run.data
        asked = [settings.asked(data, k) for k in clients]
        attendance = faults.attendance(clients, asked, t, phase, run.seed)
        attendance = attendance if timing is None else timing.attendance(attendance, phase)
        ctx, lr = run.round_context(t, phase), run.objective.lr(run.round_context(t))
        asked_of = dict(zip(clients, asked, strict=True))
        of_run, sizes = {**vars(ctx), "lr": lr, "n_mean": run.mean_samples}, data.client_sizes.numpy()
        contexts = [
            ClientContext(**of_run, K=K, K_missed=asked_of[k] - K, k_lr=K * lr, n_k=int(sizes[k]))
            for k, K in attendance.steps.items()
        ]
        wishes = [*attendance.steps] if run.clients.inits else []
        shares = assign([*attendance.steps.values()], run.fabric.world_size, wishes)
        return cls(t, phase, len(clients), [*attendance.steps], contexts, shares, attendance, faults, timing)

    @property
    def trainers(self) -> dict[int, int]:
        """Which process trains each client, by id."""
        return {self.clients[p]: rank for rank, share in enumerate(self.shares) for p in share}

    @property
    def moves(self) -> dict[int, tuple[int, int]]:
        """The clients that another process than their owner trains: by id, their owner and that process."""
        pairs = {k: (owner(k, len(self.shares)), rank) for k, rank in self.trainers.items()}
        return {k: pair for k, pair in pairs.items() if pair[0] != pair[1]}

    def next_phase(self, run: Run) -> Cohort:
        """Returns the clients of this cohort that also answer in the next phase."""
        return self.of(run, self.clients, self.t, self.faults, self.phase + 1, self.timing)

    def alone(self, run: Run, epochs: int) -> Cohort:
        """Returns the same clients in what they train by themselves; see `Part.trains_alone`.

        Args:
            run: The run.
            epochs: Epochs; 0: as many steps as in the round.
        """
        phase, contexts = run.objective.phases, []
        for k, ctx in zip(self.clients, self.contexts, strict=True):
            K = run.data.batches_per_client(k, epochs, None) if epochs else ctx.K
            contexts.append(replace(ctx, phase=phase, K=K, K_missed=0, k_lr=K * ctx.lr))
        return replace(self, phase=phase, contexts=contexts)

    def only(self, arrived: Collection[int]) -> Cohort:
        """Returns the cohort of one process after all but some of its clients have dropped out."""
        here = {k: ctx for k, ctx in zip(self.clients, self.contexts, strict=True) if k in arrived}
        dropped = [k for k in self.clients if k not in here]
        attendance = replace(
            self.attendance,
            steps={k: self.attendance.steps[k] for k in here},
            dropped=[*self.attendance.dropped, *dropped],
            late=[k for k in self.attendance.late if k not in dropped],
        )
        return replace(
            self, clients=[*here], contexts=[*here.values()], shares=[[*range(len(here))]], attendance=attendance
        )

    def arrived(self, result: LocalResult, known: State, seed: int) -> LocalResult:
        """Returns a local result with the upload as it arrives.

        Args:
            result: A local result of this cohort.
            known: What the clients received, as it has travelled.
            seed: Seed of the run.
        """
        if self.faults.corrupt is None:
            return result
        upload = self.faults.corrupt(result.upload, known, result.client, result.ctx, seed)
        return replace(result, upload=upload, finite=result.finite & State(upload).finite())
