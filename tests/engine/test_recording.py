"""What is recorded of torch's operations, against what torch records itself."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fl_lightning import FedAvg, algorithms
from fl_lightning.core import ClientContext, FlatSpec, State, UserError
from fl_lightning.engine import graphed, recorded_rounds
from fl_lightning.engine.record import Numbers, RecordedRound, Recording, Stage, Tensors, stage
from fl_lightning.engine.simplify import simplified
from tests.engine.test_engines import Small, train
from tests.engine.test_simplify import recorded
from tests.problem import optimizer_for


def operations(graph: GraphModule) -> list[str]:
    """The operations of a record in their order, each with its arguments: the place of an operation, or a value."""
    names = dict[Any, str]()

    def written(node: Any) -> str:
        arguments = torch.fx.map_arg((node.args, node.kwargs), names.__getitem__)  # type: ignore[arg-type]
        return re.sub(r"aten\.detach\b", "aten.alias", f"{node.op} {node.target} {arguments}")

    others = count()
    for node in graph.graph.nodes:
        names[node] = str(getattr(graph, str(node.target))) if node.op == "get_attr" else f"%{next(others)}"
    inner = [node for node in graph.graph.nodes if node.op == "call_function"]
    return [*map(written, inner), *(names[node] for node in graph.graph.output_node().args[0])]


def by_torch(function: Callable[[Tensors, ClientContext], Tensors], named: Tensors, ctx: ClientContext) -> GraphModule:
    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(zip(named, tensors, strict=True))
        columns: Any = {name.removeprefix("ctx."): v for name, v in inputs.items() if name.startswith("ctx.")}
        context = replace(ctx, t=RecordedRound(Numbers(ctx.t, inputs["t"])), **columns)
        return tuple(function(inputs, context).values())

    return make_fx(flat)(*named.values())


@pytest.mark.sampled(quick=60, slow=5)
@pytest.mark.parametrize("name", algorithms.__all__)
def test_every_step_and_round_is_recorded_as_torch_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded_lines = list[str]()

    def both(function: Any, named: Tensors, ctx: ClientContext) -> Stage:
        ours = stage(function, named, ctx)
        recorded_lines.extend(lines := operations(simplified(deepcopy(ours.graph), constants=False)))
        assert lines == operations(simplified(by_torch(function, named, ctx), constants=False))
        return ours

    monkeypatch.setattr(graphed, "stage", both)
    monkeypatch.setattr(recorded_rounds, "stage", both)
    objective = getattr(algorithms, name)(net=Small(), optimizer=optimizer_for(name, 0.05, momentum=0.9))
    train(tmp_path, objective, "graphed", max_rounds=4)
    assert len(recorded_lines) > 20


def in_place(x: Tensor, held: Tensor) -> list[Tensor]:
    fresh, all_of = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(6)
    fresh += x
    all_of[:3] = x
    all_of.view(2, 3)[1].copy_(fresh).mul_(held)
    return [fresh, all_of, fresh]


def several(x: Tensor, held: Tensor) -> list[Tensor]:
    values, indices = x.topk(2)
    return [*x.split(1), values, indices, held, *torch.ops.aten.native_layer_norm(x, [3], held, None, 1e-5)]


def gradients(x: Tensor, held: Tensor) -> list[Tensor]:
    def loss(v: Tensor) -> Tensor:
        return ((v * held).softmax(-1).log() * v.sigmoid() * v.tanh()).sum()

    per_row = torch.func.vmap(torch.func.grad(loss))(torch.stack([x, x.exp()]))
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (outside,) = torch.autograd.grad(loss(leaf), leaf)
    return [per_row, outside, torch.func.jvp(loss, (x,), (held,))[1]]


def casts(x: Tensor, held: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        weight = held.expand(3, 3)
        return [x @ weight, (x @ weight).exp().sum()]


@pytest.mark.parametrize("function", [in_place, several, gradients, casts])
def test_functions(function: Callable[[Tensor, Tensor], list[Tensor]]) -> None:
    """Records are those of torch, have its bits for other inputs, and write into none."""
    x, held = torch.tensor([0.3, -1.2, 2.0]), torch.tensor([1.0, 0.5, -2.0])
    ours, torchs = recorded(lambda x: function(x, held), x), make_fx(lambda x: function(x, held))(x)
    assert operations(simplified(deepcopy(ours), False)) == operations(simplified(torchs, False))
    for argument in (x, torch.tensor([-0.0, 1e-40, 0.7]), torch.randn(3)):
        copies = argument.clone(), held.clone()
        for graph in (ours, simplified(deepcopy(ours))):
            assert all(map(torch.equal, graph(argument), function(argument, held)))
        assert torch.equal(argument, copies[0]) and torch.equal(held, copies[1])


def test_python_may_look_at_what_is_always_the_same() -> None:
    def function(x: Tensor) -> Tensor:
        two = torch.tensor(2.0)
        return x * (3 if two * two > 1 else 5) + float(two)

    x = torch.tensor([1.0, 2.0])
    assert torch.equal(recorded(lambda x: [function(x)], x)(x + 1)[0], function(x + 1))


@pytest.mark.parametrize("look", [lambda x: x.sum().item(), lambda x: bool(x[0] > 0), lambda x: torch.equal(x, -x)])
def test_python_may_not_look_at_values(look: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="depends on values of tensors"), Recording({"x": (x := torch.ones(2))}):
        look(x)
    with pytest.raises(RuntimeError, match="depends on values of tensors"), Recording({"x": (x := torch.ones(2))}):
        look(torch.zeros(2))  # made here


class Looks(FedAvg):
    """Looks at a value in a round that the agreement check does not see."""

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        g = grad(w)
        return (-g if ctx.t == 1 and g.sum() > 0 else g), client


def test_a_look_in_a_later_round_is_told(tmp_path: Path) -> None:
    says = r"trainer.engine = graphed: Looks with Small cannot be batched \(.*depends on values.*\); use sequential"
    with pytest.raises(UserError, match=says):
        train(tmp_path, Looks(Small()), "graphed")


def test_a_cached_mask_is_held_and_not_made_in_each_replay() -> None:
    spec, x = FlatSpec(Small()), torch.ones(1)
    name, *_ = spec.names
    record = recorded(lambda x: [spec.mask([name], x.device) * x], x)
    assert [node.target for node in record.graph.nodes if node.op == "call_function"] == [torch.ops.aten.mul.Tensor]
    assert torch.equal(record(x)[0], spec.mask([name], x.device) * x)
