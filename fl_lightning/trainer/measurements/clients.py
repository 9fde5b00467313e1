"""Measures of each client: the evaluation of models on its data, and the curvature there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import flatness
from fl_lightning.core import NonNegativeInt, Positive, PositiveInt, State, ensure, numpy_generator, require
from fl_lightning.data import Batch, class_counts
from fl_lightning.engine import LocalResult
from fl_lightning.results.clients import ADAPTED, FILE, GLOBAL, LOCAL, UNSEEN, statistics
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.evaluation import Split
from fl_lightning.trainer.measurements.base import (
    Clients,
    Measure,
    Measurement,
    MeasurementContext,
    check_statistics,
    local_loss,
    local_models,
    own_models,
)
from fl_lightning.trainer.measurements.curvature import CurvatureMeasure
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
        found = {k: data.client_test_indices(k) for k in range(data.num_clients)}
        self.indices = {k: own for k, own in found.items() if own is not None and len(own)}
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
        most = f"{tested} clients have test data; give at most that"
        require(self.clients is None or self.clients <= tested, f"measure: {name}.clients", self.clients, most)
        own = run.objective.own_part is not None
        which = "no part gives clients models of their own; set it to 0"
        require(own or not self.adapt_epochs, f"measure: {name}.adapt_epochs", self.adapt_epochs, which)
        if not run.objective.personal:
            check_statistics(run.objective)
        alone = "centralized training has no local models; set it to false"
        require(not self.local_models or run.kind == "federated", f"measure: {name}.local_models", "true", alone)

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        run, data, of = context.run, context.run.data, client_data(context.run)
        clients, personal = of.clients, run.objective.personal
        if self.clients is not None:
            draw = numpy_generator(run.seed, "client evaluation")
            clients = sorted(draw.choice(clients, self.clients, replace=False, shuffle=False).tolist())
        run.load_statistics(context.model)
        at_once = max(len(context.cohort), 1)
        scores, unseen = _own(run, clients, of) if personal else (of.scores(clients, context.model), {})
        local = _local(run, clients, of, at_once) if self.local_models else {}
        metric = data.metric()[0]
        self._head = ["round", "client", "samples", metric, "loss", f"local_{metric}", "local_loss"]
        self._rows = [
            [run.rounds_done, k, int(data.client_sizes[k]), *each, *local.get(k, ("", ""))]
            for k, each in scores.items()
        ]
        found = _measurements(run, GLOBAL, scores, "clients' own models" if personal else "global model", of.what)
        found += _measurements(run, UNSEEN, unseen, "models of clients that have not trained", of.what)
        if self.adapt_epochs and unseen:
            adapted = _adapted(run, [*unseen], of, at_once, self.adapt_epochs)
            what = f"models of clients that have not trained, after {self.adapt_epochs} epochs of what stays"
            found += _measurements(run, ADAPTED, adapted, what, of.what)
        if local:
            found += _measurements(run, LOCAL, local, "local models of the next round", of.what)
            gap = sum(local[k][0] - {**scores, **unseen}[k][0] for k in local) / len(local)
            what = f"{of.what}, {len(local)} clients"
            found.append(Measurement(name=f"{LOCAL}/{metric}_gap", value=gap, model="local minus global", data=what))
        return found

    def keep(self, run: Run) -> None:
        run.folder.append_rows(FILE, self._head, self._rows)

    def resume(self, run: Run) -> None:
        run.folder.drop_later_rounds(FILE, run.rounds_done)


def evaluate(run: Run, split: Split) -> dict[str, float]:
    """Returns what a run logs of a split: of the global model, and of the clients' own, if there are such models.

    The clients' own models are evaluated as `ClientEvaluation` does, on the test set. Every process calls.
    """
    found = run.evaluate(split) if run.objective.has_global_model else {}
    if split == "test" and run.objective.personal:
        measured = ClientEvaluation().compute(MeasurementContext.between_rounds(run))
        found |= {m.metric: m.value for m in measured if m.value is not None}
    return found


def _own(run: Run, clients: Sequence[int], of: ClientData) -> tuple[Scores, Scores]:
    """Evaluates each client's own model; those of clients that have trained, and of the others."""
    mine: dict[int, tuple[Score, bool]] = {}
    for k in filter(run.clients.owns, clients):
        state = run.clients.get(k, run.server.w, {})
        with run.evaluator.statistics_of(state):
            mine[k] = of.score(k, run.objective.client_model(run.global_model, state)), run.clients.row(k) is not None
    found = collectives.all_gather_dict(run.fabric, mine)
    seen, unseen = ({k: score for k, (score, yes) in found.items() if yes == wanted} for wanted in (True, False))
    return seen, unseen


def _add(run: Run, scores: dict[int, Score], of: ClientData, result: LocalResult) -> None:
    """Adds the score of a client's local model, if it is finite, with its statistics, which the net holds."""
    if result.finite:
        with run.evaluator.statistics_of(State({})):
            scores[result.client] = of.score(result.client, result.w)


def _local(run: Run, clients: Sequence[int], of: ClientData, at_once: int) -> Scores:
    """Evaluates each client's local model."""
    mine: dict[int, Score] = {}
    local_models(run, clients, partial(_add, run, mine, of), at_once)
    return collectives.all_gather_dict(run.fabric, mine)


