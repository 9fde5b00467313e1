"""What the papers imply: identities between algorithms, invariants of their state, fixed points on quadratics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning import (
    ASAM,
    SAM,
    SCAFFOLD,
    SGD,
    SWA,
    Adam,
    Arrays,
    FedAdam,
    FedASAM,
    FedAvg,
    FedAvgM,
    FedDyn,
    FederatedTrainer,
    FedGloSS,
    FedGMT,
    FedSAM,
    FedSMOO,
    LocalObjective,
    Trace,
    algorithms,
)
from fl_lightning.flat import FlatSpec, norm, to_radius
from fl_lightning.state import ClientContext, Slots
from tests.conftest import Golden

WD = SGD(lr=0.1, weight_decay=1e-3)
DUALS = [
    (FedDyn, "lam"),
    (FedSMOO, "lam"),
    (FedGMT, "lam"),
    (FedGloSS, "lam"),
    (SCAFFOLD, "c"),
]


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def path(golden: Golden, objective: type[LocalObjective], **options: Any) -> Tensor:
    """The global models of a run, ``(rounds + 1, d)``."""
    options = {"optimizer": WD, "weighting": "uniform", **options}
    _, record = golden.run(objective(net=golden.net(), **options))
    return torch.stack([server.w for server in record.server])


@pytest.mark.parametrize(("algorithm", "slot"), DUALS)
@pytest.mark.parametrize("ascent", [None, "SAM"])
def test_server_slot_is_the_mean_of_all_clients(golden: Golden, algorithm: Any, slot: str, ascent: str | None) -> None:
    """Under partial participation, clients never seen included."""
    extra = {"ascent": SAM(0.1)} if ascent and algorithm is not FedSMOO else {}
    _, record = golden.run(algorithm(net=golden.net(), optimizer=WD, **extra))
    seen = 0
    for server, clients in zip(record.server[1:], record.client, strict=True):
        close(server[slot], sum(c[slot] for c in clients.values()) / 4)
        assert norm(server[slot]) > 1e-3
        seen = max(seen, len(clients))
    assert len(record.client[0]) == 2 and seen == 4


def test_methods_of_radius_zero_are_feddyn(golden: Golden) -> None:
    feddyn = path(golden, FedDyn, beta=10)
    close(path(golden, FedSMOO, rho=0, beta=10), feddyn)
    close(path(golden, FedGloSS, rho=0, beta=10), feddyn)
    assert (path(golden, FedGloSS, rho=0.1, beta=10) - feddyn).abs().max() > 1e-4


def test_methods_of_neutral_options_are_fedavg(golden: Golden) -> None:
    fedavg = path(golden, FedAvg)
    close(path(golden, FedSAM, rho=0), fedavg)
    close(path(golden, FedASAM, rho=0), fedavg)
    close(path(golden, FedAvgM, beta=0), fedavg)
    assert (path(golden, FedSAM, rho=0.1) - fedavg).abs().max() > 1e-4


def test_fedgloss_of_other_clients_is_feddyn_of_other_clients(golden: Golden) -> None:
    close(path(golden, FedGloSS, rho=0, ascent=SAM(0.1)), path(golden, FedDyn, ascent=SAM(0.1)))


def test_warm_up_of_the_radius(golden: Golden) -> None:
    """rho(t) = rho0 + (rho - rho0) t / T_s."""
    assert [SAM(0.2, warmup=4, rho0=0.0).radius(t) for t in range(6)] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2, 0.2])
    late = path(golden, FedAvg, ascent=SAM(0.1, warmup=3, rho0=0.0))
    close(late[1], path(golden, FedAvg)[1])
    assert (late[2] - path(golden, FedAvg)[2]).abs().max() > 1e-5


def test_fedgmt_without_kl_is_feddyn_without_pull(golden: Golden) -> None:
    class DualOnly(FedDyn):
        def local_step(self, w: Tensor, grad: Any, client: Slots, sent: Slots, ctx: ClientContext) -> Any:
            return grad(w) - client.lam, client

    close(path(golden, FedGMT, gamma=0), path(golden, DualOnly))


def test_fedgmt_teacher(golden: Golden) -> None:
    """Eq. 7: e^t = w^t + sum_i alpha^(t-i) (w^i - w^(i+1)); with alpha 0 the teacher is the model itself."""
    alpha = 0.7
    _, record = golden.run(FedGMT(net=golden.net(), optimizer=WD, ema_alpha=alpha))
    w = [server.w for server in record.server]
    for t, server in enumerate(record.server):
        close(server.e, w[t] + sum((alpha ** (t - i) * (w[i] - w[i + 1]) for i in range(t)), torch.zeros_like(w[0])))
    _, record = golden.run(FedGMT(net=golden.net(), optimizer=WD, ema_alpha=0.0))
    close(record.server[-1].e, record.server[-1].w)


def test_fedsmoo_perturbations_have_the_radius(golden: Golden) -> None:
    rho, seen = 0.1, []

    class Watched(FedSMOO):
        def local_step(self, w: Tensor, grad: Any, client: Slots, sent: Slots, ctx: ClientContext) -> Any:
            direction, new = super().local_step(w, grad, client, sent, ctx)
            close(new.mu - client.mu, new.s_hat - sent.s)
            seen.append(float(norm(new.s_hat)))
            return direction, new

    _, record = golden.run(Watched(net=golden.net(), optimizer=WD, rho=rho))
    assert seen == pytest.approx([rho] * (6 * 2 * 3), abs=1e-10)
    assert [float(norm(s.s)) for s in record.server] == pytest.approx([0] + [rho] * 6, abs=1e-10)
    assert "s_hat" not in record.client[-1][0]


def test_scaffold_of_one_step_keeps_the_gradient(golden: Golden) -> None:
    """K = 1, no weight decay: c_i+ is exactly the client's gradient at w^t."""
    objective = SCAFFOLD(net=golden.net(), optimizer=SGD(lr=0.1))
    _, record = golden.run(objective, local_steps=1)
    net, (x, y) = golden.net().double(), golden.arrays[0]
    spec = FlatSpec(net)
    spec.load(net, record.server[5].w)  # client 0 takes part in rounds 0, 2 and 5
    loss = nn.functional.cross_entropy(net(torch.from_numpy(x).double()), torch.from_numpy(y))
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(net.parameters()))])
    close(record.client[-1][0].c, gradient, atol=1e-12)


