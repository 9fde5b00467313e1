"""Identities, invariants and values of FedScar and its variants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_lightning import (
    SAM,
    SGD,
    Corrupt,
    Faults,
    FedAvg,
    FedDyn,
    FedScar,
    FedScar4,
    FedScarl,
    NormClipping,
    UserError,
)
from fl_lightning.core import norm
from tests.integration.test_identities import WD, close, path
from tests.problem import Golden

METHODS = [
    (FedScar, {}),
    (FedScar, {"strength": "variance", "alpha": 1.0}),
    (FedScar, {"force": "from_start", "tau": 0.0, "ascent_to": "global_update"}),
    (FedScarl, {}),
]


# Limits


@pytest.mark.slow
def test_neutral_options_of_fedscar(golden: Golden) -> None:
    close(path(golden, FedScar, alpha=0, beta=0, rho=0), path(golden, FedAvg))
    close(path(golden, FedScar, alpha=0, beta=0), path(golden, FedAvg, ascent=SAM(0.1, eps=1e-7)))
    alone = path(golden, FedScar, alpha=0, gamma=0)
    assert torch.equal(alone, path(golden, FedScar, alpha=0))  # without pushes there is nothing to decay
    assert (alone - path(golden, FedAvg, ascent=SAM(0.1, eps=1e-7))).abs().max() > 1e-3
    first = [path(golden, FedScar, **options)[1] for options in ({}, {"alpha": 1.0, "gamma": 0.1})]
    assert torch.equal(*first)
    close(path(golden, FedScarl, alpha=0, tau=0, strength="fixed", rho=0), path(golden, FedAvg))
    duals = path(golden, FedDyn, beta=20, prox="unsquared")
    close(path(golden, FedScar4, alpha=0.05, beta=0), duals)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_nobody_is_pushed_along_rounding(golden: Golden, weighting: str) -> None:
    """Alone in a round and without duals, the global model is a client's last one: there is no way to push along."""
    golden.schedule = [[0], [0], [0], [1], [1]]
    alone = path(golden, FedScar, beta=0, rho=0, weighting=weighting)
    close(alone, path(golden, FedAvg, weighting=weighting))


def test_first_round_of_one_step(golden: Golden) -> None:
    """w^1 is wbar + beta / M times the sum of the moves: there is no bias, and the force is 0 in the first step."""
    _, record = golden.run(FedScar(net=golden.net(), beta=0.3, optimizer=WD), local_steps=1, max_rounds=1)
    before, moves = record.server[0].w, [r.w - record.server[0].w for r in record.local[0].values()]
    sizes = [len(golden.arrays[k][1]) for k in record.local[0]]
    mean = before + sum(n * move for n, move in zip(sizes, moves, strict=True)) / sum(sizes)
    close(record.server[1].w, mean + 0.3 / 4 * sum(moves))


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("schedule", [None, [[0], [1], [2], [3], [0, 1, 2, 3], [0, 3]]])
@pytest.mark.parametrize(("method", "options"), METHODS)
def test_lazy_sums_are_those_of_all_clients(golden: Golden, method: Any, options: Any, schedule: Any) -> None:
    """The server's sums of biases and duals are over all clients, whose biases decay in every round; each is short."""
    golden.schedule = schedule or golden.schedule
    _, record = golden.run(method(net=golden.net(), optimizer=WD, **options))
    for t, rows in enumerate(record.client):
        server = record.server[t + 1]
        biases = [row.b * 0.9 ** (t - row.last) for row in rows.values()]
        close(server.b_sum, sum(biases))
        close(server.b_mean, sum(biases) / 4)
        close(server.h_sum, sum(row.h for row in rows.values()))
        if not options:
            assert all(float(norm(b)) <= 0.1 / (1 - 0.9) + 1e-12 for b in biases)
    assert norm(record.server[-1].b_sum) > 1e-2 < norm(record.server[-1].h_sum)


def test_size_of_fedscar(golden: Golden) -> None:
    """The values are those of the spec's transcription."""
    distances = []
    for rho in (0.1, 0.0):
        w = path(golden, FedScar, rho=rho, weighting="samples")
        distances.append(norm(w - w[0]).flatten()[1:].tolist())
    assert distances[0] == pytest.approx([0.2091719, 0.29259681, 0.38202107, 0.45515173, 0.54889431, 0.65722249])
    assert distances[1] == pytest.approx([0.20244659, 0.31976995, 0.40905252, 0.54268452, 0.69662931, 0.90789024])
    _, record = golden.run(FedScar(net=golden.net(), optimizer=WD, alpha=1.0, strength="variance"))
    strengths = [float(server.a) for server in record.server[1:]]
    assert strengths == pytest.approx([0.1153485, 0.18890751, 0.16707212, 0.2328444, 0.23703625, 0.25643022])


# Clients that fail


@pytest.mark.parametrize("corrupt", [None, Corrupt(share=0.25), Corrupt(share=0.25, kind="sign_flip")])
def test_a_push_of_a_client_that_does_not_count_is_undone(golden: Golden, corrupt: Corrupt | None) -> None:
    """Its bias and last model stay, and so do the server's sums; no fault changes what the server computes itself."""
    golden.schedule = [[0, 1, 2, 3]] * 6
    faults = Faults(drop_before=0.2, drop_after=0.3, corrupt=corrupt)
    _, record = golden.run(FedScar(net=golden.net(), optimizer=SGD(0.1)), faults=faults)
    answered = [len(local) for local in record.local]
    assert min(answered) < 4
    for t, rows in enumerate(record.client):
        biases = [row.b * 0.9 ** (t - row.last) for row in rows.values()]
        close(record.server[t + 1].b_sum * 0.9 ** (t - record.server[t + 1].last), sum(biases))
        if corrupt is None or corrupt.kind == "nan":
            close(record.server[t + 1].h_sum, sum(row.h for row in rows.values()))


def test_a_round_without_clients_decays_the_biases(golden: Golden) -> None:
    """The server's sum is that of the clients' biases after it, too."""
    golden.schedule = [[0, 1, 2]] * 5
    faults = Faults(available=[[0, 1], [0, 1], [], [], [0, 2]])
    _, record = golden.run(FedScar(net=golden.net(), optimizer=SGD(0.1)), faults=faults)
    biases = [row.b * 0.9 ** (4 - row.last) for row in record.client[-1].values()]
    close(record.server[-1].b_sum, sum(biases))
    assert torch.equal(record.server[2].w, record.server[4].w)


# The wire


def test_what_the_server_remembers_does_not_travel(golden: Golden) -> None:
    """w and the mean bias go down, the model goes up: the server computes starts and pushes from models that it has."""
    fit, _ = golden.run(FedScar(net=golden.net()), max_rounds=1)
    assert fit.state.total_bits == 64 * 2 * 3 * 1220


def test_refused(golden: Golden) -> None:
    with pytest.raises(
        UserError, match=r"^trainer\.aggregation = NormClipping: FedScar has no references for its upload"
    ):
        golden.run(FedScar(net=golden.net()), aggregation=NormClipping(1.0))
