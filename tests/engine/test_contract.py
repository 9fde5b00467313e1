"""The dry step before round 1: what it shows, and that nothing is left of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning import SAM, Callback, Compress, Ditto, FedAvg, FedSMOO, NaiveFedGloSS, ServerMomentum, UserError
from fl_lightning.core import State
from fl_lightning.engine import contract_of
from tests.engine.test_engines import Small, train


class Keeps(FedAvg):
    """Keeps all kinds of things on itself, and draws from torch's global generator."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls, self.norms, self.mean = 0, list[float](), torch.zeros(307, dtype=torch.float64)

    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        self.calls += 1
        self.norms.append(float(w.norm()))
        self.mean.add_(w)
        self.cached = torch.rand(3)
        return {"w": w}, client


class Looks(Callback):
    """Looks at the objective before the first round."""

    def on_fit_start(self, run: Any) -> None:
        model = run.objective
        self.seen = model.calls, len(model.norms), float(model.mean.norm()), hasattr(model, "cached"), run.net.w.clone()
        self.state = torch.get_rng_state()


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    net, look = Small(), Looks()
    w0, drawn = torch.cat([p.detach().flatten() for p in net.parameters()]), torch.manual_seed(3).get_state()
    with pytest.warns(UserWarning, match=r"Keeps changes self\.(calls|mean|norms) while clients train"):
        train(tmp_path, Keeps(net=net), "sequential", max_rounds=1, callbacks=[look])
    *seen, w = look.seen
    assert seen == [0, 0, 0.0, False] and torch.equal(w, w0) and torch.equal(look.state, drawn)


class SetsOnce(FedAvg):
    """Sets something in the first round, and uses it in all: where training began, or a cache."""

    def __init__(self, where: str, **options: Any) -> None:
        super().__init__(**options)
        self.where = where

    def local_start(self, client: State, received: State, ctx: Any) -> Any:
        if self.where == "client" and not hasattr(self, "began"):
            self.began = received.w
        elif self.where == "cache" and not hasattr(self, "began"):
            self.began = torch.zeros_like(received.w)
        return received.w, client

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        if self.where == "server" and not hasattr(self, "_began"):
            self._began = float(server.w.norm())
        return super().server_step(server, sent, uploads, ctx)


@pytest.mark.parametrize("where", ["client", "server", "cache"])
def test_what_is_set_once_is_a_warning_unless_it_is_a_cache(where: str, tmp_path: Path) -> None:
    """Else a resumed run sets it anew, in silence: ``hasattr`` looks like a cache."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(tmp_path, SetsOnce(where, net=Small()), "sequential", max_rounds=1)
    messages = [
        str(warning.message) for warning in caught if "is set once, from what a hook gets" in str(warning.message)
    ]
    assert [message.split()[0] for message in messages] == {
        "client": ["SetsOnce.began"],
        "server": ["SetsOnce._began"],
        "cache": [],
    }[where]


class Cools(FedAvg):
    """The server's step lowers the learning rate."""

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        self.optimizer.lr *= 0.9
        return super().server_step(server, sent, uploads, ctx)


