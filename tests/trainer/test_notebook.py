"""What a notebook shows of objects, and the errors of a first try in Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

import fl_lightning
from fl_lightning import (
    SAM,
    SCAFFOLD,
    SGD,
    Arrays,
    Digits,
    DigitsMLP,
    Dirichlet,
    FedAvg,
    FederatedTrainer,
    FlatnessMonitor,
    Frozen,
    Krum,
    LambdaMax,
    LoRA,
    TorchOptimizer,
    UserError,
)
from fl_lightning.trainer.callbacks import Callback
from fl_lightning.trainer.measurements.curvature import _check_derivatives
from fl_lightning.trainer.run import Run

DATA = "Digits(num_clients=4, partition=Dirichlet(alpha=0.1))"


def trainer(**settings: Any) -> FederatedTrainer:
    options = {"max_rounds": 1, "clients_per_round": 2, "accelerator": "cpu", "engine": "sequential"}
    return FederatedTrainer(enable_progress_bar=False, **{**options, **settings})


def test_objects_show_shapes_and_settings(tmp_path: Path) -> None:
    data = Digits(num_clients=4, partition=Dirichlet(alpha=0.1))
    assert repr(data) == DATA
    federated = trainer(default_root_dir=str(tmp_path))
    run = federated.fit(SCAFFOLD(DigitsMLP()), data)
    assert str(data) == repr(data) == f"{DATA}: 1,437 training samples of shape (1, 8, 8), 10 classes"
    assert repr(run) == "Run(SCAFFOLD-Digits: 4 clients, 4,810 weights, round 1 of 1)"
    assert repr(run.server) == "State(w: (4810,), c: (4810,))"
    assert repr(run.state).startswith(f"RunState(round 1, server: {run.server}, metrics: client/train/loss, ")
    assert repr(run.clients) == "ClientStore(2 clients seen, each with c: (4810,))"
    assert repr(federated).startswith("FederatedTrainer(max_rounds=1, sampler=UniformSampler(clients_per_round=2), ")
    assert repr(SAM(rho=0.1)) == "SAM(rho=0.1)" and repr(SGD(lr=0.3, momentum=0.9)) == "SGD(lr=0.3, momentum=0.9)"
    assert repr(DigitsMLP()).startswith("DigitsMLP(\n  (0): Flatten")  # torch's own


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trainer(max_epochs=3), "trainer.max_epochs = 3: no such setting; did you mean trainer.max_rounds?"),
        (lambda: trainer(max_roundz=3), "trainer.max_roundz = 3: no such setting; did you mean trainer.max_rounds?"),
        (lambda: trainer(lr=0.1), "trainer.lr = 0.1: no such setting; did you mean model.optimizer.lr?"),
        (lambda: FedAvg(DigitsMLP(), lr=0.1), "model.lr = 0.1: no such setting; did you mean model.optimizer.lr?"),
        (lambda: Digits(clients=9), "data.clients = 9: no such setting; did you mean data.num_clients?"),
        (lambda: Krum(keep=3), "trainer.aggregation.keep = 3: no such setting; choose from share"),  # type: ignore[call-arg]
        (
            lambda: TorchOptimizer("RMSprop", state="keep"),  # type: ignore[call-arg]
            "model.optimizer.state = keep: no such setting; choose from clip, lr, lr_decay, name, options, schedule",
        ),
        (lambda: Frozen(["a.weight"]), "model.net.net = ['a.weight']: give torch.nn.Module, such as "),  # type: ignore
        (
            lambda: Arrays(client_arrays=[np.ones(3)], test=(np.ones(3), np.ones(3))),
            "client_arrays: give a list of pairs (x, y), one for each client",
        ),
        (
            lambda: trainer(callbacks=[FlatnessMonitor]),
            "trainer.callbacks: FlatnessMonitor is a class; give an object, as FlatnessMonitor(...)",
        ),
        (
            lambda: trainer().fit(Digits(), FedAvg(DigitsMLP())),
            "model = a Digits: give LocalObjective, such as FedAvg(net); it is no model but a datamodule",
        ),  # type: ignore[arg-type]
        (lambda: trainer().fit(FedAvg(DigitsMLP())), "datamodule: missing; give FederatedDataModule, such as Digits()"),  # type: ignore[call-arg]
        (lambda: FedAvg(), "model.net: missing; give torch.nn.Module, such as DigitsMLP()"),  # type: ignore[call-arg]
        *(
            (
                partial(trainer, loggers=value),
                f"trainer.loggers = {value}: give RunLogger or Logger or null, or a list of them, such as WandbLogger(",
            )
            for value in ("wandb", ["wandb"], True)
        ),
        (
            lambda: trainer(eval_every=1e3),
            "trainer.eval_every = 1000.0: give a whole number of at least 1, written 1000",
        ),
        (
            lambda: trainer().fit(FedAvg(DigitsMLP()), data=Digits()),  # type: ignore[call-arg]
            "data = a Digits: no such argument; did you mean datamodule?",
        ),
        (
            lambda: trainer().test(FedAvg(DigitsMLP()), Digits(), None, 1),  # type: ignore[call-arg]
            "FederatedTrainer.test(model, datamodule, ckpt_path): too many positional arguments; give each argument "
            "once, by its name",
        ),
        (
            lambda: SGD(0.1, lr=0.2),  # type: ignore[misc]
            "SGD.__init__(lr, momentum, weight_decay, clip, lr_decay, schedule, state): multiple values for argument "
            "'lr'; give each argument once, by its name",
        ),
        (lambda: trainer().fit(FedAvg(DigitsMLP()), Digits(), 3), "ckpt_path = 3: give text or null"),  # type: ignore[arg-type]
        (lambda: LoRA(DigitsMLP()), "model.net.targets: missing; give a list, each text"),  # type: ignore[call-arg]
        (
            lambda: FedAvg(net=DigitsMLP),
            "model.net = the class DigitsMLP: give torch.nn.Module, such as DigitsMLP(...)",
        ),  # type: ignore[arg-type]
        (lambda: FedAvg(DigitsMLP(), ascent="sam"), "model.ascent = sam: give Ascent or null, such as SAM(...)"),  # type: ignore[arg-type]
        (
            lambda: FedAvg(DigitsMLP(), optimizer=torch.optim.Adam),  # type: ignore[arg-type]
            'model.optimizer = the class Adam: give TorchOptimizer("Adam", lr=0.1), which makes one for each client',
        ),
        (
            lambda: FedAvg(DigitsMLP(), optimizer=torch.optim.SGD(DigitsMLP().parameters(), 0.1)),  # type: ignore[arg-type]
            'model.optimizer = a SGD: give TorchOptimizer("SGD", lr=0.1), which makes one for each client',
        ),
    ],
)
def test_slips_in_python(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert str(error.value).startswith(message)  # the class that is named as an example is any that was imported
    assert "such as _" not in str(error.value)


def test_a_metric_by_a_name_that_is_like_it() -> None:
    run = trainer().fit(FedAvg(DigitsMLP(4)), Digits(num_clients=2))
    for name, hint in (("acc", "did you mean server/test/acc?"), ("nothing", "choose from client/")):
        with pytest.raises(KeyError, match=rf"{name}.*no such name; {re.escape(hint)}"):
            run.metrics[name]
    assert "acc" not in run.metrics and run.metrics.get("acc") is None


class Token(nn.Sequential):
    """Means of embeddings, in one of several ways."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nn.Embedding(9, 5, **options), nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x).mean(1))  # type: ignore[no-any-return]