def _adapted(run: Run, clients: Sequence[int], of: ClientData, at_once: int, epochs: int) -> Scores:
    """Evaluates clients after training by themselves, of which nothing is kept."""
    mine: dict[int, Score] = {}
    for at in range(0, len(clients), at_once):
        cohort = Cohort.of(run, clients[at : at + at_once], run.next_round).alone(run, epochs)
        phase = Phase(Round(run, cohort, partial(_add, run, mine, of)), cohort)
        phase.observe(run.engine.train(phase.send()))
    return collectives.all_gather_dict(run.fabric, mine)


def _measurements(run: Run, place: str, scores: Scores, model: str, what: str) -> list[Measurement]:
    """Returns the statistics of scores over clients, none without clients."""
    if not scores:
        return []
    name, samples = run.data.metric()[0], [int(run.data.client_sizes[k]) for k in scores]
    metrics, losses = ([score[i] for score in scores.values()] for i in (0, 1))
    data = f"{what}, {len(scores)} clients"
    values = {
        **{f"{name}{end}": x for end, x in statistics(metrics, samples, run.directions[name]).items()},
        "loss": sum(losses) / len(losses),
    }
    details = {name: {"clients": dict(zip(map(str, scores), metrics, strict=True))}}
    return [
        Measurement(name=f"{place}/{end}", value=x, model=model, data=data, details=details.get(end, {}))
        for end, x in values.items()
    ]


class ClientLambdaMax(CurvatureMeasure):
    """``client_lambda_max_local`` and ``_global`` of the local models, on their own data and on that of all clients.

    They are lambda_1,l and lambda_1,g of FedGloSS's Table 1, and the curves of the ECCV paper's Figure 4. The mean over
    the clients is logged; each client's value goes to ``flatness.jsonl``.

    Args:
        data: local, global, or both.
        samples: Size of the stratified sample for "global"; null: all. "local" uses all of the client's data.
        iterations: Maximum number of products.
        tol: Relative residual to stop at; null: as in `flatness.lambda_max`.
        clients: cohort: the local models of the round. all: those of all clients, each trained from w^t for this
            measure; the names then end in ``_all``. own: the clients' own models after the round (`Personal`,
            `Ditto`), of those that have trained; the names then end in ``_own``, and those of the largest in
            ``_own_max``.
        **kwargs: The matrix, as for `CurvatureMeasure`.
    """

    local = True
    of_global_model = False

    def __init__(
        self,
        data: list[Literal["local", "global"]] | None = None,
        samples: PositiveInt | None = 1000,
        iterations: PositiveInt = 100,
        tol: Positive | None = None,
        clients: Clients | Literal["own"] = "cohort",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require(data != [], "measure: ClientLambdaMax.data", data, "name local, global or both")
        self.data: list[Literal["local", "global"]] = ["local"] if data is None else data
        self.samples, self.iterations, self.tol, self.clients = samples, iterations, tol, clients

    @property
    def needs_statistics(self) -> bool:  # type: ignore[override]
        return self.clients == "own"  # local models have those of the round

    @property
    def of_round(self) -> bool:
        return self.clients != "own"

    def check(self, run: Run) -> None:
        super().check(run)
        none = "no part gives clients models of their own; choose cohort or all"
        require(self.clients != "own" or run.objective.personal, "measure: ClientLambdaMax.clients", "own", none)

    def begin(self, run: Run, cohort: Sequence[int]) -> None:
        self._found: dict[str, dict[int, tuple[float, float, int]]] = {where: {} for where in self.data}
        if self.clients == "all" and cohort:
            local_models(run, range(run.data.num_clients), partial(self._add, run), len(cohort))

    def update(self, run: Run, result: LocalResult) -> None:
        if self.clients == "cohort":
            self._add(run, result)

    def _add(self, run: Run, result: LocalResult) -> None:
        if result.finite:
            self._at(run, result.client, result.w)

    def _at(self, run: Run, client: int, w: Tensor) -> None:
        for where, found in self._found.items():
            chosen = run.data.clients[client] if where == "local" else run.data.sample_indices(self.samples, run.seed)
            matrix = self.matrix(local_loss(run, client, w, chosen))
            top = flatness.lambda_max(matrix, iterations=self.iterations, tol=self.tol, seed=run.seed)
            found[client] = (top.value, top.residual, len(chosen))

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        measurements, end = [], "" if self.clients == "cohort" else f"_{self.clients}"
        if self.clients == "own":
            self.begin(context.run, ())
            context.run.load_statistics(context.model)
            models = own_models(context.run)
            for client in filter(context.run.clients.owns, models):
                self._at(context.run, client, models[client])
        for where, mine in self._found.items():
            found = collectives.all_gather_dict(context.run.fabric, mine)
            if not found:  # no client has answered
                continue
            values, residuals, sizes = zip(*found.values(), strict=True)
            own = where == "local"
            mean_of = Measurement(
                name=f"{self.prefix}client_lambda_max_{where}{end}",
                value=mean(values),
                model="own models" if self.clients == "own" else "local models",
                data=f"own data of {len(found)} clients" if own else "training data",
                samples=sum(sizes) if own else sizes[0],
                residual=max(residuals),
                settings={"mean over": len(found), **self.protocol},
                details={"clients": dict(zip(map(str, found), values, strict=True))},
            )
            measurements.append(mean_of)
            if self.clients == "own":
                name, settings = f"{mean_of.name}_max", self.protocol
                measurements.append(replace(mean_of, name=name, value=max(values), settings=settings, details={}))
        return measurements
