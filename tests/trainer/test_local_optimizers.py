"""Optimizers of torch as local optimizers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning import (
    SAM,
    SGD,
    Digits,
    DigitsMLP,
    FedAvg,
    FederatedTrainer,
    FedProx,
    LocalObjective,
    ReplaySampler,
    TorchOptimizer,
    UserError,
    algorithms,
)
from fl_lightning.algorithms.parts.schedules import Cosine
from fl_lightning.core import ClientContext, State, Uploads, generator
from fl_lightning.trainer.run import Run
from tests.conftest import Golden
from tests.engine.test_engines import Small, assert_close, train
from tests.runs import assert_same, cli, last, run, state

ADAMW = [
    "--model.optimizer=TorchOptimizer", "--model.optimizer.name=AdamW", "--model.optimizer.lr=0.01",
    "--model.optimizer.options={weight_decay: 0.1}",
]  # fmt: skip


@pytest.mark.parametrize("name", ["FedAvg", "FedSAM", "FedDyn", "FedSWA"])
def test_sgd_of_torch_is_sgd(name: str, tmp_path: Path) -> None:
    """With momentum, weight decay, clipping and schedules; FedSWA's learning rate falls from step to step."""
    shared: dict[str, Any] = {"lr": 0.05, "clip": 1.0, "lr_decay": 0.9, "schedule": Cosine(0.1)}
    ours = SGD(momentum=0.9, weight_decay=1e-3, **shared)
    theirs = TorchOptimizer("SGD", options={"momentum": 0.9, "weight_decay": 1e-3}, **shared)
    runs = [
        train(tmp_path, getattr(algorithms, name)(net=Small(), optimizer=optimizer), "sequential")
        for optimizer in (ours, theirs)
    ]
    assert_close(*runs)


