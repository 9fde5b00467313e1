"""What is fixed in a run: processes, net and data, what the seed decides, and the seconds of the clients' devices."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import accumulate
from warnings import warn

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.core import (
    ClientContext,
    FlatNet,
    RoundContext,
    constants,
    digest,
    ensure,
    generator,
    generators,
    load_buffers,
    numpy_generator,
)
from fl_lightning.data import FederatedDataModule, Minibatches, MinibatchTable
from fl_lightning.engine import Engine, EngineName, Exchange, engine_class
from fl_lightning.results.metrics import Mode
from fl_lightning.trainer.aggregation.base import Aggregation, Mean, Plan
from fl_lightning.trainer.evaluation import Evaluator
from fl_lightning.trainer.participation import Attendance, Clock, Device, Stragglers, draw
from fl_lightning.trainer.settings import Kind, Settings


class Experiment:
    """What a run trains: a net on clients' data, by settings. No round changes it.

    The constructor launches the processes, sets up the data, and moves the objective to its device; it writes nothing.

    Args:
        settings: The trainer's settings.
        objective: The local objective.
        data: The clients' data.
        kind: Federated or centralized training.
        varied: Settings of the objective that differ between runs trained as one program, by name.

    Attributes:
        fabric: Devices and processes.
        seed: Seed of the run.
        max_rounds: Number of rounds, T.
        dtype: Dtype of weights and state.
        name: Name of the experiment, which its runs share.
        net: The flat view of the objective's net.
        frozen: Hash of the net's frozen parameters, "" if it has none.
        evaluator: Evaluates weights.
        aggregation: Combines the uploads of a cohort into one update.
        private: Whether noise of a secret key protects the clients.
        mean_samples: Mean number of samples of a client.

    Raises:
        UserError: If the data do not fit, or the net cannot be trained.
    """

    def __init__(
        self,
        settings: Settings,
        objective: LocalObjective,
        data: FederatedDataModule,
        kind: Kind = "federated",
        varied: Mapping[str, float] | None = None,
    ) -> None:
        self.settings, self.objective, self.data, self.kind = settings, objective, data, kind
        self.varied = dict(varied or {})
        self.fabric, self.seed = settings.fabric, settings.seed
        objective._began_relaxed = objective.relaxed_init != 0
        self.max_rounds, self.dtype = settings.max_rounds, settings.dtype
        self.name = settings.run_name(objective, data, kind)
        settings.launch()
        if self.fabric.local_rank == 0:
            data.prepare_data()
        self.fabric.barrier()
        data.setup("fit")
        data.to(self.fabric.device)
        self.mean_samples = float(data.client_sizes.double().mean())
        tensors = (*objective.net.named_parameters(), *objective.net.named_buffers())
        inference_names = ", ".join([name for name, value in tensors if value.is_inference()][:3])
        net = type(objective.net).__name__
        ensure(not inference_names, f"model.net = {net}: {inference_names} of torch.inference_mode(); make it outside")
        objective.flat.check(objective.net)
        objective.to(device=self.fabric.device, dtype=self.dtype)
        self.net, frozen = FlatNet(objective.net), constants(objective.net)
        if self.fabric.world_size > 1:
            # every process gets the values of rank 0, through the CPU: what is broadcast keeps the device of rank 0
            for value in frozen.values():
                value.copy_(self.fabric.broadcast(value.cpu()))
            others = [(name, buffer) for name, buffer in objective.net.named_buffers() if name not in frozen]
            load_buffers(objective.net, {name: self.fabric.broadcast(buffer.cpu()) for name, buffer in others})
        self.frozen = digest(frozen)
        if (buffers := objective.net_buffers) is not None:
            buffers.take(objective.net)
            buffers.first = buffers.first.to(self.fabric.device, self.dtype)
        self.evaluator = Evaluator(self.fabric, objective, data, self.net, self.dtype, self.seed)
        stragglers = settings.faults.stragglers
        shortens = settings.clock is not None and settings.clock.shortens
        fewer_steps = shortens or (stragglers is not None and stragglers.late == "partial")
        steps = None if fewer_steps else settings.local_steps
        plan = Plan(objective, settings.sampler, data.num_clients, settings.max_rounds, steps)
        self.aggregation: Aggregation = settings.aggregation.bind(plan) if kind == "federated" else Mean()
        if self.aggregation.noise_key is not None:  # every process draws the cohorts
            self.aggregation.noise_key = self.fabric.broadcast(self.aggregation.noise_key)
        seed = getattr(self.aggregation, "noise_seed", None)
        self.private = self.aggregation.noise_key is not None and seed is None

    def round_context(self, t: int, phase: int = 0) -> RoundContext:
        """Returns the context of round ``t``."""
        return RoundContext(t, self.max_rounds, self.data.num_clients, self.objective.flat, phase)

    def drawn(self, t: int) -> list[int]:
        """Returns the clients drawn for round ``t``, a function of (seed, t), or of a secret under privacy."""
        return draw(self.settings.sampler, t, self.data.num_clients, self.aggregation.cohort_seed(self.seed))

    def minibatches(self, client: int, ctx: ClientContext) -> Minibatches:
        """Returns a client's minibatches, a function of (seed, round, phase, client); epochs alone come first."""
        objective, data, settings = self.objective, self.data, self.settings
        alone, own_part = objective.alone(ctx) is not None, objective.own_part
        phase, count = 0 if alone else ctx.phase, ctx.K
        ahead = 0 if own_part is None or phase else data.batches_per_client(client, own_part.epochs_alone, None)
        if ahead:
            count = max(count, ahead + settings.asked(data, client))
        draw = generator(self.seed, "batches", ctx.stream, phase, client)
        batches = data.client_batches(client, settings.local_epochs, count, draw, self.dtype)
        first = 0 if alone else ahead
        return batches.take(range(first, first + ctx.K)) if ahead else batches

    def minibatch_table(self, clients: Sequence[int], contexts: Sequence[ClientContext]) -> MinibatchTable:
        """Returns the minibatches of many clients who train nothing by themselves, drawn at once."""
        keys = [(ctx.stream, ctx.phase, k) for k, ctx in zip(clients, contexts, strict=True)]
        samples, counts = self.data.clients.arrays(clients), [ctx.K for ctx in contexts]
        return self.data.minibatch_table(samples, counts, generators(self.seed, "batches", keys), self.dtype)

    def make_engine(self, name: EngineName, compile: bool = True) -> Engine:
        """Returns an engine for this run's objective; without ``compile`` not even one compiles that should."""
        block, compile = self.settings.client_block, self.settings.compile and compile
        return engine_class(name)(self.objective, self.net, self.fabric.autocast, block, compile)

    @cached_property
    def directions(self) -> dict[str, Mode]:
        """Whether large or small values of what is evaluated are good, by the metric's name, the data's first."""
        return self.objective.scores(self.data).directions()

    def evaluates(self, round: int) -> bool:
        """Returns whether evaluation is due when ``round`` rounds are done."""
        return round % self.settings.eval_every == 0 or round > self.max_rounds - self.settings.eval_last


