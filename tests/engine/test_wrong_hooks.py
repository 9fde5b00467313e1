"""Hooks with mistakes are refused in one line on batched and graphed, or give there what they give on sequential."""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning import (
    SGD,
    Aggregation,
    Callback,
    FedAvg,
    LocalObjective,
    LocalOptimizer,
    ServerUpdate,
    UserError,
)
from fl_lightning.algorithms.parts.local_optimizer import Schedule
from fl_lightning.core import State
from tests.engine.test_engines import Small, assert_close, train
from tests.runs import last, metrics, newest


class Mixer(LocalObjective):
    """With state ``h`` of a client, its last displacement."""

    client_state = {"h": "zeros"}

    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": w}, client.replace(h=w - client.start)


class NormOfAll(LocalObjective):
    up, references, server_state = ("w", "far"), {"w": "w", "far": 0.0}, {"far": 0.0}  # type: ignore[assignment]

    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": w, "far": (w - client.start).norm().reshape(1)}, client


class NoShape(NormOfAll):
    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": w, "far": (w - client.start).norm()}, client


class MeanOfEnds(LocalObjective):
    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": w - 0.1 * (w - client.start).mean(0)}, client


class MeanOfState(Mixer):
    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": w}, client.replace(h=client.h + (w - client.start) / (w - client.start).abs().max())


class WrongState(Mixer):
    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": w}, client.replace(h=w.mean(-1, keepdim=True))


class Stepping(LocalObjective):
    """Changes the gradient by `of`."""

    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        raise NotImplementedError

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        return self.of(grad(w), w, ctx), client


