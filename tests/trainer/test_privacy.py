"""Client-level differential privacy: what is released, what it costs, and what it refuses; float64."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import ndtr
from torch import nn

from fl_lightning import (
    SCAFFOLD,
    AdaBest,
    AdaptivePrivacy,
    BernoulliSampler,
    Clock,
    Corrupt,
    Digits,
    DigitsMLP,
    Faults,
    FedAvg,
    FedCM,
    FederatedTrainer,
    FedGF,
    FedNova,
    FedSAM,
    GaussianPrivacy,
    LocalObjective,
    NaiveFedGloSS,
    NormClipping,
    ReplaySampler,
    Stragglers,
    Trajectory,
    UniformSampler,
    UserError,
)
from fl_lightning.core import ClientContext, FlatSpec, RoundContext, State, Uploads
from fl_lightning.trainer import parallel_runs
from fl_lightning.trainer.aggregation.accountant import Accountant
from fl_lightning.trainer.aggregation.base import Plan, Received
from fl_lightning.trainer.run import Run
from tests.problem import Golden
from tests.runs import DIGITS, assert_same, cli, metrics, state

SLOW = pytest.mark.slow
M, S, D = 20, 4, 588
LIKE = torch.zeros(1, dtype=torch.float64)


class Two(SCAFFOLD):
    """Three names on the wire: two vectors of 588 and a scalar."""

    up = ("w", "delta_c", "distance")
    references = {"w": "w", "delta_c": "zeros", "distance": 0.0}


@cache
def objective() -> LocalObjective:
    torch.manual_seed(0)
    return Two(nn.Linear(20, 28).double())


def bound(privacy: GaussianPrivacy, make: Any = objective, **plan: Any) -> Any:
    options: dict[str, Any] = {"sampler": UniformSampler(S), "m": M, "rounds": 10, "local_steps": None}
    return privacy.bind(Plan(make(), **{**options, **plan}))


def received(uploads: list[dict[str, torch.Tensor]], t: int = 0, clip: float = 1.0) -> Received:
    model = objective()
    sent = State({"w": torch.linspace(-1, 1, D, dtype=torch.float64), "c": torch.ones(D, dtype=torch.float64)})
    contexts = [ClientContext(t, 10, M, model.flat, n_k=k + 1) for k in range(len(uploads))]
    server = State({**sent, "privacy_clip": torch.tensor([clip], dtype=torch.float64)})
    return Received(uploads, model.known(sent), contexts, server, RoundContext(t, 10, M, model.flat), 5)


def draws(n: int, scale: float = 0.01, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    draw = np.random.default_rng(seed)
    sizes = {"w": D, "delta_c": D, "distance": 1}
    return [{n: torch.from_numpy(i * scale * draw.normal(size=k)) for n, k in sizes.items()} for i in range(1, n + 1)]


def release(rule: Any, arrivals: Received) -> tuple[Uploads, torch.Tensor]:
    """The averages, and all of them as one vector of sums without what the server knew."""
    uploads = rule.uploads(objective(), arrivals.clients, arrivals.ctx, LIKE)
    rule.fill(uploads, arrivals)
    new = {name: uploads.mean(name) - arrivals.known.get(name, 0) for name in uploads.names}
    return uploads, torch.cat([v * uploads.n for v in new.values()])


# What is released


def test_release_is_the_clipped_sum_over_a_fixed_number() -> None:
    """Loops give the same: one joint norm of all names, no weights, the same divisor for any number of clients."""
    rule = bound(GaussianPrivacy(clip=2.0, noise_multiplier=0.0))
    for n in (0, 1, 3, 7):
        arrivals = received(draws(n))
        uploads, _ = release(rule, arrivals)
        expected = {name: value.clone() for name, value in arrivals.known.items()}
        for i in range(n):
            new = {name: arrivals.arrived[i][name] - value for name, value in arrivals.known.items()}
            norm = math.sqrt(sum(float(v.square().sum()) for v in new.values()))
            for name, v in new.items():
                expected[name] += v * min(1.0, 2.0 / norm) / S
        assert uploads.n == S
        for name, value in expected.items():
            torch.testing.assert_close(uploads.mean(name), value, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(uploads.weighted(name), uploads.mean(name), rtol=0, atol=0)


@pytest.mark.parametrize("privacy", [GaussianPrivacy, AdaptivePrivacy])
def test_sensitivity(privacy: Any) -> None:
    """Any upload of a client in place of another moves the sums by at most 2 C, its absence by at most C.

    The count of the adaptive clip moves by at most 1, and 1/2: the same in units of its own bound.
    """
    rule, clip = bound(privacy(clip=1.5, noise_multiplier=0.0)), 1.5
    others = draws(S - 1)
    uploads = [*draws(3), *draws(2, 1e30), *draws(2, 1e-30), *draws(1, 1e150)]
    uploads += [{name: -value for name, value in upload.items()} for upload in uploads]
    sums = [release(rule, received([*others, upload], clip=clip))[1] for upload in uploads]
    without = release(rule, received(others, clip=clip))[1]

    def moved(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
        return float((a - b)[: 2 * D + 1].norm()) / clip - 1e-9, float((a - b)[2 * D + 1 :].abs().sum())

    replaced = [moved(a, b) for a in sums for b in sums]
    assert all(sums <= 2 and counts <= 1 for sums, counts in replaced) and max(replaced)[0] > 1.9
    assert all(sums <= 1 and counts <= 0.5 for sums, counts in (moved(a, without) for a in sums))


@pytest.mark.parametrize(
    ("privacy", "std", "count"),
    [
        (GaussianPrivacy(1.5, noise_multiplier=0.8), 0.8 * 1.5, None),
        (AdaptivePrivacy(1.5, 0.8, count_noise=1.0), 1.5 / math.sqrt(0.8**-2 - 2.0**-2), 1.0),
        (AdaptivePrivacy(1.5, 0.8), 1.5 / math.sqrt(0.8**-2 - 1.6**-2), 0.8),
    ],
    ids=["fixed", "adaptive", "adaptive with default"],
)
def test_noise_that_was_added(privacy: Any, std: float, count: float | None) -> None:
    """It has mean 0 and the stated standard deviation in every number, and is independent between rounds and names."""
    rule, uploads, rounds = bound(privacy), draws(3), 60
    exact = release(bound(type(privacy)(1.5, noise_multiplier=0.0)), received(uploads, clip=1.5))[1]
    noise = torch.stack([release(rule, received(uploads, t, 1.5))[1] for t in range(rounds)]) - exact
    for start, size in ((0, D), (D, D), (2 * D, 1)):
        numbers = noise[:, start : start + size]
        error = 4 / math.sqrt(numbers.numel())
        assert abs(float(numbers.mean())) < error * std and abs(float(numbers.std()) / std - 1) < error
    if count is not None:
        assert abs(float(noise[:, -1].std()) / count - 1) < 4 / math.sqrt(rounds)
    for a, b in ((noise[:-1, :D], noise[1:, :D]), (noise[:, :D], noise[:, D : 2 * D])):  # rounds, and names
        assert abs(float((a * b).mean())) < 4 * std**2 / math.sqrt(a.numel())
    assert torch.equal(release(rule, received(uploads, 7, 1.5))[1] - exact, noise[7])


def test_adaptive_clip_finds_the_quantile() -> None:
    """Norms from 1 to 8: C goes to where the share of shorter ones is the quantile, by the paper's step."""
    rule = bound(AdaptivePrivacy(0.1, noise_multiplier=0.0, quantile=0.5), sampler=UniformSampler(8))
    vectors = [{"w": torch.linspace(-1, 1, D).double() + k / math.sqrt(D), "delta_c": torch.zeros(D).double(),
                "distance": LIKE} for k in range(1, 9)]  # fmt: skip
    clip = 0.1
    for t in range(60):
        arrivals = received(vectors, t, clip)
        uploads, _ = release(rule, arrivals)
        below = sum(k <= clip for k in range(1, 9)) / 8
        server = rule.phase_end(arrivals.server, uploads)
        assert float(server.privacy_clip) == pytest.approx(clip * math.exp(-0.2 * (below - 0.5)), rel=1e-12)
        clip = float(server.privacy_clip)
    assert 3.5 <= clip <= 5.5


