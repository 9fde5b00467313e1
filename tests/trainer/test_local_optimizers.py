"""Optimizers of torch as local optimizers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fl_lightning
from fl_lightning import (
    SAM,
    SGD,
    AdamW,
    Arrays,
    Digits,
    DigitsMLP,
    FedAvg,
    FederatedTrainer,
    FedProx,
    Lion,
    LocalObjective,
    Muon,
    ReplaySampler,
    TorchOptimizer,
    UserError,
    algorithms,
)
from fl_lightning.algorithms.base import CentralizedOptimizer
from fl_lightning.algorithms.parts.adaptive import orthogonalized
from fl_lightning.algorithms.parts.local_optimizer import Cosine
from fl_lightning.core import ClientContext, FlatSpec, State, Uploads, generator
from fl_lightning.engine import contract_of
from fl_lightning.trainer.run import Run
from tests.engine.test_engines import Small, assert_close, train
from tests.problem import Golden, optimizer_for
from tests.runs import DIGITS, assert_same, cli, ended, group, last, newest, run, state

ADAMW = [
    "--model.optimizer=TorchOptimizer", "--model.optimizer.name=AdamW", "--model.optimizer.lr=0.01",
    "--model.optimizer.options={weight_decay: 0.1}",
]  # fmt: skip
ENGINES = ["sequential", "batched", "graphed"]


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("name", ["FedAvg", "FedSAM", "FedDyn", "FedSWA"])
def test_sgd_of_torch_is_sgd(name: str, tmp_path: Path) -> None:
    """So it is with momentum, weight decay, clipping and schedules; FedSWA's learning rate falls from step to step."""
    shared: dict[str, Any] = {"lr": 0.05, "clip": 1.0, "lr_decay": 0.9, "schedule": Cosine(0.1)}
    ours = SGD(momentum=0.9, weight_decay=1e-3, **shared)
    theirs = TorchOptimizer("SGD", options={"momentum": 0.9, "weight_decay": 1e-3}, **shared)
    runs = [
        train(tmp_path, getattr(algorithms, name)(net=Small(), optimizer=optimizer), "sequential")
        for optimizer in (ours, theirs)
    ]
    assert_close(*runs)


class Replacing(torch.optim.Optimizer):
    """SGD that gives parameters other memory, and counts its steps in a Python number."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param_group in self.param_groups:
            for p in param_group["params"]:
                n = self.state[p]["n"] = self.state[p].get("n", 0) + 1
                p.data = p.data - n * param_group["lr"] / n * p.grad


def test_an_optimizer_that_replaces_its_parameters(tmp_path: Path) -> None:
    theirs = TorchOptimizer(f"{__name__}.Replacing", 0.1)
    runs = [train(tmp_path, FedAvg(net=Small(), optimizer=optimizer), "sequential") for optimizer in (theirs, SGD(0.1))]
    assert_close(*runs)


@pytest.mark.slow
def test_adamw_is_that_of_torch(tmp_path: Path) -> None:
    """Whole rounds agree, with clipping and schedules, on all engines."""
    shared: dict[str, Any] = {"lr": 0.01, "clip": 1.0, "lr_decay": 0.9, "schedule": Cosine(0.1)}
    options = {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
    theirs = train(
        tmp_path, FedAvg(net=Small(), optimizer=TorchOptimizer("AdamW", options=options, **shared)), "sequential"
    )
    for engine in ENGINES:
        optimizer = AdamW(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1, **shared)
        assert_close(train(tmp_path, FedAvg(net=Small(), optimizer=optimizer), engine), theirs)


def test_bias_correction_in_float32() -> None:
    """1 - 0.999^n loses four digits to cancellation; torch computes it in Python's floats."""
    w, g, flat = torch.zeros(7), torch.full((7,), 0.3), FlatSpec(nn.Linear(6, 1))
    memory, ctx = State({"first": w, "second": w, "count": w[:1]}), ClientContext(0, 1, 1, flat)
    parameter = nn.Parameter(w.double())
    theirs = torch.optim.AdamW([parameter], 0.1)
    for _ in range(3):
        w, memory = AdamW(0.1).step(w, g, memory, 0.1, ctx)
        parameter.grad = g.double()
        theirs.step()
    torch.testing.assert_close(w.double(), parameter.detach(), rtol=1e-6, atol=0)


