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
    EMA,
    SAM,
    SCAFFOLD,
    SGD,
    SWA,
    AdaBest,
    Arrays,
    FedAdam,
    FedASAM,
    FedAvg,
    FedAvgM,
    FedCM,
    FedDyn,
    FederatedTrainer,
    FedGAMMA,
    FedGF,
    FedGloSS,
    FedGMT,
    FedGMTv2,
    FedLESAM,
    FedLESAMD,
    FedLESAMS,
    FedNova,
    FedNSAM,
    FedNTD,
    FedProx,
    FedSAM,
    FedScar,
    FedScarl,
    FedSMOO,
    FedSOL,
    FedSpeed,
    FedTOGA,
    FedWMSAM,
    LocalObjective,
    MoFedSAM,
    NaiveFedGloSS,
    ReplaySampler,
    ServerAdam,
    STildeAM,
    UserError,
    algorithms,
)
from fl_lightning.core.flat import FlatSpec, norm, to_radius
from fl_lightning.core.losses import kl_to_teacher, not_true
from fl_lightning.core.state import ClientContext, State
from tests.problem import Golden

WD = SGD(lr=0.1, weight_decay=1e-3)
DUALS = [
    (FedDyn, "lam"),
    (FedSMOO, "lam"),
    (FedGMT, "lam"),
    (FedGMTv2, "lam"),
    (FedGloSS, "lam"),
    (NaiveFedGloSS, "lam"),
    (FedSpeed, "lam"),
    (FedLESAMD, "lam"),
    (FedTOGA, "lam"),
    (SCAFFOLD, "c"),
    (FedWMSAM, "c"),
    (FedGAMMA, "c"),
    (FedLESAMS, "c"),
]
NO_ASCENT = {
    FedSAM, FedASAM, FedSMOO, FedGAMMA, FedGF, FedLESAM, FedLESAMD, FedLESAMS, FedSpeed, MoFedSAM, STildeAM, FedNSAM,
    FedWMSAM, FedSOL, FedTOGA, FedScar, FedScarl, algorithms.AFedPDSAM,
}  # fmt: skip
"""Algorithms that have an ascent of their own."""


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def path(golden: Golden, objective: type[LocalObjective], **options: Any) -> Tensor:
    """Returns the global models of a run, ``(rounds + 1, d)``."""
    steps = {"local_steps": options.pop("local_steps", 3)}
    options = {"optimizer": WD, "weighting": "uniform", **options}
    _, record = golden.run(objective(net=golden.net(), **options), **steps)
    return torch.stack([server.w for server in record.server])


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(("algorithm", "slot"), DUALS)
@pytest.mark.parametrize("ascent", [None, "SAM"])
def test_server_slot_is_the_mean_of_all_clients(golden: Golden, algorithm: Any, slot: str, ascent: str | None) -> None:
    """This holds under partial participation; clients never seen are included."""
    extra = {"ascent": SAM(0.1)} if ascent and algorithm not in NO_ASCENT else {}
    _, record = golden.run(algorithm(net=golden.net(), optimizer=WD, **extra))
    seen = 0
    for server, clients in zip(record.server[1:], record.client, strict=True):
        close(server[slot], sum(c[slot] for c in clients.values()) / 4)
        assert norm(server[slot]) > 1e-3
        seen = max(seen, len(clients))
    assert len(record.client[0]) == 2 and seen == 4


@pytest.mark.parametrize("scale", ["sum", "mean"])
def test_server_variate_of_fedgamma(golden: Golden, scale: Any) -> None:
    """c_scale mean (FedGF's code) moves S times slower than the mean of all clients' variates."""
    _, record = golden.run(FedGAMMA(net=golden.net(), optimizer=WD, c_scale=scale))
    mean = sum(c.c for c in record.client[0].values()) / 4
    close(record.server[1].c, mean if scale == "sum" else mean / 2)