def test_tensors_clipped_each_cost_more() -> None:
    """As in DP-FedSAM's code: L tensors of norm C are one vector of norm sqrt(L) C."""
    rule = bound(GaussianPrivacy(1.0, 2.0, per_tensor=True), lambda: FedAvg(nn.Linear(2, 2), weighting="uniform"))
    joint = bound(GaussianPrivacy(1.0, 2.0 / math.sqrt(2)), lambda: FedAvg(nn.Linear(2, 2), weighting="uniform"))
    assert rule.accountant.epsilon(5) == pytest.approx(joint.accountant.epsilon(5), rel=1e-12)
    assert rule.noise_std(1.0) == pytest.approx(2.0, rel=1e-12)
    known = {"w": torch.zeros(6, dtype=torch.float64)}
    flat = FlatSpec(nn.Linear(2, 2))
    upload = torch.tensor([3.0, 0, 4, 0, 0.1, 0.2], dtype=torch.float64)
    arrivals = Received(
        [{"w": upload}], known, [ClientContext(0, 1, M, flat)], State({"w": LIKE}), RoundContext(0, 1, M, flat), 0
    )
    expected = torch.tensor([0.6, 0, 0.8, 0, 0.1, 0.2], dtype=torch.float64)
    torch.testing.assert_close(rule.sums(arrivals)["w"][0], expected)


