"""Audits of differential privacy: what an attacker learns of one client, as a lower bound on epsilon.

A canary is a client whose upload is as long as it may be, in a direction that the attacker knows. In a game, the canary
takes part or it does not, and the attacker says which from all that a run publishes. Clopper and Pearson's bounds on
how often that is right give a lower bound on epsilon, which holds with 99 % (Jagielski et al., NeurIPS 2020; Nasr et
al., S&P 2021). It stays below the epsilon of the run. With a hole of an earlier version put back it is above: the audit
finds each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta
from torch import nn

from fl_lightning import Arrays, BernoulliSampler, FedAvg, FederatedTrainer, GaussianPrivacy
from fl_lightning.core import RoundContext, State, generator
from fl_lightning.trainer.aggregation.base import Plan, Received
from fl_lightning.trainer.aggregation.noise import NoiseKey

pytestmark = pytest.mark.slow
DELTA, M, D = 0.01, 20, 60
CANARY = torch.zeros(D, dtype=torch.float64)
CANARY[3] = 1.0
MODEL = FedAvg(nn.Linear(5, 10).double(), weighting="uniform")
SENT = State({"w": torch.linspace(-1, 1, D, dtype=torch.float64)})
EVERYBODY, TENTH = BernoulliSampler(1.0), BernoulliSampler(0.1, redraw=False)
Game = Callable[[bool, int], float]
"""The attacker's score of one run: the higher, the likelier is the canary. Takes whether it is there, and a number."""


def least_epsilon(game: Game, games: int, threshold: float) -> float:
    """The lower bound; the attacker claims to see the canary if the score is above the threshold."""
    false, true = (sum(game(present, 2 * i + present) > threshold for i in range(games)) for present in (False, True))
    upper = float(beta.ppf(0.995, false + 1, games - false)) if false < games else 1.0
    lower = float(beta.ppf(0.005, true, games - true + 1)) if true else 0.0
    return math.log((lower - DELTA) / upper) if lower > DELTA + upper else 0.0


def mechanism(z: float = 1.0, sampler: BernoulliSampler = EVERYBODY) -> Any:
    """The mechanism of a new run of one round, with PLD's epsilon, the lowest that is known."""
    return RULES[z].bind(Plan(MODEL, sampler, M, rounds=1, local_steps=1))


RULES = {z: GaussianPrivacy(1.0, z, delta=DELTA, accountant="PLD") for z in (0.7, 1.0, 3.0)}


def epsilon(releases: int = 1, **options: Any) -> float:
    return float(replace(mechanism(**options).accountant, releases=releases).epsilon(1))


def released(rule: Any, present: bool, scale: float = 1.0) -> torch.Tensor:
    """The sum of a round with the canary or without it; the others upload what they got, as the attacker knows."""
    ctx = RoundContext(0, 1, M, MODEL.flat)
    uploads = rule.uploads(MODEL, (), ctx, SENT.w)
    rule.fill(uploads, Received([{"w": SENT.w + scale * CANARY * present}], SENT, [], SENT, ctx, 0))
    return (uploads.mean("w") - SENT.w) * uploads.n


# The attacks


def reading(present: bool, number: int) -> float:
    """Looks where the canary would be."""
    return float(released(mechanism(), present) @ CANARY)


def with_the_seed(present: bool, number: int) -> float:
    """Subtracts the noise of the seed that a node finds in its messages, the game's number."""
    return peeled(present, [number])


def by_search(present: bool, number: int) -> float:
    """Tries all states of a generator of few bits."""
    return peeled(present, range(STATES))


STATES = 8
"""For 2^32 states the search takes hours in place of milliseconds."""


def peeled(present: bool, seeds: Iterable[int]) -> float:
    """Subtracts the noise of a seed that leaves least."""
    rule = mechanism()
    sums, noise = released(rule, present), [torch.zeros(D, dtype=torch.float64)]
    for seed in seeds:
        noise.append(NoiseKey.of_seed(seed).normal(D, "noise", 0, 0, "w"))
        noise.append(torch.randn(D, generator=generator(seed, "privacy", 0, 0), dtype=torch.float64))
    rest = [sums - rule.noise_std(1.0) * draw for draw in noise]
    return float(min(rest, key=lambda v: float(v.norm())) @ CANARY)


