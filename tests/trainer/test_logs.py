"""Numbers that an algorithm or a part logs from its hooks: the same on every engine, and by every way of a round."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import SAM, SGD, Digits, DigitsMLP, FedAvg, FederatedTrainer, Part, UserError
from fl_lightning.core import State
from fl_lightning.trainer import program
from fl_lightning.trainer.run import Run
from tests.runs import metrics


class Logging(FedAvg):
    """Logs the length of each client's update, the number of the round, and in even rounds that of the mean update."""

    logs = ("update", "round", "mean_update")

    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        ctx.log("update", (w - received.w).norm(dim=-1, keepdim=True))
        return super().local_end(w, client, received, ctx)

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        after = super().server_step(server, sent, uploads, ctx)
        ctx.log("round", ctx.t)
        if ctx.t % 2 == 0:
            ctx.log("mean_update", (after.w - server.w).norm())
        return after


class Notes(Part):
    """Logs how far a client has moved, relative to the model."""

    logs = ("share",)

    def local_end(self, w: Tensor, upload: Any, client: State, received: State, ctx: Any) -> Any:
        ctx.log("share", (w - received.w).norm(dim=-1, keepdim=True) / received.w.norm())
        return upload, client


def train(root: Path, model: Any = None, **options: Any) -> Run:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"max_rounds": 9, "clients_per_round": 4, "local_steps": 2, "precision": "64-true"}
    fixed: dict[str, Any] = {"accelerator": "cpu", "threads": 1, "enable_progress_bar": False, "eval_every": 20}
    trainer = FederatedTrainer(default_root_dir=str(root), callbacks=[], **fixed, **(defaults | options))
    model = model or Logging(DigitsMLP(hidden=8), optimizer=SGD(lr=0.1), ascent=SAM(rho=0.05), parts=[Notes()])
    return trainer.fit(model, Digits(num_clients=9, batch_size=32))


NAMES = [f"algorithm/{name}" for name in ("update", "round", "mean_update", "share")]


@pytest.mark.slow
def test_every_engine_logs_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {}
    for engine in ("sequential", "batched", "graphed"):
        rows[engine] = metrics(train(tmp_path, engine=engine).folder.path)
    with monkeypatch.context() as patch:
        patch.setattr(program, "TAKEN_BACK", 0)
        single = metrics(train(tmp_path, engine="graphed").folder.path)
    for name in NAMES:
        assert rows["graphed"][name] == single[name]
        expected = [value for _, value in rows["sequential"][name]]
        assert len(expected) == (5 if name == "algorithm/mean_update" else 9)
        for engine in ("batched", "graphed"):
            assert [value for _, value in rows[engine][name]] == pytest.approx(expected, rel=1e-9)
    assert [value for _, value in single["algorithm/round"]] == [*range(9)]


def test_a_number_of_clients_is_their_mean(tmp_path: Path) -> None:
    """With one client a round it is that of the server."""
    run = train(tmp_path, clients_per_round=1, max_rounds=1)
    assert run.metrics["algorithm/update"] == pytest.approx(run.metrics["algorithm/mean_update"], rel=1e-12)
    assert math.isfinite(run.metrics["algorithm/share"])


class Undeclared(FedAvg):
    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        ctx.log("mine", 1.0)
        return super().server_step(server, sent, uploads, ctx)


class InAStep(FedAvg):
    logs = ("mine",)

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        ctx.log("mine", 1.0)
        return grad(w), client


class OverAllClients(FedAvg):
    """Its norm is that of all clients at once."""

    logs = ("update",)

    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        ctx.log("update", (w - received.w).norm())
        return super().local_end(w, client, received, ctx)


def test_a_number_over_all_clients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"something else than for each, in log 'update'; reduce over the last axis"):
        train(tmp_path, OverAllClients(DigitsMLP(hidden=8)), engine="batched")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (Undeclared, r"ctx\.log: declare 'mine' in logs, as logs = \('mine',\)"),
        (InAStep, r"ctx\.log: 'mine' is logged elsewhere than in local_end and server_step"),
    ],
)
def test_what_cannot_be_logged_is_one_line(make: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=line):
        train(tmp_path, make(DigitsMLP(hidden=8)), engine="sequential")
