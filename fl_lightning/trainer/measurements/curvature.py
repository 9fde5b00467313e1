"""Base classes of the measures of curvature: which matrix, of which weights, at which model."""

import re
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from fl_lightning import flatness
from fl_lightning.core import (
    FlatSpec,
    PositiveInt,
    UserError,
    WithoutCasts,
    ensure,
    folded,
    map_tensors,
    matching,
    require,
)
from fl_lightning.flatness import (
    KEEP_BYTES,
    OPERATORS,
    Differences,
    Interrupted,
    Kind,
    Matrix,
    Mixture,
    Operator,
    layers,
)
from fl_lightning.nets.pretrained import LoRA
from fl_lightning.trainer.measurements.base import Measure, Measurement, MeasurementContext, Split, check_statistics
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import collectives


def own_models(run: Run) -> dict[int, Tensor]:
    """Returns the own models of all clients that have trained, ``(d,)`` by id, those of other processes included."""
    mine = {k: run.objective.client_model(run.global_model, row).cpu() for k, row in run.clients.rows().items()}
    return {k: w.to(run.server.w) for k, w in collectives.all_gather_dict(run.fabric, mine).items()}


class CurvatureMeasure(Measure):
    """Base class of measures of a matrix of curvature.

    The names of its numbers begin with the operator, unless it is the Hessian, and with the group of parameters, if
    there is one: ``gauss_newton_lambda_max``, ``head_trace``, ``fisher_head_lambda_1``.

    Args:
        operator: hessian; finite_differences, the Hessian by differences of gradients, for nets without second
            derivatives; gauss_newton (the generalized one); or fisher (the empirical one).
        parameters: Names of the parameters whose block is measured, with ``*``, ``?`` and ``[...]`` as in a shell, such
            as ``[head.*]``; null: all.
        merged: Measure the loss as a function of the merged weights ``W + alpha/rank B A`` of a `LoRA` net, and of its
            other trained parameters, instead of the factors A and B.
    """

    layer = ""

    def __init__(self, operator: Kind = "hessian", parameters: list[str] | None = None, merged: bool = False) -> None:
        self.operator, self.parameters, self.merged = operator, parameters, merged

    @property
    def prefix(self) -> str:
        """What the names of its numbers begin with."""
        group = [self.layer] if self.layer else self.parameters or []
        words = ["" if self.operator == "hessian" else self.operator, "merged" if self.merged else "", *group]
        name = re.sub("[^0-9A-Za-z]+", "_", "_".join(words)).strip("_")
        return name and f"{name}_"

    @property
    def protocol(self) -> dict[str, Any]:
        """The settings of a measurement that name its matrix."""
        settings = {"parameters": " ".join(self.parameters or ()), "merged": self.merged}
        return {"operator": self.operator, **{name: value for name, value in settings.items() if value}}

    def matrix(self, loss: Mapping[str, Any]) -> Operator:
        """Returns the matrix of a loss, which `MeasurementContext.loss` and `local_loss` describe."""
        return self.block(self.function(loss))

    def function(self, loss: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the loss as a function of the weights of which the matrix is that of the second derivatives."""
        return {**loss, "model": loss["model"].merged(loss["at"]), "at": None} if self.merged else loss

    def block(self, function: Mapping[str, Any]) -> Operator:
        """Returns the block of the group of parameters."""
        return OPERATORS[self.operator](**function, parameters=self.parameters)

    def spec(self, run: Run) -> FlatSpec:
        """Returns the layout of the weights of which the loss is a function."""
        net = run.objective.net
        if not self.merged:
            return run.net.spec
        ensure(isinstance(net, LoRA), f"measure: merged = true: {type(net).__name__} has no adapters; set it to false")
        return FlatSpec(cast(LoRA, net).merged())

    def blocks(self, run: Run) -> list[Self]:
        """Returns one measure for each matrix: itself."""
        return [self]

    def check(self, run: Run) -> None:
        names = self.spec(run).names
        if self.parameters is not None:
            matching(names, self.parameters)
        x, y = next(iter(run.data.eval_batches("test", run.dtype)))
        few = map_tensors(lambda v: v[:4], x), y[:4]
        net = run.objective.net
        loss = {"model": net, "loss": run.objective.evaluation_loss, "batches": [few], "at": run.server.w}
        _check_derivatives(type(net).__name__, self, loss, fresh=not run.rounds_done)


def _check_derivatives(net: str, measure: CurvatureMeasure, loss: Mapping[str, Any], fresh: bool) -> None:
    """Checks on a few samples that a net has second derivatives, and in a fresh run that their matrix is symmetric.

    In float64 and without the net's own casts: otherwise a flat model's products may be no larger than their rounding.
    """
    name, remedy = type(measure).__name__, "leave this measure out, or write the layer in other operations of torch"
    try:
        _products(measure, loss)
    except (NotImplementedError, RuntimeError) as error:
        raise UserError(f"measure: {name}: {net} has no second derivative ({folded(error):.100}); {remedy}") from None
    if not fresh or measure.operator == "finite_differences":  # which is symmetric up to the kinks of a net
        return
    try:
        with WithoutCasts():
            u, v, Hu, Hv = _products(measure, _in_float64(loss))
    except Exception:  # a net that cannot be copied, or has a dtype of its own, or a device without float64
        return
    asymmetry, scale = float(v @ Hu - u @ Hv), float(Hu.norm() * v.norm())
    ensure(
        not abs(asymmetry) > 1e-3 * scale,
        f"measure: {name}: the second derivatives of {net} are no symmetric matrix, so torch's are wrong; {remedy}",
    )


def _products(measure: CurvatureMeasure, loss: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns two vectors ``(d,)``, and their products with the matrix."""
    matrix = measure.matrix(loss)
    draw = torch.Generator().manual_seed(0)
    u, v = (torch.randn(matrix.shape[0], generator=draw).to(loss["at"]) for _ in range(2))
    return u, v, matrix @ u, matrix @ v


def _with_smoothness(
    matrix: Differences, measure: CurvatureMeasure, measurements: Sequence[Measurement]
) -> list[Measurement]:
    """Returns measurements with their step and what they are of, and by how much a halved step moves a product."""
    draw = torch.Generator().manual_seed(0)
    change = matrix.halving(torch.randn(matrix.shape[0], generator=draw).to(matrix.f.w.detach()))
    more = {"step": matrix.step, "curvature": "smoothed over the step" if change > SMOOTHED else "of the loss"}
    annotated = [replace(measurement, settings={**measurement.settings, **more}) for measurement in measurements]
    return [
        *annotated,
        replace(annotated[0], name=f"{measure.prefix}halving", value=change, residual=None, error=None, details={}),
    ]


SMOOTHED = 0.05
"""Relative change of a product with a halved step, above which it is of a smoothed loss."""
SQUARES = 1e-6
"""Weight of the squared outputs, whose derivatives outweigh rounding where the loss has none, at a saturated model."""


def _in_float64(loss: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a loss in float64, with a small share of squared outputs; what is no float stays as it is."""

    def double(v: Tensor) -> Tensor:
        return v.double() if v.is_floating_point() else v

    def losses(z: Tensor, y: Tensor) -> Tensor:
        return loss["loss"](z, y) + SQUARES * z.reshape(len(z), -1).square().sum(1)  # type: ignore[no-any-return]

    return {
        **loss,
        "model": deepcopy(loss["model"]).double(),
        "loss": losses,
        "batches": [(map_tensors(double, x), double(y)) for x, y in loss["batches"]],
        "at": double(loss["at"]),
    }


def check_measures(measures: Sequence[Measure], run: Run) -> None:
    """Checks that measures suit a run, and that the numbers of different matrices have different names.

    Raises:
        UserError: If a measure does not suit the run, or two matrices have one name.
    """
    matrices: dict[str, dict[str, Any]] = {}
    for measure in measures:
        if measure.needs_statistics:
            flatness.check_running(run.objective.net)
            check_statistics(run.objective)
        if measure.of_global_model:
            run.objective.check_global_model(type(measure).__name__)
        measure.check(run)
        for block in measure.blocks(run) if isinstance(measure, CurvatureMeasure) else ():
            protocol = matrices.setdefault(block.prefix, block.protocol)
            require(
                protocol == block.protocol,
                "measure: parameters",
                f"{block.parameters} beside {protocol}",
                "names differ by letters and digits only; measure one of the two, or write the pattern otherwise",
            )


class GlobalCurvature(CurvatureMeasure):
    """Base class of measures of curvature at the global model.

    Args:
        samples: Size of the stratified sample of the training data; null: all.
        split: train, or test for the whole test set, as in the program of FedGloSS.
        by_layer: Measure the block of each layer by itself: its weight and bias, or the factors of its adapter.
        **kwargs: As for `CurvatureMeasure`.

    Where some weights stay with clients (`Personal`), it is the block of the shared weights u of
    ``sum_k p_k F_k(u, v_k)``, each client that has trained at its own model: ``sum_k p_k d^2 F_k / du^2``.
    """

    of_global_model = False

    def __init__(
        self,
        samples: PositiveInt | None = 1000,
        split: Split = "train",
        by_layer: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.samples, self.split, self.by_layer = samples, split, by_layer

    def blocks(self, run: Run) -> list[Self]:
        if not self.by_layer:
            return [self]
        names, blocks = run.objective.shared or self.spec(run).names, []
        for layer, parameters in layers(names if self.parameters is None else matching(names, self.parameters)).items():
            blocks.append(copy(self))
            blocks[-1].layer, blocks[-1].parameters = layer, parameters
        return blocks

    def check(self, run: Run) -> None:
        shared, spec = run.objective.shared, run.net.spec.names
        ensure(
            shared != [],
            f"measure: {type(self).__name__}: all weights stay with clients; take ClientLambdaMax(clients: own)",
        )
        ensure(
            shared is None or self.split == "train",
            f"measure: split = {self.split}: clients' own models are measured on train",
        )
        super().check(run)
        stays = {*matching(spec, self.parameters)} - {*shared} if self.parameters and shared is not None else ()
        ensure(not stays, f"parameters = {self.parameters}: some stay with each client; take ClientLambdaMax for these")
        ensure(
            shared is None or not self.merged,
            "measure: merged = true: some weights stay with each client; set it to false",
        )

    def estimate(self, matrix: Matrix, **options: Any) -> Any:
        """Calls the function of `fl_lightning.flatness` with seed and progress."""
        raise NotImplementedError

    def measurements(self, result: Any, **common: Any) -> list[Measurement]:
        """Returns the measurements from the function's result.

        Args:
            result: The result, or a partial one after an interrupt.
            **common: Data, number of samples, and settings.
        """
        raise NotImplementedError

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        """Returns the measurements.

        Raises:
            Interrupted: On KeyboardInterrupt; ``partial`` holds the measurements from the partial result.
        """
        batches, n, description = context.train(self.samples, self.split)
        common: dict[str, Any] = {"data": description, "samples": n}
        shared, measured = context.run.objective.shared, list[Measurement]()
        function = self.function(context.loss(batches)) if shared is None else {}
        for block in self.blocks(context.run):
            if shared is None:
                matrix: Matrix = block.block(function)
            else:
                operators = block._own(context, shared)
                if not operators:  # nobody has trained
                    return []
                n = sum(size for size, _ in operators)
                common |= {"samples": n, "model": f"shared part of {len(operators)} clients' own models"}
                matrix = Mixture([(size / n, operator) for size, operator in operators])
            try:
                estimate = block.estimate(matrix, seed=context.run.seed, progress=context.progress)
                new = block.measurements(estimate, **common)
                measured += _with_smoothness(matrix, block, new) if isinstance(matrix, Differences) else new
            except Interrupted as stop:
                raise Interrupted([*measured, *block.measurements(stop.partial, **common)]) from None
        return measured

    def _own(self, context: MeasurementContext, shared: list[str]) -> list[tuple[int, Operator]]:
        """Returns the block of what is shared at each client's own model, with its number of samples."""
        run, parameters, kept_bytes = context.run, self.parameters or shared, 0
        chosen, operators = run.data.sample_indices(self.samples, run.seed), list[tuple[int, Operator]]()
        for k, w in own_models(run).items():
            indices = run.data.clients[k]
            indices = indices[torch.isin(indices, chosen)]
            if len(indices):
                loss, keep = context.loss(context.share(indices), w), None if kept_bytes < KEEP_BYTES else False
                operator = OPERATORS[self.operator](**loss, parameters=parameters, keep_graph=keep)
                kept_bytes += operator.kept_bytes
                if kept_bytes > KEEP_BYTES:
                    operator.drop_graphs()
                operators.append((len(indices), operator))
        return operators
