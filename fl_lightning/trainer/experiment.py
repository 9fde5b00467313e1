"""What is fixed in a run: processes, net and data, and what the seed decides."""

from collections.abc import Mapping, Sequence
from functools import cached_property

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
)
from fl_lightning.data import FederatedDataModule, Minibatches, MinibatchTable
from fl_lightning.engine import Engine, EngineName, engine_class
from fl_lightning.results.metrics import Mode
from fl_lightning.trainer.aggregation.base import Aggregation, Mean, Plan
from fl_lightning.trainer.evaluation import Evaluator
from fl_lightning.trainer.participation.samplers import draw
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
        named = (*objective.net.named_parameters(), *objective.net.named_buffers())
        odd = ", ".join([name for name, value in named if value.is_inference()][:3])
        net = type(objective.net).__name__
        ensure(not odd, f"model.net = {net}: {odd} of torch.inference_mode(); make it outside")
        objective.flat.check(objective.net)
        objective.to(device=self.fabric.device, dtype=self.dtype)
        self.net, frozen = FlatNet(objective.net), constants(objective.net)
        # every process gets the values of rank 0, through the CPU: what is broadcast keeps the device of rank 0
        for value in frozen.values() if self.fabric.world_size > 1 else ():
            value.copy_(self.fabric.broadcast(value.cpu()))
        self.frozen = digest(frozen)
        if (buffers := objective.net_buffers) is not None:
            buffers.take(objective.net)
            buffers.first = self.fabric.broadcast(buffers.first.cpu()).to(self.fabric.device, self.dtype)
        self.evaluator = Evaluator(self.fabric, objective, data, self.net, self.dtype, self.seed)
        fewer = settings.faults.stragglers is not None or (settings.clock is not None and settings.clock.shortens)
        steps = None if fewer else settings.local_steps
        plan = Plan(objective, settings.sampler, data.num_clients, settings.max_rounds, steps)
        self.aggregation: Aggregation = settings.aggregation.bind(plan) if kind == "federated" else Mean()
        if self.aggregation.noise_key is not None:  # every process draws the cohorts
            self.aggregation.noise_key = self.fabric.broadcast(self.aggregation.noise_key)

    @property
    def private(self) -> bool:
        """Whether noise of a secret key protects the clients."""
        rule = self.aggregation
        return rule.noise_key is not None and getattr(rule, "noise_seed", None) is None

    def round_context(self, t: int, phase: int = 0) -> RoundContext:
        """Returns the context of round ``t``."""
        return RoundContext(t, self.max_rounds, self.data.num_clients, self.objective.flat, phase)

    def drawn(self, t: int) -> list[int]:
        """Returns the clients drawn for round ``t``, a function of (seed, t), or of a secret under privacy."""
        return draw(self.settings.sampler, t, self.data.num_clients, self.aggregation.cohort_seed(self.seed))

    def minibatches(self, client: int, ctx: ClientContext) -> Minibatches:
        """Returns a client's minibatches, a function of (seed, round, phase, client); epochs alone come first."""
        objective, data, of = self.objective, self.data, self.settings
        alone, own = objective.alone(ctx) is not None, objective.own_part
        phase, count = 0 if alone else ctx.phase, ctx.K
        ahead = 0 if own is None or phase else data.batches_per_client(client, own.epochs_alone, None)
        if ahead:
            count = max(count, ahead + of.asked(data, client))
        draw = generator(self.seed, "batches", ctx.stream, phase, client)
        batches, first = data.client_batches(client, of.local_epochs, count, draw, self.dtype), 0 if alone else ahead
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