# What it costs

Q5 = {"m": 100, "size": 5.0}
EPSILONS: list[tuple[dict[str, Any], int, float, float | None]] = [
    # dp-accounting 0.6.0
    ({**Q5, "poisson": True, "noise": 1.0, "delta": 1e-2}, 1000, 7.4261, 6.2574),
    ({**Q5, "poisson": True, "noise": 0.95, "delta": 1 / 500}, 300, 4.7989, 4.048),
    ({"m": 100, "size": 1.0, "poisson": True, "noise": 1.0, "delta": 1e-5}, 1000, 2.1014, 1.8282),
    ({"m": 100, "size": 100.0, "poisson": True, "noise": 5.0, "delta": 1e-5}, 100, 10.7255, 9.9973),
    # its noise is per change of the sum, ours per norm of an upload: half as large where a client is replaced
    ({**Q5, "poisson": False, "noise": 4.0, "delta": 1e-2}, 1000, 5.7021, None),
]


@pytest.mark.parametrize(("options", "rounds", "rdp", "pld"), EPSILONS)
def test_epsilon(options: dict[str, Any], rounds: int, rdp: float, pld: float | None) -> None:
    assert Accountant(**options).epsilon(rounds) == pytest.approx(rdp, abs=6e-5)


@pytest.mark.long
@pytest.mark.parametrize(("options", "rounds", "rdp", "pld"), [case for case in EPSILONS if case[3] is not None])
def test_epsilon_of_loss_distributions(options: dict[str, Any], rounds: int, rdp: float, pld: float) -> None:
    accountant = Accountant(**options, method="PLD", rounds=rounds)
    assert accountant.epsilon(rounds) == pytest.approx(pld, abs=6e-4)
    spent = [accountant.epsilon(t) for t in range(0, rounds + 1, rounds // 10)]
    assert spent == sorted(spent) and spent[0] == 0


def integrated(loss: Any, normal: Any, rounds: int, delta: float) -> tuple[float, float]:
    """Epsilon by our own integration, rounded down and up; nothing of dp-accounting.

    The losses of one round go to a grid, rounded down or up, the FFT composes the rounds, and epsilon solves
    ``E max(0, 1 - exp(epsilon - loss)) = delta``.

    Args:
        loss: Increasing privacy loss of what is released.
        normal: Its distribution under one of two neighbours, as weights and means of unit normal numbers.
    """
    x = np.linspace(-12, 12, 500_001)
    mass = np.diff(sum(weight * ndtr(x - mean) for weight, mean in normal))
    step, half, bounds = 0.03 / rounds, 15.0, []
    for rounded in (np.floor(loss(x[:-1]) / step), np.ceil(loss(x[1:]) / step)):
        size = 2 ** math.ceil(math.log2(2 * half / step))
        single = np.bincount(rounded.astype(int) % size, mass, size)
        composed = np.fft.irfft(np.fft.rfft(single) ** rounds, size).clip(0)
        losses = step * ((np.arange(size) + size // 2) % size - size // 2)

        def excess(e: float, losses: Any = losses, composed: Any = composed) -> float:
            above = losses > e
            return float((composed[above] * -np.expm1(e - losses[above])).sum()) - delta

        bounds.append(brentq(excess, 0, half, xtol=1e-6))
    return bounds[0], bounds[1]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "rounds", "rdp", "pld"), [case for case in EPSILONS if case[0]["size"] < 100])
def test_epsilon_by_integration(options: dict[str, Any], rounds: int, rdp: float, pld: float | None) -> None:
    """PLD is what we get, and RDP is above; so is the bound for a replaced client, of an upload C in place of -C."""
    q, z = options["size"] / options["m"], options["noise"]

    def ratio(x: Any, mean: float) -> Any:
        """Log of a release's density with the client, whose upload moves it by ``mean``, over that without."""
        return np.logaddexp(np.log1p(-q), np.log(q) + x * mean - mean**2 / 2)

    mixture = [(1 - q, 0.0), (q, 1 / z)]
    if pld is None:
        low, _ = integrated(lambda x: ratio(x, 1 / z) - ratio(x, -1 / z), mixture, rounds, options["delta"])
        assert 1 < low < rdp
    else:
        removed = integrated(lambda x: ratio(x, 1 / z), mixture, rounds, options["delta"])
        added = integrated(lambda x: -ratio(-x, 1 / z), [(1.0, 0.0)], rounds, options["delta"])
        low, high = (max(pair) for pair in zip(removed, added, strict=True))
        assert low < pld < high < rdp and high - low < 0.07


def test_epsilon_of_one_release_by_hand() -> None:
    """Without sampling the exact delta of the Gaussian mechanism (Balle and Wang, 2018) is known: a little below.

    Two releases of one cohort are one with noise 1/sqrt(2), not two of independent cohorts.
    """
    normal = torch.distributions.Normal(0.0, 1.0)
    options: dict[str, Any] = {"m": 10, "size": 10.0, "delta": 1e-5}
    for poisson, change in ((True, 1.0), (False, 2.0)):
        epsilon = Accountant(**options, poisson=poisson, noise=3.0).epsilon(1)
        a, b = change / 6, epsilon * 3 / change
        cdf = [float(normal.cdf(torch.tensor(x, dtype=torch.float64))) for x in (a - b, -a - b)]
        assert 2e-6 < cdf[0] - math.exp(epsilon) * cdf[1] < 1e-5
    once, twice = ({**Q5, "poisson": True, "noise": z, "delta": 1e-3} for z in (1.0 / math.sqrt(2), 1.0))
    assert Accountant(**once).epsilon(30) == pytest.approx(Accountant(**twice, releases=2).epsilon(30), rel=1e-12)
    assert Accountant(**twice, releases=2).epsilon(30) > Accountant(**twice).epsilon(60)


@pytest.mark.long
@pytest.mark.parametrize("poisson", [True, False])
def test_small_epsilons_have_a_useful_noise(poisson: bool) -> None:
    """It is at most that of the mechanism without sampling; epsilon falls with the noise."""
    accountant = Accountant(m=6, size=3.0, poisson=poisson, noise=1.0, delta=1e-5, rounds=3)
    epsilons = [replace(accountant, noise=z).epsilon(3) for z in (10, 100, 1000, 10_000)]
    assert all(0 < later < before / 3 for before, later in pairwise(epsilons))
    plain = 2 * math.sqrt(3 * 2 * math.log(1.25e5)) / 0.1
    assert 20 < accountant.least_noise(0.1) < plain


def test_noise_for_an_epsilon() -> None:
    accountant = Accountant(**Q5, poisson=True, noise=0.0, delta=1e-2, rounds=1000)
    assert accountant.least_noise(8.0) == pytest.approx(0.9647, abs=1.5e-4)
    with pytest.raises(
        UserError, match=r"epsilon = 1000000.0: no noise multiplier from 0.05 on gives it over 3 rounds"
    ):
        Accountant(m=3, size=3.0, poisson=True, noise=0.0, delta=1e-2, rounds=3).least_noise(1e6)


# A run


def fit(
    golden: Golden, make: Any = FedAvg, privacy: Any = None, sampler: Any = None, **options: Any
) -> tuple[Run, Trajectory]:
    model = make(golden.net(), weighting="uniform")
    options = {"sampler": sampler or UniformSampler(2), "max_rounds": 5, **options}
    return golden.run(model, privacy=privacy or GaussianPrivacy(0.5, noise_multiplier=1.0, delta=0.1), **options)


@pytest.mark.parametrize(
    "make",
    [NaiveFedGloSS, *(pytest.param(a, marks=SLOW) for a in (FedAvg, SCAFFOLD, FedGF, FedCM))],
)
def test_run_without_noise_is_the_plain_one(make: Any, golden: Golden) -> None:
    """The clip is one that nothing reaches, all cohorts have one size, and all clients as many steps."""
    _, plain = golden.run(make(golden.net(), weighting="uniform"), sampler=UniformSampler(2), max_rounds=5)
    _, private = fit(golden, make, GaussianPrivacy(1e6, noise_multiplier=0.0, delta=0.1))
    for a, b in zip(plain.server, private.server, strict=True):
        for name in a:
            torch.testing.assert_close(b[name], a[name], rtol=1e-11, atol=1e-12)


def test_bernoulli_cohorts_may_be_empty_and_are_released_all_the_same(golden: Golden, capsys: Any) -> None:
    """The model moves by noise alone then; epsilon is that of Poisson sampling, logged in every round."""
    privacy = GaussianPrivacy(0.5, noise_multiplier=1.0, delta=0.1, noise_seed=0)
    run, record = fit(golden, privacy=privacy, sampler=BernoulliSampler(0.25), max_rounds=12)
    sizes = [len(local) for local in record.local]
    assert 0 in sizes and max(sizes) >= 2
    moves = [(b.w - a.w) for a, b in zip(record.server[:-1], record.server[1:], strict=True)]
    empty = torch.cat([move for move, size in zip(moves, sizes, strict=True) if not size])
    assert float(empty.std()) == pytest.approx(0.5 / (0.25 * 4), rel=0.1)
    logged = metrics(run.folder.path)
    accountant = Accountant(m=4, size=1.0, poisson=True, noise=1.0, delta=0.1)
    assert logged["privacy/epsilon"] == [(t, pytest.approx(accountant.epsilon(t))) for t in range(1, 13)]
    assert [t for t, _ in logged["client/train/loss"]] == [t for t, size in enumerate(sizes, 1) if size]
    assert "one client added or removed; RDP; noise multiplier 1" in capsys.readouterr().out


def test_signal_to_noise(golden: Golden) -> None:
    """Estimated from what is released; with next to no noise it is the norm of the sum over that of the noise."""
    run, record = fit(
        golden, privacy=GaussianPrivacy(0.5, noise_multiplier=1e-3, delta=0.1), sampler=BernoulliSampler(1.0)
    )
    logged = dict(metrics(run.folder.path)["privacy/snr"])
    for t, (a, b) in enumerate(zip(record.server[:-1], record.server[1:], strict=True), 1):
        assert logged[t] == pytest.approx(float((b.w - a.w).norm()) * 4 / (0.5e-3 * math.sqrt(a.w.numel())), rel=1e-2)


@pytest.mark.slow
def test_budget_ends_the_run(golden: Golden, capsys: Any) -> None:
    """It ends before the round that would exceed it; a run that is resumed there does nothing more."""
    everyone = BernoulliSampler(1.0)
    accountant = Accountant(m=4, size=4.0, poisson=True, noise=2.0, delta=0.1)
    limit = (accountant.epsilon(3) + accountant.epsilon(4)) / 2
    privacy = GaussianPrivacy(0.5, 2.0, limit, delta=0.1)
    run, _ = fit(golden, privacy=privacy, sampler=everyone)
    assert run.rounds_done == 3 and run.metrics["privacy/epsilon"] == pytest.approx(accountant.epsilon(3))
    assert "privacy: stopped after round 3: epsilon" in capsys.readouterr().out
    run, _ = fit(golden, privacy=privacy, sampler=everyone, ckpt_path="last", max_rounds=6)
    assert run.rounds_done == 3
    run, _ = fit(golden, privacy=GaussianPrivacy(0.5, epsilon=limit, delta=0.1), sampler=everyone)
    assert run.rounds_done == 5 and run.metrics["privacy/epsilon"] == pytest.approx(limit, rel=1e-4)


def test_a_round_that_diverges_in_its_first_phase_is_left_out(golden: Golden) -> None:
    """Its second phase, which would release noise, is left out, too."""

    class Once(NaiveFedGloSS):
        diverged = False

        def server_step(self, server: State, sent: State, uploads: Uploads, ctx: RoundContext) -> State:
            after = super().server_step(server, sent, uploads, ctx)
            diverges = ctx.t == 2 and not self.diverged
            self.diverged |= diverges
            return after.replace(delta=after.delta * math.nan) if diverges else after

    run, record = fit(golden, Once, on_divergence="continue")
    assert run.metrics["client/diverged"] == 1
    assert_same(record.server[3], record.server[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "privacy",
    [GaussianPrivacy(0.5, 1.0, delta=0.1, noise_seed=1), AdaptivePrivacy(0.5, 1.0, delta=0.1, noise_seed=1)],
)
def test_resumed_run_is_the_same(privacy: GaussianPrivacy, golden: Golden, tmp_path: Path) -> None:
    """So are noise, clip and epsilon; with other noise it is refused, as epsilon would be wrong."""
    sampler = BernoulliSampler(0.4)
    reference, _ = fit(golden, NaiveFedGloSS, privacy, sampler)
    half, _ = fit(golden, NaiveFedGloSS, privacy, sampler, max_rounds=2)
    resumed, _ = fit(golden, NaiveFedGloSS, privacy, sampler, ckpt_path="last")
    assert half.folder.path == resumed.folder.path
    for name, value in reference.server.items():
        assert torch.equal(value, resumed.server[name])
    assert metrics(reference.folder.path) == metrics(resumed.folder.path)
    unseeded = type(privacy)(0.5, 1.0, delta=0.1)  # its epsilon would count the rounds with public noise
    for changed in (GaussianPrivacy(0.5, 0.9, delta=0.1), GaussianPrivacy(0.4, 1.0, delta=0.1), unseeded):
        with pytest.raises(UserError, match=r"made with trainer.privacy = "):
            fit(golden, NaiveFedGloSS, changed, sampler, ckpt_path="last", max_rounds=6)
    with pytest.raises(UserError, match=r"made with trainer.privacy = "):
        golden.run(NaiveFedGloSS(golden.net()), sampler=sampler, ckpt_path="last", max_rounds=6)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (FedNova, {}, "trainer.privacy: FedNova has no references for its upload update, tau"),
    (AdaBest, {}, "trainer.privacy: AdaBest has no references for its upload w,"),
    (
        FedCM,
        {"local_steps": None},
        "divides by the number of local steps, .* set trainer.local_steps",
    ),
    (FedCM, {"clock": Clock(sec_per_sample=1.0, deadline_s=9.0, late="partial")}, "let no deadline make it smaller"),
    (FedCM, {"faults": Faults(stragglers=Stragglers(2.0, late="partial"))}, "let no deadline make it smaller"),
    (
        FedAvg,
        {"sampler": ReplaySampler([[0]] * 5)},
        "trainer.sampler = ReplaySampler: trainer.privacy knows",
    ),
    (FedAvg, {"privacy": GaussianPrivacy(noise_multiplier=1, delta=0.3)}, r"delta = 0.3: at most 1/M = 1/4"),
    (
        FedAvg,
        {"privacy": GaussianPrivacy(1, 1.0, 1.0, 0.1)},
        r"epsilon = 1.0: the first round takes .*; raise",
    ),
    (
        FedAvg,
        {"privacy": GaussianPrivacy(1, 1.0, delta=0.1, accountant="PLD")},
        "accountant = PLD: only of cohorts by",
    ),
    (SCAFFOLD, {"privacy": GaussianPrivacy(1, 1.0, delta=0.1, per_tensor=True)}, "uploads w, delta_c; set it to false"),
    (
        FedAvg,
        {"privacy": AdaptivePrivacy(1, 1.0, delta=0.1, count_noise=0.5)},
        "count_noise = 0.5: above half of 1",
    ),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_refused_before_anything_is_written(
    make: Any, options: dict[str, Any], message: str, golden: Golden, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        fit(golden, make, **options)
    assert not [*tmp_path.iterdir()]


def test_clients_that_are_lost_take_no_fewer_steps(golden: Golden) -> None:
    """A client counts with all of its steps or not at all, so that the server may divide by their number."""
    faults = Faults(stragglers=Stragglers(2.0, late="lost"))
    everybody = UniformSampler(4)  # a secret draws smaller cohorts, and may draw nobody who is late
    run, _ = fit(golden, FedCM, sampler=everybody, faults=faults, max_rounds=2)
    assert run.rounds_done == 2 and run.state.failures["late"]


def test_cohorts_of_another_number_of_clients_are_refused(golden: Golden) -> None:
    """Their epsilon would count for the rounds before, too."""
    privacy = GaussianPrivacy(0.5, 1.0, delta=0.1)
    fit(golden, privacy=privacy, sampler=UniformSampler(2, held_out=2), max_rounds=2)
    with pytest.raises(
        UserError, match=r"made with trainer\.privacy = \.\.\. clients=2.* this run has \.\.\. clients=4"
    ):
        fit(golden, privacy=privacy, sampler=UniformSampler(2), ckpt_path="last", max_rounds=3)


def test_noise_or_epsilon_is_given() -> None:
    with pytest.raises(UserError, match=r"trainer.privacy.noise_multiplier = None: give it, or epsilon"):
        GaussianPrivacy()


def test_weighting_by_samples_is_refused(golden: Golden) -> None:
    with pytest.raises(UserError, match=r"model.weighting = samples: under trainer.privacy .*; set it to uniform"):
        golden.run(FedSAM(golden.net()), privacy=GaussianPrivacy(1.0, 1.0, delta=0.1), sampler=UniformSampler(2))


def test_noisy_variances_of_batch_norm_stay_above_zero(golden: Golden) -> None:
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 4))
    model = FedAvg(net, weighting="uniform", buffers="average")
    privacy = GaussianPrivacy(1.0, noise_multiplier=10.0, delta=0.1)
    run, record = golden.run(model, privacy=privacy, sampler=UniformSampler(2), max_rounds=2, local_steps=1)
    variances = record.server[-1].buffers[192:]
    assert float(variances.min()) == 0 and float(variances.max()) > 0
    assert math.isfinite(run.metrics["server/test/loss"])


def test_clients_that_fail_add_nothing(golden: Golden) -> None:
    """If all uploads are lost or refused, noise is released, and the divisor stays."""
    lost = [Faults(available=[[]]), Faults(corrupt=Corrupt(1.0, "nan"))]
    privacy = GaussianPrivacy(0.5, noise_multiplier=1.0, delta=0.1, noise_seed=3)
    runs = [fit(golden, privacy=privacy, faults=faults, max_rounds=2)[1] for faults in lost]
    for record in runs:
        for before, after in zip(record.server[:-1], record.server[1:], strict=True):
            assert float((after.w - before.w).std()) == pytest.approx(0.5 / 2, rel=0.1)
    assert_same(*({"w": record.server[-1].w} for record in runs))


@pytest.mark.parametrize(
    "options",
    [{"privacy": GaussianPrivacy(0.5, 1.0, delta=0.1, noise_seed=2)}, {"aggregation": NormClipping(0.1)}],
    ids=list,
)
def test_parallel_runs_are_those_alone(options: dict[str, Any], tmp_path: Path) -> None:
    def trainers(root: Path) -> list[FederatedTrainer]:
        common: dict[str, Any] = {"max_rounds": 3, "accelerator": "cpu", "engine": "sequential", "precision": "64-true"}
        return [
            FederatedTrainer(
                **common, **options, sampler=BernoulliSampler(0.3), seed=seed, default_root_dir=str(root),
                name=f"run_{seed}", enable_progress_bar=False,
            )
            for seed in (0, 1)
        ]  # fmt: skip

    def models() -> list[LocalObjective]:
        torch.manual_seed(0)
        net = DigitsMLP(hidden=4)
        return [FedAvg(deepcopy(net), weighting="uniform") for _ in range(2)]

    together, alone, data = trainers(tmp_path / "a"), trainers(tmp_path / "b"), Digits(num_clients=4, batch_size=64)
    parallel_runs.fit(together, models(), data)
    for one, other, model in zip(together, alone, models(), strict=True):
        other.fit(model, data)
        assert_same(state(one.run.folder.path), state(other.run.folder.path))


@pytest.mark.parametrize("settings", [("privacy=GaussianPrivacy", "privacy.epsilon=1"), ("aggregation=TrimmedMean",)])
def test_centralized_training_refuses(settings: tuple[str, ...], tmp_path: Path) -> None:
    args = [f"--trainer.{setting}" for setting in (*settings, f"default_root_dir={tmp_path}")]
    with pytest.raises(
        SystemExit, match=r"trainer\.\w+: centralized training has no uploads of clients; set it to null"
    ):
        cli("centralized", "--model=FedAvg", *DIGITS, *args)
    assert not [*tmp_path.iterdir()]