def test_a_setting_of_the_optimizer_is_in_checkpoints(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(tmp_path, Cools(net=Small()), "sequential", max_rounds=1)


def test_what_it_shows_by_phase() -> None:
    """It shows a part whose clients also train alone, with SAM in the round; two phases; an upload that is shorter."""
    d = 307
    ditto = contract_of(FedAvg(Small(), ascent=SAM(0.1), parts=[Ditto(0.1)]))
    assert [(phase, contract.passes) for phase, contract in ditto.items()] == [(1, (1, 1)), (0, (2, 2))]
    assert ditto[0].bits == (32 * d, 32 * d)
    assert [contract.passes for contract in contract_of(NaiveFedGloSS(Small())).values()] == [(1, 1), (1, 1)]
    smoo = contract_of(FedSMOO(Small()))[0]
    assert {*smoo.sent} == {*smoo.upload} == {"w", "s"} and smoo.bits == (64 * d, 64 * d)
    down, up = contract_of(FedAvg(Small(), parts=[Compress("sign")]))[0].bits
    assert down == 32 * d and up < 2 * d


class Reads(FedAvg):
    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        return super().server_step(server, sent, uploads, ctx).replace(w=server.w * float(server.w[0] * 0 + 1))


def test_outside_a_run_a_hook_may_read_values() -> None:
    assert contract_of(Reads(Small()))[0].passes == (1, 1)


class Grows(ServerMomentum):
    def __call__(self, server: State, delta: Tensor, ctx: Any) -> State:
        return super().__call__(server, delta.double().unsqueeze(0), ctx)


class Halves(FedAvg):
    """Wrong from its second round on."""

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        after = super().server_step(server, sent, uploads, ctx)
        return after.replace(w=after.w[::2]) if ctx.t else after


@pytest.mark.parametrize("make", [lambda: FedAvg(Small(), server_update=Grows(0.9)), lambda: Halves(Small())])
def test_a_mistake_of_the_server_leaves_no_run(make: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"server_step returns 'w' as .*; return float64 of shape \(307,\), as it was"):
        train(tmp_path, make(), "graphed", max_rounds=3)
    assert not [*tmp_path.iterdir()]


class LogsAll(FedAvg):
    """Logs a vector, of a client or of the server."""

    logs = ("model",)

    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        ctx.log("model", w)
        return {"w": w}, client


class ServerLogsAll(FedAvg):
    logs = ("model",)

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        ctx.log("model", server.w)
        return super().server_step(server, sent, uploads, ctx)


class BareConstant(FedAvg):
    """Without the comma of ``(v,)``."""

    def loss_constants(self, client: State, received: State, ctx: Any) -> Any:
        return received.w[..., :4]


class NumberConstant(FedAvg):
    def loss_constants(self, client: State, received: State, ctx: Any) -> Any:
        return (0.5,)


class NetAsTeacher(FedAvg):
    def teacher(self, client: State, received: State) -> Any:
        return self.net


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (LogsAll, r"ctx\.log: 'model' is float64 of shape \(307,\); log one number, as norm\(v\)"),
        (ServerLogsAll, r"ctx\.log: 'model' is float64 of shape \(307,\); log one number, as norm\(v\)"),
        (BareConstant, r"loss_constants returns float64 of shape \(4,\); return a tuple of tensors, as \(v,\)"),
        (NumberConstant, r"loss_constants returns \(0\.5,\); return a tuple of tensors, as \(v,\)"),
        (NetAsTeacher, r"teachers returns a Small; return a tuple of tensors, as \(v,\)"),
    ],
)
def test_a_tensor_for_a_number_and_a_number_for_a_tensor(kind: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        train(tmp_path, kind(net=Small()), "sequential", max_rounds=1)


class OneNumber(FedAvg):
    """A constant of the loss that is a scalar tensor."""

    def loss_constants(self, client: State, received: State, ctx: Any) -> Any:
        return (torch.tensor(0.5, dtype=torch.float64),)

    def losses(self, logits: Tensor, target: Tensor, *constants: Tensor) -> Tensor:
        return super().losses(logits, target) * constants[0]


@pytest.mark.parametrize("engine", ["batched", "graphed"])
def test_a_constant_of_the_loss_may_be_a_scalar(engine: str, tmp_path: Path) -> None:
    runs = [train(tmp_path, OneNumber(net=Small()), name, max_rounds=2) for name in (engine, "sequential")]
    torch.testing.assert_close(runs[0].server.w, runs[1].server.w, rtol=1e-9, atol=1e-12)


PAST = list[Tensor]()


class InAList(FedAvg):
    """The server's step keeps its steps in a list of the module, of which it takes the mean."""

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        PAST.append(uploads.weighted("w") - sent.w)
        return server.replace(w=sent.w + torch.stack(PAST).mean(0))


class InADefault(FedAvg):
    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any, past: Any = [0]) -> State:  # noqa: B006
        past[0] += 1
        return server.replace(w=sent.w + (uploads.weighted("w") - sent.w) / past[0])


class OfNumPy(FedAvg):
    def broadcast(self, server: State, ctx: Any) -> State:
        return server.replace(w=server.w + 0.01 * np.random.default_rng().normal())


class OfTheRound(FedAvg):
    """Draws as it should."""

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        draw = torch.Generator().manual_seed(ctx.t)
        return server.replace(w=uploads.weighted("w") + torch.randn(307, generator=draw).to(server.w))


@pytest.mark.parametrize("kind", [InAList, InADefault, OfNumPy, OfTheRound])
def test_a_hook_of_the_server_that_cannot_be_repeated_is_a_warning(kind: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        train(tmp_path, kind(net=Small()), "sequential", max_rounds=1)
    messages = {str(w.message).partition(":")[0] for w in caught if "repeated" in str(w.message)}
    hook = "broadcast" if kind is OfNumPy else "server_step"
    wanted = f"{kind.__name__}.{hook} gives another result when it is repeated"
    assert messages == ({wanted} if kind is not OfTheRound else set())
