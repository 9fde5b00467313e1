"""The arithmetic of a local step between its gradients, as few passes over the weights as it takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fl_lightning.ascent import Gradient
from fl_lightning.engine.base import COLUMNS
from fl_lightning.engine.record import Compiled, RecordedRound, Records, Tensors, plain_settings, round_number, trace
from fl_lightning.errors import UserError
from fl_lightning.objective import LocalObjective
from fl_lightning.state import ClientContext, Slots

GRADIENTS = 8
"""Most gradients of a local step."""


@dataclass(frozen=True)
class Stage:
    """What can be computed between two gradients.

    Attributes:
        compute: From inputs to outputs.
        inputs: Names of the values that it needs.
        outputs: Names of the values that it gives.
        point: Name of the value where the next gradient is asked for; None in the last stage.
    """

    compute: Compiled | None
    inputs: list[str]
    outputs: list[str]
    point: str | None


@dataclass(frozen=True)
class Stages:
    """A local step as stages, with a gradient after each but the last.

    Attributes:
        inputs: Names of the step's inputs, in order.
        gradients: Names of the gradients, in order.
        stages: The stages.
        results: Names of the step's results, in order.
    """

    inputs: list[str]
    gradients: list[str]
    stages: list[Stage]
    results: list[str]

    def __call__(self, tensors: list[Tensor], grad: Gradient) -> list[Tensor]:
        """Run the step."""
        values = dict(zip(self.inputs, tensors, strict=True))
        for k, stage in enumerate(self.stages):
            if stage.compute is not None:
                given = stage.compute(*(values[name] for name in stage.inputs))
                values.update(zip(stage.outputs, given, strict=True))
            if stage.point is not None:
                with torch.enable_grad():
                    values[self.gradients[k]] = grad(values[stage.point])
        return [values[name] for name in self.results]


class FusedStep:
    """An objective's local step and its optimizer's, recorded and compiled.

    Args:
        objective: The local objective.
    """

    def __init__(self, objective: LocalObjective) -> None:
        self.objective = objective
        self.records = Records()

    def inputs(self, start: Slots, ctx: ClientContext) -> Tensors:
        """What does not change over a client's steps, by name."""
        columns = {f"ctx.{name}": start.w.new_full((1,), float(getattr(ctx, name))) for name in COLUMNS}
        return {**{f"start.{name}": v for name, v in start.items()}, **columns, "t": round_number(ctx, start.w)}

    def __call__(
        self, inputs: Tensors, ctx: ClientContext, w: Tensor, slots: Slots, buffer: Tensor | None, grad: Gradient
    ) -> tuple[Tensor, Slots, Tensor | None]:
        """One local step.

        Args:
            inputs: Those of `inputs`.
            ctx: The context.
            w: Weights, ``(d,)``.
            slots: The client's state.
            buffer: Momentum, ``(d,)``; null before the first step.
            grad: The gradient at given weights.

        Raises:
            UserError: If the step's Python code looks at values, or no working compiler is there.
        """
        objective = self.objective
        buffer = torch.zeros_like(w) if buffer is None and objective.optimizer.momentum else buffer
        momentum = {} if buffer is None else {"buffer": buffer}
        named = {"w": w, **momentum, **{f"slot.{name}": v for name, v in slots.items()}, **inputs}
        settings = plain_settings(objective, objective.ascent, objective.optimizer)
        stages = self.records.find(named, ctx, settings, self._record)
        with torch.no_grad():
            after = dict(zip(named, stages(list(named.values()), grad), strict=False))
        return after["w"], Slots({name: after[f"slot.{name}"] for name in slots}), after.get("buffer")

    def _record(self, named: Tensors, ctx: ClientContext) -> tuple[RecordedRound, Stages]:
        points = 0

        def step(named: Tensors, ctx: ClientContext) -> list[Tensor]:
            nonlocal points
            asked: list[Tensor] = []

            def grad(v: Tensor) -> Tensor:
                asked.append(v)
                return named[f"gradient.{len(asked) - 1}"]

            slots = Slots({n.removeprefix("slot."): v for n, v in named.items() if n.startswith("slot.")})
            start = Slots({n.removeprefix("start."): v for n, v in named.items() if n.startswith("start.")})
            direction, slots = self.objective.local_step(named["w"], grad, slots, start, ctx)
            w, buffer = self.objective.optimizer.step(named["w"], direction, named.get("buffer"), ctx.lr)
            points = len(asked)
            return [w, *([] if buffer is None else [buffer]), *slots.values(), *asked]

        gradients = {f"gradient.{k}": torch.zeros_like(named["w"]) for k in range(GRADIENTS)}
        try:
            with torch.no_grad():
                recorded, graph = trace(step, {**named, **gradients}, ctx)
        except (RuntimeError, TypeError, KeyError) as error:
            raise UserError(
                f"trainer.compile = true: the local step of {type(self.objective).__name__} cannot be recorded "
                f"({str(error).splitlines()[0]:.100}); set it to false"
            ) from None
        return recorded, _split(graph, len(named), points)


def _split(graph: GraphModule, inputs: int, points: int) -> Stages:
    """Stages of a record whose inputs are followed by gradients, and its results by the points they are asked at."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    *_, output = graph.graph.nodes
    results: list[Node] = list(output.args[0])
    stage = {node: max(0, i - inputs + 1) for i, node in enumerate(placeholders)}
    for node in graph.graph.nodes:
        if node not in stage:  # as soon as all that it needs is there
            stage[node] = max((stage[other] for other in node.all_input_nodes), default=0)
    asked = results[len(results) - points :]
    wanted = set(results)
    stages = []
    for k in range(points + 1):
        nodes = [n for n in graph.graph.nodes if stage[n] == k and n.op not in ("placeholder", "output")]
        outputs = [n for n in nodes if n in wanted or any(stage[user] > k for user in n.users)]
        given = [n for n in stage if any(user in nodes for user in n.users) and n not in nodes]
        part, env = Graph(), dict[Node, Node]()
        for node in given:
            env[node] = part.placeholder(node.name)
        for node in nodes:
            env[node] = part.node_copy(node, env.__getitem__)
        part.output(tuple(env[node] for node in outputs))
        compute = Compiled(GraphModule(graph, part)) if outputs else None
        point = asked[k].name if k < points else None
        stages.append(Stage(compute, [n.name for n in given], [n.name for n in outputs], point))
    names = [node.name for node in placeholders]
    return Stages(names[:inputs], names[inputs:], stages, [n.name for n in results[: len(results) - points]])
