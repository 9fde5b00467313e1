"""Targets that are numbers, or several labels of a sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning import (
    IID,
    PAM,
    SGD,
    Arrays,
    Augment,
    Dirichlet,
    FedAvg,
    FederatedTrainer,
    FedGMT,
    FedLC,
    FedNTD,
    FedSOL,
    FLSimDirichlet,
    Natural,
    UserError,
)
from fl_lightning.commands.data import run as show_partition
from fl_lightning.core.rng import numpy_generator
from fl_lightning.data.histogram import class_counts, heat_map, histogram
from fl_lightning.trainer.run import Run

RNG = numpy_generator(0, "test tasks")
X = RNG.normal(size=(40, 3))
NUMBERS = X @ RNG.normal(size=(3, 2)) + 4.0
TAGS = (X @ RNG.normal(size=(3, 2)) > 0).astype(np.int64)
TARGETS = {"regression": NUMBERS, "multilabel": TAGS}
LOSSES: dict[str, nn.Module] = {"regression": nn.MSELoss(), "multilabel": nn.BCEWithLogitsLoss()}


def arrays(folder: Path, task: str, y: Any = None, **options: Any) -> Arrays:
    y = TARGETS[task] if y is None else y
    np.savez(folder / "data.npz", x_train=X[:30], y_train=y[:30], x_test=X[30:], y_test=y[30:])
    return Arrays(str(folder / "data.npz"), **{"num_clients": 3, "task": task, **options})


def fit(
    data: Arrays,
    folder: Path,
    engine: str = "sequential",
    model: type[FedAvg] = FedAvg,
    precision: str = "64-true",
    **parts: Any,
) -> Run:
    trainer = FederatedTrainer(
        max_rounds=1, clients_per_round=data.num_clients, engine=engine, accelerator="cpu", callbacks=[], loggers=[],
        precision=precision, default_root_dir=str(folder / "runs"), enable_progress_bar=False, threads=1,
    )  # fmt: skip
    return trainer.fit(model(**{"net": nn.Linear(3, 2), **parts}), data)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_a_step_and_the_metrics_in_closed_form(task: str, engine: str, tmp_path: Path) -> None:
    """For full batches of clients of equal size, the mean of their steps is the step on all data."""
    net = nn.Linear(3, 2)
    w, b = (p.detach().double().numpy().copy() for p in net.parameters())
    data = arrays(tmp_path, task, batch_size=None)
    run = fit(data, tmp_path, engine, net=net, loss=LOSSES[task], optimizer=SGD(lr=0.1))
    z = X[:30] @ w.T + b
    # of the mean over samples and their two values
    error = 2 * (z - NUMBERS[:30]) / 60 if task == "regression" else (1 / (1 + np.exp(-z)) - TAGS[:30]) / 60
    step = np.concatenate([(error.T @ X[:30]).ravel(), error.sum(0)])
    want = np.concatenate([w.ravel(), b]) - 0.1 * step
    np.testing.assert_allclose(run.global_model.numpy(), want, rtol=0, atol=1e-12)
    z = X[30:] @ want[:6].reshape(2, 3).T + want[6:]
    if task == "regression":
        expected = {"mae": np.abs(z - NUMBERS[30:]).mean(), "loss": np.square(z - NUMBERS[30:]).mean()}
    else:
        hits, y = ((z > 0) & (TAGS[30:] == 1)).sum(), TAGS[30:]
        expected = {"f1": 2 * hits / ((z > 0).sum() + y.sum()), "loss": (np.logaddexp(0, z) - y * z).mean()}
    for name, value in expected.items():
        assert run.metrics[f"server/test/{name}"] == pytest.approx(value, rel=1e-6)


def test_metrics_of_many_samples_keep_their_digits(tmp_path: Path) -> None:
    """For numbers far from zero float32 loses all digits of R², and the sixth of the mean absolute error."""
    x = RNG.normal(size=(100_000, 1)).astype(np.float32)
    y = (1000 + x).astype(np.float32)
    data = Arrays(client_arrays=[(x[:9], y[:9])], test=(x, y), task="regression", batch_size=None)
    run = fit(
        data,
        tmp_path,
        net=nn.Linear(1, 1),
        loss=nn.MSELoss(),
        optimizer=SGD(lr=1e-9),
        metrics=["R2Score", "MeanSquaredError"],
        precision="32-true",
    )
    w, b = run.global_model.numpy()
    error = (y.astype(np.float64) - (x * w + b))[:, 0]
    r2 = 1 - np.square(error).sum() / np.square(y - y.mean(dtype=np.float64)).sum()
    for name, value in {
        "mae": np.abs(error).mean(),
        "MeanSquaredError": np.square(error).mean(),
        "R2Score": r2,
    }.items():
        assert run.metrics[f"server/test/{name}"] == pytest.approx(value, rel=1e-7)


def test_numbers_are_columns_and_samples_have_no_class(tmp_path: Path) -> None:
    users = ["a", "b"] * 15
    data = arrays(tmp_path, "regression", NUMBERS[:, 0], num_clients=2, partition=Natural(users), val_fraction=0.1)
    data.setup()
    assert data.y_train.shape == (30, 1) and data.num_classes == 1
    assert class_counts(data).tolist() == [[int(n)] for n in data.client_sizes]
    assert len(data.val_indices) == 3 and len(data.sample_indices(7)) == 7
    x, y = next(data.eval_batches("test"))
    assert y.dtype == x.dtype == torch.float32


def test_the_partition_of_numbers_speaks_of_no_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_partition(arrays(tmp_path, "regression"), str(tmp_path / "out"))
    output = capsys.readouterr().out
    assert "3 clients, 30 samples" in output and "class" not in output
    assert (tmp_path / "out" / "clients.csv").read_text().splitlines() == ["client,samples", "0,10", "1,10", "2,10"]


@pytest.mark.parametrize(
    ("task", "y", "totals"),
    [
        ("regression", NUMBERS, [3] * 10),
        ("regression", np.full(40, 1e9), [30]),
        ("multilabel", TAGS, TAGS[:30].sum(0).tolist()),
    ],
    ids=["tenths", "equal numbers", "labels"],
)
def test_partitions_are_counted_by_the_targets(task: str, y: Any, totals: list[int], tmp_path: Path) -> None:
    """Samples of each client are counted in tenths by the first value, or with each label."""
    data = arrays(tmp_path, task, y)
    data.setup()
    table = histogram(data)
    edges = np.sort(y[:30].reshape(30, -1)[:, 0])[[*range(0, 30, 30 // len(totals)), 29]]
    for part, row in zip(data.clients, table.counts, strict=True):
        held = data.y_train[part].double().numpy()
        want = held.sum(0) if task == "multilabel" else np.histogram(held[:, 0], edges)[0] if len(totals) > 1 else [10]
        assert row.tolist() == list(want)
    assert table.counts.sum(0).tolist() == totals and len({*table.names}) == len(totals)
    axes = heat_map(table).axes[0]
    assert axes.get_ylabel() == table.unit and [tick.get_text() for tick in axes.get_yticklabels()] == table.names


class Flat(nn.Linear):
    """Outputs without a dimension for values: torch would broadcast them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze(1)


