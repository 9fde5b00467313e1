"""Every algorithm against trajectories of the official codes (tests/golden/README.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import (
    MAN,
    MOON,
    SAM,
    SCAFFOLD,
    SGD,
    SWA,
    AdamW,
    AFedPD,
    AFedPDSAM,
    FedACG,
    FedAdamW,
    FedASAM,
    FedAvg,
    FedAvgM,
    FedDecorr,
    FedDyn,
    FedExP,
    FedGF,
    FedGloSS,
    FedGMT,
    FedLC,
    FedMoSWA,
    FedMuon,
    FedNSAM,
    FedSAM,
    FedScar,
    FedScar4,
    FedScarl,
    FedSMOO,
    FedSOL,
    FedSWA,
    FedTOGA,
    FedWMSAM,
    LocalMuon,
    LocalObjective,
    Muon,
)
from fl_lightning.algorithms.parts import Gradient, Step, admm_pull
from fl_lightning.core import ClientContext, State, norm
from tests.problem import Golden, trajectory

Make = Callable[..., LocalObjective]


class BySize(FedDyn):
    """FedDyn with alpha times mean size / own size in the steps, as in its authors' program."""

    def local_step(self, w: torch.Tensor, grad: Gradient, client: State, received: State, ctx: ClientContext) -> Step:
        g = self.local_gradient(w, grad, client, received, ctx)
        return g + ctx.n_mean / ctx.n_k * admm_pull(client.lam, w, client.start, self.beta), client