def test_fedadam_against_its_box(golden: Golden) -> None:
    """Reddi et al., Algorithm 2, from the local models alone; v_0 = 0, then tau^2 with bias correction."""
    lr, b1, b2, tau = 0.05, 0.9, 0.99, 0.01
    for v0, corrected in (("0", False), ("tau2", True)):
        update = Adam(lr, b1, b2, tau, v0=v0, bias_correction=corrected)
        _, record = golden.run(FedAvg(net=golden.net(), optimizer=WD, weighting="uniform", server_update=update))
        w = record.server[0].w.numpy()
        m, v = np.zeros_like(w), np.full_like(w, 0 if v0 == "0" else tau**2)
        for t in range(6):
            delta = np.mean([r.w.numpy() for r in record.local[t].values()], axis=0) - w
            m = b1 * m + (1 - b1) * delta
            v = b2 * v + (1 - b2) * delta**2
            m_hat, v_hat = (m / (1 - b1 ** (t + 1)), v / (1 - b2 ** (t + 1))) if corrected else (m, v)
            # Google's form corrects the step, not the root: tau stays outside the correction
            eps = tau / np.sqrt(1 - b2 ** (t + 1)) if corrected else tau
            w = w + lr * m_hat / (np.sqrt(v_hat) + eps)
            np.testing.assert_allclose(record.server[t + 1].w.numpy(), w, rtol=0, atol=1e-12)
    named = path(golden, FedAdam, server_lr=lr)
    close(named, path(golden, FedAvg, server_update=Adam(lr, b1, b2, tau)))


@pytest.mark.parametrize("start", [2, 0.34])
def test_swa_of_cycle_one_is_the_mean(golden: Golden, start: float) -> None:
    """Of w^(t0+2), ..., w^T, while the clients go on from w."""
    _, record = golden.run(FedAvg(net=golden.net(), optimizer=WD, averaging=SWA(start=start)))
    w = torch.stack([s.w for s in record.server])
    close(record.evaluated[-1], w[4:].mean(0))
    close(w, path(golden, FedAvg, weighting="samples"))


def test_swa_cycle(golden: Golden) -> None:
    """Cycle 2 from t0 = 2: collected at t = 4, and the learning rate falls within each cycle."""
    swa, lr = SWA(start=2, cycle=2, lr_min=0.01), 0.1
    _, record = golden.run(FedAvg(net=golden.net(), optimizer=SGD(lr=lr), averaging=swa))
    w = torch.stack([s.w for s in record.server])
    close(record.evaluated[-1], w[5])
    lrs = [next(iter(results.values())).ctx.lr for results in record.local]
    assert lrs == pytest.approx([lr, lr, 0.055, 0.01, 0.055, 0.01])


