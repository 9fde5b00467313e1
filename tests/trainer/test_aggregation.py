"""Rules that make one of a cohort's uploads, against NumPy's and SciPy's; float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fl_lightning import (
    SCAFFOLD,
    Aggregation,
    CoordinateMedian,
    FedAvg,
    FedNova,
    FedSMOO,
    GaussianPrivacy,
    Krum,
    MultiKrum,
    NormClipping,
    TrimmedMean,
    UniformSampler,
    UserError,
)
from fl_lightning.core import ClientContext, FlatSpec, RoundContext, State, Uploads
from fl_lightning.trainer.aggregation import base as aggregation
from fl_lightning.trainer.aggregation.base import Received
from tests.problem import Golden
from tests.runs import DIGITS, assert_same, ended, group, newest, state

FLAT = FlatSpec(nn.Linear(2, 2))
CLIENTS, D = 10, 6
RULES: list[Aggregation] = [
    CoordinateMedian(), TrimmedMean(0.2), NormClipping(2.5), NormClipping(), Krum(0.2), MultiKrum(0.2),
    MultiKrum(0.2, keep=3),
]  # fmt: skip
ROBUST = [rule for rule in RULES if not isinstance(rule, NormClipping)]


def name_of(rule: Aggregation) -> str:
    return type(rule).__name__ + "".join(f"-{value}" for value in vars(rule).values())


def averages(rule: Aggregation, columns: dict[str, Any], known: dict[str, Any], counts: Any) -> Uploads:
    """Averages of rows ``(n, ...)`` by a rule."""
    contexts = [ClientContext(0, 1, 20, FLAT, n_k=int(n)) for n in counts]
    like = torch.zeros(1, dtype=torch.float64)
    uploads = Uploads(tuple(columns), "samples", contexts, like)
    rows = [{name: torch.from_numpy(value[i]) for name, value in columns.items()} for i in range(len(counts))]
    values = {name: torch.from_numpy(value) for name, value in known.items()}
    rule.fill(uploads, Received(rows, values, contexts, State({"w": like}), RoundContext(0, 1, 20, FLAT), 0))
    return uploads


def problem(seed: int = 0, n: int = CLIENTS) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Two uploaded names near what the server knows, and numbers of samples; no two values are the same."""
    draw = np.random.default_rng(seed)
    known = {"w": draw.normal(size=D) * 10, "c": np.array([3.0])}
    columns = {name: value + draw.normal(size=(n, len(value))) for name, value in known.items()}
    return columns, known, draw.integers(1, 9, n)