class NormalizedByAll(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g / (g.norm() + 1e-12)


class NoKeepdim(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g / (g.norm(dim=-1) + 1e-12)


class Centered(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g - g.mean(0)


class SlightlyCentered(Stepping):
    """Changes the update by a few percent."""

    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g * (1 + 0.02 * torch.tanh(g.mean() / g.std()))


class Summed(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g.cumsum(0)


class TopOfAll(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return torch.where(g.abs() >= g.abs().flatten().topk(20).values[-1], g, 0)


class FirstOnly(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g + w[0]


class BranchInStep(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g if g.sum() > 0 else -g


class ItemInStep(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g * (1 + 0.1 * g[..., 0].abs().max().item())


class BranchInEnd(Mixer):
    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": w if bool((w - client.start).sum() > 1e6) else client.start}, client


class InPlace(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        w.mul_(0.9)
        return g


class InPlaceGradient(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g.mul_(0.5)


class OnSelf(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        last = self.__dict__.get("last", torch.zeros(w.shape[-1], dtype=w.dtype))
        self.__dict__["last"] = w
        return g + 0.1 * (w - last)


class MixedStart(Mixer):
    def local_start(self, client: State, received: State, ctx: Any) -> Any:
        return received.w + client.h / (1 + client.h.norm()), client


class MixedConstants(LocalObjective):
    def loss_constants(self, client: State, received: State, ctx: Any) -> Any:
        return ((received.w[..., :1] * 0 + ctx.n_k) / torch.as_tensor(ctx.n_k).sum(),)

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        return super().losses(logits, target) * teacher[0]


class MixedTeacher(Mixer):
    def teacher(self, client: State, received: State) -> Tensor:
        return received.w + client.h / client.h.norm().clamp(min=1e-9)

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        return super().losses(logits, target) + (logits - teacher[0]).pow(2).mean(-1)


class MixedRate(LocalObjective):
    def step_lr(self, client: State, ctx: Any) -> Any:
        return ctx.lr * ctx.n_k / torch.as_tensor(ctx.n_k).sum()


class MixingSGD(SGD):
    def step(self, w: Tensor, direction: Any, memory: State, lr: Any, ctx: Any) -> Any:
        return w - lr * direction / direction.norm(), memory


class Forgetful(SGD):
    """Returns another state than it declares."""

    def step(self, w: Tensor, direction: Any, memory: State, lr: Any, ctx: Any) -> Any:
        return w - lr * direction, State({"other": w})


class RandomSGD(SGD):
    def step(self, w: Tensor, direction: Any, memory: State, lr: Any, ctx: Any) -> Any:
        return w - lr * direction * torch.rand(()), memory


class RandomStart(LocalObjective):
    def local_start(self, client: State, received: State, ctx: Any) -> Any:
        return received.w + 0.01 * torch.randn_like(received.w), client


class RandomStep(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g + 0.01 * torch.randn_like(g)


class RandomRate(LocalObjective):
    def step_lr(self, client: State, ctx: Any) -> Any:
        return ctx.lr * torch.rand(1)


class RandomEnd(LocalObjective):
    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": w + 0.01 * torch.randn_like(w)}, client


class RandomConstants(Mixer):
    def loss_constants(self, client: State, received: State, ctx: Any) -> Any:
        return (torch.rand_like(client.h[..., :1]),)

    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        return super().losses(logits, target) * teacher[0]


class RandomTeacher(MixedTeacher):
    def teacher(self, client: State, received: State) -> Tensor:
        return received.w + torch.randn_like(received.w)


class RandomLosses(LocalObjective):
    def losses(self, logits: Tensor, target: Tensor, *teacher: Tensor) -> Tensor:
        return super().losses(logits, target) * torch.rand(())


class FromRoundTwo(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g - g.mean(0) if ctx.t >= 1 else g


class InPhaseTwo(Stepping):
    phases = 2

    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g - g.mean(0) if ctx.phase == 1 else g


class FromStepThree(LocalObjective):
    """Mixes what it keeps for two steps."""

    scratch_state = {"last": "zeros", "before": "zeros"}

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        g = grad(w)
        return g + client.before.mean(0), client.replace(last=g, before=client.last)


class FromStepFour(LocalObjective):
    """Mixes in the fourth of five steps."""

    scratch_state = {"step": 0.0}

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        g = grad(w)
        return torch.where(client.step >= 3, g - g.mean(0), g), client.replace(step=client.step + 1)


class NumPyEnd(LocalObjective):
    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": w + float(np.random.default_rng().normal())}, client


OPTIMIZERS: dict[str, Any] = {
    "mixing optimizer": MixingSGD,
    "forgetful optimizer": Forgetful,
    "random optimizer": RandomSGD,
}
GLOBAL = (RandomStart, RandomStep, RandomRate, RandomEnd, RandomConstants, RandomTeacher)
WRONG: dict[str, Any] = {
    **{name: lambda kind=kind: FedAvg(net=Small(), optimizer=kind(0.1)) for name, kind in OPTIMIZERS.items()},
    **{
        kind.__name__: lambda kind=kind: kind(net=Small(), optimizer=SGD(0.1))
        for kind in (
            NormOfAll, NoShape, MeanOfEnds, MeanOfState, WrongState, NormalizedByAll, NoKeepdim, Centered,
            SlightlyCentered, Summed, TopOfAll, FirstOnly, BranchInStep, ItemInStep, BranchInEnd, InPlace,
            InPlaceGradient, OnSelf, MixedStart, MixedConstants, MixedTeacher, MixedRate, *GLOBAL, RandomLosses,
            NumPyEnd, FromRoundTwo, InPhaseTwo, FromStepThree, FromStepFour,
        )
    },
}  # fmt: skip
ELSEWHERE = {
    "forgetful optimizer": "Forgetful.step returns 'other', which nobody declares; declare it as state,",
    "InPlace": "InPlace.local_step changes w, client.start, received.w in place; compute a new tensor, as v - x",
    "WrongState": "WrongState.local_end returns 'h' as float64 of shape (1,); return float64 of shape (307,)",
}
SAME = ("InPlaceGradient",)
"""Those that give the same on all engines."""


class OfTheRound(LocalObjective):
    def local_step(self, w: Tensor, grad: Any, client: Any, received: Any, ctx: Any) -> Any:
        return sum((ctx.t * grad(w) for _ in range(33)), torch.zeros_like(w)), client


class Seeded(LocalObjective):
    """Draws the same numbers in each step."""

    def local_step(self, w: Tensor, grad: Any, client: Any, received: Any, ctx: Any) -> Any:
        noise = torch.randn(w.shape[-1], generator=torch.Generator().manual_seed(0), dtype=w.dtype)
        return grad(w) + noise, client


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OfTheRound, "hooks compute with ctx.t more than 32 times in one local step"),
        (Seeded, "a hook draws random numbers in a local step, which the record would repeat"),
    ],
)
def test_what_no_record_holds(kind: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        train(tmp_path, kind(net=Small()), "graphed", max_rounds=2)


def test_a_tuple_may_hold_a_list(tmp_path: Path) -> None:
    objectives = [Held(net=Small(), optimizer=SGD(0.1)) for _ in range(2)]
    for objective in objectives:
        objective.layers = (1, [2])  # type: ignore[assignment]
    assert_close(
        *(
            train(tmp_path, objective, name)
            for objective, name in zip(objectives, ("graphed", "sequential"), strict=True)
        )
    )


@pytest.mark.sampled(quick=8, slow=2, start=1)
@pytest.mark.parametrize("engine", ["batched", "graphed"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_hook(wrong: str, engine: str, tmp_path: Path) -> None:
    if wrong in SAME:
        runs = [train(tmp_path, WRONG[wrong](), name, max_rounds=2) for name in (engine, "sequential")]
        assert_close(*runs)
        return
    with pytest.raises(UserError) as error:
        train(tmp_path, WRONG[wrong](), engine, max_rounds=2)
    message, kind = str(error.value), type(WRONG[wrong]()).__name__
    assert "\n" not in message
    if wrong in ELSEWHERE:
        assert message.startswith(ELSEWHERE[wrong])
        return
    assert message.startswith(f"trainer.engine = {engine}: ") and kind in message and "sequential" in message
    if wrong in [algorithm.__name__ for algorithm in GLOBAL]:
        assert "draws from torch's global generator; draw by ctx.randn_like(v) or ctx.draw(function)" in message
    if wrong == "RandomLosses":
        assert "draw those of a loss in loss_constants, by ctx.randn_like(v) or ctx.draw(function)" in message


class Low(Small):
    """Computes in bfloat16 inside its forward."""

    def forward(self, x: Tensor) -> Tensor:
        low = torch.nn.functional.linear(x.flatten(1).bfloat16(), self[1].weight.bfloat16())
        return self[3](low.relu().to(x.dtype))  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ["batched", "graphed"])
def test_a_slight_mistake_is_found_where_the_net_casts(engine: str, tmp_path: Path) -> None:
    train(tmp_path, LocalObjective(net=Low(), optimizer=SGD(0.1)), engine, max_rounds=1)
    with pytest.raises(UserError, match="something else than for each"):
        train(tmp_path, SlightlyCentered(net=Low(), optimizer=SGD(0.1)), engine, max_rounds=1)


class Undeclared(Stepping):
    """Puts a vector into the client's state that it does not declare."""

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        return grad(w) - (0 * client.extra if "extra" in client else 0), client | {"extra": w}

    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": w + 0 * client.extra}, client


class NoReturn(LocalObjective):
    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        grad(w)


class OneReturn(LocalObjective):
    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        return grad(w)


class NoServer(LocalObjective):
    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> Any:
        super().server_step(server, sent, uploads, ctx)


class WrongRow(Mixer):
    def client_round_end(self, client: State, server: State) -> State:
        return client.replace(h=server.w.mean(-1, keepdim=True))


class NoRow(Mixer):
    def client_round_end(self, client: State, server: State) -> Any: ...


class NoGradient(LocalObjective):
    def local_gradient(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        grad(w)


class ShortStep(LocalObjective):
    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        return grad(w)[..., :5], client


class NoConstants(LocalObjective):
    def loss_constants(self, client: State, received: State, ctx: Any) -> Any: ...


class NumberUp(LocalObjective):
    up = ("w", "n")

    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": w, "n": 3.0}, client


class OneServer(LocalObjective):
    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> Any:
        return uploads.weighted("w")


class Longer(LocalObjective):
    server_state = {"h": 0.0}

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> Any:
        return server.replace(w=uploads.weighted("w"), h=torch.cat([server.h, server.h]))


class Single(LocalObjective):
    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> Any:
        return server.replace(w=uploads.weighted("w").float())


class OtherUpload(LocalObjective):
    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> Any:
        return server.replace(w=uploads.mean("v"))


class SetState(LocalObjective):
    client_state = {"h": "zeros"}

    def local_step(self, w: Tensor, grad: Any, client: Any, received: State, ctx: Any) -> Any:
        client.h = w
        return grad(w), client


class NoStep(LocalOptimizer):
    def step(self, w: Tensor, direction: Any, memory: State, lr: Any, ctx: Any) -> Any: ...


VECTOR = "return a vector of w's shape, (307,)"
VALUE = "return a value, as the docstring of this hook in the base class says"
NONE = "return two values, as the docstring of this hook in the base class says"


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: NoReturn(net=Small()), f"NoReturn.local_step returns None; {NONE}"),
        (lambda: OneReturn(net=Small()), f"OneReturn.local_step returns a Tensor; {NONE}"),
        (lambda: NoServer(net=Small()), f"NoServer.server_step returns None; {VALUE}"),
        (lambda: NoRow(net=Small()), f"NoRow.client_round_end returns None; {VALUE}"),
        (lambda: FedAvg(net=Small(), optimizer=NoStep()), f"NoStep.step returns None; {NONE}"),
        (
            lambda: NoGradient(net=Small()),
            f"NoGradient.local_gradient returns None; {VALUE}",
        ),
        (
            lambda: ShortStep(net=Small()),
            f"ShortStep.local_step returns float64 of shape (5,); {VECTOR}",
        ),
        (
            lambda: NoConstants(net=Small()),
            f"NoConstants.loss_constants returns None; {VALUE}",
        ),
        (lambda: NumberUp(net=Small()), "NumberUp.local_end uploads n = a float; upload tensors"),
        (
            lambda: OneServer(net=Small()),
            "OneServer.server_step returns float64 of shape (307,); return a State, as of replace(...)",
        ),
        (
            lambda: Longer(net=Small()),
            "Longer.server_step returns 'h' as float64 of shape (2,); return float64 of shape (1,), as it was",
        ),
        (
            lambda: Single(net=Small()),
            "Single.server_step returns 'w' as float32 of shape (307,); return float64 of shape (307,), as it was",
        ),
        (lambda: OtherUpload(net=Small()), "no upload 'v' here; there are: w; declare it in up"),
        (lambda: SetState(net=Small()), "state 'h' is set in place; return the state that replace(h=...) gives"),
    ],
    ids=[
        "nothing",
        "one",
        "server",
        "row",
        "optimizer",
        "gradient",
        "short",
        "constants",
        "number",
        "tensor",
        "longer",
        "single",
        "upload",
        "set",
    ],
)
@pytest.mark.parametrize("engine", ["sequential", "batched", "graphed"])
def test_hooks_that_return_nothing(wrong: Any, message: str, engine: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        train(tmp_path, wrong(), engine, eval_every=3)  # two rounds as one program
    assert str(error.value) == message


class Number(LocalOptimizer):
    state = {"n": 0.0}

    def step(self, w: Tensor, direction: Any, memory: State, lr: Any, ctx: Any) -> Any:
        return w - lr * self.clipped(direction), memory.replace(n=1.0)


class Taller(SGD):
    def step(self, w: Tensor, direction: Any, memory: State, lr: Any, ctx: Any) -> Any:
        return (w - lr * direction).unsqueeze(0), memory


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *[
            (
                lambda kind=kind: kind(net=Small()),
                f"{hook} returns 'h' as float64 of shape (1,); return float64 of shape (307,), as it was",
            )
            for kind, hook in ((WrongState, "WrongState.local_end"), (WrongRow, "WrongRow.client_round_end"))
        ],
        (
            lambda: FedAvg(net=Small(), optimizer=Number(0.1)),
            "Number.step returns 'n' as a float; return float64 of shape (1,), as it was",
        ),
        (
            lambda: FedAvg(net=Small(), optimizer=Taller(0.1)),
            f"Taller.step returns float64 of shape (1, 307); {VECTOR}",
        ),
        (
            lambda: Undeclared(net=Small()),
            "Undeclared.local_step returns 'extra', which nobody declares; declare it as state, or leave it out",
        ),
    ],
    ids=["state", "row", "number", "weights", "undeclared"],
)
def test_sequential_refuses_other_shapes_and_names(wrong: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        train(tmp_path, wrong(), "sequential", max_rounds=1)
    assert str(error.value) == message
    assert not [*tmp_path.iterdir()]  # a mistake before the first round leaves no run folder


@pytest.mark.parametrize("name", ["batched", "graphed"])
def test_check_trains_no_clients_beside_its_own(name: str, tmp_path: Path) -> None:
    """Once a cohort of five has been trained, the check of four clients is not padded to its width, in float64."""
    run = train(tmp_path, FedAvg(net=Small(), optimizer=SGD(0.1)), name, max_rounds=1, clients_per_round=5)
    assert run.engine._widest == 5  # type: ignore[attr-defined]
    assert run.engine.without_autocast()._widest == 2  # type: ignore[attr-defined]


class Remembers(LocalObjective):
    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        self.last = uploads.mean("w") - server.w
        return super().server_step(server, sent, uploads, ctx)


@pytest.mark.parametrize("name", ["sequential", "graphed"])
def test_what_a_resumed_run_lacks_is_a_warning(name: str, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"Remembers sets self\.last in the server's step: a resumed run lacks it; declare it"
    ):
        train(tmp_path, Remembers(net=Small()), name, max_rounds=3)


class Memory:
    """An object of a class of one's own, which several hooks may share."""

    def __init__(self) -> None:
        self.n, self.steps = 0, list[Tensor]()


class HeavyBall(ServerUpdate):
    """Keeps something on itself: as a tensor, in place, in a list, in a private attribute, ..."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.v, self._v = where, torch.zeros(307, dtype=torch.float64), 0.0
        self.all: list[Tensor] = []
        self.best: float | None = None
        self.window, self.means, self.memo = deque[Tensor](maxlen=2), dict[str, Tensor](), dict[int, Tensor]()
        self.calls, self.memories = 0, [Memory()]

    def __call__(self, server: State, delta: Tensor, ctx: Any) -> State:
        self.calls += 1  # a checkpoint has it
        if self.where == "tensor":
            self.v = 0.9 * self.v + delta
        elif self.where == "in place":
            self.v.mul_(0.9).add_(delta)
        elif self.where == "list":
            self.all.append(delta)
        elif self.where == "private":
            self._v = float(delta.norm())
        elif self.where == "none":
            self.best = float(delta.norm())
        elif self.where == "entries":
            self.window.append(delta)
            self.means["w"] = delta
        elif self.where == "object":
            self.memories[0].n += 1
        elif self.where == "nowhere":  # caches
            self.memo[ctx.t] = delta
            if not hasattr(self, "_mask"):
                self._mask = torch.ones_like(delta)
        return super().__call__(server, delta, ctx)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sequential", "graphed"])
def test_what_the_server_s_parts_keep_is_a_warning(name: str, tmp_path: Path) -> None:
    fields = {
        "tensor": "v",
        "in place": "v",
        "list": "all",
        "private": "_v",
        "none": "best",
        "entries": "(window|means)",
        "object": "n",
    }
    for where, field in fields.items():
        objective = FedAvg(net=Small(), server_update=HeavyBall(where))
        with pytest.warns(
            UserWarning, match=rf"(HeavyBall|Memory) sets self\.{field} in the server's step: a resumed run lacks it"
        ):
            train(tmp_path, objective, name, max_rounds=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path, FedAvg(net=Small(), server_update=HeavyBall("nowhere")), name, max_rounds=3)


class InTuple(ServerUpdate):
    """Keeps a list and a tensor in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = (list[int](), torch.zeros(1))

    def __call__(self, server: State, delta: Tensor, ctx: Any) -> State:
        self.kept[0].append(ctx.t)
        self.kept[1].add_(1)
        return super().__call__(server, delta, ctx)


@pytest.mark.parametrize("name", ["sequential", "graphed"])
def test_what_a_tuple_holds_is_told_and_put_back_after_the_dry_step(name: str, tmp_path: Path) -> None:
    update = InTuple()
    with pytest.warns(UserWarning, match=r"InTuple sets self\.kept in the server's step: a resumed run lacks it"):
        train(tmp_path, FedAvg(net=Small(), server_update=update), name, max_rounds=2)
    assert update.kept == ([0, 1], torch.full((1,), 2.0))


class RunningMean(Aggregation):
    def __init__(self) -> None:
        self.old: dict[int, Tensor] = {}
        self.calls = 0

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        self.calls += 1
        self.old[rows.shape[1]] = rows.mean(0)
        return self.old[rows.shape[1]]


def test_what_a_rule_keeps_is_a_warning(tmp_path: Path) -> None:
    """Numbers count as well: no checkpoint has those of a rule."""
    with pytest.warns(UserWarning, match=r"RunningMean sets self\.old in") as caught:
        train(tmp_path, FedAvg(net=Small()), "sequential", aggregation=RunningMean(), max_rounds=2)
    assert any("RunningMean sets self.calls in the server's step" in str(warning.message) for warning in caught)


class Dims(Small):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


PULL = {"mu": 0.1}
"""A setting of a user's module."""


class Pulled(Stepping):
    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g + PULL["mu"] * w


class Held(Stepping):
    """Its setting is a tensor of its own, which it replaces."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mu = torch.tensor(0.1)

    def of(self, g: Tensor, w: Tensor, ctx: Any) -> Tensor:
        return g + self.mu * w


class Changes(Callback):
    """Changes a setting after some round."""

    def __init__(self, at: int, change: Any) -> None:
        self.at, self.change = at, change

    def on_round_end(self, run: Any) -> None:
        if run.rounds_done == self.at:
            self.change(run.objective)


@pytest.mark.parametrize(("target", "at"), [("global", 1), ("net", 3)])
def test_what_a_record_does_not_see_ends_the_run(at: int, target: str, tmp_path: Path, monkeypatch: Any) -> None:
    """A global of the hooks' module ends it in the next round, an attribute of the net at the latest in the last."""
    monkeypatch.setitem(PULL, "mu", 0.1)
    change = Changes(at, lambda x: PULL.update(mu=0.2) if target == "global" else setattr(x.net, "factor", 2.0))
    objective = Pulled(net=Dims(), optimizer=SGD(0.1))
    message = "Pulled, its net or its loss reads something that has changed since its step was recorded in round 1"
    with pytest.raises(UserError, match=message):
        train(tmp_path, objective, "graphed", max_rounds=5, callbacks=[change])
    rounds = {"global": 1, "net": 4}[target]
    assert [round_ for round_, _ in metrics(newest(tmp_path))["client/lr"]] == [*range(1, rounds + 1)]


def test_a_tensor_on_the_objective_may_change(tmp_path: Path) -> None:
    runs = [
        train(tmp_path, Held(net=Small(), optimizer=SGD(0.1)), name, callbacks=[Changes(1, double)])
        for name in ("graphed", "sequential")
    ]
    assert_close(*runs)


def double(objective: Any) -> None:
    objective.mu = 2 * objective.mu


class Counting(LocalOptimizer):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def step(self, w: Tensor, direction: Any, memory: State, lr: Any, ctx: Any) -> Any:
        self.n += 1
        return w - lr / self.n * self.clipped(direction), memory


def test_what_other_processes_lack_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"^Counting changes self\.n while clients train: a resumed run, and each other"
    ):
        train(tmp_path, FedAvg(net=Small(), optimizer=Counting()), "sequential", max_rounds=1)


class Keeps(LocalObjective):
    """The server's step keeps something on the objective: in a list, in place, in a generator, ..."""

    def __init__(self, where: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.where, self.steps = where, list[Tensor]()
        self._steps, self.named = self.steps if where == "aliases" else list[Tensor](), {"steps": list[Tensor]()}
        self.sum, self.draw = torch.zeros(307, dtype=torch.float64), np.random.default_rng(0)
        self.memory = Memory()
        self._memories = {"of the server": (self.memory,)}

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        step = uploads.mean("w") - sent.w
        kept = {"public": self.steps, "private": self._steps, "aliases": self._steps, "inside": self.named["steps"]}
        kept |= {"object": self.memory.steps, "hidden object": self._memories["of the server"][0].steps}
        if self.where in kept:
            kept[self.where].append(step)
            step = sum((self.steps or kept[self.where])[-2:])  # type: ignore[assignment]
        elif self.where == "in place":
            step = self.sum.mul_(0.9).add_(step).clone()
        else:
            step = step * self.draw.random()
        return server.replace(w=sent.w + step)


class Watches(Callback):
    """Sees local training, so that no rounds run as a program."""

    def on_local_end(self, run: Any, result: Any) -> None: ...


@pytest.mark.sampled(quick=2, start=1)
@pytest.mark.parametrize(
    "where", ["public", "private", "aliases", "inside", "object", "hidden object", "in place", "generator"]
)
def test_what_the_server_s_step_keeps_is_that_of_the_rounds(where: str, tmp_path: Path) -> None:
    """Neither the dry step before the first round nor a record of a whole round adds to it."""
    objectives = [Keeps(where, net=Small(), optimizer=SGD(0.1)) for _ in range(3)]
    engines = [("sequential", []), ("graphed", [Watches()]), ("graphed", [])]
    with pytest.warns(UserWarning, match="a resumed run lacks it"):
        runs = [
            train(tmp_path, objective, name, callbacks=callbacks, eval_every=5, max_rounds=4)
            for objective, (name, callbacks) in zip(objectives, engines, strict=True)
        ]
    assert_close(runs[0], runs[1])
    assert torch.equal(runs[1].server.w, runs[2].server.w)
    draw = np.random.default_rng(0)
    for objective in objectives:
        length = max(
            len(objective.steps), len(objective._steps), len(objective.named["steps"]), len(objective.memory.steps)
        )
        assert length == (0 if where in ("in place", "generator") else 4)
    if where == "generator":
        draw.random(4)
        assert {objective.draw.random() for objective in objectives} == {draw.random()}


class OnItsClass(LocalObjective):
    """The server's step keeps something on the class: a list that all objects share, or a number."""

    past: ClassVar[list[int]] = []
    calls = 0

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        self.past.append(ctx.t)
        type(self).calls += 1
        return server.replace(w=sent.w + (uploads.mean("w") - sent.w) / (len(self.past) + self.calls))


class InABuffer(LocalObjective):
    """The server's step keeps a vector in a registered buffer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("sum", torch.zeros(self.flat.d, dtype=torch.float64))

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        self.sum = 0.9 * self.sum + uploads.mean("w") - sent.w
        return server.replace(w=sent.w + self.sum)


class Toggling(Stepping):
    """A flag that each round turns."""

    flag = False

    def begin_phase(self, server: State, ctx: Any) -> State:
        self.flag = not self.flag
        return super().begin_phase(server, ctx)

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        return grad(w) * (1.5 if self.flag else 0.5), client


@pytest.mark.parametrize("kind", [OnItsClass, InABuffer, Toggling])
def test_what_a_class_keeps_and_what_each_round_turns_is_that_of_the_rounds(
    kind: type[LocalObjective], tmp_path: Path
) -> None:
    """Neither a dry step, nor the check of an engine, nor a record adds to it, or turns it."""
    runs = []
    for name, callbacks in (("sequential", []), ("graphed", [Watches()]), ("graphed", [])):
        OnItsClass.past.clear()
        OnItsClass.calls = 0
        objective = kind(net=Small(), optimizer=SGD(0.1))
        with pytest.warns(UserWarning, match=rf"{kind.__name__} (changes|sets) self\.(past|sum|flag) .* a resumed"):
            runs.append(train(tmp_path, objective, name, callbacks=callbacks, eval_every=5, max_rounds=4))
        assert OnItsClass.past == [*range(4 * (kind is OnItsClass))]
    assert_close(runs[0], runs[1])
    assert torch.equal(runs[1].server.w, runs[2].server.w)


class Adapting(nn.CrossEntropyLoss):
    """A loss that follows its own mean, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        losses = super().forward(logits, target)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * losses.detach().mean()
        return losses * (1 + self.mean)


def test_what_a_loss_keeps_is_a_warning(tmp_path: Path) -> None:
    """The check before the first round leaves no trace."""
    objective = FedAvg(net=Small(), loss=Adapting())
    with pytest.warns(UserWarning, match=r"model\.loss = Adapting changes self\.calls, self\.mean when it is called"):
        train(tmp_path, objective, "sequential", max_rounds=1, local_steps=1, eval_every=1)
    assert objective.loss.calls == 4 + 1  # of the clients, and the evaluation


class FromElsewhere(Small):
    """A net that draws from NumPy, counts its calls, or keeps something in a buffer that no state_dict has."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "NumPy":
            x = x + 0.1 * torch.from_numpy(np.random.default_rng().normal(size=x.shape)).to(x)
        elif self.how == "torch" and self.training:
            x = x + 0.1 * torch.randn_like(x)
        elif self.how == "counter":
            self.calls += 1
        elif self.how == "buffer":
            self.scale = self.scale * 0.99
        return super().forward(x) * (self.scale + 0.01 * self.calls)


@pytest.mark.parametrize("how", ["NumPy", "torch", "counter", "buffer"])
def test_a_step_that_cannot_be_repeated_is_a_warning(how: str, tmp_path: Path) -> None:
    """The other engines refuse it; draws from torch's own generator are repeated: each client seeds it."""
    objective = FedAvg(net=FromElsewhere(how))
    if how == "torch":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(tmp_path, objective, "sequential", max_rounds=1)
    else:
        with pytest.warns(UserWarning, match=r"FedAvg gives another result when a client's step is repeated, in the w"):
            train(tmp_path, objective, "sequential", max_rounds=1)


class InAList(nn.Module):
    """A net with a parameter that it has not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.scales = Small(), [nn.Parameter(torch.ones((), dtype=torch.float64))]

    def forward(self, x: Tensor) -> Tensor:
        return self.small(x) * self.scales[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ["sequential", "batched", "graphed"])
def test_a_parameter_in_a_list_stays_as_it_is(engine: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"model\.net\.scales stays as it is: torch finds no parameters in a list or"):
        objectives = [FedAvg(net=net, optimizer=SGD(0.1)) for net in (InAList(), Small())]
    first, second = (train(tmp_path, objective, engine, max_rounds=2) for objective in objectives)
    assert not first.server.w.requires_grad
    torch.testing.assert_close(first.server.w, second.server.w, rtol=1e-9, atol=1e-12)


def test_layers_in_a_list_are_a_warning_unless_the_net_has_them() -> None:
    net = Small()
    net[0].__dict__["hidden"] = {"own": nn.Linear(2, 2)}
    with pytest.warns(UserWarning, match=r"model\.net\.0\.hidden stays as it is"):
        FedAvg(net=net)
    net[0].hidden["own"].requires_grad_(False)
    net.__dict__["known"] = [*net]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FedAvg(net=net)


class Distilling(LocalObjective):
    """The server trains by autograd, and a client scales its step by a tensor with a gradient; neither detaches."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": received.w + self.scale * (w - received.w)}, client

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        w = uploads.weighted("w").clone().requires_grad_()
        optimizer = torch.optim.SGD([w], lr=0.1)
        ((w - sent.w) ** 2).sum().backward()
        optimizer.step()
        return server.replace(w=w)


@pytest.mark.parametrize("engine", ["sequential", "batched", "graphed"])
def test_no_gradient_flows_from_a_hook(engine: str, tmp_path: Path) -> None:
    """A step of length 0.1 towards the model before leaves 0.8 of the way, of which clients go one half."""
    run = train(tmp_path, Distilling(net=Small(), optimizer=SGD(0.1)), engine)
    assert not run.server.w.requires_grad
    plain = train(tmp_path, FedAvg(net=Small(), optimizer=SGD(0.1)), engine, max_rounds=1)
    distilled = train(tmp_path, Distilling(net=Small(), optimizer=SGD(0.1)), engine, max_rounds=1)
    step, plain_step = distilled.server.w - distilled.clients.w0, plain.server.w - plain.clients.w0
    torch.testing.assert_close(step, 0.4 * plain_step, rtol=1e-9, atol=1e-12)


class Tiring(Schedule):
    """A schedule that counts its calls in the place of rounds."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, t: int, rounds: int) -> float:
        self.calls += 1
        return 0.9**self.calls


def test_a_rate_that_cannot_be_repeated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.optimizer: gives the rate of round 1 as 0\.\d+, and 0\.\d+ when"):
        train(tmp_path, FedAvg(net=Small(), optimizer=SGD(0.1, schedule=Tiring())), "sequential", max_rounds=1)


class Focal(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.power = nn.Parameter(torch.tensor(2.0))

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        ce = nn.functional.cross_entropy(logits, target, reduction="none")
        return (1 - torch.exp(-ce)) ** self.power * ce


@pytest.mark.filterwarnings("error:Converting a tensor with requires_grad")
def test_a_parameter_of_the_loss_is_a_constant_unless_the_net_has_it(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"model\.loss\.power stays as it is: only parameters of model\.net are trained"
    ):
        objectives = [FedAvg(net=Small(), loss=Focal(), optimizer=SGD(0.1)) for _ in range(2)]
    assert_close(
        *(
            train(tmp_path, objective, name)
            for objective, name in zip(objectives, ("batched", "sequential"), strict=True)
        )
    )
    assert objectives[0].loss.power == 2
    net, loss = Small(), Focal()
    net.register_parameter("power", loss.power)
    train(tmp_path, FedAvg(net=net, loss=loss, optimizer=SGD(0.1)), "sequential")
    assert loss.power != 2


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_trained_stays_the_same_in_a_run(frozen: bool, engine: str, tmp_path: Path) -> None:
    """A parameter that a callback freezes trained on, and one that it set free did not train."""
    objectives = []
    for _ in range(2):
        net = Small()
        net[1].weight.requires_grad_(frozen)
        objectives.append(FedAvg(net=net, optimizer=SGD(0.1)))
    first, second = objectives
    message = r"requires_grad of 1\.weight has changed since the algorithm was made"
    change = Changes(2, lambda objective: objective.net[1].weight.requires_grad_(not frozen))
    with pytest.raises(UserError, match=message):
        train(tmp_path, first, engine, callbacks=[change])
    assert last(newest(tmp_path))["round"] == 2
    change.change(second)
    with pytest.raises(UserError, match=message):
        train(tmp_path, second, engine)
    for objective in objectives:
        train(tmp_path, FedAvg(net=objective.net, optimizer=SGD(0.1)), engine, max_rounds=1)