RUNS: dict[str, Make] = {
    "FL-Simulator__FedAvg": lambda **k: FedAvg(weighting="uniform", **k),
    "FL-Simulator__FedDyn": lambda **k: FedDyn(beta=10, weighting="uniform", **k),
    "FL-Simulator__FedSAM": lambda **k: FedSAM(rho=0.1, weighting="uniform", **k),
    "FL-Simulator__SCAFFOLD": lambda **k: SCAFFOLD(weighting="uniform", **k),
    "fedsam__FedAvg": lambda **k: FedAvg(weighting="samples", **k),
    "fedsam__FedAvgM": lambda **k: FedAvgM(beta=0.7, weighting="samples", **k),
    "fedsam__FedASAM+SWA": lambda **k: FedASAM(
        rho=0.5, eta=0.2, averaging=SWA(start=2, cycle=1), weighting="samples", **k
    ),
    "fedgloss__FedGloSS-SAM": lambda **k: FedGloSS(
        rho=0.1, beta=10, sigma_scale="code", ascent=SAM(0.1), weighting="samples", **k
    ),
    "FedGF__FedGF": lambda **k: FedGF(rho=0.1, rho_g=0.2, T_D=0.3, W=3, weighting="samples", **k),
    # beta C = 40 in the run: C = 4 clients there and here, the sum over 2 of them
    "fedgloss__FedGloSS-SAM__papersigma": lambda **k: FedGloSS(
        rho=0.1, beta=10, sigma_scale="paper", ascent=SAM(0.1), weighting="samples", **k
    ),
    "FL-SAM__FedGMT__wd1e-3": lambda **k: FedGMT(gamma=1, tau=3, ema_alpha=0.95, beta=10, weighting="samples", **k),
    "REPAIRED-FL-SAM__FedSMOO__wd1e-3": lambda **k: FedSMOO(rho=0.1, beta=10, weighting="samples", **k),
}
MORE: dict[str, Make] = {
    "FedACG__FedACG__lam0.5_beta0.1": lambda **k: FedACG(lam=0.5, beta=0.1, prox="whole", **k),
    "REPAIRED-FedNSAM__FedNSAM__gamma0.5_rho0.2": lambda **k: FedNSAM(gamma=0.5, rho=0.2, **k),
    "REPAIRED-FedNSAMold__FedNSAM": lambda **k: FedNSAM(gamma=0.85, rho=0.05, along="momentum", **k),
    "FedExP__FedExP__eps1e-3_all4": lambda **k: FedExP(eps=1e-3, eps_scale="code", weighting="samples", **k),
    "FL-bench__FedLC__tau1": lambda **k: FedLC(tau=1.0, **k),
    "MOON__MOON__mu5_all4": lambda **k: MOON(mu=5.0, tau=0.5, unseen="initial", **k),
    "FedDecorr__FedDecorr__coef0.05": lambda **k: FedDecorr(beta=0.05, scale="code", **k),
    "FedSWAold__FedSWA__rho0.5_alpha0.8": lambda **k: FedSWA(rho=0.5, alpha=0.8, **k),
    "REPAIRED-FedSWA__FedMoSWA__rho0.5_gamma0.4_alpha1": lambda **k: FedMoSWA(rho=0.5, gamma=0.4, alpha=1.0, **k),
    "REPAIRED-FedWMSAM__FedWMSAM": lambda **k: FedWMSAM(rho=0.1, **k),
    "FedSOL__FedSOL": lambda **k: FedSOL(rho=1.0, **k),
    "FedCADS__A_FedPD__eq": lambda **k: AFedPD(beta=10, **k),
    "REPAIRED-FedPDHyper__A_FedPD_SAM__virtual": lambda **k: AFedPDSAM(rho=0.1, beta=10, **k),
    "DPFed__FedTOGA__eq": lambda **k: FedTOGA(rho=0.1, b1=0.9, beta=10, last_g="corrected", **k),
    "REPAIRED-FedMuon__Local_Muon__float64": lambda **k: LocalMuon(k["net"], Muon(lr_others=1.0)),
    "REPAIRED-FedMuon__FedMuon__float64": lambda **k: FedMuon(k["net"], 0.5, Muon(lr_others=1.0, momentum=0.98)),
    "fedMAN__FedAvg+MAN": lambda **k: FedAvg(parts=[MAN(0.15)], **k),
    "fedMAN__FedSAM+MAN": lambda **k: FedSAM(rho=0.05, parts=[MAN(1.0)], **k),
    "fedMAN__FedDyn+MAN": lambda **k: BySize(beta=10, parts=[MAN(1.0)], **k),
    "FedScar__FedScar__rho0": lambda **k: FedScar(rho=0, **k),
    "REPAIRED-FedScar__FedScar__alpha0.5_gama0.5_beta0.3_rho0.05": lambda **k: FedScar(
        alpha=0.5, gamma=0.5, beta=0.3, rho=0.05, **k
    ),
    "REPAIRED-FedScar__FedScar__variance_alpha1": lambda **k: FedScar(alpha=1, strength="variance", **k),
    "REPAIRED-FedScar__FedScarle__sliced_right": lambda **k: FedScar(beta=0.1, rho=0.2, ascent_to="global_update", **k),
    "FedScar__FedScars__alpha1": lambda **k: FedScar(
        alpha=1, rho=0, tau=0, strength="variance", force="from_start", **k
    ),
    "FedScar__FedScarl__alpha1": lambda **k: FedScarl(rho=0, **k),
    "FedScar__FedScar2": lambda **k: FedScar(alpha=0, rho=0, force="start", **k),
    "FedScar__FedScar4": FedScar4,
    "FedAdamW__FedAdamW": lambda **k: FedAdamW(k["net"], 0.5, "running", AdamW(lr=0.01)),
}
"""Of methods beyond the five papers, and what further arrays of a run are: each after its round, or after the last."""
STATE_OF_MORE: dict[str, Callable[[State], torch.Tensor]] = {
    "extra_m": lambda server: -server.server_v,
    "extra_m_last": lambda server: -server.server_v,
    "extra_c_last": lambda server: server.c,
    "extra_c_after": lambda server: server.c,
    "extra_delta_after": lambda server: server.D,
    "extra_alpha_after": lambda server: server.a[0],
    "extra_mean_of_last_two": lambda server: (server.w + server.w_before) / 2,
}


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("name", MORE)
def test_trajectory_of_more_methods(golden: Golden, name: str) -> None:
    expected = trajectory(name)
    golden.schedule = expected["local_ids"].tolist()
    if json.loads(str(expected["hyper"])).get("equal_n"):
        golden.arrays = [(x[:24], y[:24]) for x, y in golden.arrays]
    objective = MORE[name](net=golden.net(), optimizer=SGD(lr=0.1, weight_decay=1e-3))
    _, record = golden.run(objective)
    ours = torch.stack([server.w for server in record.server]).numpy()
    np.testing.assert_allclose(ours, expected["global"], rtol=0, atol=1e-7)
    for t, cohort in enumerate(expected["local_ids"]):
        local = torch.stack([record.local[t][k].w for k in cohort]).numpy()
        np.testing.assert_allclose(local, expected["local"][t], rtol=0, atol=2e-7)  # stored in float32
    for extra, value_of in STATE_OF_MORE.items():
        if extra in expected:
            rounds = record.server[-1:] if extra.endswith("last") else record.server[1:]
            actual = torch.stack([value_of(server) for server in rounds]).numpy()
            np.testing.assert_allclose(actual, expected[extra].reshape(actual.shape), rtol=0, atol=1e-7)
    if "extra_ci_last" in expected:
        rows = torch.stack([record.client[-1][k].c for k in range(4)]).numpy()
        np.testing.assert_allclose(rows, expected["extra_ci_last"], rtol=0, atol=1e-7)
    for t, duals in enumerate(expected.get("extra_lam", ())):  # those of absent clients, and of those never seen
        unseen, rows = record.server[t + 1].lam_unseen, record.client[t]
        actual = [rows[k].lam + unseen - rows[k].lam_seen if k in rows else unseen for k in range(4)]
        np.testing.assert_allclose(torch.stack(actual), duals, rtol=0, atol=1e-7)
    if "extra_bias" in expected:  # after the pushes; that of an absent client has decayed since it was drawn
        gama = json.loads(str(expected["hyper"]))["gama"]
        for t, biases in enumerate(expected["extra_bias"]):
            rows = record.client[t]
            actual = [rows[k].b * gama ** (t - rows[k].last) if k in rows else torch.zeros(1220) for k in range(4)]
            np.testing.assert_allclose(torch.stack(actual), biases, rtol=0, atol=1e-7)
    if "extra_variance" in expected:
        actual = [float(server.a) for server in record.server[1:]]
        np.testing.assert_allclose(actual, expected["extra_variance"], rtol=0, atol=1e-9)
    if "extra_eta_g" in expected:
        assert expected["extra_eta_g"].min() > 1.3  # the extrapolation was at work
        steps = [float(norm(b.w - a.w)) for a, b in pairwise(record.server)]
        sizes = [len(y) for _, y in golden.arrays]
        means = [sum(local[k].w * n for k, n in enumerate(sizes)) / sum(sizes) for local in record.local]
        plain = [float(norm(mean - a.w)) for mean, a in zip(means, record.server, strict=False)]
        assert [a / b for a, b in zip(steps, plain, strict=True)] == pytest.approx(expected["extra_eta_g"], abs=1e-7)


