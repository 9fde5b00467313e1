"""Evaluation of a run after a round, and of models on each client's data."""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.core import (
    NonNegativeInt,
    PositiveInt,
    State,
    ensure,
    numpy_generator,
    require,
)
from fl_lightning.data import Batch, class_counts
from fl_lightning.engine import LocalResult
from fl_lightning.results.clients import ADAPTED, FILE, GLOBAL, LOCAL, UNSEEN, statistics
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.evaluation import Split
from fl_lightning.trainer.measurements.base import (
    Measure,
    Measurement,
    MeasurementContext,
    check_statistics,
    local_models,
)
from fl_lightning.trainer.round import Phase, Round
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import collectives

Score = tuple[float, float]
"""The data's metric and the mean loss on a client's test data."""
Scores = Mapping[int, Score]


class OwnSamples:
    """The test samples that the data say are a client's own; see ``client_test_indices`` of a data module.

    Attributes:
        clients: The clients that have test data.
    """

    what = "own test data"

    def __init__(self, run: Run) -> None:
        self.run, data = run, run.data
        indices = {k: data.client_test_indices(k) for k in range(data.num_clients)}
        self.indices = {k: samples for k, samples in indices.items() if samples is not None and len(samples)}
        self.clients = list(self.indices)

    def score(self, client: int, w: Tensor) -> Score:
        """Evaluates weights ``(d,)`` on this process alone, with the buffers that the net holds."""
        return self.run.evaluator.alone(_batches(self.run, self.indices[client]), w)

    def scores(self, clients: Sequence[int], w: Tensor) -> Scores:
        """Evaluates weights ``(d,)`` for each client; every process calls."""
        fabric = self.run.fabric
        mine = {k: self.score(k, w) for k in clients[fabric.global_rank :: fabric.world_size]}
        return collectives.all_gather_dict(fabric, mine)


class ByClasses:
    """The whole test set, each class weighted by its share of the client's training samples.

    That is the expectation over test sets that are drawn with the client's distribution of classes, without a draw: the
    sum over classes of share times accuracy. A class without test samples has no weight.

    Attributes:
        clients: As for `OwnSamples`.
        weights: Weight of each class, ``(all clients, classes)``.
    """

    what = "test data weighted by the client's classes"

    def __init__(self, run: Run) -> None:
        self.run, data = run, run.data
        tested = torch.bincount(data.y_test, minlength=data.num_classes).cpu() > 0
        counts = torch.from_numpy(class_counts(data)).double() * tested
        self.weights = counts / counts.sum(1, keepdim=True)
        self.clients: list[int] = self.weights.isfinite().all(1).nonzero().flatten().tolist()

    def score(self, client: int, w: Tensor) -> Score:
        """See `OwnSamples`."""
        indices = (self.weights[client] > 0)[self.run.data.y_test.cpu()].nonzero().flatten()
        return self._weighted([client], self.run.evaluator.by_class(_batches(self.run, indices), w))[client]

    def scores(self, clients: Sequence[int], w: Tensor) -> Scores:
        """See `OwnSamples`."""
        run, fabric = self.run, self.run.fabric
        batches = run.data.eval_batches("test", run.dtype, (fabric.global_rank, fabric.world_size))
        return self._weighted(clients, collectives.all_reduce_sum(fabric, run.evaluator.by_class(batches, w)))

    def _weighted(self, clients: Sequence[int], sums: Tensor) -> dict[int, Score]:
        correct, losses, samples = sums.cpu().double()
        means = torch.stack([correct, losses]) / samples.clamp(min=1)
        rows = self.weights[torch.as_tensor(clients)] @ means.T
        return {k: (metric, loss) for k, (metric, loss) in zip(clients, rows.tolist(), strict=True)}


ClientData = OwnSamples | ByClasses
"""Each client's test data; ``what`` describes them in words."""


def client_data(run: Run) -> ClientData:
    """Returns the clients' test data: their own samples if the data say whose they are, otherwise by classes.

    Raises:
        UserError: If the data do not say, and what they evaluate is not accuracy.
    """
    if run.data.client_test_indices(0) is not None:
        return OwnSamples(run)
    name, metric = run.data.metric()
    plain = type(metric) is MulticlassAccuracy and metric.average == "micro" and metric.top_k == 1
    ensure(
        plain and run.data.y_test.ndim == 1,
        f"data = {type(run.data).__name__}: says of no client which test samples are its own, and {name} has no mean "
        "over classes; set test_clients of the data, or leave out what evaluates each client",
    )
    return ByClasses(run)