LONGEST = 1e15
"""Most seconds of a client in a phase; in sums of longer ones those of the others would be lost."""


class Timing:
    """The clock of one run.

    Args:
        settings: The trainer's settings.
        clock: Its clock.
        objective: The local objective.
        data: The clients' data.
        contract: What a dry step has shown of each phase.

    Attributes:
        uneven: Whether fast clients may take part more often than slow ones.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        objective: LocalObjective,
        data: FederatedDataModule,
        contract: Mapping[int, Exchange],
    ) -> None:
        self.clock, self.objective, self.data, self.settings = clock, objective, data, settings
        self.seed, self.wanted = settings.seed, settings.wanted
        self.uneven = clock.leaves_out or settings.asynchronous is not None
        self.speeds = settings.faults.stragglers or Stragglers(1.0, sigma=clock.sigma)
        ensure(
            not (clock.shortens and objective.trains_alone),
            "trainer.clock.late = partial: clients also train before the round; set it to lost",
        )
        self.contract = contract
        self.device, self._place = cache(self._device), cache(self._placed)
        self._nobody = cache(partial(warn, stacklevel=2))  # once a run

    def _device(self, client: int) -> Device:
        """Returns a client's device, a function of the file or of (seed, client)."""
        rows, m, median = self.clock.rows, self.data.num_clients, self.clock.median
        n = len(rows)
        if n:
            return rows[client if n >= m else numpy_generator(self.seed, "devices").permutation(n)[client % n]]
        bandwidth = float(numpy_generator(self.seed, "bandwidth", client).lognormal(0.0, self.clock.bandwidth_sigma))
        seconds = median.sec_per_sample / self.speeds.speed(client, self.seed)
        return Device(seconds, median.down_mbps * bandwidth, median.up_mbps * bandwidth, median.latency_s)

    def spent(self, client: int, K: int, phase: int = 0) -> tuple[float, float]:
        """Returns the seconds in which a client computes its K steps of a phase, and those in which it exchanges.

        Training before the round, by itself, belongs to the first phase.
        """
        data, objective, device = self.data, self.objective, self.device(client)
        own_part, size, before = objective.own_part, len(self.data.clients[client]), 0.0
        if own_part is not None and own_part.trains_alone and not phase:
            alone = data.batches_per_client(client, own_part.epochs_alone, None) if own_part.epochs_alone else K
            before = device.compute_s(sum(data.batch_sizes(size, alone)), *self.contract[objective.phases].passes)
        computed = before + device.compute_s(sum(data.batch_sizes(size, K)), *self.contract[phase].passes)
        comm = device.comm_s(*self.contract[phase].bits)
        ensure(
            computed + comm <= LONGEST,
            f"trainer.clock: client {client} takes {computed + comm:.3g} seconds; give devices and bandwidths with "
            f"which it takes at most {LONGEST:.0e}",
        )
        return computed, comm

    def _placed(self, client: int) -> tuple[float, int]:
        """Returns what sorts the clients by the seconds of a whole task."""
        return sum(self.spent(client, self.settings.asked(self.data, client))), client

    @cached_property
    def _tenths(self) -> list[tuple[float, int]]:
        """Returns the first places of the second to the last tenth of the clients, of up to 1,000 of them."""
        places = sorted(map(self._place, range(0, m := self.data.num_clients, -(-m // 1000))))
        return [places[len(places) * tenth // 10] for tenth in range(1, 10)]

    def attendance(self, attendance: Attendance, phase: int) -> Attendance:
        """Returns who is done before the server stops waiting, and when that is.

        Args:
            attendance: Who answers at all.
            phase: The phase.
        """
        deadline, wanted = self.clock.deadline_s or float("inf"), None if phase else self.wanted
        times = {k: self.spent(k, K, phase) for k, K in attendance.steps.items()}
        late = [k for k, spent in times.items() if sum(spent) > deadline]
        steps = {k: self._steps(k, K, phase) if k in late else K for k, K in attendance.steps.items()}
        done = [k for k, K in steps.items() if K]
        if late and not done:
            self._nobody(
                f"trainer.clock.deadline_s = {deadline}: nobody is done in time in some round, which leaves the model "
                "as it is; see client/late"
            )
        ends = {k: deadline if k in late else sum(times[k]) for k in done}
        first = {*sorted(done, key=ends.__getitem__)[:wanted]}  # of two at the same time, the first one of the cohort
        counted = {k: steps[k] for k in done if k in first}
        return replace(
            attendance,
            steps=counted,
            late=[*attendance.late, *(k for k in attendance.steps if k not in counted or (k in late and not phase))],
            times={k: self.spent(k, K, phase) if k in late else times[k] for k, K in counted.items()},
            seconds=deadline if late and len(counted) != wanted else max((ends[k] for k in counted), default=0.0),
        )

    def _steps(self, client: int, asked: int, phase: int) -> int:
        """Returns the whole steps for which a client that is late has time."""
        if not self.clock.shortens:
            return 0
        device, left = self.device(client), (self.clock.deadline_s or 0.0) - self.spent(client, 0, phase)[1]
        samples = accumulate(self.data.batch_sizes(len(self.data.clients[client]), asked))
        return sum(device.compute_s(n, *self.contract[phase].passes) <= left for n in samples)

    def metrics(self, before: Mapping[str, float], phases: Sequence[Attendance]) -> dict[str, float]:
        """Returns the metrics of a round.

        Args:
            before: The latest value of every metric.
            phases: Who has answered in each phase.
        """
        spent = {"time_s": self.clock.server_s, "compute_s": 0.0, "comm_s": 0.0, "idle_s": 0.0}
        spent |= {f"uploads_{tenth}": 0.0 for tenth in range(1, 11) if self.uneven}
        for attendance in phases:
            spent["time_s"] += attendance.seconds or 0.0
            for k, (compute, comm) in attendance.times.items():
                if self.uneven:
                    spent[f"uploads_{1 + bisect_right(self._tenths, self._place(k))}"] += 1
                spent["compute_s"] += compute
                spent["comm_s"] += comm
                spent["idle_s"] += 0.0 if attendance.seconds is None else attendance.seconds - (compute + comm)
        return {f"clock/{name}": before.get(f"clock/{name}", 0.0) + value for name, value in spent.items()}