EXTRA_SERVER = {"extra_sigma": "lam", "extra_final_c_params_list": "c"}


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(("dtype", "atol"), [(np.float64, 1e-7), (np.float32, 2e-6)], ids=["float64", "float32"])
@pytest.mark.parametrize("name", RUNS)
def test_trajectory(golden: Golden, name: str, dtype: Any, atol: float) -> None:
    expected = trajectory(name)
    objective = RUNS[name](net=golden.net(), optimizer=SGD(lr=0.1, weight_decay=1e-3))
    fit, record = golden.run(objective, dtype)

    ours = torch.stack([server.w for server in record.server]).numpy()
    np.testing.assert_allclose(ours, expected["global"], rtol=0, atol=atol)
    if "local" in expected:
        for t, cohort in enumerate(expected["local_ids"]):
            local = torch.stack([record.local[t][k].w for k in cohort]).numpy()
            np.testing.assert_allclose(local, expected["local"][t], rtol=0, atol=max(atol, 2e-7))  # stored in float32
    if name.startswith("fedgloss"):
        sigma = torch.stack([server.lam for server in record.server[1:]]).numpy()
        np.testing.assert_allclose(sigma, expected["extra_sigma"], rtol=0, atol=atol)
    if name.startswith("FedGF"):
        assert [float(server.c) for server in record.server[:-1]] == pytest.approx(expected["extra_c_used"], abs=1e-6)
        w_tilde = torch.stack([server.w_tilde for server in record.server[1:]]).numpy()
        sent = expected["extra_perturbed"]
        np.testing.assert_allclose(
            w_tilde if len(sent) == 6 else w_tilde[: len(sent)], sent, rtol=0, atol=max(atol, 2e-7)
        )
    if "extra_swa" in expected:
        swa = torch.stack(record.evaluated)[expected["extra_swa_round"]].numpy()
        np.testing.assert_allclose(swa, expected["extra_swa"], rtol=0, atol=max(atol, 2e-7))
    if "extra_final_c_i_params_list" in expected:
        rows = torch.stack([record.client[-1][k].c for k in range(4)]).numpy()
        np.testing.assert_allclose(rows, expected["extra_final_c_i_params_list"], rtol=0, atol=max(atol, 2e-6))
    if "extra_swa" not in expected:
        assert fit.metrics["server/test/loss"] == pytest.approx(expected["test_loss"][-1], abs=10 * atol)
        assert fit.metrics["server/test/acc"] == pytest.approx(expected["test_acc"][-1], abs=1e-6)
