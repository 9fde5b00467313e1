"""What is fixed in a run: processes, net and data, what the seed decides, and how weights are evaluated."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Literal

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn.functional import one_hot
from torch.optim.swa_utils import update_bn
from torchmetrics import Metric

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.metrics import Scores
from fl_lightning.algorithms.parts.buffers import Buffers
from fl_lightning.core import (
    ClientContext,
    FlatNet,
    RoundContext,
    State,
    UserError,
    accumulator_dtype,
    constants,
    digest,
    ensure,
    eval_mode,
    forward_at,
    generator,
    generators,
    seeded,
    to_device,
)
from fl_lightning.data import FederatedDataModule, Minibatches, MinibatchTable, Regression
from fl_lightning.engine import Engine, EngineName, engine_class
from fl_lightning.results.metrics import Mode
from fl_lightning.trainer.aggregation.base import Aggregation, Mean, Plan
from fl_lightning.trainer.participation.samplers import draw
from fl_lightning.trainer.runtime import collectives
from fl_lightning.trainer.settings import Kind, Settings

Split = Literal["train", "val", "test"]


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
        remedy = "make it on the CPU, or fill it by to_empty(device='cpu') and load_state_dict"
        for odd, what in (
            ([name for name, value in named if value.is_meta], f"on the meta device, without values; {remedy}"),
            ([name for name, value in named if value.is_inference()], "of torch.inference_mode(); make it outside"),
        ):
            ensure(not odd, f"model.net = {type(objective.net).__name__}: {', '.join(odd[:3])} {what}")
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


class Evaluator:
    """Evaluates weights of a net. Every process must call, in the same order.

    Args:
        fabric: The processes, which share the samples.
        objective: The local objective.
        data: The data.
        net: The flat view of the objective's net; evaluation moves it.
        dtype: Dtype of the weights.
        seed: Seed of the run, for nets that draw random numbers while their statistics are estimated.
    """

    def __init__(
        self,
        fabric: Fabric,
        objective: LocalObjective,
        data: FederatedDataModule,
        net: FlatNet,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self.fabric, self.objective, self.data, self.net = fabric, objective, data, net
        self.dtype, self.seed = dtype, seed
        self._estimated: list[tuple[Tensor, Tensor]] = []
        self._scores: dict[str, Scores] = {}
        self._of_client = False

    @property
    def by_batch(self) -> bool:
        """Whether evaluation normalizes each batch by its own statistics."""
        buffers = self.objective.net_buffers
        return buffers is not None and buffers.policy == "local" and not self._of_client

    @contextmanager
    def statistics_of(self, client: State) -> Iterator[None]:
        """Within it, evaluation normalizes by the statistics that a client keeps, if it keeps some."""
        buffers, self._of_client = self.objective.net_buffers, True
        if buffers is not None and "buffers" in client:
            buffers.load(self.objective.net, client.buffers)
        try:
            yield
        finally:
            self._of_client = False

    def logits(self, w: Tensor, x: Tensor, by_batch: bool = False) -> Tensor:
        """Returns the net's output at weights ``w``, ``(d,)``, in eval mode."""
        return forward_at(self.net, self.objective.net, w, x, self.fabric.autocast, by_batch)

    def evaluate(self, split: Split, w: Tensor, statistics: Tensor | None) -> dict[str, float]:
        """Returns the mean loss and the data's metric on a whole split.

        Args:
            split: "train" (all clients' data, not augmented), "val" or "test".
            w: Weights, ``(d,)``.
            statistics: The server's net buffers, ``(b,)``, if it keeps any.

        Returns:
            ``server/<split>/acc`` (or the metric's name), those of ``model.metrics``, ``server/<split>/loss``, and if
            the data name parts of the test set, their metrics as ``server/test_<part>/acc``.
        """
        rank, world = self.fabric.global_rank, self.fabric.world_size
        # normalized by batch, batches stay whole and the processes share them; otherwise they share samples
        share = (0, 1) if self.by_batch else (rank, world)
        parts = self.data.test_parts() if split == "test" else {}
        if not self.by_batch:
            parts = {part: of[rank::world] for part, of in parts.items()}
        values = self.measure(self.data.eval_batches(split, self.dtype, share), w, statistics, parts)
        return {f"server/{split}{name}": value for name, value in values.items()}

    def measure(
        self,
        batches: Iterable[tuple[Tensor, Tensor]],
        w: Tensor,
        statistics: Tensor | None,
        parts: Mapping[str, Tensor] | None = None,
    ) -> dict[str, float]:
        """Returns mean loss, the data's metric and those of ``model.metrics`` on batches; the net keeps its buffers.

        Args:
            batches: This process's samples; with ``model.buffers`` = local all of them on every process.
            w: Weights, ``(d,)``.
            statistics: The server's net buffers, ``(b,)``, if it keeps any.
            parts: Parts of the samples by name, boolean ``(n,)``.

        Returns:
            Each metric as ``/<name>``, of each part as ``_<part>/<name>``, and ``/loss``.
        """
        fabric, n, parts, buffers = self.fabric, 0, parts or {}, self.objective.net_buffers
        before = None if buffers is None else buffers.vector(self.objective.net)
        self.load_statistics(w, statistics)
        sums = torch.zeros(2, dtype=accumulator_dtype(fabric.device), device=fabric.device)  # of losses, and samples
        scores = {part: self._empty_scores(part) for part in ("", *parts)}
        for i, (x, y) in enumerate(batches):
            rows, n = slice(n, n + len(y)), n + len(y)
            if self.by_batch and i % fabric.world_size != fabric.global_rank:
                continue
            z, losses = self._outputs(w, x, y)
            sums += torch.stack([losses.sum().to(sums.dtype), sums.new_full((), len(y))])
            scores[""].update(z, y)
            for part, of in parts.items():
                if len(mine := of[rows].nonzero()[:, 0]):
                    here = to_device(mine, y.device)
                    scores[part].update(z[here], y[here])
        if buffers is not None and before is not None:
            buffers.load(self.objective.net, before)
        sums = torch.as_tensor(fabric.all_reduce(sums, reduce_op="sum"))
        found = {part: each.compute() for part, each in scores.items()}
        return {
            **{f"{part and '_'}{part}/{name}": v for part, of in found.items() for name, v in of.items()},
            "/loss": float(sums[0] / sums[1]),
        }

    def alone(self, batches: Iterable[tuple[Tensor, Tensor]], w: Tensor) -> tuple[float, float]:
        """Returns the data's metric and the mean loss on batches of this process alone, with the buffers in the net.

        Args:
            batches: At least one sample.
            w: Weights, ``(d,)``.
        """
        metric = self.data.metric()[1].to(self.fabric.device)
        metric.distributed_available_fn = lambda: False
        self._sum_exactly(metric)
        sums = torch.zeros(2, dtype=accumulator_dtype(self.fabric.device), device=self.fabric.device)
        for x, y in batches:
            z, losses = self._outputs(w, x, y)
            sums += torch.stack([losses.sum().to(sums.dtype), sums.new_full((), len(y))])
            metric.update(z, y)
        try:
            value = float(metric.compute())
        except ValueError as error:
            raise UserError(
                f"{type(metric).__name__} of {int(sums[1])} samples of a client: {error}; take a metric that few "
                "samples have"
            ) from None
        return value, float(sums[0] / sums[1])

    def by_class(self, batches: Iterable[tuple[Tensor, Tensor]], w: Tensor) -> Tensor:
        """Returns correct predictions, losses and samples of each class, with the buffers that the net holds.

        Args:
            batches: This process's samples, with one class each.
            w: Weights, ``(d,)``.

        Returns:
            Sums over this process's samples, ``(3, num_classes)``.
        """
        classes, device = self.data.num_classes, self.fabric.device
        sums = torch.zeros(3, classes, dtype=accumulator_dtype(device), device=device)
        for x, y in batches:
            z, losses = self._outputs(w, x, y)
            rows = torch.stack([(z.argmax(1) == y).to(sums.dtype), losses.to(sums.dtype), torch.ones_like(y).to(sums)])
            sums += rows @ one_hot(y, classes).to(sums.dtype)  # in an order that does not vary
        return sums

    def _outputs(self, w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns outputs for the data's classes, ``(n, C, ...)``, and the loss of each sample, ``(n,)``."""
        z = self.logits(w, x, self.by_batch).to(self.dtype)
        return z[:, : self.data.num_classes], self.objective.evaluation_loss(z, y)

    def _empty_scores(self, part: str) -> Scores:
        """Returns the metrics without samples; they are moved to the device once a run."""
        if part not in self._scores:
            self._scores[part] = scores = self.objective.scores(self.data).to(self.fabric.device)
            for metric in (module for module in scores.modules() if isinstance(module, Metric)):
                metric.dist_sync_fn = collectives.gather_states
                self._sum_exactly(metric)
        self._scores[part].reset()
        return self._scores[part]

    def _sum_exactly(self, metric: Metric) -> None:
        """Lets a metric of numbers sum in float64; those of classes count."""
        if isinstance(self.data.task, Regression) and accumulator_dtype(self.fabric.device) == torch.float64:
            metric.set_dtype(torch.float64)

    def load_statistics(self, w: Tensor, statistics: Tensor | None) -> None:
        """Loads the buffers that weights are evaluated with into the net.

        With ``model.buffers`` = average these are the server's; reset: the initial ones, with BatchNorm's statistics
        estimated on the training data at ``w``; local: the initial ones.

        Args:
            w: Weights, ``(d,)``.
            statistics: The server's net buffers, ``(b,)``; None: the initial ones.
        """
        buffers, net = self.objective.net_buffers, self.objective.net
        if buffers is None:
            return
        if buffers.policy == "reset":
            statistics = next((found for at, found in self._estimated if at is w), None)
            if statistics is None:
                buffers.load(net, buffers.first)
                statistics = self._estimate(w, buffers)
                self._estimated = [(w, statistics), *self._estimated[:1]]  # the server's model, and an average
        buffers.load(net, buffers.first if statistics is None else statistics)

    def _estimate(self, w: Tensor, buffers: Buffers) -> Tensor:
        """Returns buffers at ``w``, ``(b,)``, by torch's update_bn: means over all batches of their statistics."""
        fabric, net, seen = self.fabric, self.objective.net, 0

        def mine() -> Iterator[Tensor]:
            nonlocal seen
            for i, (x, _) in enumerate(self.data.eval_batches("train", self.dtype)):
                if i % fabric.world_size == fabric.global_rank:
                    seen += 1
                    yield x

        self.net.move_to(w)
        with eval_mode(net), fabric.autocast(), seeded(fabric.device, self.seed, "statistics"):  # restores all modes
            update_bn(mine(), net)
        sums = buffers.vector(net) * seen
        total = collectives.all_reduce_sum(fabric, torch.cat([sums, sums.new_tensor([seen])]))
        return total[:-1] / total[-1] if total[-1] else buffers.first  # without BatchNorm no batch was read
