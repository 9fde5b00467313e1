"""What a notebook shows of objects, and the errors of a first try in Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

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
    FedGMT,
    FedTOGA,
    FlatnessMonitor,
    LoRA,
    UserError,
)

DATA = "Digits(num_clients=4, partition=Dirichlet(alpha=0.1))"


def trainer(**settings: Any) -> FederatedTrainer:
    options = {"max_rounds": 1, "clients_per_round": 2, "accelerator": "cpu", "engine": "sequential"}
    return FederatedTrainer(enable_progress_bar=False, **{**options, **settings})


def test_objects_show_shapes_and_settings(tmp_path: Path) -> None:
    data = Digits(num_clients=4, partition=Dirichlet(alpha=0.1))
    assert repr(data) == DATA
    made = trainer(default_root_dir=str(tmp_path))
    run = made.fit(SCAFFOLD(DigitsMLP()), data)
    assert repr(data) == f"{DATA}: 1,437 training samples of shape (1, 8, 8), 10 classes"
    assert repr(run) == "Run(SCAFFOLD-Digits: 4 clients, 4,810 weights, round 1 of 1)"
    assert repr(run.server) == "State(w: (4810,), c: (4810,))"
    assert repr(run.state).startswith(f"RunState(round 1, server: {run.server}, metrics: client/train/loss, ")
    assert repr(run.clients) == "ClientStore(2 clients seen, each with c: (4810,))"
    assert repr(made).startswith("FederatedTrainer(max_rounds=1, sampler=UniformSampler(clients_per_round=2), ")
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
            "model = a Digits: give LocalObjective, such as ",
        ),  # type: ignore[arg-type]
        (lambda: trainer().fit(FedAvg(DigitsMLP())), "datamodule: missing; give FederatedDataModule"),  # type: ignore[call-arg]
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
            lambda: FedTOGA(DigitsMLP(), ascent=SAM()),
            "model.ascent = a SAM: it has a value already, by its position or from the class; leave it out",
        ),
        (lambda: FedGMT(DigitsMLP(), prox="squared"), "model.prox = squared: it has a value already, "),
        (lambda: SGD(0.1, lr=0.2), "model.optimizer.lr = 0.2: it has a value already, "),  # type: ignore[misc]
        (lambda: trainer().fit(FedAvg(DigitsMLP()), Digits(), 3), "ckpt_path = 3: give text or null"),  # type: ignore[arg-type]
        (lambda: LoRA(DigitsMLP()), "model.net.targets: missing; give a list, each text"),  # type: ignore[call-arg]
        (lambda: FedAvg(net=DigitsMLP), "model.net = the class DigitsMLP: give Module, such as DigitsMLP(...)"),  # type: ignore[arg-type]
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