def transcription(rule: Aggregation, columns: dict[str, Any], known: dict[str, Any], counts: Any) -> dict[str, Any]:
    """The same from the papers, by loops; a client with n samples counts as n clients with the same upload."""
    n = len(counts)
    new = np.array([np.concatenate([columns[name][i] - known[name] for name in columns]) for i in range(n)])
    norms = [np.sqrt(sum(x * x for x in row)) for row in new]
    repeated = {name: np.repeat(rows, counts, axis=0) for name, rows in columns.items()}
    if isinstance(rule, CoordinateMedian):
        return {name: np.median(rows, axis=0) for name, rows in repeated.items()}
    if isinstance(rule, TrimmedMean):
        return {name: stats.trim_mean(rows, rule.share, axis=0) for name, rows in repeated.items()}
    weights = counts / counts.sum()
    if isinstance(rule, NormClipping):
        clip = np.median(norms) if rule.clip is None else rule.clip
        shorter = [min(1.0, clip / norm) for norm in norms]
        return {
            name: known[name] + sum(weights[i] * shorter[i] * (rows[i] - known[name]) for i in range(n))
            for name, rows in columns.items()
        }
    assert isinstance(rule, MultiKrum)
    bad = int(np.ceil(rule.share * n))
    scores = []
    for i in range(n):
        distances = sorted(sum((a - b) ** 2 for a, b in zip(new[i], new[j], strict=True)) for j in range(n) if j != i)
        scores.append(sum(distances[: n - bad - 2]))
    best = sorted(range(n), key=scores.__getitem__)[: rule.keep or n - bad]
    total = sum(counts[i] for i in best)
    return {name: sum(counts[i] * rows[i] for i in best) / total for name, rows in columns.items()}


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_rules_are_those_of_the_papers(rule: Aggregation, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are with and without weights, in any order, at once and in blocks of two coordinates."""
    columns, known, _ = problem()
    counts = np.array([1, 3, 2, 5, 1, 4, 2, 6, 3, 3])  # 30: a fifth is a whole number
    order = np.random.default_rng(1).permutation(CLIENTS)
    ordered = averages(rule, columns, known, counts)
    shuffled = averages(rule, {name: rows[order] for name, rows in columns.items()}, known, counts[order])
    monkeypatch.setattr(aggregation, "BLOCK", 2 * CLIENTS)
    blocks = averages(rule, columns, known, counts)
    weighted, plain = (transcription(rule, columns, known, n) for n in (counts, np.ones(CLIENTS, int)))
    for name in columns:
        for uploads in (ordered, shuffled, blocks):
            np.testing.assert_allclose(uploads.weighted(name), weighted[name], rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(uploads.mean(name), plain[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rule", ROBUST, ids=name_of)
@pytest.mark.parametrize("value", [1e4, -1e30, 1e200])
def test_bad_clients_move_nothing_out_of_the_range_of_the_others(rule: Aggregation, value: float) -> None:
    """Two of ten are bad, with as many samples as the mean: the share that the rules are set to."""
    for seed in range(5):
        columns, known, _ = problem(seed)
        honest = {name: rows[2:] for name, rows in columns.items()}
        bad = {name: np.concatenate([np.full_like(rows[:2], value), rows[2:]]) for name, rows in columns.items()}
        uploads = averages(rule, bad, known, np.full(CLIENTS, 3))
        for name, rows in honest.items():
            for mean in (uploads.mean(name), uploads.weighted(name)):
                assert (mean.numpy() >= rows.min(0) - 1e-12).all() and (mean.numpy() <= rows.max(0) + 1e-12).all()


def test_clipping_bounds_what_a_client_moves_the_mean() -> None:
    """The bound is its weight times the norm, whatever it uploads, jointly over all names."""
    columns, known, counts = problem()
    for value in (0.0, 1e3, 1e30, 1e300):
        changed = {name: np.concatenate([np.full_like(rows[:1], value), rows[1:]]) for name, rows in columns.items()}
        a, b = (averages(NormClipping(2.0), rows, known, counts) for rows in (columns, changed))
        moved = np.sqrt(sum(float((a.weighted(n) - b.weighted(n)).square().sum()) for n in columns))
        assert moved <= 2 * 2.0 * counts[0] / counts.sum() + 1e-12


@pytest.mark.parametrize("rule", [TrimmedMean(0.2), NormClipping(1e3)], ids=name_of)
def test_a_small_client_moves_the_weighted_mean_by_a_small_part(rule: Aggregation) -> None:
    """It has 0.6 % of the samples, and goes from the lowest to the highest value: less than five times its share."""
    columns, known, _ = problem(n=20)
    counts = np.array([1, *[9] * 18, 5])  # 168 samples
    ends = [{n: np.concatenate([end(r, 0)[None], r[1:]]) for n, r in columns.items()} for end in (np.min, np.max)]
    low, high = (averages(rule, rows, known, counts) for rows in ends)
    for name, rows in columns.items():
        part = 5 / 168 * np.ptp(rows, axis=0)
        assert ((high.weighted(name) - low.weighted(name)).numpy() < part).all()
        assert ((high.mean(name) - low.mean(name)).numpy() > part).all()  # one of twenty


RUNS: list[tuple[Any, dict[str, Any]]] = [(FedAvg, {"weighting": "samples"}), (SCAFFOLD, {}), (FedSMOO, {})]


@pytest.mark.parametrize(("make", "options"), RUNS, ids=[make.__name__ for make, _ in RUNS])
@pytest.mark.parametrize("rule", [CoordinateMedian(), NormClipping()], ids=name_of)
def test_a_run_takes_its_steps_from_the_rule(rule: Aggregation, make: Any, options: Any, golden: Golden) -> None:
    """Every server step is that of the algorithm, with the rule's averages of what its clients uploaded."""
    objective = make(golden.net(), **options)
    run, record = golden.run(objective, aggregation=rule)
    for t, (before, after, local) in enumerate(zip(record.server[:-1], record.server[1:], record.local, strict=True)):
        contexts = [local[k].ctx for k in local]
        rows = {name: np.stack([local[k].upload[name].numpy() for k in local]) for name in objective.up}
        known = {name: value.numpy() for name, value in objective.known(before).items()}
        counts = np.array([ctx.n_k for ctx in contexts])
        plain, weighted = transcription(rule, rows, known, counts * 0 + 1), transcription(rule, rows, known, counts)
        uploads = Uploads(objective.up, objective.weighting, contexts, before.w)
        uploads.change(
            lambda name, _, p=plain, w=weighted, u=uploads: torch.stack(
                [torch.from_numpy(p[name]) * u.n, torch.from_numpy(w[name]) * u.samples]
            )
        )
        ctx = run.round_context(t)
        expected = objective.finish_round(objective.finish_phase(before, before, uploads, ctx), before, ctx)
        for name, value in expected.items():
            torch.testing.assert_close(after[name], value, rtol=1e-10, atol=1e-12)


REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"aggregation": Krum(0.2)}, FedAvg, r"aggregation.share = 0.2: Krum needs cohorts of more than 2 f \+ 2 clients"),
    (
        {"aggregation": NormClipping()},
        FedNova,
        "NormClipping: FedNova has no references for its upload update, tau",
    ),
    (
        {"aggregation": Krum(), "privacy": GaussianPrivacy(1, 1)},
        FedAvg,
        "aggregation = Krum: not under trainer.privacy",
    ),
]


