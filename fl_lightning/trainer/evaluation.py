"""Evaluation of weights, which fit, validate, test, corruptions and measurements share."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from lightning.fabric import Fabric
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.optim.swa_utils import update_bn
from torchmetrics import Metric

from fl_lightning.algorithms.base import LocalObjective
from fl_lightning.algorithms.metrics import Scores
from fl_lightning.algorithms.parts.buffers import Buffers
from fl_lightning.core import (
    FlatNet,
    State,
    UserError,
    Watched,
    accumulator_dtype,
    contents_kept,
    ensure,
    eval_mode,
    folded,
    forward_at,
    seeded,
    to_device,
)
from fl_lightning.data import FederatedDataModule, Regression
from fl_lightning.trainer.runtime import collectives

Split = Literal["train", "val", "test"]
MISFIT = (RuntimeError, ValueError, IndexError, TypeError, AttributeError)
"""Errors that a net or a loss raises on input of the wrong shape or type."""


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
        first, step = (0, 1) if self.by_batch else (rank, world)
        masks = self.data.test_parts() if split == "test" else {}
        parts = {part: mask[first::step] for part, mask in masks.items()}
        values = self.measure(self.data.eval_batches(split, self.dtype, (first, step)), w, statistics, parts)
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
            for part, mask in parts.items():
                if len(indices := mask[rows].nonzero()[:, 0]):
                    selected = to_device(indices, y.device)
                    scores[part].update(z[selected], y[selected])
        if buffers is not None and before is not None:
            buffers.load(self.objective.net, before)
        sums = torch.as_tensor(fabric.all_reduce(sums, reduce_op="sum"))
        metrics = {part: score.compute() for part, score in scores.items()}
        return {
            **{f"{part and '_'}{part}/{name}": v for part, values in metrics.items() for name, v in values.items()},
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

    def check_loss(self, logits: Tensor, y: Tensor) -> None:
        """Checks that the loss gives a value for each sample, ``(n,)``; what it keeps is a warning.

        Args:
            logits: Outputs of the net, ``(n, ...)``.
            y: Their targets, ``(n, ...)``.

        Raises:
            UserError: If it cannot take them, or gives something else.
        """
        loss, task = self.objective.loss, self.data.task
        name = f"model.loss = {type(loss).__name__}"
        wrong = not task.by_class and isinstance(loss, nn.CrossEntropyLoss)  # takes y for probabilities
        ensure(not wrong, f"{name}: for classes, these targets are none; choose a loss {task.remedy}")
        try:
            with contents_kept((loss,)):
                watched = Watched((loss,))
                shape = tuple(loss(logits, y).shape)
                kept = sorted({attribute for _, attribute in watched.changed()})
        except MISFIT as error:
            raise UserError(
                f"{name} cannot take logits {tuple(logits.shape)} and labels {tuple(y.shape)} "
                f"{why(error, f'choose a loss {task.remedy}')}"
            ) from None
        remedy = f"it must give one loss per sample, {(len(y),)}"
        ensure(shape == (len(y),), f"{name} gives a value of shape {shape}; {remedy}")
        if kept:
            rank_zero_warn(
                f"{name} changes self.{', self.'.join(kept)} when it is called: a resumed run, and each other process, "
                "lacks it; make it a function of logits and labels alone",
                stacklevel=5,
            )

    @torch.no_grad()  # a loss may have parameters
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
            statistics = next((estimate for at, estimate in self._estimated if at is w), None)
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


def why(error: Exception, remedy: str) -> str:
    """Returns an error's first line and what helps: another thing where torch lacks an operation in a precision."""
    if re.search("not implemented for '(BFloat16|Double)'", str(error)):
        remedy = "torch has it not in this trainer.precision; set that to 32-true"
    return f"({folded((str(error) or type(error).__name__).splitlines()[0], 150)}); {remedy}"
