"""Identities, limits and values of the ten methods beyond the five papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning import (
    MOON,
    SGD,
    SWA,
    Arrays,
    Digits,
    Dirichlet,
    FedACG,
    FedAvg,
    FedCM,
    FedDecorr,
    FederatedTrainer,
    FedExP,
    FedLC,
    FedMoSWA,
    FedNSAM,
    FedProx,
    FedSAM,
    FedSOL,
    FedSWA,
    FedWMSAM,
    LocalObjective,
    UserError,
)
from fl_lightning.core.state import ClientContext, State
from fl_lightning.data.counts import class_counts
from tests.conftest import GOLDEN, Golden
from tests.integration.test_identities import WD, close, path


def test_methods_of_neutral_options(golden: Golden) -> None:
    fedavg = path(golden, FedAvg)
    close(path(golden, FedACG, lam=0, beta=0.3), path(golden, FedProx, mu=0.3))
    close(path(golden, FedACG, lam=0.7, beta=0), path(golden, FedNSAM, gamma=0.7, rho=0))
    close(path(golden, FedNSAM, gamma=0, rho=0.1), path(golden, FedSAM, rho=0.1))
    close(path(golden, FedExP, eps=1e9), fedavg)
    close(path(golden, MOON, mu=0), fedavg)
    close(path(golden, MOON, mu=9)[:2], fedavg[:2])  # no client has a local model in its first round
    close(path(golden, FedDecorr, beta=0), fedavg)
    close(path(golden, FedLC, tau=0), fedavg)
    close(path(golden, FedSWA, rho=1, alpha=1), fedavg)
    close(path(golden, FedSOL, rho=0), fedavg)
    close(path(golden, FedSOL, rho=5.0, local_steps=1), path(golden, FedAvg, local_steps=1))  # no ascent in step one
    still = path(golden, FedWMSAM, rho=0, lam=0, alpha=0.3, cv_scale=0)
    close(still, path(golden, FedCM, alpha=0.3))
    assert (path(golden, FedLC, tau=1e-9) - fedavg).abs().max() > 1e-2  # classes that a client lacks are out


def test_momentum_of_fedacg_is_the_last_step(golden: Golden) -> None:
    """w^(t+1) = mean w_i = w^t + m."""
    _, record = golden.run(FedACG(net=golden.net(), optimizer=WD, beta=0.1))
    for t, results in enumerate(record.local):
        mean = sum(r.w for r in results.values()) / len(results)
        close(record.server[t + 1].w, mean)
        close(record.server[t].w - record.server[t + 1].w, record.server[t + 1].server_v)


def test_step_of_fedexp(tmp_path: Path) -> None:
    """Without eps: 1/2 and so 1 for equal updates; S/2 for orthogonal ones of one size; 1 where nothing moves."""

    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(6, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w.unsqueeze(-1)

    class Sum(nn.Module):
        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return out.sum(1)

    axes = np.eye(6)
    for samples, factor in ((axes[[0] * 6], 1), (axes, 3), (0 * axes, 1)):
        clients = [(x[None], np.array([0])) for x in samples]
        fit = FederatedTrainer(
            max_rounds=1, clients_per_round=6, precision="64-true", accelerator="cpu", engine="sequential",
            enable_progress_bar=False, default_root_dir=str(tmp_path),
        )  # fmt: skip
        objective = FedExP(net=Slopes(), loss=Sum(), optimizer=SGD(0.1), eps=0.0, averaging=SWA())
        run = fit.fit(objective, Arrays(client_arrays=clients, test=(axes + 2, np.zeros(6, int)), batch_size=None))
        close(run.server.w, -0.1 * factor * torch.from_numpy(samples.mean(0)))


def test_fedlc_of_equal_counts_is_fedavg(golden: Golden) -> None:
    """Whatever tau: a constant added to all logits changes nothing."""
    golden.arrays = [(x[:4], np.arange(4)) for x, _ in golden.arrays]
    close(path(golden, FedLC, tau=3.0), path(golden, FedAvg))


def test_class_counts_are_those_of_what_a_client_trains_on() -> None:
    data = Digits(num_clients=4, partition=Dirichlet(0.3), val_fraction=0.3)
    data.setup()
    counts = torch.stack([data.class_counts(k) for k in range(4)])
    assert torch.equal(counts.sum(1), data.client_sizes) and counts.sum() + len(data.val_indices) == len(data.y_train)
    assert torch.equal(counts, torch.from_numpy(class_counts(data))) and not counts.all()


@pytest.mark.parametrize("algorithm", [MOON, FedDecorr])
def test_a_net_without_features_is_refused(golden: Golden, algorithm: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten())
    with pytest.raises(UserError, match=r"model.net = Sequential has no linear layer"):
        golden.run(algorithm(net=net), max_rounds=1)


def test_features_that_are_shifted_and_scaled_have_the_same_correlation() -> None:
    z = torch.randn(9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for scale in ("paper", "code"):
        term = FedDecorr(net=nn.Linear(2, 2), scale=scale).correlation
        close(term(3 * z + torch.arange(5)), term(z), atol=1e-6)
        padded = torch.cat([z, z[-1:].repeat(4, 1)])
        close(term(padded, torch.tensor([1 / 9] * 9 + [0.0] * 4)), term(z))
        alone = z[:1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(value := term(alone), alone)
        assert value.detach() == 0 and not gradient.any()
    correlations = np.corrcoef(z.numpy().T)[~np.eye(5, dtype=bool)]
    assert float(term(z)) == pytest.approx(8**2 / 9 * (correlations**2).mean(), rel=1e-6)


def test_fedmoswa_keeps_a_mean_of_the_newest_variates(golden: Golden) -> None:
    """c <- (1 - gamma) c + gamma mean c_i; of one step, without decay, c_i is the client's gradient."""
    _, record = golden.run(FedMoSWA(net=golden.net(), optimizer=SGD(0.1), gamma=0.3))
    for t, results in enumerate(record.local):
        newest = sum(record.client[t][k].c for k in results) / len(results)
        close(record.server[t + 1].c, 0.7 * record.server[t].c + 0.3 * newest)
    _, once = golden.run(FedMoSWA(net=golden.net(), optimizer=SGD(0.1)), local_steps=1)
    _, plain = golden.run(FedAvg(net=golden.net(), optimizer=SGD(0.1)), local_steps=1)
    for k in (0, 1):
        close(once.client[0][k].c, (plain.server[0].w - plain.local[0][k].w) / 0.1)


