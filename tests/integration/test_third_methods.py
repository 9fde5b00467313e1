"""Identities, invariants and values of A-FedPD's rule, FedTOGA, Local Muon, FedMuon and FedAdamW."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import (
    SGD,
    AdamW,
    AFedPD,
    AFedPDSAM,
    FedAdamW,
    FedAvg,
    FedDyn,
    FedGloSS,
    FedGMT,
    FedGMTv2,
    FedLESAMD,
    FedMuon,
    FedSMOO,
    FedSpeed,
    FedTOGA,
    LocalMuon,
    LocalObjective,
    Muon,
    NaiveFedGloSS,
    ReplaySampler,
    UserError,
)
from fl_lightning.algorithms.parts.adaptive import orthogonalized
from fl_lightning.core import ClientContext, FlatSpec, State, norm
from tests.integration.test_identities import WD, close, path
from tests.problem import Golden, trajectory

METHODS = [FedDyn, FedGMT, FedGMTv2, FedGloSS, FedLESAMD, FedSMOO, FedSpeed, FedTOGA, NaiveFedGloSS]
EVERYBODY = ReplaySampler([[0, 1, 2, 3]] * 3)


# A-FedPD


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("method", METHODS)
def test_nobody_is_absent(golden: Golden, method: Any) -> None:
    """The duals of absent clients change no bit where there are none."""
    runs = [
        golden.run(method(golden.net(), optimizer=WD, absent=absent), sampler=EVERYBODY, max_rounds=3)[1]
        for absent in ("kept", "virtual")
    ]
    for kept, virtual in zip(*(run.server for run in runs), strict=True):
        assert all(torch.equal(kept[name], virtual[name]) for name in kept)


@pytest.mark.parametrize("method", [AFedPD, AFedPDSAM])
def test_server_of_a_fedpd(golden: Golden, method: Any) -> None:
    """w^(t+1) = 2 wbar^(t+1) - wbar^t; lam is the mean of all duals, and that of a client never seen."""
    _, record = golden.run(method(golden.net(), optimizer=WD))
    before = record.server[0].w
    for t, results in enumerate(record.local):
        server, rows = record.server[t + 1], record.client[t]
        mean = sum(r.w for r in results.values()) / len(results)
        close(server.w, 2 * mean - before)
        before = mean
        close(server.lam, server.lam_unseen)
        duals = [r.lam + server.lam_unseen - r.lam_seen for r in rows.values()]
        close(server.lam, (sum(duals) + (4 - len(rows)) * server.lam_unseen) / 4)
    assert len(record.client[0]) == 2


def test_size_of_a_fedpd(golden: Golden) -> None:
    """The values are those of the spec's transcription."""
    models = {method: path(golden, method, beta=10) for method in (FedDyn, AFedPD)}
    distances = {method: norm(w - w[0]).flatten()[1:].tolist() for method, w in models.items()}
    assert distances[FedDyn] == pytest.approx([0.28827100, 0.54413654, 0.68800622, 1.00582819, 1.39640056, 1.86982242])
    assert distances[AFedPD] == pytest.approx([0.38436133, 0.75582522, 0.95342739, 1.44211631, 2.05952096, 2.71802630])


# FedTOGA


@pytest.mark.slow
def test_neutral_options_of_fedtoga(golden: Golden) -> None:
    speed = path(golden, FedSpeed, rho=0.1, eps=1e-7)
    close(path(golden, FedTOGA, b1=0, kappa=0, last_g="none"), speed)
    close(path(golden, FedTOGA, last_g="none")[:2], speed[:2])  # no global update in the first round
    close(path(golden, FedTOGA, b1=0, rho=0), path(golden, FedDyn))
    runs = [path(golden, FedTOGA, last_g=r, local_steps=1) for r in ("none", "perturbed", "corrected")]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


# Muon


@pytest.mark.slow
def test_neutral_options_of_fedmuon(golden: Golden) -> None:
    muon = {"lr": 0.02, "lr_others": 0.5, "momentum": 0.98}
    local = path(golden, LocalMuon, optimizer=Muon(**muon))
    alone = path(golden, FedMuon, gamma=0.0, optimizer=Muon(**muon))
    assert torch.equal(alone[:2], local[:2]) and not torch.equal(alone, local)  # B starts from 0 once
    assert torch.equal(local, path(golden, FedAvg, optimizer=Muon(**muon)))
    first = path(golden, FedMuon, gamma=0.5, optimizer=Muon(**muon))[:2]
    assert torch.equal(first, path(golden, LocalMuon, optimizer=Muon(**{**muon, "lr": 0.01}))[:2])


class Restarting(FedMuon):
    """Each round starts from zero buffers."""

    def broadcast(self, server: State, ctx: Any) -> State:
        return server.replace(B=0 * server.B)


def test_fedmuon_without_its_means_is_local_muon(golden: Golden) -> None:
    muon = Muon(momentum=0.9)
    assert torch.equal(path(golden, Restarting, gamma=0.0, optimizer=muon), path(golden, LocalMuon, optimizer=muon))


