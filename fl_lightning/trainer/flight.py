"""The clients of an asynchronous server: who trains, until when, and from which version of the model."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from math import ceil, inf
from statistics import fmean
from typing import Any, NamedTuple

from torch import Tensor

from fl_lightning.core import NonNegativeInt, State, ensure, fits
from fl_lightning.trainer.experiment import Experiment, Timing
from fl_lightning.trainer.participation import Asynchronous

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
        run: The run, without its state.
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

    def __init__(self, run: Experiment, rule: Asynchronous, timing: Timing, t: int, saved: Mapping[str, Any]) -> None:
        self.run, self.rule, self.timing, self.t, self.saved = run, rule, timing, t, saved
        self.now: float = saved.get("now", 0.0)
        self._tasks = [Task(*fields) for fields in saved.get("tasks", ())]
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
                tick = ceil(self.arrived[0].end / period * (1 - 1e-12)) * period  # 4.9 / 0.7 is above 7
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
        staleness, limit = self.t - task.version, self.rule.max_staleness
        late = limit is not None and staleness > limit
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
            attendance = run.settings.faults.attendance([client], [K], cohort, 0, run.seed)
            self.events.append(
                Event(self.t + 1, self.now, "start" if attendance.receivers else "absent", client, self.t)
            )
            if not attendance.receivers:
                self.failed["dropped"].append(client)
                continue
            end = self.now + sum(self.timing.spent(client, K))
            heappush(self._tasks, Task(end, self._starts, client, self.t, cohort, not attendance.steps))
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
            "sent": {
                v: dict(sent) if v == self.t else before[v] for v in sorted({task.version for task in self._tasks})
            },
            "events": [tuple(event) for event in self.events],
        }


FORM = {
    "now": float, "drawn": NonNegativeInt, "waiting": list[NonNegativeInt], "starts": NonNegativeInt,
    "refused": NonNegativeInt,
    "tasks": list[tuple[float, NonNegativeInt, NonNegativeInt, NonNegativeInt, NonNegativeInt, bool]],
    "sent": dict[NonNegativeInt, dict[str, Tensor]], "events": list,
}  # fmt: skip
"""What `Flight.after` returns: annotations by name."""


def is_flight(saved: Mapping[str, Any], run: Experiment, steps: int, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns whether the `RunState.training` of a checkpoint is what an asynchronous run has left.

    Args:
        saved: That value.
        run: The run that goes on.
        steps: Steps of its server so far.
        shapes: Shapes of the server's state.
    """
    names, m = run.objective.wire[0], run.data.num_clients
    return (
        fits(saved, FORM)
        and all(task.client < m and task.version in saved["sent"] for task in map(Task._make, saved["tasks"]))
        and max([*saved["waiting"], 0]) < m
        and max([*saved["sent"], 0]) < steps
        and all(
            {n: tuple(v.shape) for n, v in state.items()} == {n: shapes[n] for n in names}
            for state in saved["sent"].values()
        )
    )