def _batches(run: Run, indices: Tensor) -> Iterator[Batch]:
    """Returns batches of some test samples."""
    data = run.data
    return data.evaluation_batches(data.x_test, data.y_test, data.in_batches(indices), run.dtype)


class ClientEvaluation(Measure):
    """Loss and metric of the global model on each client's own test data, and of local models after local training.

    With a personal part (see `Part.client_model`) each client's own model takes the place of the global one, with its
    own statistics if it keeps some. Clients that have never trained are apart, as ``server/unseen_clients/acc``.

    A client's test data are those samples of the test set that the data say are its own; if they do not say, the whole
    test set, with each class weighted by its share of the client's training samples. For accuracy that is exact:
    ``accuracy_i = sum_c p_i(c) accuracy_c``.

    It logs, for accuracy, ``server/clients/acc`` (the mean over clients) with the endings ``_weighted`` (by training
    samples), ``_std``, ``_worst_decile`` (mean of the worst tenth, of at least one) and ``_worst``, and
    ``server/clients/loss``; of the local models the same as ``client/test/acc``, and ``client/test/acc_gap``, the mean
    over clients of local minus global. Each client's values are a row of ``client_evaluation.csv`` in the run folder.

    Args:
        local_models: Whether to train each client from the server's new model, as the next round would, and evaluate
            its local model, too. Only a cohort of local models is in memory at a time.
        adapt_epochs: With a personal part, epochs after which clients that have never trained are evaluated once more,
            as ``client/adapted/acc``: of what stays with them, with the rest frozen. Nothing of it is kept.
        clients: Number of clients, a seeded sample that is the same in every round; null: all that have test data.
    """

    of_global_model = needs_statistics = False

    def __init__(
        self, local_models: bool = False, clients: PositiveInt | None = None, adapt_epochs: NonNegativeInt = 0
    ) -> None:
        self.local_models, self.clients, self.adapt_epochs = local_models, clients, adapt_epochs
        self._rows: list[list[object]] = []
        self._head: list[str] = []

    def check(self, run: Run) -> None:
        name, tested = type(self).__name__, len(client_data(run).clients)
        ensure(tested > 0, f"data = {type(run.data).__name__}: no client has test data; leave {name} out")
        require(
            self.clients is None or self.clients <= tested,
            f"measure: {name}.clients",
            self.clients,
            f"{tested} clients have test data; give at most that",
        )
        require(
            run.objective.own_part is not None or not self.adapt_epochs,
            f"measure: {name}.adapt_epochs",
            self.adapt_epochs,
            "no part gives clients models of their own; set it to 0",
        )
        if not run.objective.personal:
            check_statistics(run.objective)
        require(
            not self.local_models or run.kind == "federated",
            f"measure: {name}.local_models",
            "true",
            "centralized training has no local models; set it to false",
        )

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        run, data, test_data = context.run, context.run.data, client_data(context.run)
        clients, personal = test_data.clients, run.objective.personal
        if self.clients is not None:
            draw = numpy_generator(run.seed, "client evaluation")
            clients = sorted(draw.choice(clients, self.clients, replace=False, shuffle=False).tolist())
        run.load_statistics(context.model)
        at_once = max(len(context.cohort), 1)
        scores, unseen = _own(run, clients, test_data) if personal else (test_data.scores(clients, context.model), {})
        local = _local(run, clients, test_data, at_once) if self.local_models else {}
        metric = data.metric()[0]
        self._head = ["round", "client", "samples", metric, "loss", f"local_{metric}", "local_loss"]
        self._rows = [
            [run.rounds_done, k, int(data.client_sizes[k]), *score, *local.get(k, ("", ""))]
            for k, score in scores.items()
        ]
        measurements = _measurements(
            run, GLOBAL, scores, "clients' own models" if personal else "global model", test_data.what
        )
        measurements += _measurements(run, UNSEEN, unseen, "models of clients that have not trained", test_data.what)
        if self.adapt_epochs and unseen:
            adapted = _adapted(run, [*unseen], test_data, at_once, self.adapt_epochs)
            model = f"models of clients that have not trained, after {self.adapt_epochs} epochs of what stays"
            measurements += _measurements(run, ADAPTED, adapted, model, test_data.what)
        if local:
            measurements += _measurements(run, LOCAL, local, "local models of the next round", test_data.what)
            gap = sum(local[k][0] - {**scores, **unseen}[k][0] for k in local) / len(local)
            description = f"{test_data.what}, {len(local)} clients"
            measurements.append(
                Measurement(name=f"{LOCAL}/{metric}_gap", value=gap, model="local minus global", data=description)
            )
        return measurements

    def keep(self, run: Run) -> None:
        run.folder.append_rows(FILE, self._head, self._rows)

    def resume(self, run: Run) -> None:
        run.folder.drop_later_rounds(FILE, run.rounds_done)