def test_bfloat16(golden: Golden) -> None:
    """Rounding in the iteration moves the weights by some percent of the way, as in the official program."""
    muon = Muon(lr_others=1.0, momentum=0.98, ns_bfloat16=True)
    expected = torch.from_numpy(trajectory("REPAIRED-FedMuon__FedMuon__float64")["global"])
    difference = (path(golden, FedMuon, optimizer=muon) - expected).abs().max()
    assert 1e-4 < difference < 2e-2


def test_steps_of_muon() -> None:
    """Rotations go through; singular values are about 1; a zero gradient gives no step but the decay."""
    draw = torch.Generator().manual_seed(0)
    u, p, q = (torch.randn(n, m, generator=draw, dtype=torch.float64) for n, m in ((4, 6), (4, 4), (6, 6)))
    P, Q = torch.linalg.qr(p)[0], torch.linalg.qr(q)[0]
    close(orthogonalized(P @ u @ Q, 5), P @ orthogonalized(u, 5) @ Q)
    values = torch.linalg.svdvals(orthogonalized(u, 5))
    assert values.min() > 0.65 and values.max() < 1.25
    tall = torch.tensor([[3.0, 1], [0, 2], [1, 1], [-1, 0]], dtype=torch.float64).flatten()
    flat, zero = FlatSpec(nn.Linear(2, 4, bias=False)), torch.zeros_like(tall)
    memory, ctx = State({"first": zero, "second": zero, "count": zero[:1]}), ClientContext(0, 1, 1, flat)
    w, _ = Muon(momentum=0.0).step(zero, tall, memory, 1.0, ctx)
    close(w[:2], -(2**0.5) * torch.tensor([0.7001603485, 0.0545611060], dtype=torch.float64), atol=1e-9)
    w, _ = Muon().step(tall, zero, memory, 0.1, ctx)
    assert torch.equal(w, tall - 0.1 * (0.01 * tall))


# FedAdamW


def test_neutral_options_of_fedadamw(golden: Golden) -> None:
    adamw = AdamW(0.01)
    models = path(golden, FedAdamW, gamma=0.0, optimizer=adamw)
    assert torch.equal(models[:2], path(golden, FedAvg, optimizer=adamw)[:2])  # no second moment in the first round
    running = path(golden, FedAdamW, gamma=0.0, count="running", optimizer=adamw)
    assert torch.equal(running[:2], models[:2])
    assert norm(running[2] - running[1]) < 0.6 * norm(models[2] - models[1])  # the first moment counts as a late one
    assert "count" in adamw.state and adamw.state["count"] == 0.0  # that of the caller stays as it is


def test_state_of_fedadamw(golden: Golden) -> None:
    """v is the mean of the clients' second moments; n counts the mean number of steps."""
    fit, record = golden.run(FedAdamW(golden.net()))
    for t, results in enumerate(record.local):
        close(record.server[t + 1].v, sum(r.upload["v"] for r in results.values()) / len(results))
    assert float(fit.server.n) == pytest.approx(18)


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda net: FedDyn(net, absent="virtual", use_dual=False), r"^model\.absent = virtual: without duals"),
        (lambda net: FedGloSS(net, absent="virtual", sigma_ref="clean"), r"^model\.absent = virtual: .*leave out"),
        (lambda net: FedDyn(net, absent="away"), r"^model\.absent = away: give one of kept, virtual$"),
        (lambda net: LocalMuon(net, SGD()), r"^model\.optimizer = a SGD: give Muon or null$"),
        (lambda net: FedAdamW(net, optimizer=Muon()), r"^model\.optimizer = Muon: .*; take AdamW$"),
        (lambda net: FedMuon(net, optimizer=Muon(state="keep")), r"^model\.optimizer\.state = keep: .* reset$"),
        (lambda net: FedMuon(nn.GroupNorm(1, 4)), r"^model\.net = GroupNorm: has no matrix .* take FedAdamW$"),
    ],
)
def test_refused(golden: Golden, make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(golden.net())


def test_a_net_of_one_matrix(golden: Golden) -> None:
    """Without vectors all numbers of the momentum go over the wire."""
    net: Tensor | nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(192, 4, bias=False))
    fit, _ = golden.run(FedMuon(net), max_rounds=1)  # type: ignore[arg-type]
    assert fit.server.B.shape == fit.server.w.shape and fit.server.finite()


@pytest.mark.parametrize("method", [LocalMuon, FedMuon, FedAdamW])
def test_can_be_pickled_and_copied(method: type[LocalObjective]) -> None:
    objective = method(nn.Linear(4, 3))
    for copy in (pickle.loads(pickle.dumps(objective)), deepcopy(objective)):
        inits = {**copy.server_inits(), **copy.client_inits()}
        values = State.initial(inits, copy.flat.vector(copy.net), copy.flat.vector(copy.net))
        assert type(copy) is method and {*values} == {*objective.server_inits(), *objective.client_inits()}
