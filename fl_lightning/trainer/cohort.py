"""The clients of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fl_lightning.core import ClientContext, State
from fl_lightning.engine import LocalResult
from fl_lightning.trainer.collectives import assign
from fl_lightning.trainer.faults import NO_FAULTS, Attendance, Faults
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.samplers import draw


@dataclass(frozen=True)
class Cohort:
    """The clients whose uploads arrive in a phase of a round, the same on every process.

    Attributes:
        t: The round, from 0.
        phase: The phase, from 0.
        asked: Number of clients that were drawn, or of a later phase those of the phase before.
        clients: Ids of those whose uploads arrive.
        contexts: The context that each trains in.
        shares: Positions of the cohort that each process trains.
        attendance: Who else received the server's state, and who failed.
        faults: How clients fail.
    """

    t: int
    phase: int
    asked: int
    clients: list[int]
    contexts: list[ClientContext]
    shares: list[list[int]]
    attendance: Attendance
    faults: Faults

    @classmethod
    def draw(cls, run: Run, t: int) -> Cohort:
        """The cohort of round ``t``, a function of (seed, t)."""
        return cls.of(run, draw(run.settings.sampler, t, run.data.num_clients, run.seed), t, run.settings.faults)

    @classmethod
    def drawn(cls, run: Run, t: int) -> Cohort:
        """All clients that are drawn for round ``t``, as if none failed; the first client if that is nobody."""
        return cls.of(run, draw(run.settings.sampler, t, run.data.num_clients, run.seed) or [0], t)

    @classmethod
    def of(cls, run: Run, clients: Sequence[int], t: int, faults: Faults = NO_FAULTS, phase: int = 0) -> Cohort:
        """Some clients as the cohort of round ``t``.

        Args:
            run: The run.
            clients: Their ids.
            t: The round, from 0.
            faults: How they fail; by default they do not.
            phase: The phase, from 0.
        """
        settings, data = run.settings, run.data
        asked = [data.batches_per_client(k, settings.local_epochs, settings.local_steps) for k in clients]
        attendance = faults.attendance(clients, asked, t, phase, run.seed)
        ctx, lr = run.round_context(t, phase), run.objective.lr(run.round_context(t))
        contexts = [
            ClientContext(**vars(ctx), lr=lr, K=K, k_lr=K * lr, n_k=int(data.client_sizes[k]), n_mean=run.mean_samples)
            for k, K in attendance.steps.items()
        ]
        shares = assign([*attendance.steps.values()], run.fabric.world_size)
        return cls(t, phase, len(clients), [*attendance.steps], contexts, shares, attendance, faults)

    def next_phase(self, run: Run) -> Cohort:
        """Those of these clients whose uploads arrive in the next phase, too."""
        return self.of(run, self.clients, self.t, self.faults, self.phase + 1)

    def nobody(self, run: Run) -> Cohort:
        """The same phase without clients."""
        return self.of(run, [], self.t, self.faults, self.phase)

    def arrived(self, result: LocalResult, seed: int) -> LocalResult:
        """A local result with the upload as it arrives.

        Args:
            result: A local result of this cohort.
            seed: Seed of the run.
        """
        upload = self.faults.in_flight(result.upload, result.received, result.client, result.ctx, seed)
        if upload is result.upload:
            return result
        return replace(result, upload=upload, finite=result.finite & State(upload).finite())