@pytest.mark.slow
def test_methods_of_radius_zero(golden: Golden) -> None:
    feddyn = path(golden, FedDyn, beta=10)
    close(path(golden, FedSMOO, rho=0, beta=10), feddyn)
    close(path(golden, FedGloSS, rho=0, beta=10), feddyn)
    close(path(golden, NaiveFedGloSS, rho=0, beta=10), feddyn)
    close(path(golden, FedSpeed, rho=0, alpha=0.3, beta=10), feddyn)
    close(path(golden, FedLESAMD, rho=0, beta=10), feddyn)
    assert (path(golden, FedGloSS, rho=0.1, beta=10) - feddyn).abs().max() > 1e-4
    scaffold = path(golden, SCAFFOLD)
    close(path(golden, FedGAMMA, rho=0), scaffold)
    close(path(golden, FedLESAMS, rho=0), scaffold)
    close(path(golden, MoFedSAM, rho=0, alpha=0.3), path(golden, FedCM, alpha=0.3))
    assert (path(golden, FedLESAMS, rho=0.1) - scaffold).abs().max() > 1e-4


@pytest.mark.slow
def test_methods_of_neutral_options(golden: Golden) -> None:
    fedavg = path(golden, FedAvg)
    close(path(golden, FedSAM, rho=0), fedavg)
    close(path(golden, FedASAM, rho=0), fedavg)
    close(path(golden, FedAvgM, beta=0), fedavg)
    close(path(golden, FedProx, mu=0), fedavg)
    close(path(golden, FedCM, alpha=1), fedavg)
    close(path(golden, AdaBest, mu=0, beta=0), fedavg)
    close(path(golden, FedNTD, gamma=0), fedavg)
    close(path(golden, FedDyn, use_dual=False), fedavg)
    for zero in ({"rho": 0}, {"rho": 0, "relaxed_init": 0.3}):
        fedavg_too = path(golden, FedAvg, **{key: value for key, value in zero.items() if key != "rho"})
        for algorithm in (FedSMOO, FedGloSS, FedSpeed, FedLESAMD):
            close(path(golden, algorithm, use_dual=False, **zero), fedavg_too)
    close(path(golden, NaiveFedGloSS, rho=0, use_dual=False), fedavg)
    close(path(golden, FedSpeed, rho=0, use_dual=False, dual_agg="active"), fedavg)
    for algorithm in (FedGMT, FedGMTv2):
        close(path(golden, algorithm, gamma=0, use_dual=False), fedavg)
    close(path(golden, FedNova, weighting="uniform"), fedavg)  # equal numbers of steps
    fedsam = path(golden, FedSAM, rho=0.1)
    close(path(golden, MoFedSAM, rho=0.1, alpha=1), fedsam)
    close(path(golden, FedGF, rho=0.1, c=0.0), fedsam)
    assert (fedsam - fedavg).abs().max() > 1e-4


def test_fedgf_of_c_one_takes_all_gradients_at_the_servers_point(golden: Golden) -> None:
    """It does so from round 1 on."""
    _, record = golden.run(FedGF(net=golden.net(), optimizer=SGD(lr=0.1), c=1.0, rho_g=0.2))
    _, once = golden.run(FedGF(net=golden.net(), optimizer=SGD(lr=0.1), c=1.0, rho_g=0.2), local_steps=1)
    assert [float(s.c) for s in record.server] == [0] + [1] * 6
    ahead = once.local[1][1].w - once.server[1].w
    objective, server = FedGF(net=golden.net().double()), once.server[1]
    x, y = (torch.from_numpy(a) for a in golden.arrays[1])
    objective.flat.load(objective.net, server.w_tilde)
    loss = nn.functional.cross_entropy(objective.net(x.double()), y)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(objective.net.parameters()))])
    close(ahead, -0.1 * gradient)


def test_fedlesam_ascent(golden: Golden) -> None:
    """It is the same for all steps of a round, of length rho, and there is none at the first part."""
    seen: dict[tuple[int, int], list[Tensor]] = {}

    class Watched(FedLESAM):
        def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: ClientContext) -> Any:
            def spy(v: Tensor) -> Tensor:
                seen.setdefault((ctx.t, ctx.n_k), []).append(v - w)
                return grad(v)

            return super().local_step(w, spy, client, received, ctx)

    _, record = golden.run(
        Watched(net=golden.net(), optimizer=WD, rho=0.1), sampler=ReplaySampler([[1, 2], [2], [1], [2]]), max_rounds=4
    )
    del seen[0, 1], seen[1, 1]  # of the dry step
    for (t, size), steps in seen.items():
        assert len(steps) == 3 + 2 * ((t, size) == (0, 32))  # the first step of a run is repeated before it
        for e in steps:
            close(e, steps[0], atol=1e-15)
            assert float(norm(e)) == pytest.approx(0 if t == 0 else 0.1, abs=1e-9), size
    old = record.server[0].w - record.server[2].w  # client 1 took part in rounds 0 and 2
    close(seen[2, 32][0], to_radius(old, 0.1))