NONE = "for classes, these targets are none; choose"


@pytest.mark.parametrize(
    ("task", "options", "parts", "message"),
    [
        *(("regression", {}, {"model": model}, f"model = {model.__name__}: {NONE} another algorithm")
          for model in (FedNTD, FedLC, FedSOL, FedGMT)),
        *(("multilabel", {"partition": split}, {}, f"data.partition: {type(split).__name__} divides by class")
          for split in (Dirichlet(1.0), PAM(), IID(stratified=True), FLSimDirichlet(0.1))),
        ("regression", {"augment": Augment(mixup=1.0)}, {}, r"data.augment = Augment: samples of shape \(3,\) are not"),
        ("regression", {}, {"loss": None}, f"model.loss = CrossEntropyLoss: {NONE} a loss for numbers, such as torch"),
        ("multilabel", {}, {"loss": None}, f"model.loss = CrossEntropyLoss: {NONE} a loss for several labels, such as"),
        ("regression", {}, {"net": nn.Linear(3, 1)}, r"model.net = Linear gives outputs of shape \(10, 1\) for 2 val"),
        ("multilabel", {}, {"net": nn.Linear(3, 4)}, r"model.net = Linear gives outputs of shape \(10, 4\) for 2 lab"),
        ("regression", {"y": NUMBERS[:, 0]}, {"net": Flat(3, 1)},
         r"model.net = Flat gives outputs of shape \(10,\) for 1 values of a target; it must give \(10, 1\)$"),
        ("regression", {"y": np.where(NUMBERS > 5, np.nan, 1.0)}, {}, "y_train: row .* holds NaN or infinity"),
        ("regression", {"y": NUMBERS[:, :, None]}, {}, r"y_train: torch.float64 \(30, 2, 1\) are not numbers"),
        ("multilabel", {"y": NUMBERS}, {}, r"y_train: torch.float64 \(30, 2\) are not zeros and ones"),
        ("multilabel", {"y": TAGS[:, 0]}, {}, r"y_train: torch.int64 \(30,\) are not zeros and ones"),
        ("classification", {"y": NUMBERS[:, 0]}, {}, "y_train: labels are .*, or set data.task, to reg"),
        ("classification", {"y": TAGS[:, 0]}, {"loss": nn.MSELoss()}, "model.loss = MSELoss cannot take logits"),
        ("ranking", {"y": TAGS}, {}, "data.task = ranking: give one of classification, regression, multilabel"),
    ],
)  # fmt: skip
def test_refused_in_one_line(task: str, options: Any, parts: Any, message: str, tmp_path: Path) -> None:
    parts = {"loss": LOSSES.get(task), **parts}
    with pytest.raises(UserError, match=rf"^{message}[^\n]*$"):
        fit(arrays(tmp_path, task, **options), tmp_path, **parts)
    assert not (tmp_path / "runs").exists()


def test_a_net_of_more_outputs_than_classes_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"^model\.net = Linear has 5 outputs for 2 classes; give it 2, or set data"):
        fit(arrays(tmp_path, "classification", TAGS[:, 0]), tmp_path, net=nn.Linear(3, 5))


def test_mixup_needs_classes(tmp_path: Path) -> None:
    images = np.zeros((4, 1, 2, 2), np.uint8)
    np.savez(tmp_path / "data.npz", x_train=images, y_train=np.ones(4), x_test=images, y_test=np.ones(4))
    data = Arrays(str(tmp_path / "data.npz"), num_clients=2, task="regression", augment=Augment(crop=0, mixup=1.0))
    with pytest.warns(UserWarning, match="x_test"), pytest.raises(UserError, match=r"^data.augment.mixup = 1.0: mixes"):
        data.setup()
