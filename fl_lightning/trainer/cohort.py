"""The clients of a round."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fl_lightning.core import ClientContext, State
from fl_lightning.engine import LocalResult
from fl_lightning.trainer.experiment import Timing
from fl_lightning.trainer.flight import Flight, Task
from fl_lightning.trainer.participation import NO_FAULTS, Attendance, Faults
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime.collectives import assign, owner


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
            return cls._landed(run, Flight(run, rule, timing, run.rounds_done, run.state.training))
        return cls.of(run, run.drawn(t), t, run.settings.faults, timing=run.timing)

    @classmethod
    def _landed(cls, run: Run, flight: Flight) -> Cohort:
        waves = list[list[Task]]()
        for task in flight.arrived:
            trained = [member.client for member in waves[-1]] if waves else []
            if not waves or waves[-1][0].version != task.version or task.client in trained:
                waves.append([])
            waves[-1].append(task)
        cohorts = list[Cohort]()
        for number, wave in enumerate(waves):
            cohort = cls.of(run, [task.client for task in wave], wave[0].version)
            contexts = [replace(ctx, drawn=task.draw) for ctx, task in zip(cohort.contexts, wave, strict=True)]
            times = {k: flight.timing.spent(k, K) for k, K in cohort.attendance.steps.items()}
            attendance = replace(cohort.attendance, receivers=0, times=times, seconds=None)
            if not number:
                failed = flight.failed
                attendance = replace(
                    attendance, receivers=flight.started, dropped=failed["dropped"], late=failed["late"]
                )
            waits = number + 1 < len(waves)
            faults = run.settings.faults
            cohorts.append(replace(cohort, contexts=contexts, attendance=attendance, faults=faults, waits=waits))
        clients = [task.client for task in flight.arrived]
        contexts = [ctx for cohort in cohorts for ctx in cohort.contexts]
        union = replace(cohorts[0], t=flight.t, asked=len(clients), clients=clients, contexts=contexts)
        return replace(union, flight=flight, waves=tuple(cohorts))

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
        contexts = {k: ctx for k, ctx in zip(self.clients, self.contexts, strict=True) if k in arrived}
        dropped = [k for k in self.clients if k not in contexts]
        attendance = replace(
            self.attendance,
            steps={k: self.attendance.steps[k] for k in contexts},
            dropped=[*self.attendance.dropped, *dropped],
            late=[k for k in self.attendance.late if k not in dropped],
        )
        return replace(
            self,
            clients=[*contexts],
            contexts=[*contexts.values()],
            shares=[[*range(len(contexts))]],
            attendance=attendance,
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