def lion(v: Tensor, g: Tensor, memory: dict[str, Tensor], flat: FlatSpec) -> Tensor:
    """Algorithm 2 of Chen et al., NeurIPS 2023."""
    old = memory.get("m", torch.zeros_like(v))
    c = 0.9 * old + (1 - 0.9) * g
    memory["m"] = 0.99 * old + (1 - 0.99) * g
    return v - 0.01 * (c.sign() + 0.1 * v)


def newton(u: Tensor) -> Tensor:
    """The iteration of the authors' code, of one matrix."""
    x = (u.T if len(u) > u.shape[1] else u) / (u.pow(2).sum().sqrt() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if len(u) > u.shape[1] else x


def muon(v: Tensor, g: Tensor, memory: dict[str, Tensor], flat: FlatSpec) -> Tensor:
    """Jordan et al.'s Muon, with AdamW for vectors, one parameter after another."""
    n = memory["n"] = memory.get("n", torch.zeros((), dtype=torch.float64)) + 1
    new = []
    for name, p, d in zip(flat.names, flat.split(v).values(), flat.split(g).values(), strict=True):
        m = memory.get(name, torch.zeros_like(p))
        if p.ndim >= 2:
            memory[name] = m = 0.95 * m + 0.05 * d
            o = newton((0.05 * d + 0.95 * m).reshape(len(p), -1)).reshape(p.shape)
            o = o * max(1, p.shape[-2] / p.shape[-1]) ** 0.5
            new.append((1 - 0.02 * 0.01) * p - 0.02 * o)
        else:
            memory[name] = m = 0.9 * m + 0.1 * d
            s = memory[f"{name}.s"] = 0.95 * memory.get(f"{name}.s", torch.zeros_like(p)) + 0.05 * d**2
            a = (m / (1 - 0.9**n)) / ((s / (1 - 0.95**n)).sqrt() + 1e-10)
            new.append((1 - 0.001 * 0.01) * p - 0.001 * a)
    return torch.cat([p.reshape(-1) for p in new])


WRITTEN: dict[str, tuple[Any, Any]] = {
    "Lion": (lambda state: Lion(0.01, weight_decay=0.1, state=state), lion),
    "Muon": (lambda state: Muon(state=state), muon),
}


class Convolutional(nn.Sequential):
    """Matrices that are wide and tall, and a kernel that is not square."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            nn.Conv2d(1, 3, (3, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(126, 4), nn.Tanh(), nn.Linear(4, 10)
        )


@pytest.mark.sampled(quick=5, slow=2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("state", ["reset", "keep"])
@pytest.mark.parametrize("name", WRITTEN)
def test_written_out(name: str, state: str, engine: str, golden: Golden, tmp_path: Path) -> None:
    """SAM's gradient goes into the optimizer; its state starts afresh every round, or is the client's own."""
    make, written = WRITTEN[name]
    rng = np.random.default_rng(0)
    arrays = [(rng.random((n, 1, 8, 8)), rng.integers(0, 10, n)) for n in (5, 9, 12)]
    schedule, net = [[0, 1], [2, 1], [0, 2]], Convolutional().double()
    objective = FedAvg(net=Convolutional(), optimizer=make(state), ascent=SAM(0.05))
    trainer = FederatedTrainer(
        max_rounds=3, precision="64-true", engine=engine, sampler=ReplaySampler(schedule), local_steps=3,
        accelerator="cpu", threads=1, enable_progress_bar=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    run = trainer.fit(objective, Arrays(client_arrays=arrays, test=arrays[0], batch_size=None))

    flat, states = FlatSpec(net), dict[int, dict[str, Tensor]]()

    def gradient(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
        at = at.clone().requires_grad_()
        loss = F.cross_entropy(torch.func.functional_call(net, flat.split(at), (x,)), y)
        return torch.autograd.grad(loss, at)[0]

    w = flat.vector(net)
    for cohort in schedule:
        local = []
        for k in cohort:
            x, y = (torch.from_numpy(array) for array in arrays[k])
            v, memory = w, states.setdefault(k, {}) if state == "keep" else {}
            for _ in range(3):
                g = gradient(v, x, y)
                v = written(v, gradient(v + 0.05 * g / g.norm(), x, y), memory, flat)
            local.append(v * len(y))
        w = torch.stack(local).sum(0) / sum(len(arrays[k][1]) for k in cohort)
    torch.testing.assert_close(run.server.w, w, rtol=1e-9, atol=1e-11)
    names = {"Lion": {"Lion.momentum"}, "Muon": {"Muon.first", "Muon.second", "Muon.count"}}[name]
    assert set(run.clients.get(1, w)) == (names if state == "keep" else set())


def test_muon_is_that_of_torch() -> None:
    """torch iterates in bfloat16."""
    u = torch.randn(5, 12, generator=generator(0, "u"))
    w, flat = torch.zeros(60), FlatSpec(nn.Linear(12, 5, bias=False))
    memory, ctx = State({"first": w, "second": w, "count": w[:1]}), ClientContext(0, 1, 1, flat)
    parameter = nn.Parameter(w.view(5, 12).clone())
    theirs = torch.optim.Muon([parameter], 0.1, weight_decay=0.01)
    for sign in (1, -0.5, 2):
        w, memory = Muon(0.1).step(w, sign * u.flatten() + 0.1, memory, 0.1, ctx)
        parameter.grad = sign * u + 0.1
        theirs.step()
    assert (w - parameter.detach().flatten()).norm() <= 0.02 * w.norm()


def test_newton_schulz_by_hand() -> None:
    u = torch.tensor([[3.0, 1], [0, 2], [1, 1], [-1, 0]], dtype=torch.float64)
    orthogonal = orthogonalized(torch.stack([u, 2 * u]), 5)
    expected = [[0.7001603485, 0.0545611060], [-0.2524597790, 0.8665015491]]
    torch.testing.assert_close(orthogonal[0, :2], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(orthogonal[0], orthogonal[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(orthogonalized(u.T, 5), orthogonal[0].T)
    assert torch.equal(orthogonalized(0 * u, 5), 0 * u)


def test_newton_schulz_in_bfloat16_is_that_of_the_program() -> None:
    """Bit for bit: each product is rounded, so the brackets matter."""
    g = torch.randn(5, 12, generator=generator(0, "g")).bfloat16()
    x = g / (g.norm() + 1e-7)
    for _ in range(5):
        A = x @ x.T
        B = -4.7750 * A + 2.0315 * A @ A
        x = 3.4445 * x + B @ x
    assert torch.equal(orthogonalized(g, 5), x)


OWN = '''
import torch
from fl_lightning import LocalOptimizer


class Slowing(LocalOptimizer):
    """Momentum whose steps get shorter."""

    state = {"m": "zeros", "steps": 0.0}

    def __init__(self, beta: float = 0.9, **kwargs):
        super().__init__(**kwargs)
        self.beta = beta

    def step(self, w, direction, memory, lr, ctx):
        m = self.beta * memory.m + self.clipped(direction)
        return w - lr / (memory.steps + 1) * torch.tanh(m), memory.replace(m=m, steps=memory.steps + 1)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with an optimizer in a file."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.slow
@pytest.mark.sampled(slow=4, start=1)
@pytest.mark.parametrize("kept", ["reset", "keep"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_of_ones_own_resumes_to_the_same_bits(engine: str, kept: str, folder: Path) -> None:
    """It is named by its dotted path, and has rows on disk; on all engines it gives the same."""
    args = ["--model.optimizer=mine.Slowing", "--model.optimizer.lr=0.05", f"--model.optimizer.state={kept}"]
    args += [f"--trainer.engine={engine}", "--trainer.client_memory=0"]
    reference = run("fit", *args, "--trainer.max_rounds=4", root=folder / "whole")
    half = run("fit", *args, root=folder / "half")
    cli("fit", "--ckpt_path", str(half / "checkpoints/last.ckpt"), "--trainer.max_rounds=4")
    assert_same(state(half), state(reference))
    assert (last(reference)["clients"]["file"]["row_bytes"] >= 4 * (610 + 1)) == (kept == "keep")
    if engine != "sequential":
        sequential = run("fit", *args, "--trainer.engine=sequential", "--trainer.max_rounds=4", root=folder / "one")
        torch.testing.assert_close(state(reference)["server.w"], state(sequential)["server.w"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_kept_state_in_two_processes(folder: Path) -> None:
    args = ["--model.optimizer=mine.Slowing", "--model.optimizer.state=keep", "--trainer.max_rounds=3"]
    single = run("fit", *args, root=folder / "one")
    processes = ["--trainer.devices=2", "--trainer.strategy=ddp", f"--trainer.default_root_dir={folder / 'many'}"]
    with group(2, "fit", "--model=FedAvg", *DIGITS, *args, *processes, cwd=folder) as children:
        ended(children)
    assert_same(state(newest(folder / "many")), state(single))
    assert {name for name in state(single) if "Slowing" in name} == {"client.Slowing.m", "client.Slowing.steps"}


def test_kept_state_is_a_row_that_is_not_sent(tmp_path: Path) -> None:
    adamw = ["--model.optimizer=AdamW", "--model.optimizer.lr=0.01"]
    kept = run("fit", *adamw, "--model.optimizer.state=keep", root=tmp_path / "kept")
    reset = run("fit", *adamw, root=tmp_path / "reset")
    assert last(kept)["total_bits"] == last(reset)["total_bits"] and not last(reset)["clients"]["rows"]
    assert not torch.equal(last(kept)["server"]["w"], last(reset)["server"]["w"])
    with pytest.raises(SystemExit, match=r"client state\) = \['AdamW.count', .*\], this run has \['Lion.momentum'\]"):
        cli("fit", "--ckpt_path", str(kept / "checkpoints/last.ckpt"), "--model.optimizer=Lion",
            "--model.optimizer.state=keep")  # fmt: skip


@pytest.mark.parametrize("name", ["AdamW", "Lion", "Muon", "SGD"])
def test_centralized(name: str, tmp_path: Path) -> None:
    """One client with all data, whose state is kept, takes the same steps."""
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}

    def build(state: Any) -> FedAvg:
        torch.manual_seed(0)
        return FedAvg(DigitsMLP(4), optimizer=getattr(fl_lightning, name)(0.01, state=state, **options))

    objective = build("reset")
    flat = objective.flat
    x, y = torch.rand(20, 64, generator=generator(0, "x")), torch.arange(20) % 10
    centralized = CentralizedOptimizer(objective, lambda lr: ClientContext(0, 1, 1, flat, lr=lr), lambda: 1)

    def closure() -> Tensor:
        centralized.zero_grad()
        loss = F.cross_entropy(objective.net(x.view(20, 8, 8)), y)
        loss.backward()
        return loss

    for _ in range(4):
        centralized.step(closure)
    model = build("keep")
    w, memory = flat.vector(model.net), State.initial(model.optimizer.named_state, *[flat.vector(model.net)] * 2)
    for _ in range(4):
        flat.load(model.net, w)
        loss = F.cross_entropy(model.net(x.view(20, 8, 8)), y)
        g = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.net.parameters()))])
        w, memory = model.optimizer.take(w, g, memory, 0.01, ClientContext(0, 1, 1, flat))
    assert torch.equal(flat.vector(objective.net), w)


@pytest.mark.parametrize("name", algorithms.__all__)
def test_an_algorithm_that_needs_the_learning_rates_of_sgd_says_so(name: str) -> None:
    """What an algorithm does with its displacements does not depend on the sum of learning rates, or it takes SGD."""
    kind = getattr(algorithms, name)
    if kind.needs_sgd:
        with pytest.raises(UserError, match=rf"^model\.optimizer = TorchOptimizer: {name} divides .*; take SGD$"):
            kind(net=Small(), optimizer=TorchOptimizer())
        return
    if not isinstance(optimizer_for(name, 0.1), SGD):
        with pytest.raises(UserError, match=r"^model\.optimizer = a TorchOptimizer: give (Muon|AdamW) or null$"):
            kind(net=Small(), optimizer=TorchOptimizer())
        return

    def after(lr: float) -> dict[str, Tensor]:
        objective: LocalObjective = kind(net=Small(), optimizer=TorchOptimizer(lr=lr))
        w0 = objective.flat.vector(objective.net)
        server = State({"w": w0, **State.initial(objective.server_inits(), w0, w0)})
        step = torch.randn(len(w0), generator=generator(0, "displacement"))
        ctx = ClientContext(t=1, rounds=3, m=4, flat=objective.flat, lr=lr, K=2, k_lr=2 * lr)
        ctx = replace(ctx, class_counts=torch.ones(3)) if objective.uses_class_counts else ctx
        sent = objective.broadcast(server, ctx).only(objective.wire[0])
        client = State.initial({**objective.client_inits(), **objective.scratch_state}, w0, sent.w)
        _, client = objective.begin_local(client, sent, ctx)
        upload, client = objective.finish_local(w0 + step, client, sent, ctx)
        uploads = Uploads(objective.wire[1], objective.weighting, [ctx], w0)
        uploads.add(upload, 1)
        following = objective.finish_phase(server, sent, uploads, ctx)
        return {**client, **{f"server.{name}": value for name, value in following.items()}}

    assert_same(after(0.125), after(0.25))


def make(optimizer: Any = None, engine: Any = "sequential", **options: Any) -> Run:
    trainer = FederatedTrainer(max_rounds=1, clients_per_round=2, accelerator="cpu", threads=1, engine=engine)
    return trainer.fit(FedAvg(DigitsMLP(4), optimizer=optimizer), Digits(num_clients=2, batch_size=512), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorchOptimizer("Adamm"), r"^model\.optimizer\.name = Adamm: give a class of torch\.optim"),
        (lambda: TorchOptimizer("torch.nn.Linear"), r"^model\.optimizer\.name = torch\.nn\.Linear: give"),
        (lambda: TorchOptimizer(options={"capturable": True}), r"^model\.optimizer = AdamW: If capturable=True"),
        (lambda: TorchOptimizer("..Adam"), r"^model\.optimizer\.name = \.\.Adam: give a class"),
        (lambda: TorchOptimizer("no.such.Module"), r"^model\.optimizer\.name = no\.such\.Module: give"),
        (
            lambda: TorchOptimizer(options={"beta": 1}),
            r"^model\.optimizer = AdamW: .*unexpected keyword .*'beta'",
        ),
        (lambda: TorchOptimizer(options={"eps": -1}), r"^model\.optimizer = AdamW: Invalid epsilon value: -1"),
        (lambda: TorchOptimizer(options={"lr": 1}), r"^model\.optimizer\.options\.lr = 1: give it as lr"),
        (lambda: TorchOptimizer("LBFGS"), r"^model\.optimizer = LBFGS: .*closure"),
        (lambda: TorchOptimizer("SparseAdam"), r"^model\.optimizer = SparseAdam: .*dense"),
        (
            lambda: contract_of(FedAvg(DigitsMLP(4), optimizer=TorchOptimizer("Muon"))),
            r"^model\.optimizer = Muon: .*2D",
        ),
        (lambda: TorchOptimizer(lr=-1), r"^model\.optimizer\.lr = -1: give a finite number above 0$"),
        (lambda: make(TorchOptimizer(), "batched"), r"^trainer\.engine = batched: model\.optimizer = TorchOptimizer"),
        (lambda: make(TorchOptimizer(), "graphed"), r"^trainer\.engine = graphed: model\.optimizer = TorchOptimizer"),
        (lambda: FedProx(DigitsMLP(4), optimizer=3), r"^model\.optimizer = 3: give SGD or LocalOptimizer or null"),
        (
            lambda: FedAvg(DigitsMLP(4), optimizer=TorchOptimizer()).check_centralized(),
            r"^centralized training: model\.optimizer = TorchOptimizer steps .*; take SGD, AdamW, Lion or Muon$",
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