@pytest.mark.parametrize("ref", ["own_last_active", "previous_round"])
def test_fedlesam_ascent_is_taken_from_the_received_model(golden: Golden, ref: Any) -> None:
    """Also with a relaxed start it is zero at a client's first part, and later along w_old - w^t."""
    seen: dict[tuple[int, int], list[Tensor]] = {}

    class Watched(FedLESAM):
        def local_step(self, w: Tensor, grad: Any, client: State, *rest: Any) -> Any:
            def spy(v: Tensor) -> Tensor:
                seen.setdefault((rest[-1].t, rest[-1].n_k), []).append(v - w)
                return grad(v)

            return super().local_step(w, spy, client, *rest)

    cohorts = ReplaySampler([[1], [2], [1], [2]])
    objective = Watched(net=golden.net(), optimizer=WD, rho=0.1, ref=ref, relaxed_init=0.3)
    _, record = golden.run(objective, sampler=cohorts, max_rounds=4)
    w = [server.w for server in record.server]
    first = torch.zeros_like(w[0]) if ref == "own_last_active" else w[0] - w[1]
    close(seen[1, 40][0], to_radius(first, 0.1), atol=1e-15)  # client 2's first part: it starts at w + 0.3 (w - w0)
    for e in seen[2, 32]:
        close(e, to_radius(w[0 if ref == "own_last_active" else 1] - w[2], 0.1), atol=1e-15)


def test_fedntd_term() -> None:
    """It is zero for a student that is its teacher, and blind to the logit of the true class."""
    draw = torch.Generator().manual_seed(0)
    z, teacher, y = torch.randn(6, 5, generator=draw), torch.randn(6, 5, generator=draw), torch.arange(6) % 5

    def term(z: Tensor, teacher: Tensor) -> Tensor:
        return kl_to_teacher(not_true(z, y), not_true(teacher, y), tau=2.0)

    close(term(z, z), torch.zeros(6), atol=1e-6)
    moved = z + 3 * nn.functional.one_hot(y, 5)
    close(term(moved, teacher), term(z, teacher), atol=1e-6)
    p, q = (torch.softmax(v[0, 1:] / 2, -1) for v in (teacher, z))
    assert float(term(z, teacher)[0]) == pytest.approx(4 * float((p * (p / q).log()).sum()), rel=1e-5)


def test_naive_fedgloss_climbs_along_the_gradient(golden: Golden) -> None:
    """With K = 1, everybody, no decay, in the first round the pseudo-gradient is lr times the gradient of F."""
    objective = NaiveFedGloSS(net=golden.net(), rho=0.3, optimizer=SGD(lr=0.1))
    _, record = golden.run(objective, local_steps=1, sampler=ReplaySampler([[0, 1, 2, 3]]), max_rounds=1)
    net = golden.net().double()
    x, y = (torch.cat([torch.from_numpy(a[i]) for a in golden.arrays]) for i in (0, 1))
    loss = nn.functional.cross_entropy(net(x.double()), y)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(net.parameters()))])
    w0 = record.server[0].w
    sent = record.local[0][0].w - w0  # one SGD step from the perturbed model, dual still zero
    spec = FlatSpec(net)
    spec.load(net, w0 + to_radius(gradient, 0.3))
    x, y = (torch.from_numpy(a) for a in golden.arrays[0])
    client_loss = nn.functional.cross_entropy(net(x.double()), y)
    g = torch.cat([g.reshape(-1) for g in torch.autograd.grad(client_loss, list(net.parameters()))])
    close(sent, to_radius(gradient, 0.3) - 0.1 * g)


