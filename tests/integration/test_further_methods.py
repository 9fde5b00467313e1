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
    Faults,
    FedACG,
    FedAvg,
    FedCM,
    FedDecorr,
    FederatedTrainer,
    FedExP,
    FedGF,
    FedLC,
    FedMoSWA,
    FedNSAM,
    FedProx,
    FedSAM,
    FedSOL,
    FedSWA,
    FedWMSAM,
    LocalObjective,
    ReplaySampler,
    ServerAdam,
    ServerYogi,
    Stragglers,
    UserError,
)
from fl_lightning.core.state import ClientContext, State
from fl_lightning.data.histogram import class_counts
from tests.integration.test_identities import WD, close, path
from tests.problem import Golden, trajectory


@pytest.mark.slow
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
    """Without eps it is 1/2, so 1, for equal updates, S/2 for orthogonal ones of one size, 1 where nothing moves."""

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
    """A constant added to all logits changes nothing, whatever tau."""
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
    """The values are those of the official functions, mended, after rounds 1 to 6."""
    _, record = golden.run(FedWMSAM(net=golden.net(), optimizer=WD, rho=0.1))
    alphas = [float(server.a) for server in record.server[1:]]
    assert alphas == pytest.approx([0.1, 0.10186246, 0.10251730, 0.10372701, 0.10418179, 0.10413997], abs=1e-8)


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
    """They are those of public programs at the initial weights; MOON's teachers are rows of a stored trajectory."""
    x, y = torch.from_numpy(golden.arrays[k][0]).double(), torch.from_numpy(golden.arrays[k][1])
    net = golden.net().double()
    teachers = list(torch.from_numpy(trajectory("fedsam__FedAvg")["global"][1:3]))
    counts = torch.bincount(y, minlength=4)
    assert tuple(counts.tolist()) == COUNTS[k]

    def value(objective: LocalObjective, *constants: Any) -> float:
        with objective.observed():
            return float(objective.batch_loss(objective.net(x), y, *constants))

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
    terms = (
        plain, value(FedDecorr(net=net, beta=1.0, scale="code")) - plain, calibrated(tau=1.0), calibrated(tau=0.1),
        calibrated(tau=1.0, denominator="others"), value(moon, *outputs) - plain,
    )  # fmt: skip
    assert terms == pytest.approx(TERMS[k], abs=2e-10)


# Rounds in which nobody answers, and clients that are late

NOBODY, EVERYBODY = [], [0, 1, 2, 3]


def answered(golden: Golden, model: LocalObjective, *rounds: list[int], **options: Any) -> Any:
    """Returns the trajectory of rounds in which these clients answer."""
    everyone = ReplaySampler([EVERYBODY] * len(rounds))
    faults = Faults(available=list(rounds))
    return golden.run(model, sampler=everyone, max_rounds=len(rounds), faults=faults, **options)[1]


