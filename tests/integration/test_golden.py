"""Every algorithm against trajectories of the official codes (tests/golden/README.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import (
    SAM,
    SCAFFOLD,
    SGD,
    SWA,
    FedASAM,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedGF,
    FedGloSS,
    FedGMT,
    FedSAM,
    FedSMOO,
    LocalObjective,
)
from tests.conftest import GOLDEN, Golden

Make = Callable[..., LocalObjective]

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
    # beta C = 40 in the file: C = 4 clients there and here, the sum over 2 of them
    "fedgloss__FedGloSS-SAM__papersigma": lambda **k: FedGloSS(
        rho=0.1, beta=10, sigma_scale="paper", ascent=SAM(0.1), weighting="samples", **k
    ),
    "FL-SAM__FedGMT__wd1e-3": lambda **k: FedGMT(gamma=1, tau=3, ema_alpha=0.95, beta=10, weighting="samples", **k),
    "REPAIRED-FL-SAM__FedSMOO__wd1e-3": lambda **k: FedSMOO(rho=0.1, beta=10, weighting="samples", **k),
}
EXTRA_SERVER = {"extra_sigma": "lam", "extra_final_c_params_list": "c"}


@pytest.mark.parametrize(("dtype", "atol"), [(np.float64, 1e-7), (np.float32, 2e-6)], ids=["float64", "float32"])
@pytest.mark.parametrize("name", RUNS)
def test_trajectory(golden: Golden, name: str, dtype: Any, atol: float) -> None:
    with np.load(GOLDEN / f"{name}.npz") as z:
        expected = {key: z[key] for key in z.files}
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