def test_fedgmt_v2_of_all_clients_is_fedgmt(golden: Golden) -> None:
    """Everybody takes part: a client's teacher is then the server's of the round, so the runs are the same."""
    everybody = {"sampler": ReplaySampler([[0, 1, 2, 3]] * 4), "max_rounds": 4}
    _, v1 = golden.run(FedGMT(net=golden.net(), optimizer=WD, ema_alpha=0.5), **everybody)
    _, v2 = golden.run(FedGMTv2(net=golden.net(), optimizer=WD, ema_alpha=0.5), **everybody)
    for t in range(4):
        for k in range(4):
            close(v2.client[t][k].e, v1.server[t].e)
    close(v2.server[-1].w, v1.server[-1].w)
    _, late = golden.run(FedGMTv2(net=golden.net(), optimizer=WD, v2_init="first_seen"))
    close(late.client[3][3].e, late.server[3].w)  # client 3 takes part in round 3 for the first time


@pytest.mark.slow
def test_relaxed_initialisation(golden: Golden) -> None:
    """Local training starts ahead of the model received; ADMM keeps lam = mean of lam_i."""
    b = 0.3
    for algorithm in (FedDyn, FedGloSS, FedGMT, FedSMOO, FedSpeed, FedLESAMD):
        _, record = golden.run(algorithm(net=golden.net(), optimizer=WD, relaxed_init=b))
        for server, clients in zip(record.server[1:], record.client, strict=True):
            close(server.lam, sum(c.lam for c in clients.values()) / 4)
    with pytest.raises(UserError, match=r"relaxed_init = 0.3"):
        NaiveFedGloSS(net=golden.net(), relaxed_init=b)
    _, avg = golden.run(FedAvg(net=golden.net(), optimizer=WD, relaxed_init=b, weighting="uniform"))
    last = dict.fromkeys(range(4), avg.server[0].w)
    for t, results in enumerate(avg.local):
        w = avg.server[t].w
        start = {k: w + b * (w - last[k]) for k in results}
        close(avg.server[t + 1].w, w + sum(r.w - start[k] for k, r in results.items()) / len(results))
        last |= {k: r.w for k, r in results.items()}


def test_ema_of_the_global_model(golden: Golden) -> None:
    _, record = golden.run(FedAvg(net=golden.net(), optimizer=WD, averaging=EMA(0.8)))
    ema = record.server[0].w
    for server, evaluated in zip(record.server[1:], record.evaluated[1:], strict=True):
        ema = 0.8 * ema + 0.2 * server.w
        close(evaluated, ema)


def test_split_proximal_term_is_the_same_without_a_clip(golden: Golden) -> None:
    """FL-Simulator's form differs only where the clip acts: it does not see the part in w."""
    plain, split = (path(golden, FedDyn, beta=1.0, prox=prox) for prox in ("squared", "fl_simulator"))
    close(plain, split)
    sgd = SGD(lr=0.1, clip=0.5)
    plain, split = (path(golden, FedDyn, beta=1.0, prox=p, optimizer=sgd) for p in ("squared", "fl_simulator"))
    assert (plain - split).abs().max() > 1e-3


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
        def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: ClientContext) -> Any:
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


@pytest.mark.parametrize("algorithm", [FedDyn, FedSMOO, FedGMT, FedGloSS, FedLESAMD])
def test_model_is_the_mean_shifted_by_all_duals(golden: Golden, algorithm: Any) -> None:
    """w^(t+1) = mean_S w_i + mean_M h_i with h_i = -beta lam_i (of FedGloSS about the clean model)."""
    _, record = golden.run(algorithm(net=golden.net(), optimizer=WD, beta=10, weighting="uniform"))
    for t, results in enumerate(record.local):
        mean = sum(r.w for r in results.values()) / len(results)
        if algorithm is FedGloSS and t > 0:
            mean = mean - to_radius(record.server[t].delta, 0.1)
        close(record.server[t + 1].w, mean - 10 * sum(c.lam for c in record.client[t].values()) / 4)


def test_duals_shift_the_model_however_large_beta_is(golden: Golden) -> None:
    """As beta goes to infinity, local steps are plain, yet it is not FedAvg."""
    options = {"optimizer": WD, "weighting": "uniform"}
    _, dyn = golden.run(FedDyn(net=golden.net(), beta=1e9, **options))
    _, avg = golden.run(FedAvg(net=golden.net(), **options))
    for k in (0, 1):
        close(dyn.local[0][k].w, avg.local[0][k].w, atol=1e-8)
    assert (dyn.server[1].w - avg.server[1].w).abs().max() > 1e-3