class Quadratics(nn.Module):
    """``sqrt(h) (w - b)`` for samples ``(h, b)``: with half its square as loss, f_i = h_i/2 ||w - b_i||^2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1].sqrt() * (self.w - x[:, 1:])


class HalfSquare(nn.Module):
    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return out.square().sum(1) / 2


H, B = np.array([0.5, 2.0]), np.array([[1.0, -2.0], [-3.0, 1.0]])


def fixed_point(folder: Path, objective: LocalObjective, schedule: list[list[int]], steps: int = 5) -> Tensor:
    clients = [(np.array([[h, *b]]), np.array([i])) for i, (h, b) in enumerate(zip(H, B, strict=True))]
    data = Arrays(client_arrays=clients, test=clients[0], batch_size=None)
    fit = FederatedTrainer(
        max_rounds=len(schedule), sampler=Trace(schedule), local_steps=steps, precision="64-true", accelerator="cpu",
        eval_every=len(schedule), enable_progress_bar=False, default_root_dir=str(folder),
    )  # fmt: skip
    fit.fit(objective, data)
    return fit.server.w


def quadratic(algorithm: type[LocalObjective], **options: Any) -> LocalObjective:
    return algorithm(net=Quadratics(), loss=HalfSquare(), optimizer=SGD(lr=0.1), weighting="uniform", **options)


def test_fedavg_stays_off_by_its_known_bias(tmp_path: Path) -> None:
    shrink = (1 - (1 - 0.1 * H) ** 5)[:, None]
    biased = torch.from_numpy((shrink * B).sum(0) / shrink.sum())
    w = fixed_point(tmp_path, quadratic(FedAvg), [[0, 1]] * 150)
    close(w, biased, atol=1e-10)
    assert (biased - torch.from_numpy((H[:, None] * B).sum(0) / H.sum())).norm() > 0.1


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (SCAFFOLD, {}),
        (FedDyn, {"beta": 1.0}),
        (FedDyn, {"beta": 10.0}),
        (FedSMOO, {"rho": 0.0, "beta": 1.0}),
        (FedGloSS, {"rho": 0.0, "beta": 1.0}),
        (FedGMT, {"gamma": 0.0, "beta": 10.0}),
    ],
)
@pytest.mark.parametrize("schedule", [[[0, 1]] * 600, [[0], [1], [1], [0]] * 250], ids=["all", "half"])
def test_drift_corrected_methods_are_exact(tmp_path: Path, algorithm: Any, options: Any, schedule: Any) -> None:
    optimum = torch.from_numpy((H[:, None] * B).sum(0) / H.sum())
    close(fixed_point(tmp_path, quadratic(algorithm, **options), schedule), optimum, atol=1e-9)


@pytest.mark.parametrize("name", algorithms.__all__)
@pytest.mark.parametrize("ascent", [None, SAM(0.1), ASAM(0.3)], ids=["none", "SAM", "ASAM"])
def test_one_text_serves_one_client_and_a_cohort(name: str, ascent: Any) -> None:
    """The client's hooks on (clients, d) give what they give on each (d,)."""
    algorithm = getattr(algorithms, name)
    if ascent is not None and name in ("FedSAM", "FedASAM", "FedSMOO"):
        pytest.skip("has an ascent of its own")
    objective = algorithm(net=nn.Linear(3, 2), **({} if ascent is None else {"ascent": ascent}))
    d, clients = objective.flat.d, 4
    draw = torch.Generator().manual_seed(0)
    rules = {**objective.client_rules(), **objective.scratch_slots}

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    w, h, b = random(clients, d), random(clients, d).abs(), random(clients, d)
    sent = Slots({n: random(d) for n in objective.down})
    state = Slots({n: random(clients, d) for n in rules})
    lr, steps = torch.full((clients, 1), 0.1), torch.arange(1, clients + 1).reshape(-1, 1)
    ctx: Any = {"t": 0, "rounds": 1, "m": 10, "flat": objective.flat}
    many = ClientContext(**ctx, lr=lr, K=steps, k_lr=lr * steps)  # type: ignore[arg-type]
    direction, after = objective.local_step(w, lambda v: h * (v - b), state, sent, many)
    upload, kept = objective.local_end(w - 0.1 * direction, after, sent, many)
    for k in range(clients):
        one = ClientContext(**ctx, lr=0.1, K=k + 1, k_lr=float(lr[k] * (k + 1)))
        mine = Slots({n: v[k] for n, v in state.items()})
        direction_k, after_k = objective.local_step(w[k], lambda v, k=k: h[k] * (v - b[k]), mine, sent, one)
        upload_k, kept_k = objective.local_end(w[k] - 0.1 * direction_k, after_k, sent, one)
        for ours, theirs in ((upload, upload_k), (kept, kept_k)):
            for n in theirs:
                close(ours[n][k], theirs[n], atol=1e-6)  # lr is float32 here
        close(direction[k], direction_k, atol=1e-12)


def test_zero_vector_stays_zero() -> None:
    assert torch.equal(to_radius(torch.zeros(3), 0.1), torch.zeros(3))
    v = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    close(to_radius(v, 10.0), torch.tensor([[6.0, 8.0], [0.0, 0.0]]), atol=1e-6)