@pytest.mark.parametrize("kept", ["reset", "keep"])
def test_fedavg_with_adamw_written_out(kept: Any, golden: Golden) -> None:
    """SAM's gradient goes into AdamW; moments start from zero every round, or are the client's own."""
    options = {"weight_decay": 0.1, "betas": (0.8, 0.95)}
    optimizer = TorchOptimizer("AdamW", 0.01, options, kept)
    fit, _ = golden.run(FedAvg(net=golden.net(), optimizer=optimizer, ascent=SAM(0.05)))

    net = golden.net().double()
    w, moments = [p.detach().clone() for p in net.parameters()], dict[int, tuple[int, list[Tensor], list[Tensor]]]()
    sizes = [len(y) for _, y in golden.arrays]

    def gradient(at: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        named = dict(zip(dict(net.named_parameters()), [v.clone().requires_grad_() for v in at], strict=True))
        loss = F.cross_entropy(torch.func.functional_call(net, named, (x,)), y)
        return list(torch.autograd.grad(loss, list(named.values())))

    for cohort in golden.schedule:
        local = []
        for k in cohort:
            x, y = (torch.from_numpy(array) for array in golden.arrays[k])
            v, x = [p.clone() for p in w], x.double()
            zeros = 0, [torch.zeros_like(p) for p in v], [torch.zeros_like(p) for p in v]
            step, first, second = moments.get(k, zeros) if kept == "keep" else zeros
            for _ in range(3):
                g = gradient(v, x, y)
                length = torch.cat([each.flatten() for each in g]).norm()
                g = gradient([p + 0.05 * each / length for p, each in zip(v, g, strict=True)], x, y)
                step += 1
                first = [0.8 * m + 0.2 * each for m, each in zip(first, g, strict=True)]
                second = [0.95 * m + 0.05 * each**2 for m, each in zip(second, g, strict=True)]
                v = [
                    (1 - 0.01 * 0.1) * p - 0.01 * (m / (1 - 0.8**step)) / ((s / (1 - 0.95**step)).sqrt() + 1e-8)
                    for p, m, s in zip(v, first, second, strict=True)
                ]
            moments[k] = step, first, second
            local.append(v)
        weights = torch.tensor([sizes[k] for k in cohort], dtype=torch.float64)
        weights /= weights.sum()
        w = [sum(a * p for a, p in zip(weights, each, strict=True)) for each in zip(*local, strict=True)]
    torch.testing.assert_close(fit.server.w, torch.cat([p.flatten() for p in w]), rtol=1e-9, atol=1e-12)


def test_kept_state_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """It is a row of the client, not sent, and not what a reset state gives."""
    keep = [*ADAMW, "--model.optimizer.state=keep"]
    whole = run("fit", *keep, "--trainer.max_rounds=5", "--trainer.client_memory=0", root=tmp_path / "whole")
    half = run("fit", *keep, "--trainer.client_memory=0", root=tmp_path / "half")
    cli("fit", "--ckpt_path", str(half / "checkpoints/last.ckpt"), "--trainer.max_rounds=5")
    assert_same(state(half), state(whole))
    reset = run("fit", *ADAMW, "--trainer.max_rounds=5", root=tmp_path / "reset")
    saved, other = last(whole), last(reset)
    assert not torch.equal(saved["server"]["w"], other["server"]["w"])
    assert saved["total_floats"] == other["total_floats"]
    assert saved["clients"]["file"]["row_bytes"] >= 4 * (1 + 2 * 610 + 4) and not other["clients"]["rows"]
    with pytest.raises(SystemExit, match="client state"):
        cli("fit", "--ckpt_path", str(half / "checkpoints/last.ckpt"), "--model.optimizer.state=reset")


OTHERS = ["Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("name", OTHERS)
def test_kept_state_is_all_of_it(name: str, golden: Golden) -> None:
    """One client in every round, on the same batch: keeping the state is one optimizer over all rounds."""
    options: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}
    optimizer = TorchOptimizer(name, 0.01, options, state="keep")
    fit, _ = golden.run(FedAvg(net=golden.net(), optimizer=optimizer), sampler=ReplaySampler([[1]] * 3), max_rounds=3)
    net = golden.net().double()
    x, y = (torch.from_numpy(array) for array in golden.arrays[1])
    alone = getattr(torch.optim, name)(net.parameters(), lr=0.01, **options)
    for _ in range(9):
        alone.zero_grad()
        F.cross_entropy(net(x.double()), y).backward()
        alone.step()
    assert fit.clients.get(1, fit.server.w, {}).optimizer[0] == 9
    torch.testing.assert_close(fit.server.w, fit.objective.flat.vector(net), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", algorithms.__all__)
def test_an_algorithm_that_needs_the_learning_rates_of_sgd_says_so(name: str) -> None:
    """What an algorithm does with its displacements does not depend on the sum of learning rates, or it takes SGD."""
    kind = getattr(algorithms, name)
    if kind.needs_sgd:
        with pytest.raises(UserError, match=rf"^model\.optimizer = TorchOptimizer: {name} divides .*; take SGD$"):
            kind(net=Small(), optimizer=TorchOptimizer())
        return
    objective: LocalObjective = kind(net=Small(), optimizer=TorchOptimizer())
    w0 = objective.flat.vector(objective.net)
    server = State({"w": w0, **State.initial(objective.server_inits(), w0, w0)})
    step = torch.randn(len(w0), generator=generator(0, "displacement"))

    def after(k_lr: float) -> dict[str, Tensor]:
        ctx = ClientContext(t=1, rounds=3, m=4, flat=objective.flat, lr=0.1, K=2, k_lr=k_lr)
        ctx = replace(ctx, class_counts=torch.ones(3)) if objective.uses_class_counts else ctx
        sent = objective.broadcast(server, ctx).only(objective.wire[0])
        client = State.initial({**objective.client_inits(), **objective.scratch_state}, w0, sent.w)
        _, client = objective.begin_local(client, sent, ctx)
        upload, client = objective.finish_local(w0 + step, client, sent, ctx)
        uploads = Uploads(objective.wire[1], objective.weighting, [ctx], w0)
        uploads.add(upload, 1)
        following = objective.finish_phase(server, sent, uploads, ctx)
        return {**client, **{f"server.{name}": value for name, value in following.items()}}

    assert_same(after(0.2), after(float("nan")))


def make(optimizer: Any = None, engine: Any = "sequential", **options: Any) -> Run:
    trainer = FederatedTrainer(max_rounds=1, clients_per_round=2, accelerator="cpu", threads=1, engine=engine)
    return trainer.fit(FedAvg(DigitsMLP(4), optimizer=optimizer), Digits(num_clients=2, batch_size=512), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorchOptimizer("Adamm"), r"^model\.optimizer\.name = Adamm: give a class of torch\.optim"),
        (lambda: TorchOptimizer("torch.nn.Linear"), r"^model\.optimizer\.name = torch\.nn\.Linear: give"),
        (lambda: TorchOptimizer("no.such.Module"), r"^model\.optimizer\.name = no\.such\.Module: give"),
        (
            lambda: TorchOptimizer(options={"beta": 1}),
            r"^model\.optimizer = AdamW: .*unexpected keyword .*'beta'",
        ),
        (lambda: TorchOptimizer(options={"eps": -1}), r"^model\.optimizer = AdamW: Invalid epsilon value: -1"),
        (lambda: TorchOptimizer(options={"lr": 1}), r"^model\.optimizer\.options\.lr = 1: give it as lr"),
        (lambda: TorchOptimizer("LBFGS"), r"^model\.optimizer = LBFGS: .*closure"),
        (lambda: TorchOptimizer("SparseAdam"), r"^model\.optimizer = SparseAdam: .*dense"),
        (lambda: FedAvg(DigitsMLP(4), optimizer=TorchOptimizer("Muon")), r"^model\.optimizer = Muon: .*2D"),
        (lambda: TorchOptimizer(lr=-1), r"^model\.optimizer\.lr = -1: give a finite number above 0$"),
        (lambda: make(TorchOptimizer(), "batched"), r"^trainer\.engine = batched: model\.optimizer = TorchOptimizer"),
        (lambda: make(TorchOptimizer(), "graphed"), r"^trainer\.engine = graphed: model\.optimizer = TorchOptimizer"),
        (lambda: FedProx(DigitsMLP(4), optimizer=3), r"^model\.optimizer = 3: give SGD or TorchOptimizer or null"),
        (
            lambda: FedAvg(DigitsMLP(4), optimizer=TorchOptimizer()).check_centralized(),
            r"^model\.optimizer = TorchOptimizer: centralized training takes SGD$",
        ),
    ],
)
def test_refused(make: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        make()
    assert "\n" not in str(error.value) and not any(tmp_path.iterdir())


def test_auto_takes_the_sequential_engine(tmp_path: Path) -> None:
    folder = run("fit", *ADAMW, "--trainer.engine=auto", "--trainer.max_rounds=3", root=tmp_path)
    assert last(folder)["engine"] == "sequential"
