"""Evaluation by client: by hand, by a loop over its samples, and of what the engines really train."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric, R2Score
from torchmetrics.classification import MulticlassF1Score

from fl_lightning import (
    SCAFFOLD,
    SGD,
    Arrays,
    Callback,
    ClientEvaluation,
    Digits,
    DigitsMLP,
    Dirichlet,
    FedAvg,
    FederatedDataModule,
    FederatedTrainer,
    FedGloSS,
    FlatnessMonitor,
    FromDataset,
    LocalObjective,
    NaiveFedGloSS,
    UserError,
)
from fl_lightning.engine import LocalResult
from fl_lightning.results.clients import FILE, read_clients
from fl_lightning.trainer.measurements import MeasurementContext
from fl_lightning.trainer.measurements.clients import ByClasses, client_data
from fl_lightning.trainer.run import Run
from tests.runs import DIGITS, cli, measurements, metrics, run


def fit(folder: Path, model: LocalObjective, data: FederatedDataModule, *callbacks: Callback, **options: Any) -> Run:
    options = {"max_rounds": 2, "clients_per_round": 3, "precision": "64-true", "engine": "sequential", **options}
    trainer = FederatedTrainer(
        accelerator="cpu", enable_progress_bar=False, callbacks=list(callbacks), default_root_dir=str(folder), **options
    )
    return trainer.fit(model, data)


def watched(**options: Any) -> FlatnessMonitor:
    return FlatnessMonitor(1, [ClientEvaluation(**options)])


def digits(**options: Any) -> Digits:
    return Digits(num_clients=6, partition=Dirichlet(0.5), eval_batch_size=100, **options)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return DigitsMLP(hidden=8)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / FILE).open(newline="") as file:
        return list(csv.DictReader(file))


# By hand

EYE = np.eye(3)


class Guess(nn.Module):
    """Predicts the class that a sample shows, whatever its label is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(4 * torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def guesses(*client_labels: list[int]) -> Arrays:
    """Class 0 is right in 3 of 4 test samples, class 1 in 1 of 2, and of class 2 there is none."""
    shown, labels = [0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 1]
    clients = [(2 * EYE[targets], np.array(targets)) for targets in client_labels]
    return Arrays(client_arrays=clients, test=(EYE[shown], np.array(labels)), batch_size=None)


def test_by_hand(tmp_path: Path) -> None:
    """A class that is not tested has no weight, and a client with nothing else is left out."""
    data = guesses([0, 0, 0, 0], [0, 1], [1, 2, 2], [2])
    run = fit(tmp_path, FedAvg(Guess(), optimizer=SGD(lr=1e-9)), data, watched(), max_rounds=1)
    accuracy = [0.75, 0.625, 0.5]
    rows = table(run.folder.path)
    assert [row["acc"] for row in rows] == [*map(str, accuracy)]
    right, wrong = (-np.log(np.exp(z) / (np.exp(4) + 2)) for z in (4, 0))
    losses = [(3 * right + wrong) / 4, (5 * right + 3 * wrong) / 8, (right + wrong) / 2]
    assert [float(row["loss"]) for row in rows] == pytest.approx(losses, rel=1e-6)
    assert [int(row["samples"]) for row in rows] == [4, 2, 3] and rows[0]["local_acc"] == ""
    logged = {n.removeprefix("server/clients/"): v for n, v in run.metrics.items() if n.startswith("server/clients/")}
    assert logged == {
        "acc": pytest.approx(0.625),
        "acc_weighted": pytest.approx((4 * 0.75 + 2 * 0.625 + 3 * 0.5) / 9),
        "acc_std": pytest.approx(np.std(accuracy)),
        "acc_worst_decile": 0.5,
        "acc_worst": 0.5,
        "loss": pytest.approx(np.mean(losses), rel=1e-6),
    }


def test_weighting_is_drawing(tmp_path: Path) -> None:
    """A test set that holds each class as often as the client does, relative to the others, has the same accuracy."""
    data = digits()
    run = fit(tmp_path, FedAvg(mlp(), optimizer=SGD(lr=0.1)), data, watched())
    x, y = data.x_test.double() / 16, data.y_test
    run.net.move_to(run.global_model)
    with torch.no_grad():
        z = run.objective.net(x)
    correct, losses = (z.argmax(1) == y).double(), nn.functional.cross_entropy(z, y, reduction="none")
    for row in table(run.folder.path)[-6:]:
        assert row["round"] == "2"
        held = data.y_train[data.clients[int(row["client"])]]
        for name, values in (("acc", correct), ("loss", losses)):
            # each training sample stands for the test samples of its class
            scores = torch.stack([values[y == label].mean() for label in held])
            assert float(row[name]) == pytest.approx(float(scores.mean()), rel=1e-12)


def test_clients_of_the_test_sets_distribution_are_served_as_the_test_set(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 3
    data = Arrays(client_arrays=[(x[:20] + 1, y[:20]), (x[20:] + 1, y[20:])], test=(x, y), batch_size=None)
    logged = fit(tmp_path, FedAvg(Guess(), optimizer=SGD(lr=0.1)), data, watched(), clients_per_round=1).metrics
    assert logged["server/clients/acc_weighted"] == pytest.approx(logged["server/test/acc"], rel=1e-6)


# Test samples of their own


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.targets = x, y.tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], self.targets[i]


class Users(FromDataset):
    """Digits of three users; the third one tests nothing."""

    def __init__(self, own: bool = True) -> None:
        data = Digits()
        data.setup()
        train, test = Pairs(data.x_train[:90], data.y_train[:90]), Pairs(data.x_test[:60], data.y_test[:60])
        owners = [k % 2 for k in range(60)] if own else None
        super().__init__(train, test, [k % 3 for k in range(90)], owners, batch_size=30)


class F1(Users):
    def metric(self) -> tuple[str, Metric]:
        return "f1", MulticlassF1Score(self.num_classes, average="macro")


def test_a_metric_that_one_sample_does_not_have(tmp_path: Path) -> None:
    class OfNumbers(Arrays):
        def metric(self) -> tuple[str, Metric]:
            return "r2", R2Score()

    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    np.savez(tmp_path / "n.npz", x_train=x, y_train=x.sum(1), x_test=x, y_test=x.sum(1))
    data = OfNumbers(str(tmp_path / "n.npz"), num_clients=3, task="regression", batch_size=4)
    data.test_clients = np.array([0, *[1] * 6, *[2] * 5])
    net = nn.Linear(3, 1)
    with pytest.raises(UserError, match=r"^R2Score of 1 samples of a client: .*; take a metric that few samples have$"):
        fit(tmp_path, FedAvg(net, loss=nn.MSELoss()), data, watched(), max_rounds=1)


@pytest.mark.parametrize("kind", [Users, F1])
def test_own_samples(kind: type[Users], tmp_path: Path) -> None:
    data = kind()
    run = fit(tmp_path, FedAvg(mlp(), optimizer=SGD(lr=0.1)), data, watched(local_models=True), max_rounds=1)
    name = data.metric()[0]
    rows = table(run.folder.path)
    for k in (0, 1):
        indices = torch.arange(k, 60, 2)
        batches = data.evaluation_batches(data.x_test, data.y_test, data.in_batches(indices), torch.float64)
        expected = run.evaluate_batches(batches)
        assert float(rows[k][name]) == pytest.approx(expected[name]) and 0 < expected[name] < 1
        assert float(rows[k]["loss"]) == pytest.approx(expected["loss"])
    assert [row["client"] for row in rows] == ["0", "1"]
    assert run.metrics[f"client/test/{name}_worst"] == min(float(row[f"local_{name}"]) for row in rows[:2])


def test_numbers_as_targets(tmp_path: Path) -> None:
    """Of errors the largest is the worst."""
    data = Digits()
    data.setup()
    train, test = Pairs(data.x_train[:90], data.y_train[:90]), Pairs(data.x_test[:60], data.y_test[:60])
    users = [k % 3 for k in range(60)]
    regression = FromDataset(train, test, [k % 3 for k in range(90)], users, task="regression", batch_size=30)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    model = FedAvg(net, loss=nn.MSELoss(reduction="none"), optimizer=SGD(lr=1e-6))
    run = fit(tmp_path, model, regression, watched())
    last = read_clients(run.folder.path)
    assert last is not None and last.mode == "min" and last.metric == "mae"
    assert run.metrics["server/clients/mae_worst"] == last.columns["mae"].max() > last.columns["mae"].min()
    unowned = FromDataset(train, test, [k % 3 for k in range(90)], task="regression", batch_size=30)
    with pytest.raises(UserError, match=r"mae has no mean over classes"):
        fit(tmp_path, FedAvg(net, loss=nn.MSELoss(reduction="none")), unowned, watched())


# Local models


class Keep(Callback):
    """The local models of the last phase, by round."""

    def __init__(self) -> None:
        self.models: dict[int, dict[int, Tensor]] = {}

    def on_local_end(self, run: Run, result: LocalResult) -> None:
        if result.ctx.phase == run.objective.phases - 1:
            self.models.setdefault(result.ctx.t, {})[result.client] = result.w


@pytest.mark.parametrize(
    ("algorithm", "cohort", "engine"),
    [
        (SCAFFOLD, 3, "sequential"),
        (FedGloSS, 3, "batched"),
        (NaiveFedGloSS, 6, "sequential"),  # a block is all clients, as the cohort
        pytest.param(SCAFFOLD, 3, "graphed", marks=pytest.mark.slow),
    ],
)
def test_local_models_are_those_of_the_next_round(
    algorithm: type[LocalObjective], cohort: int, engine: str, tmp_path: Path
) -> None:
    """To measure them changes nothing."""
    keep, data = Keep(), digits()
    options = {"clients_per_round": cohort, "engine": engine, "max_rounds": 3}
    run = fit(tmp_path, algorithm(mlp(), optimizer=SGD(lr=0.1)), data, watched(local_models=True), keep, **options)
    plain = fit(tmp_path, algorithm(mlp(), optimizer=SGD(lr=0.1)), digits(), **options)
    assert all(torch.equal(run.server[name], value) for name, value in plain.server.items())
    evaluation, rows = client_data(run), table(run.folder.path)
    assert isinstance(evaluation, ByClasses) and [row["round"] for row in rows] == ["1"] * 6 + ["2"] * 6 + ["3"] * 6
    for t in (1, 2):
        assert len(keep.models[t]) == cohort
        for client, w in keep.models[t].items():
            row = rows[6 * (t - 1) + client]
            assert row["client"] == str(client)
            score = float(row["local_acc"]), float(row["local_loss"])
            assert score == pytest.approx(evaluation.score(client, w), rel=1e-9)
            assert row["local_loss"] != row["loss"]
    gaps = [float(row["local_acc"]) - float(row["acc"]) for row in rows[-6:]]
    assert run.metrics["client/test/acc_gap"] == pytest.approx(np.mean(gaps), abs=1e-12)


def test_a_local_model_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    class Wild(FedAvg):
        def local_end(self, w: Any, client: Any, received: Any, ctx: Any) -> Any:
            upload, client = super().local_end(w, client, received, ctx)
            return {**upload, "w": w * float("nan") if ctx.n_k < 150 and ctx.t == 1 else w}, client

    data = Digits(num_clients=6, partition=Dirichlet(0.5, power=1))
    run = fit(tmp_path, Wild(mlp(), optimizer=SGD(lr=0.1)), data, watched(local_models=True), max_rounds=1)
    rows = table(run.folder.path)
    assert [row["client"] for row in rows] == ["0", "1", "2", "3", "4", "5"] and all(row["acc"] for row in rows)
    small = [bool(int(row["samples"]) < 150) for row in rows]
    longer = fit(tmp_path, Wild(mlp(), optimizer=SGD(lr=0.1)), data, watched(local_models=True), max_rounds=2)
    first = table(longer.folder.path)[:6]
    assert [row["local_acc"] == "" for row in first] == small and 0 < sum(small) < 6
    known = [float(row["local_acc"]) for row in first if row["local_acc"]]
    assert measurements(longer.folder.path / "flatness.jsonl")[6]["value"] == pytest.approx(np.mean(known))


# Options, resumption, commands


def test_a_sample_is_the_same_in_every_round(tmp_path: Path) -> None:
    sampled = fit(tmp_path, FedAvg(mlp()), digits(), watched(clients=2)).folder.path
    full = fit(tmp_path, FedAvg(mlp()), digits(), watched()).folder.path
    rows, all_rows = table(sampled), table(full)
    assert len({row["client"] for row in rows}) == 2 and [row["round"] for row in rows] == ["1", "1", "2", "2"]
    assert all(row in all_rows for row in rows)


def test_what_is_refused(tmp_path: Path) -> None:
    for options, text in (({"clients": 0}, "ClientEvaluation.clients = 0"), ({"local_models": 1}, "local_models = 1")):
        with pytest.raises(UserError, match=text):
            ClientEvaluation(**options)
    with pytest.raises(UserError, match=r"ClientEvaluation.clients = 7: 6 clients have test data; give at most that$"):
        fit(tmp_path, FedAvg(mlp()), digits(), watched(clients=7))

    class Unowned(F1):
        def __init__(self) -> None:
            super().__init__(own=False)

    with pytest.raises(
        UserError, match=r"^data = Unowned: says of no client .* and f1 has no mean over classes; [^\n]*$"
    ):
        fit(tmp_path, FedAvg(mlp()), Unowned(), watched())
    with pytest.raises(UserError, match=r"no client has test data; leave ClientEvaluation out$"):
        fit(tmp_path, FedAvg(Guess()), guesses([2], [2]), watched(), clients_per_round=1)
    assert not [*tmp_path.glob("*/*/metrics.csv")]


def test_centralized(tmp_path: Path) -> None:
    """The model is evaluated for each client, as one of a server; there are no local models."""
    args = ["--trainer.callbacks+=FlatnessMonitor", "--trainer.callbacks.metrics=[ClientEvaluation]"]
    folder = run("centralized", "--trainer.max_rounds=1", *args, root=tmp_path)
    assert len(table(folder)) == 6 and "server/clients/acc" in metrics(folder)
    local = "--trainer.callbacks.metrics=[{class_path: ClientEvaluation, init_args: {local_models: true}}]"
    with pytest.raises(SystemExit, match=r"local_models = true: centralized training has no local models; set it to f"):
        run("centralized", args[0], local, root=tmp_path)


MONITOR = ["--trainer.callbacks+=FlatnessMonitor", "--trainer.callbacks.every_n_rounds=1"]
LOCAL = "[{class_path: ClientEvaluation, init_args: {local_models: true}}]"


@pytest.mark.slow
def test_a_resumed_run_has_the_rows_of_a_whole_one(tmp_path: Path) -> None:
    """Rows of rounds that are trained again, and one that a crash has cut short, are left out."""
    args = [*MONITOR, "--trainer.callbacks.metrics=[ClientEvaluation]"]
    reference = run("fit", *args, "--trainer.max_rounds=3", root=tmp_path / "whole")
    resumed = run("fit", *args, root=tmp_path / "part")
    with (resumed / FILE).open("a") as file:
        file.write("3,0,1,0.5,0.5,0.5,0.5\n3,1,1,0.")
    run("fit", *args, "--trainer.max_rounds=3", "--ckpt_path=last", root=tmp_path / "part")
    assert (resumed / FILE).read_text() == (reference / FILE).read_text() and metrics(resumed) == metrics(reference)
    rows, lines = (resumed / FILE).read_text(), (resumed / "flatness.jsonl").read_text()
    for name, damaged in (
        (FILE, "round,client\nnonsense\n"),
        ("flatness.jsonl", lines[20:]),
        ("flatness.jsonl", "[]\n"),
        (FILE, rows[:-2] + chr(ord(rows[-2]) ^ 1) + "\n"),  # a digit
        ("flatness.jsonl", lines.replace('"value": ', '"value": 1', 1)),
    ):
        (resumed / FILE).write_text(rows)
        (resumed / "flatness.jsonl").write_text(lines)
        (resumed / name).write_text(damaged)
        with pytest.raises(
            SystemExit, match=rf"^error: {resumed / name}: a line is not as the run has written it; restore [^\n]*$"
        ):
            run("fit", *args, "--trainer.max_rounds=4", "--ckpt_path=last", root=tmp_path / "part")


def test_a_checkpoint_has_the_numbers_of_the_monitor(tmp_path: Path) -> None:
    folder = run("fit", *MONITOR, f"--trainer.callbacks.metrics={LOCAL}", root=tmp_path, model="SCAFFOLD")
    cli("flatness", f"--ckpt_path={folder / 'checkpoints/last.ckpt'}", f"--metrics={LOCAL}", f"--out={tmp_path}")
    with (tmp_path / "flatness.csv").open(newline="") as file:
        values = {row["name"]: float(row["value"]) for row in csv.DictReader(file)}
    logged = metrics(folder)
    assert values == pytest.approx({name: logged[name][-1][1] for name in values}, rel=1e-6) and len(values) == 13
    last = read_clients(folder)
    assert last is not None and last.round == 2
    assert values["client/test/acc_worst"] == pytest.approx(last.columns["local_acc"].min(), rel=1e-6)
    assert len(table(folder)) == 12  # the command adds no rows


@pytest.mark.slow
def test_several_seeds_as_one_program(tmp_path: Path) -> None:
    args = [*MONITOR, f"--trainer.callbacks.metrics={LOCAL}", "--trainer.precision=64-true", "--trainer.engine=batched"]
    root = f"--trainer.default_root_dir={tmp_path / 'both'}"
    cli("fit", "--model=SCAFFOLD", *DIGITS, *args, root, "--seeds=0,1")
    for seed in (0, 1):
        (together,) = (tmp_path / "both").glob(f"**/seed_{seed}/version_0")
        alone = run("fit", *args, f"--trainer.seed={seed}", root=tmp_path / f"one{seed}", model="SCAFFOLD")
        a, b = table(together), table(alone)
        assert len(a) == 12 and [[*map(float, r.values())] for r in a] == [
            pytest.approx([*map(float, r.values())], rel=1e-9) for r in b
        ]


def test_the_average_is_evaluated_and_the_servers_model_is_trained_on(tmp_path: Path) -> None:
    """In a dry context with other weights than the server's, global scores are theirs, and local ones do not change."""
    run = fit(tmp_path, FedAvg(mlp(), optimizer=SGD(lr=0.1)), digits(), max_rounds=1)
    context = MeasurementContext.between_rounds(run, [0, 1])
    a, b = (
        {m.name: m.value for m in ClientEvaluation(True).compute(replace(context, model=w))}
        for w in (run.server.w, torch.zeros_like(run.server.w))
    )
    assert a["client/test/loss"] == b["client/test/loss"] and a["server/clients/loss"] != b["server/clients/loss"]
    assert b["server/clients/loss"] == pytest.approx(np.log(10))