def test_fedgmt_of_alpha_zero_starts_without_kl(golden: Golden) -> None:
    """The teacher is then w^t: the KL term has no gradient at the first step."""
    options = {"local_steps": 1}
    _, with_kl = golden.run(FedGMT(net=golden.net(), optimizer=WD, ema_alpha=0.0, gamma=1.0), **options)
    _, without = golden.run(FedGMT(net=golden.net(), optimizer=WD, ema_alpha=0.0, gamma=0.0), **options)
    close(with_kl.server[-1].w, without.server[-1].w)


def test_fedsmoo_without_its_duals_is_fedsam(golden: Golden) -> None:
    class Still(FedSMOO):
        def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: ClientContext) -> Any:
            direction, new = super().local_step(w, grad, client, received, ctx)
            return direction, new.replace(mu=client.mu)

        def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
            return super().server_step(server, sent, uploads, ctx).replace(s=server.s)

    close(path(golden, Still, rho=0.1, use_dual=False), path(golden, FedSAM, rho=0.1))


def test_asam_of_parameters_without_weights_is_sam(tmp_path: Path) -> None:
    """T = 1 for whatever has no "weight" in its name."""
    sam, asam = (fixed_point(tmp_path, quadratic(FedAvg, ascent=a), [[0, 1]] * 5) for a in (SAM(0.1), ASAM(0.1)))
    close(sam, asam)


def test_scaffold_that_knows_the_momentum(tmp_path: Path) -> None:
    """On a slope (constant gradient) c_i+ is then exactly the gradient, whatever the momentum."""

    class Slope(nn.Module):
        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return out.sum(1)

    gradient = torch.tensor([H[0] ** 0.5] * 2, dtype=torch.float64)
    for aware in (True, False):
        optimizer = SGD(lr=0.1, momentum=0.9)
        objective = SCAFFOLD(net=Quadratics(), loss=Slope(), optimizer=optimizer, momentum_aware=aware)
        assert torch.allclose(fixed_point(tmp_path, objective, [[0]], slot="c"), gradient / 2, atol=1e-12) is aware


def test_fedsmoo_perturbations_have_the_radius(golden: Golden) -> None:
    rho, seen = 0.1, []

    class Watched(FedSMOO):
        def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: ClientContext) -> Any:
            direction, new = super().local_step(w, grad, client, received, ctx)
            close(new.mu - client.mu, new.s_hat - received.s)
            seen.append(float(norm(new.s_hat)))
            return direction, new

    _, record = golden.run(Watched(net=golden.net(), optimizer=WD, rho=rho))
    assert seen[2:] == pytest.approx([rho] * (2 + 6 * 2 * 3), abs=1e-10)  # after the dry step; the first is repeated
    assert [float(norm(s.s)) for s in record.server] == pytest.approx([0] + [rho] * 6, abs=1e-10)
    assert "s_hat" not in record.client[-1][0]


def test_scaffold_of_one_step_keeps_the_gradient(golden: Golden) -> None:
    """With K = 1 and no weight decay, c_i+ is exactly the client's gradient at w^t."""
    objective = SCAFFOLD(net=golden.net(), optimizer=SGD(lr=0.1))
    _, record = golden.run(objective, local_steps=1)
    net, (x, y) = golden.net().double(), golden.arrays[0]
    spec = FlatSpec(net)
    spec.load(net, record.server[5].w)  # client 0 takes part in rounds 0, 2 and 5
    loss = nn.functional.cross_entropy(net(torch.from_numpy(x).double()), torch.from_numpy(y))
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(net.parameters()))])
    close(record.client[-1][0].c, gradient, atol=1e-12)


def test_fedadam_against_its_box(golden: Golden) -> None:
    """The box is Reddi et al.'s Algorithm 2, of the local models alone; v_0 = 0, then tau^2 with bias correction."""
    lr, b1, b2, tau = 0.05, 0.9, 0.99, 0.01
    for v0, corrected in (("0", False), ("tau2", True)):
        update = ServerAdam(lr, b1, b2, tau, v0=v0, bias_correction=corrected)
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
    fedadam = path(golden, FedAdam, server_lr=lr)
    close(fedadam, path(golden, FedAvg, server_update=ServerAdam(lr, b1, b2, tau)))


