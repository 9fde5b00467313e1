"""Every algorithm, round by round, against an independent transcription of its box (tests/integration/boxes.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import fl_lightning as fl
from tests.catalogue import entries
from tests.integration import boxes, further_boxes
from tests.integration.boxes import Models, Problem, Setting, asam, fedopt, momentum, sam
from tests.problem import Golden, trajectory

Box = Callable[[Problem], Models]
Averaged = Callable[[Problem], tuple[Models, Models]]
Make = Callable[..., fl.LocalObjective]

COHORTS = [[2, 0, 1], [3], [0, 1, 2, 3], [1, 2], [3, 0, 1], [0]]
SETTINGS = {
    "wd": Setting(weight_decay=1e-3, weighting="uniform"),
    "momentum": Setting(momentum=0.9, lr_decay=0.9, weighting="samples"),
    "K1-cohorts": Setting(weight_decay=1e-3, local_steps=1, weighting="samples", schedule=COHORTS),
    "K5-clip": Setting(momentum=0.5, clip=1.0, local_steps=5, weighting="uniform"),
}

CASES: dict[str, tuple[Box, Make]] = {
    "FedAvg": (boxes.fedavg, lambda **k: fl.FedAvg(**k)),
    "FedAvg-RI": (lambda P: boxes.fedavg(P, b=0.1), lambda **k: fl.FedAvg(relaxed_init=0.1, **k)),
    "FedProx": (lambda P: boxes.fedavg(P, mu=0.1), lambda **k: fl.FedProx(mu=0.1, **k)),
    "FedProx+ASAM": (
        lambda P: boxes.fedavg(P, asam(0.5, 0.2), mu=0.1),
        lambda **k: fl.FedProx(mu=0.1, ascent=fl.ASAM(0.5, 0.2), **k),
    ),
    "FedAvg-server_lr": (
        lambda P: boxes.fedavg(P, server=momentum(0.0, 0.5)),
        lambda **k: fl.FedAvg(server_update=fl.ServerUpdate(0.5), **k),
    ),
    "FedAvgM": (
        lambda P: boxes.fedavg(P, server=momentum(0.7, 0.8)),
        lambda **k: fl.FedAvgM(beta=0.7, server_lr=0.8, **k),
    ),
    "FedAvgM+ASAM": (
        lambda P: boxes.fedavg(P, asam(0.5, 0.2), server=momentum(0.7)),
        lambda **k: fl.FedAvgM(beta=0.7, ascent=fl.ASAM(0.5, 0.2), **k),
    ),
    "FedAdam": (
        lambda P: boxes.fedavg(P, server=fedopt("adam", 0.1, 0.01, 0.9, 0.99)),
        lambda **k: fl.FedAdam(server_lr=0.1, beta1=0.9, beta2=0.99, tau=0.01, **k),
    ),
    "FedAdam-google": (
        lambda P: boxes.fedavg(P, server=fedopt("adam", 0.1, 0.01, 0.9, 0.999, bias_correction=True)),
        lambda **k: fl.FedAvg(
            server_update=fl.ServerAdam(lr=0.1, beta1=0.9, beta2=0.999, tau=0.01, v0="0", bias_correction=True), **k
        ),
    ),
    "FedAdam-tau2": (
        lambda P: boxes.fedavg(P, server=fedopt("adam", 0.1, 0.01, 0.9, 0.99, v0="tau2")),
        lambda **k: fl.FedAvg(server_update=fl.ServerAdam(lr=0.1, beta1=0.9, beta2=0.99, tau=0.01, v0="tau2"), **k),
    ),
    "FedYogi": (
        lambda P: boxes.fedavg(P, server=fedopt("yogi", 0.1, 0.01, 0.9, 0.99)),
        lambda **k: fl.FedYogi(server_lr=0.1, beta1=0.9, beta2=0.99, tau=0.01, **k),
    ),
    "FedYogi-tau2-google": (
        lambda P: boxes.fedavg(P, server=fedopt("yogi", 0.1, 0.01, 0.9, 0.99, "tau2", True)),
        lambda **k: fl.FedAvg(
            server_update=fl.ServerYogi(lr=0.1, beta1=0.9, beta2=0.99, tau=0.01, v0="tau2", bias_correction=True), **k
        ),
    ),
    "FedAdagrad": (
        lambda P: boxes.fedavg(P, server=fedopt("adagrad", 0.1, 0.01, 0.0)),
        lambda **k: fl.FedAdagrad(server_lr=0.1, tau=0.01, **k),
    ),
    "FedAdagrad-beta1-tau2": (
        lambda P: boxes.fedavg(P, server=fedopt("adagrad", 0.1, 0.01, 0.9, v0="tau2")),
        lambda **k: fl.FedAvg(server_update=fl.ServerAdagrad(lr=0.1, tau=0.01, beta1=0.9, v0="tau2"), **k),
    ),
    "FedSAM": (lambda P: boxes.fedavg(P, sam(0.1)), lambda **k: fl.FedSAM(rho=0.1, **k)),
    "FedSAM-warmup": (
        lambda P: boxes.fedavg(P, sam(0.1, 3, 0.01)),
        lambda **k: fl.FedAvg(ascent=fl.SAM(0.1, warmup=3, rho0=0.01), **k),
    ),
    "FedASAM": (lambda P: boxes.fedavg(P, asam(0.5, 0.2)), lambda **k: fl.FedASAM(rho=0.5, eta=0.2, **k)),
    "SCAFFOLD": (boxes.scaffold, lambda **k: fl.SCAFFOLD(**k)),
    "SCAFFOLD+ASAM": (
        lambda P: boxes.scaffold(P, asam(0.5, 0.2)),
        lambda **k: fl.SCAFFOLD(ascent=fl.ASAM(0.5, 0.2), **k),
    ),
    "SCAFFOLD-server_lr": (
        lambda P: boxes.scaffold(P, eta_g=0.7),
        lambda **k: fl.SCAFFOLD(server_update=fl.ServerUpdate(0.7), **k),
    ),
    "FedGAMMA": (lambda P: boxes.scaffold(P, sam(0.1)), lambda **k: fl.FedGAMMA(rho=0.1, **k)),
    "FedGAMMA-mean": (
        lambda P: boxes.scaffold(P, sam(0.1), "mean"),
        lambda **k: fl.FedGAMMA(rho=0.1, c_scale="mean", **k),
    ),
    "FedCM": (lambda P: boxes.fedcm(P, 0.1), lambda **k: fl.FedCM(alpha=0.1, **k)),
    "MoFedSAM": (lambda P: boxes.fedcm(P, 0.3, sam(0.1)), lambda **k: fl.MoFedSAM(rho=0.1, alpha=0.3, **k)),
    "MoFedSAM-server_lr": (
        lambda P: boxes.fedcm(P, 0.3, sam(0.1), eta_g=0.7),
        lambda **k: fl.MoFedSAM(rho=0.1, alpha=0.3, server_update=fl.ServerUpdate(0.7), **k),
    ),
    "MoFedSAM-gf_repo": (
        lambda P: boxes.fedcm(P, 0.3, sam(0.1), eta_g=0.1, gf_repo=True),
        lambda **k: fl.MoFedSAM(rho=0.1, alpha=0.3, step="gf_repo", server_update=fl.ServerUpdate(0.1), **k),
    ),
    "AdaBest": (lambda P: boxes.adabest(P, 0.1, 0.8), lambda **k: fl.AdaBest(mu=0.1, beta=0.8, **k)),
    "AdaBest+ASAM": (
        lambda P: boxes.adabest(P, 0.1, 0.8, asam(0.5, 0.2)),
        lambda **k: fl.AdaBest(mu=0.1, beta=0.8, ascent=fl.ASAM(0.5, 0.2), **k),
    ),
    "FedNTD": (lambda P: boxes.fedntd(P, 0.8, 2.0), lambda **k: fl.FedNTD(gamma=0.8, tau=2.0, **k)),
    "FedNova": (boxes.fednova, lambda **k: fl.FedNova(**k)),
    "FedDyn": (lambda P: boxes.feddyn(P, 5.0), lambda **k: fl.FedDyn(beta=5.0, **k)),
    "FedDyn-unsquared": (
        lambda P: boxes.feddyn(P, 5.0, prox="unsquared"),
        lambda **k: fl.FedDyn(beta=5.0, prox="unsquared", **k),
    ),
    "FedDyn-fl_simulator": (
        lambda P: boxes.feddyn(P, 5.0, prox="fl_simulator"),
        lambda **k: fl.FedDyn(beta=5.0, prox="fl_simulator", **k),
    ),
    "FedDyn+SAM": (
        lambda P: boxes.feddyn(P, 5.0, sam(0.1)),
        lambda **k: fl.FedDyn(beta=5.0, ascent=fl.SAM(0.1), **k),
    ),
    "FedDyn-RI": (lambda P: boxes.feddyn(P, 5.0, b=0.1), lambda **k: fl.FedDyn(beta=5.0, relaxed_init=0.1, **k)),
    "FedSpeed": (
        lambda P: boxes.feddyn(P, 5.0, sam(0.1), alpha=0.9),
        lambda **k: fl.FedSpeed(rho=0.1, alpha=0.9, beta=5.0, **k),
    ),
    "FedSpeed-active": (
        lambda P: boxes.feddyn(P, 5.0, sam(0.1), dual_agg="active"),
        lambda **k: fl.FedSpeed(rho=0.1, alpha=1.0, beta=5.0, dual_agg="active", **k),
    ),
    "FedSpeed-RI": (
        lambda P: boxes.feddyn(P, 5.0, sam(0.1), alpha=0.9, b=0.1),
        lambda **k: fl.FedSpeed(rho=0.1, alpha=0.9, beta=5.0, relaxed_init=0.1, **k),
    ),
    "FedSMOO-RI": (
        lambda P: boxes.fedsmoo(P, 0.1, 5.0, b=0.1),
        lambda **k: fl.FedSMOO(rho=0.1, beta=5.0, relaxed_init=0.1, **k),
    ),
    "FedSMOO": (lambda P: boxes.fedsmoo(P, 0.1, 5.0), lambda **k: fl.FedSMOO(rho=0.1, beta=5.0, **k)),
    "FedSMOO-warmup": (
        lambda P: boxes.fedsmoo(P, 0.1, 5.0, T_s=3),
        lambda **k: fl.FedSMOO(rho=0.1, beta=5.0, warmup=3, **k),
    ),
    "FedSMOO-noreg": (
        lambda P: boxes.fedsmoo(P, 0.1, 5.0, use_dual=False),
        lambda **k: fl.FedSMOO(rho=0.1, beta=5.0, use_dual=False, **k),
    ),
    "FedSMOO-mu_only-unsquared": (
        lambda P: boxes.fedsmoo(P, 0.1, 5.0, s_agg="mu_only", prox="unsquared"),
        lambda **k: fl.FedSMOO(rho=0.1, beta=5.0, s_agg="mu_only", prox="unsquared", **k),
    ),
    "FedSMOO-fl_simulator": (
        lambda P: boxes.fedsmoo(P, 0.1, 5.0, prox="fl_simulator"),
        lambda **k: fl.FedSMOO(rho=0.1, beta=5.0, prox="fl_simulator", **k),
    ),
    "FedGF": (
        lambda P: boxes.fedgf(P, 0.1, T_D=0.3, W=3, rho_g=0.2),
        lambda **k: fl.FedGF(rho=0.1, rho_g=0.2, T_D=0.3, W=3, **k),
    ),
    "FedGF-full": (
        lambda P: boxes.fedgf(P, 0.1, T_D=0.3, W=4, window_warmup="full"),
        lambda **k: fl.FedGF(rho=0.1, T_D=0.3, W=4, window_warmup="full", **k),
    ),
    "FedGF-server_lr": (
        lambda P: boxes.fedgf(P, 0.1, T_D=0.3, W=3, eta_g=0.7),
        lambda **k: fl.FedGF(rho=0.1, T_D=0.3, W=3, server_update=fl.ServerUpdate(0.7), **k),
    ),
    "FedGF-static": (
        lambda P: boxes.fedgf(P, 0.1, T_D=0.3, W=3, c=0.5),
        lambda **k: fl.FedGF(rho=0.1, T_D=0.3, W=3, c=0.5, **k),
    ),
    "FedGMT": (
        lambda P: boxes.fedgmt(P, 1.0, 3.0, 0.8, 5.0),
        lambda **k: fl.FedGMT(gamma=1.0, tau=3.0, ema_alpha=0.8, beta=5.0, **k),
    ),
    "FedGMT-tau1": (
        lambda P: boxes.fedgmt(P, 0.7, 2.0, 0.9, 5.0, kl_tau2=False),
        lambda **k: fl.FedGMT(gamma=0.7, tau=2.0, ema_alpha=0.9, beta=5.0, kl_tau2=False, **k),
    ),
    "FedGloSS": (
        lambda P: boxes.fedgloss(P, 0.1, 5.0),
        lambda **k: fl.FedGloSS(rho=0.1, beta=5.0, ascent=None, **k),
    ),
    "FedGloSS-SAM-warmup": (
        lambda P: boxes.fedgloss(P, 0.1, 5.0, rho_l=0.15, T_s=3),
        lambda **k: fl.FedGloSS(rho=0.1, beta=5.0, ascent=fl.SAM(0.15, warmup=3, rho0=1e-3), **k),
    ),
    "FedGloSS-code-linear": (
        lambda P: boxes.fedgloss(P, 0.1, 5.0, 0.15, 3, 0.01, sigma_scale="code", rho_schedule="linear"),
        lambda **k: fl.FedGloSS(
            rho=0.1,
            beta=5.0,
            sigma_scale="code",
            rho_schedule="linear",
            warmup=3,
            rho0=0.01,
            ascent=fl.SAM(0.15, warmup=3, rho0=0.01),
            **k,
        ),
    ),
    "FedGloSS-clean-repo_bug": (
        lambda P: boxes.fedgloss(P, 0.1, 5.0, 0.15, 3, 0.01, sigma_ref="clean", rho_schedule="repo_bug"),
        lambda **k: fl.FedGloSS(
            rho=0.1,
            beta=5.0,
            sigma_ref="clean",
            rho_schedule="repo_bug",
            warmup=3,
            rho0=0.01,
            ascent=fl.SAM(0.15, warmup=3, rho0=0.01),
            **k,
        ),
    ),
    "FedGloSS-server_lr": (
        lambda P: boxes.fedgloss(P, 0.1, 5.0, 0.15, eta_s=0.7),
        lambda **k: fl.FedGloSS(rho=0.1, beta=5.0, ascent=fl.SAM(0.15), server_update=fl.ServerUpdate(0.7), **k),
    ),
    "NaiveFedGloSS": (
        lambda P: boxes.fedgloss(P, 0.1, 5.0, naive=True),
        lambda **k: fl.NaiveFedGloSS(rho=0.1, beta=5.0, ascent=None, **k),
    ),
    "NaiveFedGloSS-SAM": (
        lambda P: boxes.fedgloss(P, 0.1, 5.0, 0.15, naive=True),
        lambda **k: fl.NaiveFedGloSS(rho=0.1, beta=5.0, ascent=fl.SAM(0.15), **k),
    ),
}
CASES |= {
    "FedACG": (lambda P: further_boxes.fedacg(P, 0.5, 0.1), lambda **k: fl.FedACG(lam=0.5, beta=0.1, **k)),
    "FedACG-whole": (
        lambda P: further_boxes.fedacg(P, 0.5, 0.1, whole=True),
        lambda **k: fl.FedACG(lam=0.5, beta=0.1, prox="whole", **k),
    ),
    "FedNSAM": (lambda P: further_boxes.fednsam(P, 0.5, 0.2), lambda **k: fl.FedNSAM(gamma=0.5, rho=0.2, **k)),
    "FedNSAM-momentum": (
        lambda P: further_boxes.fednsam(P, 0.5, 0.2, along_momentum=True),
        lambda **k: fl.FedNSAM(gamma=0.5, rho=0.2, along="momentum", **k),
    ),
    "FedExP": (lambda P: further_boxes.fedexp(P, 1e-3), lambda **k: fl.FedExP(eps=1e-3, **k)),
    "FedExP-code": (
        lambda P: further_boxes.fedexp(P, 1e-3, code=True),
        lambda **k: fl.FedExP(eps=1e-3, eps_scale="code", **k),
    ),
    "FedLC": (lambda P: further_boxes.fedlc(P, 1.0), lambda **k: fl.FedLC(tau=1.0, **k)),
    "FedLC-others": (
        lambda P: further_boxes.fedlc(P, 0.1, others=True),
        lambda **k: fl.FedLC(tau=0.1, denominator="others", **k),
    ),
    "MOON": (lambda P: further_boxes.moon(P, 2.0, 0.5), lambda **k: fl.MOON(mu=2.0, tau=0.5, **k)),
    "MOON-initial": (
        lambda P: further_boxes.moon(P, 1.0, 0.7, initial=True),
        lambda **k: fl.MOON(mu=1.0, tau=0.7, unseen="initial", **k),
    ),
    "FedDecorr": (lambda P: further_boxes.feddecorr(P, 0.1), lambda **k: fl.FedDecorr(beta=0.1, **k)),
    "FedDecorr-code": (
        lambda P: further_boxes.feddecorr(P, 1e-3, code=True),
        lambda **k: fl.FedDecorr(beta=1e-3, scale="code", **k),
    ),
    "FedSWA": (lambda P: further_boxes.fedswa(P, 0.5, 0.8), lambda **k: fl.FedSWA(rho=0.5, alpha=0.8, **k)),
    "FedMoSWA": (
        lambda P: further_boxes.fedmoswa(P, 0.1, 1.5, 0.2),
        lambda **k: fl.FedMoSWA(rho=0.1, alpha=1.5, gamma=0.2, **k),
    ),
    "FedWMSAM": (lambda P: further_boxes.fedwmsam(P, 0.1), lambda **k: fl.FedWMSAM(rho=0.1, **k)),
    "FedWMSAM-away": (
        lambda P: further_boxes.fedwmsam(P, 0.1, a=0.3, lam=0.2, sign=-1.0),
        lambda **k: fl.FedWMSAM(rho=0.1, alpha=0.3, lam=0.2, ascent_to="away", **k),
    ),
    "FedSOL": (lambda P: further_boxes.fedsol(P, 1.0), lambda **k: fl.FedSOL(rho=1.0, **k)),
    "FedSOL-fixed": (
        lambda P: further_boxes.fedsol(P, 0.1, tau=2.0, fixed=True),
        lambda **k: fl.FedSOL(rho=0.1, tau=2.0, radius="fixed", **k),
    ),
}


def instead(k: dict[str, object], optimizer: fl.LocalOptimizer) -> dict[str, object]:
    """Returns the arguments with another optimizer, of the same decay and clipping."""
    sgd = k.get("optimizer", fl.SGD())
    assert isinstance(sgd, fl.SGD)
    optimizer.clip, optimizer.lr_decay = sgd.clip, sgd.lr_decay
    return {**k, "optimizer": optimizer}


CASES |= {
    "AFedPD": (lambda P: boxes.feddyn(P, 5.0, absent=True), lambda **k: fl.AFedPD(beta=5.0, **k)),
    "AFedPD-fl_simulator": (
        lambda P: boxes.feddyn(P, 5.0, prox="fl_simulator", absent=True),
        lambda **k: fl.FedDyn(beta=5.0, prox="fl_simulator", absent="virtual", **k),
    ),
    "AFedPD-RI": (
        lambda P: boxes.feddyn(P, 5.0, b=0.1, absent=True),
        lambda **k: fl.AFedPD(beta=5.0, relaxed_init=0.1, **k),
    ),
    "AFedPDSAM": (
        lambda P: boxes.feddyn(P, 5.0, sam(0.1), absent=True),
        lambda **k: fl.AFedPDSAM(beta=5.0, rho=0.1, eps=1e-12, **k),
    ),
    "FedSpeed-active-virtual": (
        lambda P: boxes.feddyn(P, 5.0, sam(0.1), dual_agg="active", absent=True),
        lambda **k: fl.FedSpeed(rho=0.1, beta=5.0, dual_agg="active", absent="virtual", **k),
    ),
    "FedLESAMD-virtual": (
        lambda P: boxes.feddyn(P, 5.0, lesam={"rho": 0.2}, absent=True),
        lambda **k: fl.FedLESAMD(beta=5.0, rho=0.2, absent="virtual", **k),
    ),
    "FedSMOO-virtual": (
        lambda P: boxes.fedsmoo(P, 0.1, 5.0, absent=True),
        lambda **k: fl.FedSMOO(rho=0.1, beta=5.0, absent="virtual", **k),
    ),
    "FedGMT-virtual": (
        lambda P: boxes.fedgmt(P, 1.0, 3.0, 0.8, 5.0, absent=True),
        lambda **k: fl.FedGMT(gamma=1.0, tau=3.0, ema_alpha=0.8, beta=5.0, absent="virtual", **k),
    ),
    "FedGMTv2-virtual": (
        lambda P: boxes.fedgmt(P, 1.0, 3.0, 0.6, 5.0, v2="w0", absent=True),
        lambda **k: fl.FedGMTv2(gamma=1.0, tau=3.0, ema_alpha=0.6, beta=5.0, absent="virtual", **k),
    ),
    "FedGloSS-virtual": (
        lambda P: boxes.fedgloss(P, 0.1, 5.0, absent=True),
        lambda **k: fl.FedGloSS(rho=0.1, beta=5.0, absent="virtual", **k),
    ),
    "NaiveFedGloSS-virtual": (
        lambda P: boxes.fedgloss(P, 0.1, 5.0, naive=True, absent=True),
        lambda **k: fl.NaiveFedGloSS(rho=0.1, beta=5.0, absent="virtual", **k),
    ),
    "FedTOGA": (
        lambda P: further_boxes.fedtoga(P, 0.1, 0.9, 1.0, 5.0),
        lambda **k: fl.FedTOGA(rho=0.1, b1=0.9, kappa=1.0, beta=5.0, **k),
    ),
    "FedTOGA-present-virtual": (
        lambda P: further_boxes.fedtoga(P, 0.1, 0.5, 0.7, 5.0, "present", absent=True),
        lambda **k: fl.FedTOGA(rho=0.1, b1=0.5, kappa=0.7, beta=5.0, last_g="present", absent="virtual", **k),
    ),
    "FedTOGA-corrected": (
        lambda P: further_boxes.fedtoga(P, 0.1, 0.9, 1.0, 5.0, "corrected"),
        lambda **k: fl.FedTOGA(beta=5.0, last_g="corrected", **k),
    ),
    "LocalMuon": (
        lambda P: further_boxes.muon(P, 0.001, 20, 0.95),
        lambda **k: fl.LocalMuon(**instead(k, fl.Muon())),  # type: ignore[arg-type]
    ),
    "FedMuon": (
        lambda P: further_boxes.muon(P, 0.005, 4, 0.98, gamma=0.3),
        lambda **k: fl.FedMuon(gamma=0.3, **instead(k, fl.Muon(lr_others=0.25, momentum=0.98))),  # type: ignore[arg-type]
    ),
    "FedAvg+MAN": (lambda P: further_boxes.man(P, 0.5), lambda **k: fl.FedAvg(parts=[fl.MAN(0.5)], **k)),
    "FedSAM+MAN": (
        lambda P: further_boxes.man(P, 1.0, 0.1),
        lambda **k: fl.FedSAM(rho=0.1, parts=[fl.MAN(1.0)], **k),
    ),
    "FedScar": (further_boxes.fedscar, lambda **k: fl.FedScar(**k)),
    "FedScar-rho0": (
        lambda P: further_boxes.fedscar(P, 0.5, 0.5, 0.3, 0.0),
        lambda **k: fl.FedScar(alpha=0.5, gamma=0.5, beta=0.3, rho=0.0, **k),
    ),
    "FedScar-variance": (
        lambda P: further_boxes.fedscar(P, 1.0, rho=0.05, variance=True),
        lambda **k: fl.FedScar(alpha=1.0, rho=0.05, strength="variance", **k),
    ),
    "FedScars": (
        lambda P: further_boxes.fedscar(P, 1.0, 0.8, variant="Scars", variance=True),
        lambda **k: fl.FedScar(alpha=1.0, gamma=0.8, tau=0.0, strength="variance", force="from_start", **k),
    ),
    "FedScarl": (
        lambda P: further_boxes.fedscar(P, 1.0, 0.9, 0.0, 0.0, "Scarl", variance=True, tau=0.2),
        lambda **k: fl.FedScarl(tau=0.2, rho=0.0, **k),
    ),
    "FedScarl-fixed": (
        lambda P: further_boxes.fedscar(P, 0.2, 0.9, 0.0, 0.1, "Scarl"),
        lambda **k: fl.FedScarl(alpha=0.2, strength="fixed", **k),
    ),
    "FedScarle": (
        lambda P: further_boxes.fedscar(P, beta=0.1, rho=0.2, variant="Scarle"),
        lambda **k: fl.FedScar(beta=0.1, rho=0.2, ascent_to="global_update", **k),
    ),
    "FedScar2": (
        lambda P: further_boxes.fedscar(P, 0.0, variant="Scar2", beta=0.2),
        lambda **k: fl.FedScar(alpha=0.0, beta=0.2, force="start", **k),
    ),
    "FedScar4": (
        lambda P: further_boxes.fedscar4(P, 0.05, 0.2),
        lambda **k: fl.FedScar4(alpha=0.05, beta=0.2, **k),
    ),
    "FedAdamW": (
        lambda P: further_boxes.fedadamw(P, 0.01, 0.5),
        lambda **k: fl.FedAdamW(**instead(k, fl.AdamW(0.01))),  # type: ignore[arg-type]
    ),
    "FedAdamW-running": (
        lambda P: further_boxes.fedadamw(P, 0.01, 0.3, running=True),
        lambda **k: fl.FedAdamW(gamma=0.3, count="running", **instead(k, fl.AdamW(0.01))),  # type: ignore[arg-type]
    ),
}
for _ref in ("own_last_active", "previous_round"):
    _lesam = {"rho": 0.2, "ref": _ref}
    CASES |= {
        f"FedLESAM-{_ref}": (
            lambda P, o=_lesam: boxes.fedlesam(P, **o),
            lambda o=_lesam, **k: fl.FedLESAM(**o, **k),
        ),
        f"FedLESAMD-{_ref}": (
            lambda P, o=_lesam: boxes.feddyn(P, 5.0, lesam=o),
            lambda o=_lesam, **k: fl.FedLESAMD(beta=5.0, **o, **k),
        ),
        f"FedLESAMS-{_ref}": (
            lambda P, o=_lesam: boxes.scaffold(P, lesam=o, cv_scale=0.5),
            lambda o=_lesam, **k: fl.FedLESAMS(cv_scale=0.5, **o, **k),
        ),
    }
for _init in ("w0", "first_seen"):
    CASES[f"FedGMTv2-{_init}"] = (
        lambda P, o=_init: boxes.fedgmt(P, 1.0, 3.0, 0.6, 5.0, v2=o),
        lambda o=_init, **k: fl.FedGMTv2(gamma=1.0, tau=3.0, ema_alpha=0.6, beta=5.0, v2_init=o, **k),
    )

AVERAGED: dict[str, tuple[Averaged, Make]] = {
    "SWA": (
        lambda P: boxes.with_swa(P, boxes.fedavg, start=2, cycle=1),
        lambda **k: fl.FedAvg(averaging=fl.SWA(start=2, cycle=1), **k),
    ),
    "SWA-cycle": (
        lambda P: boxes.with_swa(P, boxes.fedavg, start=1, cycle=2, lr_min=0.01, init_in_average=True),
        lambda **k: fl.FedAvg(averaging=fl.SWA(start=1, cycle=2, lr_min=0.01, init_in_average=True), **k),
    ),
    "FedASAM+SWA-cycle_end": (
        lambda P: boxes.with_swa(
            P, lambda P: boxes.fedavg(P, asam(0.5, 0.2)), start=2, cycle=2, lr_min=0.01, collect="cycle_end"
        ),
        lambda **k: fl.FedASAM(
            rho=0.5, eta=0.2, averaging=fl.SWA(start=2, cycle=2, lr_min=0.01, collect="cycle_end"), **k
        ),
    ),
    "FedDyn+EMA": (
        lambda P: boxes.with_ema(P, lambda P: boxes.feddyn(P, 5.0), 0.7),
        lambda **k: fl.FedDyn(beta=5.0, averaging=fl.EMA(0.7), **k),
    ),
}


def problem(golden: Golden, s: Setting) -> Problem:
    return Problem(golden.net(), golden.arrays, s.schedule or golden.schedule, s)


def run(golden: Golden, make: Make, s: Setting) -> fl.Trajectory:
    """Returns the package's run of the setting."""
    optimizer = fl.SGD(lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay, clip=s.clip, lr_decay=s.lr_decay)
    objective = make(net=golden.net(), optimizer=optimizer, weighting=s.weighting)
    golden.schedule = s.schedule or golden.schedule
    return golden.run(objective, local_steps=s.local_steps, eval_every=len(golden.schedule))[1]