def evaluate_round(run: Run, losses: Sequence[float]) -> None:
    """Evaluates a run after a round, and logs the result; every process calls.

    Args:
        run: The run, which has taken over the result of the round.
        losses: Training loss of each client of the round.
    """
    started = time.perf_counter()
    for split in ("val", "test") if run.data.val_fraction else ("test",):
        run.note(evaluate(run, split))
    for logger in run.own_loggers if losses and run.fabric.is_global_zero else ():
        logger.log_clients("client/train/loss", losses, run.rounds_done)
    run.evaluation_s = time.perf_counter() - started


def evaluate(run: Run, split: Split) -> dict[str, float]:
    """Returns what a run logs of a split: of the global model, and of the clients' own, if there are such models.

    The clients' own models are evaluated as `ClientEvaluation` does, on the test set. Every process calls.
    """
    metrics = run.evaluate(split) if run.objective.has_global_model else {}
    if split == "test" and run.objective.personal:
        measurements = ClientEvaluation().compute(MeasurementContext.between_rounds(run))
        metrics |= {m.metric: m.value for m in measurements if m.value is not None}
    return metrics


def _own(run: Run, clients: Sequence[int], test_data: ClientData) -> tuple[Scores, Scores]:
    """Returns the scores of the clients' own models: of clients that have trained, and of the others."""
    mine: dict[int, tuple[Score, bool]] = {}
    for k in filter(run.clients.owns, clients):
        state = run.clients.get(k, run.server.w)
        with run.evaluator.statistics_of(state):
            mine[k] = (
                test_data.score(k, run.objective.client_model(run.global_model, state)),
                run.clients.row(k) is not None,
            )
    scores = collectives.all_gather_dict(run.fabric, mine)
    seen, unseen = (
        {k: score for k, (score, trained) in scores.items() if trained == wanted} for wanted in (True, False)
    )
    return seen, unseen


def _add(run: Run, scores: dict[int, Score], test_data: ClientData, result: LocalResult) -> None:
    """Adds the score of a client's local model, if it is finite, with its statistics, which the net holds."""
    if result.finite:
        with run.evaluator.statistics_of(State({})):
            scores[result.client] = test_data.score(result.client, result.w)


def _local(run: Run, clients: Sequence[int], test_data: ClientData, at_once: int) -> Scores:
    """Evaluates each client's local model."""
    mine: dict[int, Score] = {}
    local_models(run, clients, partial(_add, run, mine, test_data), at_once)
    return collectives.all_gather_dict(run.fabric, mine)


def _adapted(run: Run, clients: Sequence[int], test_data: ClientData, at_once: int, epochs: int) -> Scores:
    """Evaluates clients after training by themselves, of which nothing is kept."""
    mine: dict[int, Score] = {}
    for start in range(0, len(clients), at_once):
        cohort = Cohort.of(run, clients[start : start + at_once], run.next_round).alone(run, epochs)
        phase = Phase(Round(run, cohort, partial(_add, run, mine, test_data)), cohort)
        phase.observe(run.engine.train(phase.send()))
    return collectives.all_gather_dict(run.fabric, mine)


def _measurements(run: Run, place: str, scores: Scores, model: str, description: str) -> list[Measurement]:
    """Returns the statistics of scores over clients, none without clients."""
    if not scores:
        return []
    name, samples = run.data.metric()[0], [int(run.data.client_sizes[k]) for k in scores]
    metrics, losses = ([score[i] for score in scores.values()] for i in (0, 1))
    data = f"{description}, {len(scores)} clients"
    values = {
        **{f"{name}{end}": x for end, x in statistics(metrics, samples, run.directions[name]).items()},
        "loss": sum(losses) / len(losses),
    }
    details = {name: {"clients": dict(zip(map(str, scores), metrics, strict=True))}}
    return [
        Measurement(name=f"{place}/{end}", value=x, model=model, data=data, details=details.get(end, {}))
        for end, x in values.items()
    ]