def of_two_runs(present: bool, number: int) -> float:
    """Compares a run with one of a learning rate so small that its clients upload next to nothing."""
    return float((released(mechanism(), present) - released(mechanism(), present, 1e-30)) @ CANARY)


def knowing_the_cohort(present: bool, number: int) -> float:
    """Looks only if the public seed, the game's number, draws the canary."""
    if 0 not in TENTH(0, M, number):
        return -math.inf
    rule = mechanism(0.7, TENTH)
    return float(released(rule, present and 0 in TENTH(0, M, rule.cohort_seed(number))) @ CANARY)


def test_reading_stays_below_epsilon() -> None:
    """It comes near it, so that the audit has power."""
    assert 0.4 * epsilon() < least_epsilon(reading, 2000, 2.0) < epsilon()


KEYS: dict[str, tuple[Game, Callable[[int], int], int]] = {
    # the attack, the public seed of the noise in a game, and how many releases it sees
    "the seed is on the wire": (with_the_seed, lambda number: number, 1),
    "noise of few bits": (by_search, lambda number: number // 2 % STATES, 1),
    "runs of one seed share noise": (of_two_runs, lambda number: 0, 2),
}


@pytest.mark.long
@pytest.mark.parametrize("hole", KEYS)
def test_audit_finds_a_public_key(hole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (attack, seed, releases), current = KEYS[hole], [0]

    def game(present: bool, number: int) -> float:
        current[0] = number
        return attack(present, number)

    assert least_epsilon(game, 250, 0.5) < epsilon(releases)
    monkeypatch.setattr(NoiseKey, "fresh", lambda: NoiseKey.of_seed(seed(current[0])))
    assert least_epsilon(game, 700, 0.5) > 1.1 * epsilon(releases)


def test_audit_finds_cohorts_of_a_public_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epsilon of sampled cohorts holds while nobody knows them."""
    promised = epsilon(z=0.7, sampler=TENTH)
    assert least_epsilon(knowing_the_cohort, 8000, 1.2) < promised
    monkeypatch.setattr(GaussianPrivacy, "cohort_seed", lambda self, seed: seed)
    assert least_epsilon(knowing_the_cohort, 8000, 1.2) > promised


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.long
def test_audit_finds_statistics_of_the_clients_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run exports statistics of BatchNorm, which the server averages with noise, or estimates without."""
    x, y = np.linspace(0, 0.1, 16).reshape(4, 1, 2, 2), np.arange(4) % 2

    def published(buffers: Any, present: bool) -> float:
        data = Arrays(client_arrays=[(x + present, y), *[(x, y)] * 3], test=(x, y), batch_size=None)
        trainer = FederatedTrainer(
            max_rounds=1, local_steps=1, sampler=EVERYBODY, privacy=RULES[3.0], accelerator="cpu",
            engine="sequential", precision="64-true", enable_progress_bar=False, default_root_dir=str(tmp_path),
        )  # fmt: skip
        run = trainer.fit(FedAvg(Normed(), weighting="uniform", buffers=buffers), data)
        run.load_statistics(run.global_model)
        return float(run.objective.net[1].running_mean.mean())  # type: ignore[index,union-attr]

    promised = epsilon(z=3.0)
    assert least_epsilon(lambda present, _: published("average", present), 12, 0.15) < promised
    bind = GaussianPrivacy.bind

    def unchecked(self: GaussianPrivacy, plan: Plan) -> GaussianPrivacy:
        buffers = plan.objective.net_buffers
        assert buffers is not None
        buffers.policy = "local"
        bound = bind(self, plan)
        buffers.policy = "reset"
        return bound

    monkeypatch.setattr(GaussianPrivacy, "bind", unchecked)
    assert least_epsilon(lambda present, _: published("reset", present), 24, 0.15) > 1.5 * promised
