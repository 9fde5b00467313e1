"""``model.metrics``: metrics of torchmetrics next to that of the data, and whether large or small values are good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import AUROC, F1Score, MeanSquaredError, R2Score
from torchmetrics.classification import MulticlassCalibrationError, MulticlassF1Score, MultilabelF1Score

from fl_lightning import Arrays, Digits, DigitsMLP, FedAvg, FederatedTrainer, UserError
from fl_lightning.algorithms.metrics import Scores
from fl_lightning.data.tasks import TASKS
from fl_lightning.results.metrics import mode_of, read_metrics
from fl_lightning.results.summary import summarise
from fl_lightning.trainer.callbacks import Checkpoints
from fl_lightning.trainer.run import Run
from tests.runs import DIGITS, cli, ended, group, metrics, newest, run


def fit(metrics: Any, folder: Path, data: Any = None, callbacks: Any = (), **parts: Any) -> Run:
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        max_rounds=4, clients_per_round=3, engine="sequential", accelerator="cpu", threads=1, callbacks=[*callbacks],
        default_root_dir=str(folder / "runs"), enable_progress_bar=False,
    )  # fmt: skip
    data = data or Digits(num_clients=6, batch_size=32, eval_batch_size=100)
    return trainer.fit(FedAvg(**{"net": DigitsMLP(8), "metrics": metrics, **parts}), data)


def test_they_are_those_of_the_whole_test_set(tmp_path: Path) -> None:
    """By class, by path and as objects they are what torchmetrics computes from all outputs at once."""
    macro = MulticlassF1Score(10, average="macro")
    macro.update(torch.zeros(1, 10), torch.zeros(1, dtype=torch.int64))  # what it holds does not count
    metrics = {
        "F1Score": "F1Score",
        "auc": "torchmetrics.AUROC",
        "macro": macro,
        "error": MulticlassCalibrationError(10),
    }
    run = fit(metrics, tmp_path)
    data = run.data
    batches = list(data.eval_batches("test"))
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert len(batches) == 4
    z = run.evaluator.logits(run.global_model, x).softmax(1)
    expected = {
        "F1Score": F1Score("multiclass", num_classes=10), "auc": AUROC("multiclass", num_classes=10),
        "macro": MulticlassF1Score(10, average="macro"), "error": MulticlassCalibrationError(10),
    }  # fmt: skip
    for name, metric in expected.items():
        assert run.metrics[f"server/test/{name}"] == pytest.approx(float(metric(z, y)), abs=1e-6), name
    assert run.evaluate("train").keys() == {f"server/train/{name}" for name in ("acc", *metrics, "loss")}
    plain = fit(None, tmp_path)
    names = plain.metrics.keys() - {name for name in plain.metrics if name.startswith("time/")}
    assert {name: plain.metrics[name] for name in names} == {name: run.metrics[name] for name in names}
    assert not (plain.folder.path / "directions.json").exists()


def test_a_batch_of_small_logits_is_not_taken_for_probabilities() -> None:
    rng = torch.Generator().manual_seed(0)
    z, y = torch.rand(40, 3, generator=rng), torch.randint(2, (40, 3), generator=rng)
    z[20:] = 4 * z[20:] - 2
    task = TASKS["multilabel"]
    scores = Scores(task.metric(3), {"auc": "AUROC", "macro": MultilabelF1Score(3)}, task, 3)
    for rows in (slice(20), slice(20, 40)):
        scores.update(z[rows], y[rows].float())
    micro = MultilabelF1Score(3, average="micro")
    expected = {"f1": micro, "auc": AUROC("multilabel", num_labels=3), "macro": MultilabelF1Score(3)}
    assert scores.compute() == {name: float(metric(z.sigmoid(), y)) for name, metric in expected.items()}


def numbers(folder: Path) -> Arrays:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    y = x @ [1.0, 2.0, 3.0]
    np.savez(folder / "n.npz", x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    return Arrays(str(folder / "n.npz"), num_clients=4, task="regression", eval_batch_size=7)


def test_small_values_are_good_where_the_metric_says_so(tmp_path: Path) -> None:
    """So it is in best checkpoints, the summary and the directions of the run folder; large R2 stays good."""
    best = Checkpoints(monitor="server/test/mae")
    parts = {"net": nn.Linear(3, 1), "loss": nn.MSELoss()}
    run = fit(["R2Score", "MeanSquaredError"], tmp_path, numbers(tmp_path), [best], **parts)
    values = dict(read_metrics(run.folder.path / "metrics.csv")["server/test/mae"])
    lowest = min(values, key=lambda t: values[t])
    assert lowest > 1 and best.best == {lowest: values[lowest]}  # the largest is that of the first round
    assert json.loads((run.folder.path / "directions.json").read_text()) == {"mae": "min", "MeanSquaredError": "min"}
    summaries = {name: summarise(run.folder.path, metric=f"server/test/{name}") for name in ("mae", "R2Score")}
    assert [(summary.mode, summary.best_round) for summary in summaries.values()] == [("min", lowest), ("max", lowest)]
    assert summarise(run.folder.path).metric == "server/test/mae"
    x, y = (torch.cat(parts) for parts in zip(*run.data.eval_batches("test"), strict=True))
    z = run.evaluator.logits(run.global_model, x)
    for metric in (R2Score(), MeanSquaredError()):
        value = run.metrics[f"server/test/{type(metric).__name__}"]
        assert value == pytest.approx(float(metric(z, y)), rel=1e-5)


def test_names_that_do_not_tell_need_a_mode(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^metric = client/lr: set mode to max or min: its name does not tell$"):
        fit(None, tmp_path, callbacks=[Checkpoints(monitor="client/lr")])
    assert mode_of("server/val/loss") == "min" and mode_of("server/test/mae", None, {"mae": "min"}) == "min"
    assert mode_of("server/test/mae", "max", {"mae": "min"}) == "max"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["F2"], "model.metrics = F2: no class of torchmetrics"),
        (["torch.nn.Linear"], "model.metrics = torch.nn.Linear: no class of torchmetrics"),
        (["AUROC", "torchmetrics.AUROC"], "model.metrics: AUROC is there twice; give a mapping, with a name for each"),
        ({"acc": "F1Score"}, "model.metrics: acc is the data's own metric; choose another name"),
        ({"a/b": "F1Score"}, "model.metrics = a/b: not a name for a metric"),
        ({"loss": "F1Score"}, "model.metrics = loss: not a name for a metric"),
        (["ConfusionMatrix"], "model.metrics = ConfusionMatrix: not one number of these outputs and targets"),
        (["R2Score"], "model.metrics = R2Score: not one number of these outputs and targets"),
        ([MulticlassF1Score(3)], "model.metrics = MulticlassF1Score: not one number of these outputs and targets"),
        (["MinMaxMetric"], "model.metrics = MinMaxMetric: "),
        (3, "model.metrics = 3: give "),
    ],
)
def test_errors_are_one_line(metrics: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^{message}[^\n]*$"):
        fit(metrics, tmp_path)
    assert not (tmp_path / "runs").exists()


def test_plain_lightning_logs_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data, model = Digits(), FedAvg(net=DigitsMLP(8), metrics=["F1Score", MulticlassCalibrationError(10)])
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    (logged,) = trainer.test(model, data, verbose=False)
    x, y = next(data.batches_of("x", data.x_test, data.y_test))
    z = model(x).softmax(1)
    assert logged["test/F1Score"] == pytest.approx(float(F1Score("multiclass", num_classes=10)(z, y)))
    assert logged["test/MulticlassCalibrationError"] == pytest.approx(float(MulticlassCalibrationError(10)(z, y)))


FURTHER = "--model.metrics={auc: AUROC, f1: {class_path: torchmetrics.F1Score, init_args: {task: multiclass, num_classes: 10, average: macro}}}"  # noqa: E501


@pytest.mark.slow
def test_two_processes_measure_what_one_does(tmp_path: Path) -> None:
    """So it is from the command line; the config that is written is read as the same one."""
    one = run("fit", FURTHER, root=tmp_path / "one")
    args = ["fit", "--model=FedAvg", *DIGITS, FURTHER, "--trainer.strategy=ddp", "--trainer.devices=2"]
    with group(2, *args, f"--trainer.default_root_dir={tmp_path}/two", cwd=tmp_path) as children:
        ended(children)
    two = newest(tmp_path / "two")
    a, b = metrics(one), metrics(two)
    for name in ("acc", "auc", "f1"):
        assert [v for _, v in a[f"server/test/{name}"]] == pytest.approx([v for _, v in b[f"server/test/{name}"]])
    cli("fit", f"--config={one / 'config.yaml'}", f"--trainer.default_root_dir={tmp_path}/again")
    assert metrics(newest(tmp_path / "again")) == a