class Bag(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.EmbeddingBag(9, 5), nn.Linear(5, 3))


class Centred(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float().sub_(1) if x.dtype != torch.float32 else x.sub_(1))


class Crooked(torch.autograd.Function):
    """Its second derivative is wrong."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g[0] * 3 * x.detach().square() * (x.flip(-1) / x.detach().flip(-1))


class Bent(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Crooked.apply(super().forward(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("net", "dtype", "message"),
    [
        (
            lambda: Token(max_norm=0.5),
            np.int64,
            "model.net = Token changes its own weights in forward, as nn.Embedding(max_norm=...) does; they are the "
            "server's, too: leave it out",
        ),
        (lambda: Token(sparse=True), np.int64, "model.net = Token: 0 has sparse gradients; set its sparse to false"),
        (lambda: Centred(6, 3), np.float32, "model.net = Centred changes its input in place, which a step of SAM "),
        (Bag, np.int64, "measure: LambdaMax: Bag has no second derivative (the derivative for '_embedding_bag_"),
        (lambda: Bent(6, 3), np.float32, "measure: LambdaMax: the second derivatives of Bent are no symmetric matrix"),
        (Token, np.int64, ""),
        (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3)), np.float32, ""),  # twice is once
    ],
)
def test_nets_that_would_go_wrong_in_silence(net: Any, dtype: Any, message: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    clients = [(draw.integers(0, 9, (8, 6)).astype(dtype), np.arange(8) % 3) for _ in range(4)]
    federated = trainer(callbacks=[FlatnessMonitor()], default_root_dir=str(tmp_path))
    model, data = FedAvg(net()), Arrays(client_arrays=clients[:3], test=clients[3])
    if message:
        with pytest.raises(UserError) as error:
            federated.fit(model, data)
        assert str(error.value).startswith(message)
    else:
        federated.fit(model, data)


class Casts(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = nn.functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())
        return low.tanh().to(x.dtype)


@pytest.mark.parametrize("net", [nn.Linear, lambda *sizes: nn.Sequential(nn.Linear(*sizes), nn.Tanh()), Bent, Casts])
def test_symmetry_at_saturated_models(net: Any) -> None:
    """The loss of a saturated model has no second derivatives but rounding; those of its net are still looked at."""
    refusals = 0
    for scale in (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0):
        for seed in range(5):
            torch.manual_seed(seed)
            model, x = net(2, 3), torch.randn(4, 2)
            at = torch.cat([p.detach().flatten() for p in model.parameters()]) * scale
            for p in model.parameters():
                p.data *= scale
            losses = nn.CrossEntropyLoss(reduction="none")
            loss = {"model": model, "loss": losses, "batches": [(x, model(x).argmax(1))], "at": at}
            try:
                _check_derivatives("net", LambdaMax(), loss, fresh=True)
            except UserError:
                refusals += 1
    assert refusals >= 25 if net is Bent else not refusals


@pytest.mark.parametrize("metrics", [{"a": "x"}, {"a": None}, {3: 1.0}, {"a": torch.zeros(2)}, {"round": 3}])
def test_metrics_are_numbers(metrics: Any, tmp_path: Path) -> None:
    class Log(Callback):
        def on_round_end(self, run: Run) -> None:
            run.log(metrics)

    with pytest.raises(UserError, match=r"^run\.log: (.*: give numbers by name|round is the column of.*)$"):
        trainer(callbacks=[Log()], default_root_dir=str(tmp_path)).fit(FedAvg(DigitsMLP()), Digits(num_clients=4))


def test_a_slip_without_a_likeness_gets_all_settings() -> None:
    with pytest.raises(
        UserError, match=r"^trainer\.xyz = 0\.1: no such setting; choose from accelerator, .*, tf32, threads"
    ):
        trainer(xyz=0.1)
    with pytest.raises(AttributeError, match=r"no attribute 'FedSam'; did you mean FedSAM or "):
        _ = fl_lightning.FedSam


def test_metric_names_under_lightnings_trainer() -> None:
    """The names that docs/python.md lists."""
    lightnings = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    model, data = FedAvg(DigitsMLP()), Digits(batch_size=32, val_fraction=0.2)
    lightnings.fit(model, datamodule=data)
    assert {"train/loss", "val/loss", "val/acc"} <= {*lightnings.callback_metrics}
    assert {*lightnings.test(model, datamodule=data, verbose=False)[0]} == {"test/loss", "test/acc"}
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in ("train/loss", "val/loss", "val/acc", "test/loss", "test/acc"))