@pytest.mark.parametrize("start", [2, 0.34])
def test_swa_of_cycle_one_is_the_mean(golden: Golden, start: float) -> None:
    """It is that of w^(t0+2), ..., w^T, while the clients go on from w."""
    _, record = golden.run(FedAvg(net=golden.net(), optimizer=WD, averaging=SWA(start=start)))
    w = torch.stack([s.w for s in record.server])
    close(record.evaluated[-1], w[4:].mean(0))
    close(w, path(golden, FedAvg, weighting="samples"))


def test_swa_cycle(golden: Golden) -> None:
    """Cycle 2 from t0 = 2 collects at t = 4, and the learning rate falls within each cycle."""
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


def fixed_point(
    folder: Path, objective: LocalObjective, schedule: list[list[int]], steps: int = 5, slot: str = "w"
) -> Tensor:
    clients = [(np.array([[h, *b]]), np.array([i])) for i, (h, b) in enumerate(zip(H, B, strict=True))]
    data = Arrays(client_arrays=clients, test=clients[0], batch_size=None)
    fit = FederatedTrainer(
        max_rounds=len(schedule), sampler=ReplaySampler(schedule), local_steps=steps, precision="64-true",
        accelerator="cpu", engine="sequential", eval_every=len(schedule), enable_progress_bar=False,
        default_root_dir=str(folder),
    )  # fmt: skip
    return fit.fit(objective, data).server[slot]


def quadratic(algorithm: type[LocalObjective], **options: Any) -> LocalObjective:
    return algorithm(net=Quadratics(), loss=HalfSquare(), optimizer=SGD(lr=0.1), weighting="uniform", **options)


@pytest.mark.slow
def test_fedavg_stays_off_by_its_known_bias(tmp_path: Path) -> None:
    shrink = (1 - (1 - 0.1 * H) ** 5)[:, None]
    biased = torch.from_numpy((shrink * B).sum(0) / shrink.sum())
    w = fixed_point(tmp_path, quadratic(FedAvg), [[0, 1]] * 150)
    close(w, biased, atol=1e-10)
    assert (biased - torch.from_numpy((H[:, None] * B).sum(0) / H.sum())).norm() > 0.1


@pytest.mark.sampled(quick=12, slow=3)
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (SCAFFOLD, {}),
        (FedDyn, {"beta": 1.0}),
        (FedDyn, {"beta": 3.0}),
        (FedSMOO, {"rho": 0.0, "beta": 1.0}),
        (FedGloSS, {"rho": 0.0, "beta": 1.0}),
        (FedGMT, {"gamma": 0.0, "beta": 3.0}),
    ],
)
@pytest.mark.parametrize("schedule", [[[0, 1]] * 150, [[0], [1], [1], [0]] * 75], ids=["all", "half"])
def test_drift_corrected_methods_are_exact(tmp_path: Path, algorithm: Any, options: Any, schedule: Any) -> None:
    optimum = torch.from_numpy((H[:, None] * B).sum(0) / H.sum())
    close(fixed_point(tmp_path, quadratic(algorithm, **options), schedule), optimum, atol=1e-9)


@pytest.mark.parametrize(("algorithm", "options", "slot"), [(SCAFFOLD, {}, "c"), (FedDyn, {"beta": 1.0}, "lam")])
def test_an_error_of_the_server_slot_shifts_the_fixed_point(
    tmp_path: Path, algorithm: Any, options: Any, slot: str
) -> None:
    """If the server's slot is off the mean of the clients' by e, as after a robust rule, then grad F ends at -e."""
    e = torch.tensor([0.1, -0.2], dtype=torch.float64)

    class Off(algorithm):
        def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
            after = super().server_step(server, sent, uploads, ctx)
            return after.replace(**{slot: after[slot] + e}) if ctx.t == 3 else after  # type: ignore[no-any-return]

    w = fixed_point(tmp_path, quadratic(Off, **options), [[0, 1]] * 60)
    gradient = (torch.from_numpy(H[:, None]) * (w - torch.from_numpy(B))).mean(0)
    close(gradient, -e, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "exact"), [(SCAFFOLD, True), (FedDyn, True), (FedAvg, False)])