@pytest.mark.parametrize(("options", "make", "message"), REFUSED, ids=["small cohort", "no references", "privacy"])
def test_refused_before_anything_is_written(
    options: dict[str, Any], make: Any, message: str, golden: Golden, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        golden.run(make(golden.net()), **options)
    assert not [*tmp_path.iterdir()]


class Rows(Aggregation):
    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        return rows if len(rows) > 1 else None  # type: ignore[return-value]


def test_a_rule_of_ones_own_with_a_mistake(golden: Golden) -> None:
    for clients, message in (
        (2, r"trainer\.aggregation = Rows: returns shape \(2, 1220\)"),
        (1, r"trainer\.aggregation = Rows: returns None; return one value for each coordinate"),
    ):
        with pytest.raises(UserError, match="^" + message):
            golden.run(FedAvg(golden.net()), aggregation=Rows(), sampler=UniformSampler(clients), max_rounds=1)


@pytest.mark.slow
def test_processes(tmp_path: Path) -> None:
    """Two give the same bits as one; without the gathering that the rules need they are refused in one line."""
    args = ["--model=SCAFFOLD", *DIGITS, "--trainer.aggregation=TrimmedMean", "--trainer.aggregation.share=0.34"]
    for size, folder in ((1, "one"), (2, "two")):
        devices = [f"--trainer.devices={size}", *(["--trainer.strategy=ddp"] if size > 1 else [])]
        with group(size, "fit", *args, *devices, f"--trainer.default_root_dir={folder}", cwd=tmp_path) as children:
            ended(children)
    assert_same(state(newest(tmp_path / "one")), state(newest(tmp_path / "two")))
    refused = [*args, "--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.deterministic=false"]
    with group(2, "fit", *refused, "--trainer.default_root_dir=three", cwd=tmp_path) as children:
        errors = "".join(err for _, err in ended(children, code=1))
    assert errors.count("error: ") == 1
    assert "trainer.deterministic = false: TrimmedMean needs all uploads in one process; set it to true" in errors
    assert not (tmp_path / "three").exists()
