"""Running statistics under each policy, against loops written by hand; float64."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning import (
    SAM,
    SGD,
    SWA,
    Arrays,
    Callback,
    FedAvg,
    FedAvgM,
    FederatedTrainer,
    FedGMT,
    FedSMOO,
    FlatnessMonitor,
    LocalObjective,
    NaiveFedGloSS,
    ReplaySampler,
    UserError,
)
from fl_lightning.commands import flatness, landscape
from fl_lightning.flatness import hessian, lambda_max, mean_loss, sharpness
from fl_lightning.trainer import parallel_runs
from fl_lightning.trainer.measurements import (
    ClientEvaluation,
    ClientLambdaMax,
    CohortLoss,
    Discrepancy,
    LambdaMax,
    Measure,
    Updates,
)
from fl_lightning.trainer.run import Run
from tests.problem import Golden
from tests.runs import DIGITS, assert_same, cli, ended, group, killed, last, metrics, newest, state

LR, MOMENTUM, STEPS = 0.1, 0.5, 3


class Net(nn.Sequential):
    """Convolution and BatchNorm, then a linear layer and BatchNorm: 4 + 4 running statistics twice, 16 numbers."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64, 4), nn.BatchNorm1d(4),
        )  # fmt: skip


B = 16


def norms(net: nn.Module) -> list[Any]:
    return [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def statistics(net: nn.Module) -> Tensor:
    """Running means and variances in order, by hand."""
    return torch.cat([v for m in norms(net) for v in (m.running_mean, m.running_var)]).clone()


def put(net: nn.Module, vector: Tensor) -> None:
    start = 0
    for m in norms(net):
        for v in (m.running_mean, m.running_var):
            v.copy_(vector[start : start + len(v)])
            start += len(v)


def weights(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def train(net: nn.Module, x: Tensor, y: Tensor, rho: float, steps: int = STEPS) -> None:
    """Local training in place by torch.optim.SGD; a second pass of SAM with the momentum of the statistics at 0."""
    sgd = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    net.train()
    for _ in range(steps):
        sgd.zero_grad()
        F.cross_entropy(net(x), y).backward()
        if rho:
            e = [p.grad.clone() for p in net.parameters()]
            length = torch.sqrt(sum((g**2).sum() for g in e))
            e = [rho * g / (length + 1e-12) for g in e]
            for p, move in zip(net.parameters(), e, strict=True):
                p.data += move
            for m in norms(net):
                m.momentum = 0.0
            sgd.zero_grad()
            F.cross_entropy(net(x), y).backward()
            for m in norms(net):
                m.momentum = 0.1
            for p, move in zip(net.parameters(), e, strict=True):
                p.data -= move
        sgd.step()


def tensors(golden: Golden) -> list[tuple[Tensor, Tensor]]:
    return [(torch.from_numpy(x).double(), torch.from_numpy(y).long()) for x, y in golden.arrays]


def by_hand(golden: Golden, rho: float, policy: str) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """FedAvg or FedSAM: global weights, the mean of the clients' statistics, and the clients' own."""
    data = tensors(golden)
    net, rows = Net().double(), dict[int, Tensor]()
    first = statistics(net)
    w, server = weights(net), first
    for cohort in golden.schedule:
        total = sum(len(data[k][1]) for k in cohort)
        new_w, new_server = torch.zeros_like(w), torch.zeros_like(server)
        for k in cohort:
            client = deepcopy(net)
            nn.utils.vector_to_parameters(w.clone(), client.parameters())
            put(client, {"average": server, "local": rows.get(k, first), "reset": first}[policy])
            train(client, *data[k], rho)
            rows[k] = statistics(client)
            share = len(data[k][1]) / total
            new_w, new_server = new_w + share * weights(client), new_server + share * rows[k]
        w, server = new_w, new_server
    return w, server, rows


def objective(rho: float = 0.0, policy: Any = "average", cls: Any = FedAvg, **options: Any) -> LocalObjective:
    ascent = SAM(rho) if rho else None
    options |= {} if ascent is None else {"ascent": ascent}
    model: LocalObjective = cls(net=Net(), optimizer=SGD(lr=LR, momentum=MOMENTUM), buffers=policy, **options)
    return model


@pytest.mark.parametrize("rho", [0.0, 0.1], ids=["FedAvg", "FedSAM"])
def test_average_against_a_loop(golden: Golden, rho: float) -> None:
    run, record = golden.run(objective(rho))
    w, server, _ = by_hand(golden, rho, "average")
    torch.testing.assert_close(record.server[-1].w, w, rtol=0, atol=1e-12)
    torch.testing.assert_close(record.server[-1].buffers, server, rtol=0, atol=1e-12)
    assert (server - statistics(Net().double())).abs().max() > 0.1
    # the run leaves the net as it is evaluated
    net = run.objective.net
    torch.testing.assert_close(statistics(net), server, rtol=0, atol=1e-12)
    x, y = (torch.from_numpy(a) for a in golden.test)
    loss = F.cross_entropy(net.eval()(x.double()), y.long()).detach()
    assert run.metrics["server/test/loss"] == pytest.approx(float(loss), rel=1e-12)


@pytest.mark.parametrize("rho", [0.0, 0.1], ids=["FedAvg", "FedSAM"])
def test_local_against_a_loop(golden: Golden, rho: float) -> None:
    """SiloBN: own statistics from the initial ones on, scales and shifts shared, evaluation by batch."""
    run, record = golden.run(objective(rho, "local"))
    w, _, rows = by_hand(golden, rho, "local")
    torch.testing.assert_close(record.server[-1].w, w, rtol=0, atol=1e-12)
    assert "buffers" not in record.server[-1]
    stored = run.clients.rows()
    assert stored.keys() == rows.keys()
    for k, row in rows.items():
        torch.testing.assert_close(stored[k].buffers, row, rtol=0, atol=1e-12)
    assert any(len([c for c in golden.schedule if k in c]) > 1 for k in rows)  # somebody came back
    net = Net().double().train()
    nn.utils.vector_to_parameters(w, net.parameters())
    x, y = (torch.from_numpy(a) for a in golden.test)
    loss = F.cross_entropy(net(x.double()), y.long()).detach()  # one batch: the whole test set
    assert run.metrics["server/test/loss"] == pytest.approx(float(loss), rel=1e-10)


def test_reset_against_a_loop(golden: Golden) -> None:
    """Nobody's statistics go on; those of evaluation are torch's update_bn on the training data."""
    run, record = golden.run(objective(0.1, "reset"))
    w, _, _ = by_hand(golden, 0.1, "reset")
    torch.testing.assert_close(record.server[-1].w, w, rtol=0, atol=1e-12)
    assert "buffers" not in record.server[-1] and not run.clients.rows()
    net = Net().double()
    nn.utils.vector_to_parameters(w, net.parameters())
    torch.optim.swa_utils.update_bn([x for x, _ in run.data.eval_batches("train", torch.float64)], net)
    torch.testing.assert_close(statistics(run.objective.net), statistics(net), rtol=0, atol=1e-12)
    x, y = (torch.from_numpy(a) for a in golden.test)
    loss = F.cross_entropy(net.eval()(x.double()), y.long()).detach()
    assert run.metrics["server/test/loss"] == pytest.approx(float(loss), rel=1e-10)


def test_training_does_not_depend_on_the_policy(golden: Golden) -> None:
    """In training BatchNorm takes the statistics of the minibatch."""
    ends = [golden.run(objective(0.1, policy))[1].server[-1].w for policy in ("average", "local", "reset")]
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_weights_of_the_mean_follow_weighting(golden: Golden) -> None:
    _, record = golden.run(objective(weighting="uniform"), max_rounds=1)
    data, rows = tensors(golden), []
    for k in golden.schedule[0]:
        train(net := Net().double(), *data[k], 0.0)
        rows.append(statistics(net))
    torch.testing.assert_close(record.server[-1].buffers, torch.stack(rows).mean(0), rtol=0, atol=1e-12)


def test_server_optimizer_does_not_step_them(golden: Golden) -> None:
    _, plain = golden.run(objective(), max_rounds=1)
    _, stepped = golden.run(objective(cls=FedAvgM, beta=0.9, server_lr=0.5), max_rounds=1)
    assert torch.equal(plain.server[-1].buffers, stepped.server[-1].buffers)
    assert not torch.equal(plain.server[-1].w, stepped.server[-1].w)


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(
    ("cls", "vectors"), [(FedAvg, (1, 1)), (FedSMOO, (2, 2)), (NaiveFedGloSS, (1, 1))], ids=["plain", "more", "twice"]
)
@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_communication_is_counted(golden: Golden, cls: Any, vectors: tuple[int, int], policy: str) -> None:
    model = objective(0.0, policy, cls)
    run, _ = golden.run(model)
    contacts = sum(map(len, golden.schedule)) * model.phases
    numbers = sum(vectors) * model.flat.d + (2 * B if policy == "average" else 0)
    assert run.metrics["comm/total_bits"] == contacts * numbers * 64


@pytest.mark.parametrize("policy", ["average", "local"])
def test_integers_start_anew(golden: Golden, policy: Any) -> None:
    """BatchNorm without momentum takes the mean over the batches seen: those of this round, and of no round before."""
    net = Net()
    for m in norms(net):
        m.momentum = None
    model = FedAvg(net=net, optimizer=SGD(lr=LR, momentum=MOMENTUM), buffers=policy)
    run, record = golden.run(model, sampler=ReplaySampler([[1], [1]]), max_rounds=2)
    x, y = tensors(golden)[1]
    net = Net().double()
    for _ in range(2):
        for m in norms(net):
            m.momentum = None
            m.num_batches_tracked.zero_()
        train(net, x, y, 0.0)
    buffers = record.server[-1].buffers if policy == "average" else run.clients.rows()[1].buffers
    torch.testing.assert_close(buffers, statistics(net), rtol=0, atol=1e-12)
    assert [int(m.num_batches_tracked) for m in norms(run.objective.net)] == [0, 0]


def test_a_teacher_normalises_by_the_batch_and_leaves_no_trace(golden: Golden) -> None:
    """FedGMT, whose first teacher is the initial model: cross-entropy + tau^2 KL."""
    tau, k = 3.0, golden.schedule[0][0]
    _, record = golden.run(objective(cls=FedGMT, tau=tau), max_rounds=1)
    x, y = tensors(golden)[k]
    net, teacher = Net().double().train(), Net().double().train()
    sgd = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    for _ in range(STEPS):
        sgd.zero_grad()
        out, target = net(x), (teacher(x).detach() / tau).softmax(1)
        kl = F.kl_div((out / tau).log_softmax(1), target, reduction="batchmean")
        (F.cross_entropy(out, y) + tau**2 * kl).backward()
        sgd.step()
    result = record.local[0][k]
    torch.testing.assert_close(result.w, weights(net), rtol=0, atol=1e-12)
    torch.testing.assert_close(result.buffers, statistics(net), rtol=0, atol=1e-12)


def test_an_average_of_models_is_evaluated_with_statistics_of_its_own(golden: Golden) -> None:
    run, record = golden.run(objective(policy="reset", averaging=SWA(start=0, cycle=1)))
    assert not torch.equal(record.evaluated[-1], record.server[-1].w)
    net = Net().double()
    nn.utils.vector_to_parameters(record.evaluated[-1], net.parameters())
    torch.optim.swa_utils.update_bn([x for x, _ in run.data.eval_batches("train", torch.float64)], net)
    x, y = (torch.from_numpy(a) for a in golden.test)
    loss = F.cross_entropy(net.eval()(x.double()), y.long()).detach()
    assert run.metrics["server/test/loss"] == pytest.approx(float(loss), rel=1e-10)


@pytest.mark.parametrize("policy", ["average", "reset"])
def test_flatness_monitor_measures_with_the_right_statistics(golden: Golden, policy: Any) -> None:
    monitor = FlatnessMonitor(1, [LambdaMax(samples=None, tol=1e-8), Discrepancy(rho=0.1, samples=None)])
    run, record = golden.run(objective(0.1, policy), max_rounds=1, callbacks=[monitor])
    net, loss, data = run.objective.net, run.objective.loss, run.data
    put(net, statistics(net) if policy == "reset" else record.server[-1].buffers)
    rise = sharpness(net, loss, lambda: data.eval_batches("train", torch.float64), 0.1, at=record.server[-1].w)
    assert run.metrics["flatness/sharpness_global"] == pytest.approx(rise, rel=1e-9)
    top = lambda_max(
        hessian(net, loss, lambda: data.eval_batches("train", torch.float64), at=record.server[-1].w), tol=1e-8
    )
    assert run.metrics["flatness/lambda_max"] == pytest.approx(top.value, rel=1e-5)
    local, total = 0.0, 0
    for k, result in record.local[0].items():
        put(net, result.buffers)
        rise = sharpness(net, loss, lambda k=k: data.eval_batches(data.clients[k], torch.float64), 0.1, at=result.w)
        local, total = local + result.ctx.n_k * rise, total + result.ctx.n_k
    assert run.metrics["flatness/sharpness_local"] == pytest.approx(local / total, rel=1e-9)


@pytest.mark.parametrize("policy", ["average", "reset"])
def test_each_model_is_measured_with_its_own_statistics(golden: Golden, policy: Any) -> None:
    """The model before a round, the mean of all clients' models, and that after a round from a checkpoint."""
    monitor = FlatnessMonitor(1, [CohortLoss(), Discrepancy(rho=0.1, samples=None, clients="all"), Discrepancy(0.1)])
    run, record = golden.run(objective(0.1, policy), max_rounds=3, callbacks=[monitor])
    net, loss, data = run.objective.net, run.objective.loss, run.data
    chosen = torch.cat([data.clients[k] for k in record.local[2]])
    losses = []
    for before in record.server[2:]:
        run.evaluator.load_statistics(before.w, before.get("buffers"))
        losses.append(mean_loss(net, loss, lambda: data.eval_batches(chosen, torch.float64), before.w))
    assert run.metrics["flatness/loss_drop_cohort"] == pytest.approx(losses[0] - losses[1], rel=1e-9)

    half, _ = golden.run(objective(0.1, policy), max_rounds=2)
    path, model = str(half.folder.path / "checkpoints/last.ckpt"), objective(0.1, policy)
    half.settings.max_rounds = 3
    measures: list[Measure] = [Discrepancy(0.1), Discrepancy(0.1, samples=None, clients="all"), CohortLoss()]
    for measurement in flatness.run(half.settings, model, run.data, path, measures):  # type: ignore[arg-type]
        assert measurement.value == pytest.approx(run.metrics[measurement.metric], rel=1e-9), measurement.name


def test_local_statistics_are_no_matter_to_what_measures_no_global_model(golden: Golden) -> None:
    measures: list[Measure] = [Updates(), ClientLambdaMax()]
    run, _ = golden.run(objective(policy="local"), max_rounds=1, callbacks=[FlatnessMonitor(1, measures)])
    assert {"flatness/norm_w", "flatness/client_lambda_max_local"} <= run.metrics.keys()
    for wrong in (LambdaMax(), ClientEvaluation(), Discrepancy()):
        with pytest.raises(UserError, match=r"model.buffers = local: .*or do not measure it"):
            golden.run(objective(policy="local"), max_rounds=1, callbacks=[FlatnessMonitor(1, [*measures, wrong])])


# Checkpoints


BATCHNORM = """
from torch import nn

class BatchNormed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
"""


def arguments(root: Path, policy: str) -> list[str]:
    """FedSAM with BatchNorm on the digits; `DIGITS` without its net."""
    digits = [arg for arg in DIGITS if not arg.startswith("--model.net")]
    options = ["--trainer.max_rounds=40", "--trainer.callbacks+=Checkpoints", "--trainer.callbacks.every_n_rounds=7"]
    net = ["--model=FedSAM", "--model.net=batchnormed.BatchNormed", f"--model.buffers={policy}"]
    return [*net, *digits, *options, f"--trainer.default_root_dir={root}"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a net of the user's."""
    (tmp_path / "batchnormed.py").write_text(BATCHNORM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
def test_kill_9_and_resume(folder: Path) -> None:
    """The clients' own statistics come back to the bit."""
    broken = killed("fit", *arguments(folder / "broken", "local"), root=folder / "broken")
    assert 0 < last(broken)["round"] < 40
    cli("fit", *arguments(folder / "broken", "local"), "--ckpt_path=last")
    cli("fit", *arguments(folder / "whole", "local"))
    reference = newest(folder / "whole")
    assert state(broken)["client.buffers"].shape == (6, 16)
    assert_same(state(broken), state(reference))
    assert metrics(broken) == metrics(reference)


class Stop(Callback):
    """Breaks off in the middle of the second round."""

    def on_local_end(self, run: Run, result: Any) -> None:
        if run.rounds_done == 1:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_resume(golden: Golden, policy: Any) -> None:
    """It does so from other first values in the net, too: they are in the checkpoint."""

    def build() -> LocalObjective:
        return objective(0.0, policy, NaiveFedGloSS)

    reference, _ = golden.run(build(), name="whole")
    with pytest.raises(KeyboardInterrupt):
        golden.run(build(), name="broken", callbacks=[Stop()])
    model = build()
    norms(model.net)[0].running_mean += 1
    run, _ = golden.run(model, name="broken", ckpt_path="last")
    assert_same(state(run.folder.path), state(reference.folder.path))
    assert torch.equal(statistics(run.objective.net), statistics(reference.objective.net))
    wrong = objective(0.0, "local" if policy == "average" else "average", NaiveFedGloSS)
    with pytest.raises(UserError, match=r"made with model \(its (client|server) state\)"):
        golden.run(wrong, name="broken", ckpt_path="last")


@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_a_checkpoint_is_evaluated_as_in_its_run(golden: Golden, policy: Any) -> None:
    run, _ = golden.run(objective(0.1, policy))
    scores = {name: run.metrics[name] for name in ("server/test/acc", "server/test/loss")}
    path = str(run.folder.path / "checkpoints/last.ckpt")
    assert run.settings.test(run.objective, run.data) == scores  # the net as it was left
    assert run.settings.test(objective(0.1, policy), run.data, path) == scores
    started = objective(0.1, policy, init_weights=path)
    assert torch.equal(started.flat.vector(started.net), run.server.w.float())
    saved = last(run.folder.path)["state_dict"]
    expected = run.server.buffers if policy == "average" else statistics(Net().double())
    assert torch.equal(statistics(started.net), expected.float())
    assert saved["net.1.num_batches_tracked"] == 0


# Centralized


@pytest.mark.parametrize("rho", [0.0, 0.1], ids=["SGD", "SAM"])
def test_centralized_is_torch(golden: Golden, tmp_path: Path, rho: float) -> None:
    """Under lightning.Trainer: parameters and statistics; the second pass of SAM does not move these."""
    x, y = golden.arrays[0]
    data = Arrays(client_arrays=[(x, y)], test=golden.test, batch_size=None)
    ours = objective(rho)
    L.Trainer(
        max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    ).fit(ours, datamodule=data)  # fmt: skip
    net = Net()
    train(net, torch.from_numpy(x).float(), torch.from_numpy(y).long(), rho, steps=4)
    torch.testing.assert_close(weights(ours.net), weights(net), rtol=0, atol=1e-5)
    torch.testing.assert_close(statistics(ours.net), statistics(net), rtol=0, atol=1e-5)
    assert [int(m.num_batches_tracked) for m in norms(ours.net)] == [4, 4]


@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_centralized_by_the_federated_trainer(golden: Golden, policy: Any) -> None:
    """Evaluation between the epochs leaves the statistics alone."""
    (x, y), test = ((a.astype(np.float64), b) for a, b in (golden.arrays[0], golden.test))
    data = Arrays(client_arrays=[(x, y)], test=test, batch_size=None)
    trainer = FederatedTrainer(
        max_rounds=3, accelerator="cpu", precision="64-true", enable_progress_bar=False,
        default_root_dir=str(golden.folder),
    )  # fmt: skip
    model, observed = objective(0.1, policy), list[Tensor]()
    begin = model.on_train_batch_start
    model.on_train_batch_start = lambda *args: (observed.append(statistics(model.net)), begin(*args))  # type: ignore
    run = trainer.centralized(model, data)
    for epoch in range(4):
        net = Net().double()
        train(net, torch.from_numpy(x), torch.from_numpy(y).long(), 0.1, steps=epoch)
        if epoch < 3:
            torch.testing.assert_close(observed[epoch], statistics(net), rtol=0, atol=1e-12)
    torch.testing.assert_close(run.server.w, weights(net), rtol=0, atol=1e-12)
    if policy == "average":
        torch.testing.assert_close(run.server.buffers, statistics(net), rtol=0, atol=1e-12)
        x_test, y_test = (torch.from_numpy(a) for a in golden.test)
        loss = F.cross_entropy(net.eval()(x_test.double()), y_test.long()).detach()
        assert run.metrics["server/test/loss"] == pytest.approx(float(loss), rel=1e-10)


# Groups, processes, refusals


def test_a_group_of_runs(golden: Golden) -> None:
    """Each run is what it is alone, statistics included."""
    *arrays, test = ((x.astype(np.float64), y) for x, y in (*golden.arrays, golden.test))

    def data() -> Arrays:
        return Arrays(client_arrays=arrays, test=test, batch_size=4)

    def trainer(seed: int, name: str) -> FederatedTrainer:
        return FederatedTrainer(
            max_rounds=2, clients_per_round=2, seed=seed, name=name, precision="64-true", accelerator="cpu",
            engine="sequential", enable_progress_bar=False, default_root_dir=str(golden.folder),
        )  # fmt: skip

    together = [trainer(seed, f"group{seed}") for seed in (0, 1)]
    runs = parallel_runs.fit(together, [objective(0.1, "average") for _ in together], data())
    for seed, member in enumerate(runs):
        alone = trainer(seed, f"alone{seed}").fit(objective(0.1, "average"), data())
        assert torch.equal(member.server.buffers, alone.server.buffers)
        assert member.metrics["server/test/loss"] == alone.metrics["server/test/loss"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_two_processes(folder: Path, policy: str) -> None:
    cli("fit", *arguments(folder / "one", policy), "--trainer.max_rounds=3")
    options = ["--trainer.max_rounds=3", "--trainer.devices=2", "--trainer.strategy=ddp"]
    with group(2, "fit", *arguments(folder / "two", policy), *options, cwd=folder) as children:
        ended(children)
    one, two = newest(folder / "one"), newest(folder / "two")
    assert_same(state(one), state(two))
    for name, values in metrics(one).items():
        assert metrics(two)[name] == [(t, pytest.approx(value, rel=1e-4)) for t, value in values]


def test_refusals(golden: Golden) -> None:
    with pytest.raises(UserError, match=r"buffer '1.running_mean': .*model.buffers = average, local or reset"):
        FedAvg(net=Net())
    with pytest.raises(UserError, match=r"model.buffers = mean: give one of average, local, reset or null"):
        FedAvg(net=Net(), buffers="mean")  # type: ignore[arg-type]
    for engine in ("batched", "graphed"):
        with pytest.raises(UserError, match=rf"trainer.engine = {engine}: Net has buffers.*use sequential"):
            golden.run(objective(), engine=engine)
    run, _ = golden.run(objective(), engine="auto")
    assert run.engine_name == "sequential"
    with pytest.raises(UserError, match=r"model.buffers = local: .*or do not measure it"):
        golden.run(objective(policy="local"), callbacks=[FlatnessMonitor()])
    x, y = golden.arrays[0]
    data = Arrays(client_arrays=[(x, y)], test=golden.test, batch_size=len(x) - 1)
    alone = FederatedTrainer(
        max_rounds=1, clients_per_round=1, accelerator="cpu", engine="sequential", enable_progress_bar=False,
        default_root_dir=str(golden.folder),
    )  # fmt: skip
    with pytest.raises(UserError, match=r"data.batch_size: client 0 has a minibatch of one sample"):
        alone.fit(objective(), data)
    data = Arrays(client_arrays=[(x, y)], test=golden.test, batch_size=len(x) - 1, drop_last=True)
    alone.fit(objective(), data)
    data = Arrays(client_arrays=[(x[:1], y[:1])], test=golden.test, batch_size=16, drop_last=True, num_classes=4)
    with pytest.raises(UserError, match=r"no variance; choose a larger one; for a client of one sample GroupNorm, or"):
        alone.fit(objective(), data)
    data = Arrays(client_arrays=[(x, y)], test=golden.test, eval_batch_size=len(golden.test[0]) - 1)
    with pytest.raises(
        UserError, match=r"^data.eval_batch_size = \d+ leaves a batch of one test sample, .*, such as 8$"
    ):
        alone.fit(objective(policy="local"), data)
    data = Arrays(client_arrays=[(x, y)], test=golden.test, batch_size=len(x), eval_batch_size=len(x) - 1)
    with pytest.raises(UserError, match=r"leaves a batch of one training sample, .*, and model.buffers = reset"):
        alone.fit(objective(policy="reset"), data)
    data = Arrays(
        client_arrays=[(x, y)], test=[v[:1] for v in golden.test], batch_size=len(x), eval_batch_size=len(x) - 2
    )
    alone.fit(objective(policy="reset"), data)
    with pytest.raises(UserError, match="keeps buffers, and a landscape would need"):
        landscape.run(alone, objective(), run.data, str(run.folder.path / "checkpoints/last.ckpt"))
    plain = FedAvg(net=nn.Sequential(nn.Flatten(), nn.Linear(192, 4)), buffers="average")  # nothing to keep
    assert plain.net_buffers is None and plain.wire == (("w",), ("w",))