def test_momentum_of_fedwmsam_adapts(golden: Golden) -> None:
    """The values of the official functions, mended, after rounds 1 to 6."""
    _, record = golden.run(FedWMSAM(net=golden.net(), optimizer=WD, rho=0.1))
    found = [float(server.a) for server in record.server[1:]]
    assert found == pytest.approx([0.1, 0.10186246, 0.10251730, 0.10372701, 0.10418179, 0.10413997], abs=1e-8)


COUNTS = {0: (15, 4, 3, 2), 1: (1, 19, 11, 1), 2: (4, 4, 23, 9), 3: (9, 3, 0, 12)}
TERMS = {
    # cross-entropy; FedDecorr (code); FedLC with tau 1, with tau 0.1, with the paper's denominator; MOON
    0: (1.3447554205, 1.0272937852, 1.2599605244, 1.3355337193, 0.9022273436, 0.6090090160),
    1: (1.5140110654, 0.9156123538, 1.3213087905, 1.4921937210, 0.9936097372, 0.5905345042),
    2: (1.3252623136, 1.1725247290, 1.2637741503, 1.3185689676, 0.9082219743, 0.5802539387),
    3: (1.4337799259, 0.6610336801, 1.0201024806, 1.0462008926, 0.5452288064, 0.6076920984),
}


@pytest.mark.parametrize("k", range(4))
def test_terms_of_the_losses(golden: Golden, k: int) -> None:
    """Values of public programs at the initial weights; MOON's teachers are rows of a stored trajectory."""
    x, y = torch.from_numpy(golden.arrays[k][0]).double(), torch.from_numpy(golden.arrays[k][1])
    net = golden.net().double()
    with np.load(GOLDEN / "fedsam__FedAvg.npz") as z:
        teachers = [torch.from_numpy(z["global"][row]) for row in (1, 2)]
    counts = torch.bincount(y, minlength=4)
    assert tuple(counts.tolist()) == COUNTS[k]

    def value(objective: LocalObjective, *more: Any) -> float:
        with objective.observed():
            return float(objective.batch_loss(objective.net(x), y, *more))

    def calibrated(**options: Any) -> float:
        objective = FedLC(net=net, **options)
        ctx = ClientContext(0, 1, 4, objective.flat, class_counts=counts.double())
        return value(objective, *objective.loss_constants(State({}), State({}), ctx))

    moon, outputs = MOON(net=net, tau=0.5), []
    start = moon.flat.vector(net)
    for w in teachers:
        moon.flat.load(net, w)
        with moon.observed(), torch.no_grad():
            outputs.append(net(x))
    moon.flat.load(net, start)
    plain = value(FedAvg(net=net))
    found = (
        plain, value(FedDecorr(net=net, beta=1.0, scale="code")) - plain, calibrated(tau=1.0), calibrated(tau=0.1),
        calibrated(tau=1.0, denominator="others"), value(moon, *outputs) - plain,
    )  # fmt: skip
    assert found == pytest.approx(TERMS[k], abs=2e-10)