def assert_same(ours: Models, box: Models) -> None:
    difference = (torch.stack(ours) - torch.stack(box)).abs().amax(1)
    assert difference.max() <= 1e-10, f"max abs difference by round {difference.tolist()}"


@pytest.mark.sampled(quick=43, slow=7)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_box(golden: Golden, case: str, setting: str) -> None:
    s, (box, make) = SETTINGS[setting], CASES[case]
    record = run(golden, make, s)
    assert_same([server.w for server in record.server], box(problem(golden, s)))


def test_every_algorithm_has_a_box() -> None:
    names = {type(make(net=torch.nn.Linear(2, 2))).__name__ for _, make in CASES.values()}
    elsewhere = {"STildeAM"}  # tests/trainer/test_centralized.py
    assert {entry.name for entry in entries()} - names == elsewhere


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", AVERAGED)
def test_box_of_average(golden: Golden, case: str, setting: str) -> None:
    s, (box, make) = SETTINGS[setting], AVERAGED[case]
    record = run(golden, make, s)
    models, evaluated = box(problem(golden, s))
    assert_same([server.w for server in record.server], models)
    assert_same(record.evaluated, evaluated)


UNEQUAL_STEPS = (
    "FedNova",
    "SCAFFOLD",
    "FedGAMMA",
    "FedLESAMS-own_last_active",
    "FedCM",
    "MoFedSAM",
    "FedMoSWA",
    "FedWMSAM",
    "FedTOGA",
    "FedMuon",
    "FedAdamW",
)


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("case", UNEQUAL_STEPS)
def test_box_unequal_steps(golden: Golden, case: str, momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients hold copies of one sample: 3, 4, 5, 3 minibatches of 8, with the same gradient on each."""
    s, (box, make) = Setting(momentum=momentum, batch=8, local_steps=None, weight_decay=1e-3), CASES[case]
    golden.arrays = [(x[:1].repeat(len(x), 0), y[:1].repeat(len(y), 0)) for x, y in golden.arrays]
    monkeypatch.setattr("tests.problem.Arrays", lambda batch_size, **k: fl.Arrays(batch_size=8, **k))
    record = run(golden, make, s)
    assert_same([server.w for server in record.server], box(problem(golden, s)))


GOLDEN_RUNS: dict[str, tuple[str, Box]] = {
    "FL-Simulator__FedAvg": ("uniform", boxes.fedavg),
    "FL-Simulator__FedDyn": ("uniform", lambda P: boxes.feddyn(P, 10)),
    "FL-Simulator__FedSAM": ("uniform", lambda P: boxes.fedavg(P, sam(0.1))),
    "FL-Simulator__SCAFFOLD": ("uniform", boxes.scaffold),
    "fedsam__FedAvg": ("samples", boxes.fedavg),
    "fedsam__FedAvgM": ("samples", lambda P: boxes.fedavg(P, server=momentum(0.7))),
    "fedsam__FedASAM+SWA": ("samples", lambda P: boxes.fedavg(P, asam(0.5, 0.2))),
    "FedGF__FedGF": ("samples", lambda P: boxes.fedgf(P, 0.1, T_D=0.3, W=3, rho_g=0.2)),
    "fedgloss__FedGloSS-SAM": ("samples", lambda P: boxes.fedgloss(P, 0.1, 10, 0.1, sigma_scale="code")),
    "fedgloss__FedGloSS-SAM__papersigma": ("samples", lambda P: boxes.fedgloss(P, 0.1, 10, 0.1)),
    "FL-SAM__FedGMT__wd1e-3": ("samples", lambda P: boxes.fedgmt(P, 1, 3, 0.95, 10)),
    "REPAIRED-FL-SAM__FedSMOO__wd1e-3": ("samples", lambda P: boxes.fedsmoo(P, 0.1, 10)),
}


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("name", GOLDEN_RUNS)
def test_box_meets_official_code(golden: Golden, name: str) -> None:
    weighting, box = GOLDEN_RUNS[name]
    models = box(problem(golden, Setting(weight_decay=1e-3, weighting=weighting)))
    np.testing.assert_allclose(torch.stack(models), trajectory(name)["global"], rtol=0, atol=1e-7)


def test_swa_meets_official_code(golden: Golden) -> None:
    P = problem(golden, Setting(weight_decay=1e-3))
    evaluated = boxes.with_swa(P, GOLDEN_RUNS["fedsam__FedASAM+SWA"][1], start=2, cycle=1)[1]
    expected = trajectory("fedsam__FedASAM+SWA")
    swa = torch.stack(evaluated)[expected["extra_swa_round"]]
    np.testing.assert_allclose(swa, expected["extra_swa"], rtol=0, atol=2e-7)