def test_eight_clients_of_unequal_work(tmp_path: Path, algorithm: Any, exact: bool) -> None:
    """With f_i = h_i/2 ||w - b_i||^2, K_i from 3 to 8 and 4 clients a round, all but FedAvg reach the optimum."""
    draw = np.random.default_rng(0)
    h, b, steps = draw.uniform(0.5, 2, 8), draw.normal(size=(8, 2)), [3, 4, 5, 6, 7, 8, 3, 8]
    clients = [(np.tile([h[i], *b[i]], (k, 1)), np.full(k, i % 2)) for i, k in enumerate(steps)]  # K_i batches of one
    options = {"beta": 1.0} if algorithm is FedDyn else {}
    fit = FederatedTrainer(
        max_rounds=200, clients_per_round=4, precision="64-true", accelerator="cpu", engine="sequential",
        eval_every=200, enable_progress_bar=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    run = fit.fit(quadratic(algorithm, **options), Arrays(client_arrays=clients, test=clients[0], batch_size=1))
    error = float((run.server.w - torch.from_numpy((h[:, None] * b).sum(0) / h.sum())).norm())
    assert error < 1e-8 if exact else error > 0.05


TEXTS = [
    (algorithm, ascent)
    for algorithm in (getattr(algorithms, name) for name in algorithms.__all__)
    for ascent in ([None] if algorithm in NO_ASCENT else [None, SAM(0.1), ASAM(0.3)])
]


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize(("algorithm", "ascent"), TEXTS)
def test_one_text_serves_one_client_and_a_cohort(algorithm: Any, ascent: Any) -> None:
    """The client's hooks on (clients, d) give what they give on each (d,)."""
    objective = algorithm(net=nn.Linear(3, 2), **({} if ascent is None else {"ascent": ascent}))
    d, clients = objective.flat.d, 4
    draw = torch.Generator().manual_seed(0)
    rules = {**objective.client_inits(), **objective.scratch_state, **objective.optimizer.named_state}

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    w, h, b = random(clients, d), random(clients, d).abs(), random(clients, d)
    zero = torch.zeros(d, dtype=torch.float64)
    server = State({"w": zero, **State.initial(objective.server_inits(), zero, zero)})
    received = State({n: random(*server[n].shape) for n in objective.down})
    state = State({n: random(clients, *v.shape) for n, v in State.initial(rules, zero, zero).items()})
    state = state | {"start": random(clients, d)}
    lr, steps = (
        torch.full((clients, 1), 0.1, dtype=torch.float64),
        torch.arange(1.0, clients + 1, dtype=torch.float64).reshape(-1, 1),
    )
    ctx: Any = {"t": 0, "rounds": 1, "m": 10, "flat": objective.flat}
    many = ClientContext(**ctx, lr=lr, K=steps, k_lr=lr * steps)  # type: ignore[arg-type]
    direction, after = objective.local_step(w, lambda v, *losses: h * (v - b), state, received, many)
    upload, kept = objective.local_end(w - 0.1 * direction, after, received, many)
    for k in range(clients):
        ctx_k = ClientContext(**ctx, lr=0.1, K=k + 1, k_lr=float(lr[k] * (k + 1)))
        state_k = State({n: v[k] for n, v in state.items()})
        direction_k, after_k = objective.local_step(
            w[k], lambda v, *losses, k=k: h[k] * (v - b[k]), state_k, received, ctx_k
        )
        upload_k, kept_k = objective.local_end(w[k] - 0.1 * direction_k, after_k, received, ctx_k)
        for ours, theirs in ((upload, upload_k), (kept, kept_k)):
            for n in theirs:
                close(ours[n][k], theirs[n])
        close(direction[k], direction_k, atol=1e-12)


def test_zero_vector_stays_zero() -> None:
    assert torch.equal(to_radius(torch.zeros(3), 0.1), torch.zeros(3))
    v = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    close(to_radius(v, 10.0), torch.tensor([[6.0, 8.0], [0.0, 0.0]]), atol=1e-6)