def test_rounds_without_clients_do_not_count_in_fedgf(golden: Golden) -> None:
    """Every round diverges, so c, the mean over the rounds present, is 1 from the first one on."""
    pattern = [NOBODY, EVERYBODY, NOBODY, EVERYBODY, EVERYBODY]
    for window in (10, 2):
        record = answered(golden, FedGF(golden.net(), T_D=1e-9, W=window, optimizer=WD), *pattern)
        assert [float(s.c) for s in record.server] == [0, 0, 1, 1, 1, 1]
    full = answered(golden, FedGF(golden.net(), T_D=1e-9, W=4, window_warmup="full", optimizer=WD), *pattern)
    assert [float(s.c) for s in full.server] == [0, 0, 0.25, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("update", [ServerAdam, ServerYogi])
def test_bias_correction_counts_updates(golden: Golden, update: Any) -> None:
    """Rounds in between in which nobody answers change no step."""

    def path(*rounds: list[int]) -> list[Tensor]:
        model = FedAvg(golden.net(), optimizer=WD, server_update=update(lr=0.05, bias_correction=True))
        return [s.w for s in answered(golden, model, *rounds).server]

    plain = path(EVERYBODY, EVERYBODY)
    empty = path(NOBODY, EVERYBODY, NOBODY, EVERYBODY)
    assert torch.equal(torch.stack(plain), torch.stack([empty[0], empty[2], empty[4]]))


def test_fedexp_evaluates_its_first_model_alone(golden: Golden) -> None:
    record = answered(golden, FedExP(golden.net(), optimizer=WD), NOBODY, EVERYBODY, NOBODY, EVERYBODY)
    w = [s.w for s in record.server]
    assert torch.equal(record.evaluated[0], w[0]) and torch.equal(record.evaluated[2], w[2])
    assert torch.equal(record.evaluated[3], w[2])
    close(record.evaluated[4], (w[4] + w[3]) / 2)


@pytest.mark.parametrize(("start", "rounds"), [(0.29, 100), (0.57, 300), (0.58, 100), (0.07, 1000)])
def test_swa_starts_in_the_round_that_is_named(start: float, rounds: int) -> None:
    assert SWA(start=start).start_round(rounds) == round(start * rounds)
    assert SWA(start=start).start_round(rounds + 1) == round(start * rounds)  # rounded down


class Iterates(FedSWA):
    """Keeps the weights before each local step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[Tensor] = []

    def local_step(self, w: Tensor, *others: Any) -> Any:
        self.seen.append(w)
        return super().local_step(w, *others)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_late_client_uploads_its_model_after_the_steps_done(golden: Golden, engine: Any) -> None:
    """FedSWA's rate falls over the steps asked for, as if the client did not know that it will be late."""
    options = {"rho": 0.1, "optimizer": SGD(lr=0.1)}
    objective = Iterates(net=golden.net(), **options)
    golden.run(objective, max_rounds=1, local_steps=6, sampler=ReplaySampler([EVERYBODY]))
    iterates = {k: objective.seen[6 * k : 6 * k + 6] for k in EVERYBODY}
    faults = Faults(stragglers=Stragglers(deadline=3.0))
    sampler = ReplaySampler([EVERYBODY])
    model = FedSWA(golden.net(), **options)
    _, late = golden.run(model, max_rounds=1, local_steps=6, sampler=sampler, faults=faults, engine=engine)
    steps = {k: result.ctx.K for k, result in late.local[0].items()}
    assert len({K for K in steps.values() if 0 < K < 6}) > 1
    for k, K in steps.items():
        if K < 6:
            close(late.local[0][k].w, iterates[k][K])


class Slope(nn.Module):
    """A loss whose gradient is the same everywhere."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return logits.mean(1)


def test_a_late_client_of_fedmoswa_keeps_its_gradient(golden: Golden) -> None:
    """Of a constant gradient the variate is that gradient: the displacement over the sum of the rates of the steps."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(golden.test[0][0].size, 4))

    faults = Faults(stragglers=Stragglers(deadline=3.0))
    model = FedMoSWA(net(), rho=0.1, loss=Slope(), optimizer=SGD(lr=0.1))
    _, record = golden.run(model, max_rounds=1, local_steps=6, sampler=ReplaySampler([EVERYBODY]), faults=faults)
    assert {r.ctx.K for r in record.local[0].values()} & {1, 2, 3, 4, 5}
    for k, result in record.local[0].items():
        x = torch.from_numpy(golden.arrays[k][0]).double().flatten(1).mean(0) / 4
        expected = torch.cat([x.repeat(4), torch.full((4,), 0.25, dtype=x.dtype)])
        close(result.state.c, expected)


# Losses and nets that are refused


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), r"model\.loss\.reduction = sum: "),
        (nn.KLDivLoss(reduction="batchmean"), r"model\.loss\.reduction = batchmean: "),
        (nn.CrossEntropyLoss(weight=torch.ones(4)), r"model\.loss\.weight = "),
        (nn.NLLLoss(ignore_index=1), r"model\.loss\.ignore_index = 1: "),
    ],
)
def test_losses_whose_mean_is_not_that_of_samples_are_refused(golden: Golden, loss: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FedAvg(golden.net(), loss=loss)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(label_smoothing=0.1), nn.NLLLoss(), nn.MSELoss()])
def test_loss_of_a_minibatch_is_that_of_torch(golden: Golden, loss: nn.Module) -> None:
    torch.manual_seed(0)
    z, y = torch.randn(6, 4), torch.randint(4, (6,))
    y = torch.randn(6, 4) if isinstance(loss, nn.MSELoss) else y
    torch.testing.assert_close(FedAvg(golden.net(), loss=loss).batch_loss(z, y), loss(z, y))


def test_fedlc_refuses_label_smoothing(golden: Golden) -> None:
    """Classes that a client lacks have probability 0, and smoothing gives each a share of an infinite loss."""
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    with pytest.raises(UserError, match=r"^model\.loss\.label_smoothing = 0\.1: FedLC .* set it to 0$"):
        FedLC(golden.net(), loss=smooth)
    close(path(golden, FedLC, tau=0, loss=smooth), path(golden, FedAvg, loss=smooth))


class Attention(nn.Module):
    """Its last-defined linear layer is one that `nn.MultiheadAttention` does not call as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, None, :4]
        return self.fc(self.attention(x, x, x, need_weights=False)[0][:, 0])


@pytest.mark.parametrize("algorithm", [MOON, FedDecorr])
def test_a_classifier_that_is_not_the_last_layer_is_refused(golden: Golden, algorithm: Any) -> None:
    with pytest.raises(UserError, match=r"^model\.net = Attention: does not call .* define its classifier last$"):
        golden.run(algorithm(Attention()), max_rounds=1)
