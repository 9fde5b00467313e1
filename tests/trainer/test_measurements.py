"""Measures of flatness: closed forms, the monitor in a run, and the commands on checkpoints."""

from __future__ import annotations

import csv
import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning import (
    IID,
    LPF,
    SAM,
    SCAFFOLD,
    SGD,
    AdaptiveSharpness,
    Arrays,
    Callback,
    ClientEvaluation,
    ClientLambdaMax,
    CohortLoss,
    DeltaEpsilon,
    Digits,
    DigitsMLP,
    Discrepancy,
    Faults,
    FedAvg,
    FederatedTrainer,
    FedGF,
    FedGloSS,
    FedSMOO,
    FlatnessMonitor,
    HessianTrace,
    LambdaMax,
    LocalObjective,
    Measure,
    NaiveFedGloSS,
    Sharpness,
    SpectralDensity,
    Spectrum,
    Updates,
    UserError,
    flatness,
)
from fl_lightning.commands import landscape
from fl_lightning.core.flat import FlatSpec
from fl_lightning.flatness import (
    Interrupted,
    cosine,
    delta_epsilon,
    gradient,
    lpf,
    mean_loss,
    random_plane,
    sharpness,
    surface,
)
from fl_lightning.flatness.neighbourhood import filter_scale
from fl_lightning.results.metrics import last_measurements, protocol
from fl_lightning.trainer.callbacks.flatness_monitor import scalars
from fl_lightning.trainer.measurements import MeasurementContext, dry_round
from fl_lightning.trainer.run import Run
from tests.flatness.test_flatness import CE, Quadratic, cnn, data, output, symmetric
from tests.runs import cli, ended, group, last, measurements, metrics, newest, run, state

# Closed forms


def test_adaptive_sharpness_by_hand() -> None:
    net, batches = cnn(), data((5, 7))
    spec = FlatSpec(net)
    w, g = spec.vector(net), gradient(net, CE, batches)
    scaled = {name: p.abs() + 0.2 if name.endswith("weight") else p * 0 + 1 for name, p in net.named_parameters()}
    T = torch.cat([p.flatten() for p in scaled.values()]).detach()
    ascended = w + 0.3 * T**2 * g / (T * g).norm()
    expected = mean_loss(net, CE, batches, ascended) - mean_loss(net, CE, batches)
    assert sharpness(net, CE, batches, rho=0.3, eta=0.2) == pytest.approx(expected, rel=1e-9)
    # T is 1 where there is no parameter called weight
    b = torch.tensor([3.0, 4.0], dtype=torch.float64)
    linear = Quadratic(torch.zeros(2, 2, dtype=torch.float64), b)
    assert sharpness(linear, output, data(), rho=0.1, eta=0.7) == pytest.approx(0.5)


def test_adaptive_steps_stay_in_the_ellipsoid() -> None:
    net, batches = cnn(), data((12,))
    one, many = (sharpness(net, CE, batches, rho=0.5, steps=k, eta=0.1) for k in (1, 12))
    assert 0 < one <= many + 1e-12


@pytest.mark.slow
def test_lpf_of_a_quadratic() -> None:
    """E F(w + ε) = F(w) + sigma² tr(A) / 2."""
    a = symmetric([5.0, 3.0, 1.0, -2.0])
    net = Quadratic(a, w=torch.tensor([0.3, -0.1, 0.2, 0.5], dtype=torch.float64))
    estimates = [lpf(net, output, data((3, 2)), sigma=0.5, draws=400, seed=seed) for seed in range(4)]
    exact = mean_loss(net, output, data()) + 0.5**2 * a.trace().item() / 2
    assert all(abs(m.value - exact) < 4 * m.error for m in estimates) and all(m.samples == 400 for m in estimates)
    assert 0.02 < estimates[0].error < 0.2
    single = lpf(net, output, data((5,)), sigma=0.5, draws=400, seed=0)  # in one batch: other sums, in the last bit
    assert (single.value, single.error) == pytest.approx((estimates[0].value, estimates[0].error), rel=1e-12)
    assert estimates[0].value != estimates[1].value
    assert lpf(net, output, data(), sigma=0.0, draws=2).value == pytest.approx(
        mean_loss(net, output, data()), rel=1e-12
    )


def test_filter_relative_noise() -> None:
    """Doubling a filter and its bias doubles its noise; the noise of the other filters stays."""
    net = cnn()
    spec = FlatSpec(net)
    parts = spec.split(filter_scale(spec, spec.vector(net)))
    weight, bias = net.get_parameter("0.weight"), net.get_parameter("0.bias")
    for f in range(len(bias)):
        expected = weight[f].norm() + bias[f].abs()
        torch.testing.assert_close(parts["0.weight"][f], expected.expand_as(weight[f]).detach())
        torch.testing.assert_close(parts["0.bias"][f], expected.detach())
    gamma, beta = net.get_parameter("1.weight"), net.get_parameter("1.bias")
    torch.testing.assert_close(parts["1.weight"], (gamma.abs() + beta.abs()).detach())


def test_angles() -> None:
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert cosine(a, b) == 0 and cosine(a, 2 * a) == pytest.approx(1) and cosine(a, 0 * a) == 0
    assert delta_epsilon(a, 5 * a, 0.1) == pytest.approx(0, abs=1e-7)
    assert delta_epsilon(a, -a, 0.1) == pytest.approx(0.2)
    assert delta_epsilon(a, b, 0.1) == pytest.approx(0.1 * 2**0.5)


# Dry rounds


class DryRounds(Callback):
    """Computes before every round what it will come to."""

    def __init__(self) -> None:
        self.promised: list[dict[str, Tensor]] = []
        self.local: list[dict[int, Tensor]] = []

    def on_round_start(self, run: Run, ctx: Any, cohort: list[int]) -> None:
        local: dict[int, Tensor] = {}
        after = dry_round(run, cohort, lambda result: local.update({result.client: result.w}))
        dry_round(run, [0, 3], lambda result: None, perturb=False)
        self.promised.append(dict(after))
        self.local.append(local)

    def on_round_end(self, run: Run) -> None:
        for name, value in run.server.items():
            assert torch.equal(value, self.promised[-1][name]), name


def fit(
    folder: Path, objective: LocalObjective, *callbacks: Callback, ckpt_path: str | None = None, **options: Any
) -> Run:
    options = {"max_rounds": 3, "clients_per_round": 4, "precision": "64-true", "engine": "sequential", **options}
    trainer = FederatedTrainer(
        accelerator="cpu", enable_progress_bar=False, callbacks=list(callbacks), default_root_dir=str(folder), **options
    )
    return trainer.fit(objective, Digits(num_clients=6, partition=IID()), ckpt_path)


def net() -> nn.Module:
    torch.manual_seed(0)
    return DigitsMLP(8)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("algorithm", [SCAFFOLD, FedSMOO, FedGF, FedGloSS, NaiveFedGloSS])
def test_a_dry_round_is_the_next_one_and_leaves_nothing(algorithm: type[LocalObjective], tmp_path: Path) -> None:
    dry = DryRounds()
    watched = fit(tmp_path, algorithm(net(), optimizer=SGD(lr=0.1)), dry)
    assert len(dry.promised) == 3 and all(len(local) == 4 for local in dry.local)
    plain = fit(tmp_path, algorithm(net(), optimizer=SGD(lr=0.1)))
    assert all(torch.equal(watched.server[name], value) for name, value in plain.server.items())
    a, b = (state(run.folder.path) for run in (watched, plain))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# The monitor

ALL: list[Measure] = [
    LambdaMax(samples=100, iterations=5),
    LambdaMax(samples=None, method="power", iterations=2, split="test"),
    Spectrum(k=5, samples=50, iterations=8),
    HessianTrace(probes=6, samples=50),
    SpectralDensity(probes=2, steps=4, samples=50),
    ClientLambdaMax(data=["local", "global"], samples=50, iterations=3),
    ClientLambdaMax(samples=50, iterations=3, clients="all"),
    Discrepancy(samples=200),
    Discrepancy(clients="all", steps=2, samples=None),
    Sharpness(samples=100),
    AdaptiveSharpness(samples=100),
    LPF(draws=3, samples=100),
    LPF(draws=3, samples=100, scale="filter"),
    CohortLoss(),
    Updates(),
    DeltaEpsilon(rho=0.1),
    ClientEvaluation(local_models=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [FedGloSS, SCAFFOLD])
def test_nothing_that_is_measured_changes_the_run(algorithm: type[LocalObjective], tmp_path: Path) -> None:
    plain = fit(tmp_path, algorithm(net(), ascent=SAM(0.05), optimizer=SGD(lr=0.1)))
    watched = fit(tmp_path, algorithm(net(), ascent=SAM(0.05), optimizer=SGD(lr=0.1)), FlatnessMonitor(1, ALL))
    a, b = (state(run.folder.path) for run in (plain, watched))
    assert all(torch.equal(b[name], value) for name, value in a.items())
    lines = measurements(watched.folder.path / "flatness.jsonl")
    names = {line["name"] for line in lines}
    assert names >= {
        "lambda_max", "lambda_max_2", "lambda_1", "lambda_ratio", "trace", "density_mean",
        "client_lambda_max_local", "client_lambda_max_global", "client_lambda_max_local_all",
        "discrepancy", "discrepancy_all",
        "sharpness_all", "sharpness_cohort", "adaptive_sharpness_all", "lpf", "lpf_filter", "loss_drop_cohort",
        "loss_gap", "norm_w", "drift", "distance", "divergence_next", "delta_epsilon", "pseudo_gradient_cosine",
    }  # fmt: skip
    assert all(line["data"] and line["model"] for line in lines if line["name"] != "norm_w")
    logged = watched.metrics
    assert {name if "/" in name else f"flatness/{name}" for name in names} <= logged.keys() and 0 < logged[
        "time/flatness_share"
    ] < 1
    (measurement,) = (line for line in lines if line["name"] == "client_lambda_max_local" and line["round"] == 3)
    values = list(measurement["details"]["clients"].values())
    assert len(values) == 4 and measurement["value"] == pytest.approx(sum(values) / 4)


def test_updates(tmp_path: Path) -> None:
    """The models themselves give the same numbers."""
    models: list[tuple[Tensor, dict[int, tuple[Tensor, int]], Tensor]] = []

    class Keep(Callback):
        def on_round_start(self, run: Run, ctx: Any, cohort: list[int]) -> None:
            self.before, self.local = run.server.w, dict[int, tuple[Tensor, int]]()

        def on_local_end(self, run: Run, result: Any) -> None:
            self.local[result.client] = (result.w, result.ctx.n_k)

        def on_round_end(self, run: Run) -> None:
            models.append((self.before, self.local, run.server.w))

    measures = [Updates(rho=0.3), DeltaEpsilon(rho=0.1), CohortLoss()]
    folder = fit(tmp_path, FedAvg(net(), optimizer=SGD(lr=0.1)), FlatnessMonitor(1, measures), Keep()).folder.path
    measured = {(line["round"], line["name"]): line["value"] for line in measurements(folder / "flatness.jsonl")}
    steps = []
    for t, (before, local, after) in enumerate(models, 1):
        ws = [w for w, _ in local.values()]
        n = sum(n for _, n in local.values())
        steps.append(before - sum(w * n_k for w, n_k in local.values()) / n)
        torch.testing.assert_close(after, before - steps[-1])
        drifts = [float((w - before).norm()) for w in ws]
        distances = [float((w - after).norm()) for w in ws]
        assert measured[t, "drift"] == pytest.approx(sum(drifts) / 4)
        assert measured[t, "distance"] == pytest.approx(sum(distances) / 4)
        assert measured[t, "distance_max"] == pytest.approx(max(distances))
        assert measured[t, "divergence_previous"] == pytest.approx(sum(x**2 for x in drifts) / 4)
        assert measured[t, "divergence_next"] == pytest.approx(sum(x**2 for x in distances) / 4)
        assert measured[t, "step_sharpness"] == pytest.approx(0.3 * float((before - after).norm()))
        assert measured[t, "pseudo_gradient_norm"] == pytest.approx(float(steps[-1].norm()))
        assert measured[t, "norm_w"] == pytest.approx(float(after.norm()))
        assert measured[t, "loss_drop_cohort"] != 0 and measured[t, "loss_gap"] > 0
    assert (1, "pseudo_gradient_cosine") not in measured and (1, "delta_epsilon") not in measured
    for t in (2, 3):
        similarity = cosine(steps[t - 2], steps[t - 1])
        assert measured[t, "pseudo_gradient_cosine"] == pytest.approx(similarity)
        # FedAvg sends what it has: the direction from the unperturbed model is the round's own
        assert measured[t, "delta_epsilon_cosine"] == pytest.approx(similarity)
        assert measured[t, "delta_epsilon"] == pytest.approx(0.1 * (2 - 2 * similarity) ** 0.5)


def test_a_cohorts_loss_is_that_of_the_clients_whose_models_count(tmp_path: Path) -> None:
    """Client 2's model is not finite, and client 0 is lost after the first of two phases."""

    class Lost(Faults):
        def attendance(self, clients: Any, asked: Any, t: int, phase: int, seed: int) -> Any:
            there = [k for k in clients if k or not phase]
            return super().attendance(there, [asked[clients.index(k)] for k in there], t, phase, seed)

    class Break(NaiveFedGloSS):
        def local_end(self, w: Tensor, client: Any, received: Any, ctx: Any) -> Any:
            return super().local_end(w * (math.nan if ctx.n_k == sizes[2] else 1.0), client, received, ctx)

    class Keep(Callback):
        def on_round_start(self, run: Run, ctx: Any, cohort: list[int]) -> None:
            self.before, self.local = run.server.w, dict[int, Tensor]()

        def on_local_end(self, run: Run, result: Any) -> None:
            if result.ctx.phase and result.client != 2:
                self.local[result.client] = result.w

    rng, sizes, keep = np.random.default_rng(0), [5, 7, 9, 11], Keep()
    clients = [(rng.random((n, 1, 8, 8)), np.arange(n) % 10) for n in sizes]
    trainer = FederatedTrainer(
        max_rounds=1,
        clients_per_round=4,
        precision="64-true",
        accelerator="cpu",
        engine="sequential",
        enable_progress_bar=False,
        faults=Lost(),
        callbacks=[keep, FlatnessMonitor(1, [CohortLoss()])],
        default_root_dir=str(tmp_path),
    )
    data = Arrays(client_arrays=clients, test=(rng.random((3, 1, 8, 8)), np.arange(3)), scale=1.0)
    run = trainer.fit(Break(net(), optimizer=SGD(lr=0.1)), data)

    def loss(client: int, w: Tensor) -> float:
        x, y = (torch.from_numpy(v) for v in clients[client])
        return sizes[client] * mean_loss(net().double(), CE, [(x, y)], w)

    assert list(keep.local) == [1, 3]
    drop = sum(loss(k, keep.before) - loss(k, run.server.w) for k in (1, 3)) / 18
    gap = abs(sum(loss(k, run.server.w) - loss(k, keep.local[k]) for k in (1, 3))) / 18
    assert run.metrics["flatness/loss_drop_cohort"] == pytest.approx(drop, rel=1e-9)
    assert run.metrics["flatness/loss_gap"] == pytest.approx(gap, rel=1e-9)


@pytest.mark.slow
def test_all_clients_in_the_cohort(tmp_path: Path) -> None:
    """With full participation the measures of the cohort and of all clients are the same numbers."""
    measures: list[Measure] = [Discrepancy(samples=None), ClientLambdaMax(samples=50, data=["local", "global"])]
    measures += [Discrepancy(samples=None, clients="all"), ClientLambdaMax(["local", "global"], 50, clients="all")]
    objective, options = FedAvg(net(), optimizer=SGD(lr=0.1)), {"clients_per_round": 6, "max_rounds": 2}
    logged = fit(tmp_path, objective, FlatnessMonitor(1, measures), **options).metrics
    for source in ("local", "global"):
        name = f"flatness/client_lambda_max_{source}"
        assert logged[f"{name}_all"] == pytest.approx(logged[name], rel=1e-9)
    assert logged["flatness/discrepancy_all"] == pytest.approx(logged["flatness/discrepancy"], rel=1e-9)
    assert logged["flatness/sharpness_local_all"] == pytest.approx(logged["flatness/sharpness_local"], rel=1e-12)


# Interruptions

HOOKS = ("on_round_start", "on_local_end", "on_round_end", "on_round_logged")


class Stop(Callback):
    """Ctrl-C in a hook of round 3."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda run, *_, **__: self.stop(run, run.rounds_done + (hook in HOOKS[:2])))

    def stop(self, run: Run, round: int) -> None:
        if round == 3:
            raise KeyboardInterrupt


def glosses(folder: Path, *callbacks: Callback, **options: Any) -> Run:
    return fit(folder, FedGloSS(net(), ascent=SAM(0.05), optimizer=SGD(lr=0.1)), *callbacks, max_rounds=5, **options)


def tracking() -> FlatnessMonitor:
    return FlatnessMonitor(
        1,
        [
            Updates(),
            DeltaEpsilon(),
            CohortLoss(),
            Discrepancy(samples=100),
            LambdaMax(50),
            ClientEvaluation(True, clients=2),
        ],
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is not interrupted."""
    return glosses(tmp_path_factory.mktemp("whole"), tracking()).folder.path


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS)
def test_an_interruption_in_any_hook_gives_the_same_numbers(hook: str, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        glosses(tmp_path / "broken", tracking(), Stop(hook))
    broken = glosses(tmp_path / "broken", tracking(), ckpt_path="last").folder.path
    assert last(newest(tmp_path / "broken"))["round"] == 5 and newest(tmp_path / "broken") == broken
    assert measurements(broken / "flatness.jsonl") == measurements(whole / "flatness.jsonl")
    assert metrics(broken) == metrics(whole)
    assert (broken / "client_evaluation.csv").read_text() == (whole / "client_evaluation.csv").read_text()


# Operators and groups of parameters


def test_measures_of_operators_and_groups(tmp_path: Path) -> None:
    """Each number has a name of its own, says in its protocol what it measures, and is that of the function."""
    group = {"parameters": ["*.bias"]}
    measures: list[Measure] = [
        LambdaMax(200, tol=1e-8),
        LambdaMax(200, tol=1e-8, operator="gauss_newton"),
        LambdaMax(200, tol=1e-8, operator="fisher", **group),
        Spectrum(2, 200, tol=1e-8, **group),
        Spectrum(2, 200, tol=1e-8, operator="gauss_newton", split="test"),
        HessianTrace(probes=6, samples=200, operator="fisher"),
        SpectralDensity(probes=2, steps=12, samples=200, operator="gauss_newton", **group),
        ClientLambdaMax(operator="fisher", iterations=3),
    ]
    run = fit(tmp_path, FedAvg(net(), optimizer=SGD(lr=0.1)), FlatnessMonitor(1, measures), max_rounds=1)
    lines = {line["name"]: line for line in measurements(run.folder.path / "flatness.jsonl")}
    assert set(lines) == {
        "lambda_max", "gauss_newton_lambda_max", "fisher_bias_lambda_max", "bias_lambda_1", "gauss_newton_lambda_1",
        "fisher_trace", "gauss_newton_bias_density_mean", "fisher_client_lambda_max_local",
    }  # fmt: skip
    assert {f"flatness/{name}" for name in lines} <= run.metrics.keys()
    protocols = {name: line["settings"] for name, line in lines.items()}
    assert protocols["lambda_max"] == {"method": "lanczos", "operator": "hessian"}
    assert protocols["fisher_bias_lambda_max"] == {"method": "lanczos", "operator": "fisher", "parameters": "*.bias"}
    assert all("operator" in settings for settings in protocols.values())
    loss = MeasurementContext.between_rounds(run).loss(MeasurementContext.between_rounds(run).train(200)[0])
    for name, matrix in (
        ("lambda_max", flatness.hessian(**loss)),
        ("gauss_newton_lambda_max", flatness.gauss_newton(**loss)),
        ("fisher_bias_lambda_max", flatness.fisher(**loss, **group)),
        ("bias_lambda_1", flatness.hessian(**loss, **group)),
    ):
        assert lines[name]["value"] == pytest.approx(flatness.lambda_max(matrix, tol=1e-8).value, rel=1e-9), name
    density = lines["gauss_newton_bias_density_mean"]
    exact = flatness.gauss_newton(**loss, **group) @ torch.eye(18, dtype=torch.float64)
    assert density["value"] == pytest.approx(exact.trace().item() / 18, abs=4 * density["error"] + 1e-12)
    assert density["details"]["moments"]["1"] == density["value"] and density["iterations"] <= 36


def test_matrices_of_one_name_and_groups_of_nothing_are_refused(tmp_path: Path) -> None:
    for measures, text in (
        ([LambdaMax(parameters=["head.*"])], r"^parameters = head.\*: matches none of "),
        ([LambdaMax(), HessianTrace(parameters=["*"])], r"^measure: parameters = \['\*'\] beside"),
        ([LambdaMax(parameters=["*.bias"]), Spectrum(2, parameters=["*bias"])], r"\['\*bias'\] beside"),
    ):
        with pytest.raises(UserError, match=text) as error:
            fit(tmp_path, FedAvg(net()), FlatnessMonitor(1, measures))
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"LambdaMax.operator = jacobian"):
        LambdaMax(operator="jacobian")


def test_density_says_its_error(tmp_path: Path) -> None:
    measures: list[Measure] = [SpectralDensity(samples=50, steps=5)]
    run = fit(tmp_path, FedAvg(net()), FlatnessMonitor(1, measures), max_rounds=1)
    (line,) = measurements(run.folder.path / "flatness.jsonl")
    assert line["error"] == run.metrics["flatness/density_mean_error"] == line["details"]["moment_errors"]["1"] > 0
    assert line["settings"] == {"probes": 5, "steps": 5, "operator": "hessian"} and line["iterations"] == 30
    (measurement,) = SpectralDensity(1, 5, 50).compute(MeasurementContext.between_rounds(run))
    assert measurement.error is None and "moment_errors" not in measurement.details


@pytest.mark.slow
def test_two_monitors_keep_their_own_state(tmp_path: Path) -> None:
    def monitors() -> list[Callback]:
        return [FlatnessMonitor(2, [Updates(rho=0.3)]), FlatnessMonitor(3, [LambdaMax(50)]), tracking()]

    reference = glosses(tmp_path / "whole", *monitors()).folder.path
    with pytest.raises(KeyboardInterrupt):
        glosses(tmp_path / "broken", *monitors(), Stop("on_round_start"))
    states = last(newest(tmp_path / "broken"))["callbacks"]
    kept = [state["pseudo_gradient"] is not None for key, state in states.items() if key.startswith("FlatnessMonitor")]
    assert kept == [True, False, True]
    broken = glosses(tmp_path / "broken", *monitors(), ckpt_path="last").folder.path
    assert measurements(broken / "flatness.jsonl") == measurements(reference / "flatness.jsonl")
    assert metrics(broken) == metrics(reference)


@pytest.mark.slow
def test_a_monitor_forgets_another_run(tmp_path: Path) -> None:
    monitor = tracking()
    first, second = (measurements(glosses(tmp_path, monitor).folder.path / "flatness.jsonl") for _ in range(2))
    assert first == second


@pytest.mark.parametrize("measure", [LambdaMax(50, tol=1e-12), Spectrum(3, 50), HessianTrace("hutchinson", samples=50)])
def test_an_interrupted_measure_holds_what_it_has(measure: Measure, tmp_path: Path) -> None:
    def progress(done: int, most: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    run = fit(tmp_path, FedAvg(net()), max_rounds=1)
    with pytest.raises(Interrupted) as stop:
        measure.compute(replace(MeasurementContext.between_rounds(run), progress=progress))
    (partial, *_) = stop.value.partial
    assert partial.name in ("lambda_max", "lambda_1", "trace") and partial.value > 0 and partial.iterations == 5


def test_a_ratio_to_zero_is_undefined() -> None:
    """So it is for a Hessian of rank 1, and for zero: its protocol says so, and the log holds no rounding error."""
    v = torch.tensor([1.0, 2.0, -1.0, 0.5, 3.0, 0.1], dtype=torch.float64)
    for a in (torch.outer(v, v), torch.zeros(6, 6, dtype=torch.float64)):
        for matrix in (a, a.float()):
            spectrum = flatness.spectrum(flatness.hessian(Quadratic(matrix), output, data()), k=6)
            assert len(spectrum.values) == 6 and math.isnan(spectrum.ratio(5)) and math.isnan(spectrum.ratio(2))
    largest, ratio = Spectrum(k=6).measurements(spectrum, data="", samples=1)
    assert ratio.value is None and "lambda_5 zero up to rounding" in ratio.protocol()
    assert scalars([largest, ratio]).keys() == {"flatness/lambda_1", "flatness/lambda_1_residual"}
    assert largest.residual == spectrum.residuals[0] and largest.details["residuals"] == spectrum.residuals.tolist()
    full = flatness.spectrum(
        flatness.hessian(Quadratic(symmetric([5.0, 4.0, 3.0, 2.0, -1.0])), output, data()), k=5, tol=1e-10
    )
    assert full.ratio(5) == pytest.approx(-5) and full.ratio(2) == pytest.approx(1.25)


def test_settings(tmp_path: Path) -> None:
    for make, text in (
        (lambda: LPF(draws=1), "LPF.draws = 1"),
        (lambda: Sharpness(rho=0), "Sharpness.rho = 0"),
        (lambda: LambdaMax(tol=-1.0), "LambdaMax.tol = -1.0"),
        (lambda: Discrepancy(clients="some"), "Discrepancy.clients = some"),  # type: ignore[arg-type]
        (lambda: FlatnessMonitor(metrics=[]), "FlatnessMonitor.metrics"),
        (lambda: HessianTrace(probes=3), r"HessianTrace.probes = 3: hutch\+\+ needs at least 4"),
        (lambda: HessianTrace("hutchinson", probes=1), "HessianTrace.probes = 1: hutchinson needs at least 2"),
        (lambda: Sharpness([]), r"Sharpness.data = \[\]: name all, cohort or both"),
        (lambda: ClientLambdaMax([]), r"ClientLambdaMax.data = \[\]: name local, global or both"),
    ):
        with pytest.raises(UserError, match=text):
            make()
    unstable = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 10))
    with pytest.raises(UserError, match="BatchNorm without running statistics"):  # before the first round
        fit(tmp_path, FedAvg(nn.Sequential(nn.Flatten(), *unstable)), FlatnessMonitor(2, [Sharpness()]))
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UserError, match=r"DeltaEpsilon.rho = None: FedAvg has no rho"):
        fit(tmp_path, FedAvg(net()), FlatnessMonitor(1, [DeltaEpsilon()]))


# Commands on checkpoints

MEASURED = "[{class_path: LambdaMax, init_args: {samples: 100, tol: 1.0e-6}}, Discrepancy, Updates]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two runs of two rounds, and one of three with a monitor."""
    root = tmp_path_factory.mktemp("runs")
    folders = {name: run("fit", f"--trainer.seed={i}", root=root / name) for i, name in enumerate(("a", "b"))}
    monitor = ["--trainer.callbacks+=FlatnessMonitor", "--trainer.callbacks.every_n_rounds=1"]
    args = ["--trainer.max_rounds=3", *monitor, f"--trainer.callbacks.metrics={MEASURED}"]
    folders["watched"] = run("fit", *args, root=root / "watched")
    return folders


def ckpt(folder: Path) -> str:
    return str(folder / "checkpoints" / "last.ckpt")


@pytest.mark.slow
def test_flatness_says_what_the_monitor_does(runs: dict[str, Path], tmp_path: Path) -> None:
    """lambda_max is that of the checkpoint's round; local models are those of the round to come."""
    args = [f"--metrics={MEASURED}", f"--out={tmp_path}", "--trainer.max_rounds=3"]
    cli("flatness", "--ckpt_path", ckpt(runs["a"]), *args)
    report = json.loads((tmp_path / "flatness.json").read_text())
    values = {r["name"]: r["value"] for r in report["measurements"]}
    lines = measurements(runs["watched"] / "flatness.jsonl")
    watched = {(line["round"], line["name"]): line["value"] for line in lines}
    assert report["round"] == 2 and report["seed"] == 0 and "weight decay" in report["protocol"]
    assert values["lambda_max"] == pytest.approx(watched[2, "lambda_max"], rel=1e-5)
    models, data = ({r["name"]: r[key] for r in report["measurements"]} for key in ("model", "data"))
    local, gap = (r for name in ("sharpness_local", "discrepancy") for r in report["measurements"] if r["name"] == name)
    assert models["lambda_max"] == "global model"
    assert models["discrepancy"] == "aggregated and local models (cohort retrained from the checkpoint)"
    part = f"own data of the cohort, 3 of 6 ({local['samples']:,})"
    assert data["discrepancy"] == f"S_i on {part}, S on training data of all clients" and gap["samples"] == 1437
    assert local["samples"] < gap["samples"]
    for name in ("discrepancy", "sharpness_global", "sharpness_local", "drift", "norm_w", "divergence_next"):
        assert values[name] == pytest.approx(watched[3, name], rel=1e-5), name
    with (tmp_path / "flatness.csv").open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [r["name"] for r in report["measurements"]]


@pytest.mark.slow
def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    """It is so in flatness.jsonl and in flatness.json, and both can be read."""
    init_args = "{samples: 20, k: 2}"
    setting = f"=[{{class_path: Spectrum, init_args: {init_args}}}]"
    args = ["--trainer.max_rounds=1", "--trainer.callbacks+=FlatnessMonitor", f"--trainer.callbacks.metrics{setting}"]
    folder = run("fit", *args, "--model.optimizer.lr=1e25", "--trainer.local_steps=1", root=tmp_path)
    cli("flatness", "--ckpt_path", ckpt(folder), f"--metrics{setting}", f"--out={tmp_path}")
    entries = json.loads((tmp_path / "flatness.json").read_text(), parse_constant=int)["measurements"]
    for measurement in (*entries, *measurements(folder / "flatness.jsonl"), *last_measurements(folder).values()):
        assert measurement["value"] is None and measurement["details"]["eigenvalues"] == [None]


FISHER = "{class_path: LambdaMax, init_args: {samples: 100, tol: 1.0e-6, operator: fisher, parameters: ['*.bias']}}"


@pytest.mark.slow
def test_flatness_on_processes(runs: dict[str, Path], tmp_path: Path) -> None:
    """Two processes share the samples and the clients."""
    several = f"[{FISHER}, {MEASURED[1:]}"
    args = ["flatness", "--ckpt_path", ckpt(runs["a"]), f"--metrics={several}", f"--out={tmp_path}"]
    with group(2, *args, "--trainer.devices=2", "--trainer.strategy=ddp", cwd=tmp_path) as children:
        (out, err), (second_out, _) = ended(children)
    assert "lambda_max" in out and "Traceback" not in err and second_out == ""
    assert "eval mode" in (tmp_path / "flatness.json").read_text()
    cli(*args, f"--out={tmp_path / 'one'}")
    ddp, single = (json.loads((f / "flatness.json").read_text())["measurements"] for f in (tmp_path, tmp_path / "one"))
    assert [r["name"] for r in ddp] == [r["name"] for r in single]
    assert [r["value"] for r in ddp] == pytest.approx([r["value"] for r in single], rel=1e-4)


@pytest.mark.slow
def test_flatness_of_another_matrix(runs: dict[str, Path], tmp_path: Path) -> None:
    """It is a setting of each measure; figures have the names of their numbers."""
    density = "{class_path: SpectralDensity, init_args: {probes: 2, steps: 4, samples: 50, operator: gauss_newton}}"
    cli("flatness", "--ckpt_path", ckpt(runs["a"]), f"--metrics=[{FISHER}, {density}]", f"--out={tmp_path}")
    entries = json.loads((tmp_path / "flatness.json").read_text())["measurements"]
    assert [m["name"] for m in entries] == ["fisher_bias_lambda_max", "gauss_newton_density_mean"]
    assert entries[0]["settings"] == {"method": "lanczos", "operator": "fisher", "parameters": "*.bias"}
    assert (tmp_path / "gauss_newton_density.pdf").exists()
    args = ["--metrics+=HessianTrace", "--metrics.operator=gauss_newton", "--metrics.parameters=['*.weight']"]
    cli("flatness", "--ckpt_path", ckpt(runs["a"]), *args, f"--out={tmp_path / 'more'}")
    names = [m["name"] for m in json.loads((tmp_path / "more" / "flatness.json").read_text())["measurements"]]
    assert "gauss_newton_weight_trace" in names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "files"),
    [
        (["--points=4", "--splits=train,test"], ("surface", "surface_3d")),
        (["--points=4", "--clients", "1"], ("surface", "surface_3d")),
        (["--kind=perturbation", "--points=4", "--directions=2"], ("perturbation",)),
        (["--kind=trajectory", "--points=4", "--clients=[2]"], ("trajectory",)),
    ],
)
def test_landscape(args: list[str], files: tuple[str, ...], runs: dict[str, Path], tmp_path: Path) -> None:
    compare = [] if "--clients=[2]" in args else [f"--compare=[{ckpt(runs['b'])}]"]
    cli("landscape", "--ckpt_path", ckpt(runs["a"]), *compare, f"--out={tmp_path}", "--samples=60", *args)
    for name in files:
        assert (tmp_path / f"{name}.pdf").read_bytes()[:5] == b"%PDF-"
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    results = json.loads((tmp_path / f"{files[0]}.json").read_text())
    assert len(results) == (1 if not compare else 3 if "--clients" in args else 2)
    assert all(result["missing"] == 0 and result["protocol"]["seed"] == 0 for result in results.values())
    with (tmp_path / f"{files[0]}.csv").open(newline="") as file:
        assert all(float(row["loss"]) > 0 for row in csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("same", [False, True])
def test_directions_of_a_surface(
    same: bool, runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are normalised by each model's filters; as an option all are those of the first model."""
    directions, origins = list[Tensor](), list[Tensor]()

    def recorded(**options: Any) -> Any:
        directions.append(options["directions"])
        origins.append(options["at"])
        return surface(**options)

    monkeypatch.setattr(landscape, "surface", recorded)
    args = ["--ckpt_path", ckpt(runs["a"]), f"--compare=[{ckpt(runs['b'])}]", "--points=2", f"--out={tmp_path}"]
    cli("landscape", *args, *(["--same-directions"] if same else []))
    spec = FlatSpec(DigitsMLP(8))
    assert [torch.equal(d, random_plane(spec, origins[0], 0)) for d in directions] == [True, same]
    assert torch.equal(directions[1], random_plane(spec, origins[0] if same else origins[1], 0))
    first, *_ = grids = json.loads((tmp_path / "surface.json").read_text())
    model = first if same else "each model"
    assert {grids[key]["protocol"]["directions"] for key in grids} == {f"random, normalised by the filters of {model}"}


@pytest.mark.slow
def test_plane_and_line_through_checkpoints(runs: dict[str, Path], tmp_path: Path) -> None:
    a, b, c = (ckpt(runs[name]) for name in ("a", "b", "watched"))
    cli("landscape", "--ckpt_path", a, f"--compare=[{b},{c}]", "--kind=plane", "--points=3", f"--out={tmp_path}")
    (plane,) = json.loads((tmp_path / "plane.json").read_text()).values()
    assert len(plane["models"]) == 3 and all(max(m["residual"]) < 1e-5 for m in plane["models"].values())
    cli("landscape", "--ckpt_path", a, "--clients=0,2,5", "--kind=plane", "--points=3", f"--out={tmp_path}/local")
    (plane,) = json.loads((tmp_path / "local" / "plane.json").read_text()).values()
    assert [*plane["models"]] == ["client 0", "client 2", "client 5"]
    assert all(max(m["residual"]) < 1e-5 for m in plane["models"].values())
    ends = np.array([m["coordinates"][0] for m in plane["models"].values()])
    assert abs(np.linalg.det(ends[1:] - ends[0])) > 1e-9  # three models that are not on a line
    cli("interpolate", a, b, "--points=4", f"--out={tmp_path}")
    (line,) = json.loads((tmp_path / "interpolate.json").read_text()).values()
    losses = dict(zip(line["gammas"], line["loss"]["test"], strict=True))
    for gamma, name in ((1.0, "a"), (0.0, "b")):
        assert losses[gamma] == pytest.approx(metrics(runs[name])["server/test/loss"][-1][1], rel=1e-5)


@pytest.mark.long
def test_paths_of_an_algorithm_with_parts(tmp_path: Path) -> None:
    """FedAvg with an ascent is neither FedAvg nor FedSAM of the figure; a plain FedAvg is its own rival."""
    rivals = ["FedAvg", "FedSAM"]
    topk = ["--model.parts+=Compress", "--model.parts.method=topk"]  # leaves local training alone
    for i, (options, names) in enumerate(
        ((["--model.ascent=SAM"], ["FedAvg of this run", *rivals]), (topk, rivals), ([], rivals))
    ):
        folder, out = run("fit", *options, root=tmp_path), tmp_path / str(i)
        args = ["--kind=trajectory", "--clients=[2]", "--points=2", "--samples=60", f"--out={out}"]
        cli("landscape", "--ckpt_path", ckpt(folder), *args)
        (trajectory,) = json.loads((out / "trajectory.json").read_text()).values()
        assert list(trajectory["models"]) == names


@pytest.mark.slow
def test_accuracies_of_a_net_with_more_outputs_than_classes(tmp_path: Path) -> None:
    """A landscape counts as the evaluation does: among the classes."""
    folder = run("fit", "--model.net.num_classes=40", root=tmp_path)
    cli("interpolate", ckpt(folder), ckpt(folder), "--points=3", f"--out={tmp_path}")
    (line,) = json.loads((tmp_path / "interpolate.json").read_text()).values()
    assert line["accuracy"]["test"][0] == pytest.approx(dict(metrics(folder)["server/test/acc"])[2], abs=1e-7)


def test_nothing_measured_says_why(runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli("flatness", "--ckpt_path", ckpt(runs["a"]), "--metrics=[{class_path: DeltaEpsilon, init_args: {rho: 0.1}}]")
    assert "DeltaEpsilon: nothing was measured; no client has trained, or" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_fedgmt_has_a_fourth_path(tmp_path: Path) -> None:
    """Its Fig. 6: without ADMM the direction has no dual; start and minibatches are the same."""
    folder = run("fit", root=tmp_path, model="FedGMT")
    args = ["--kind=trajectory", "--clients=[2]", "--points=3", "--samples=60", f"--out={tmp_path}"]
    cli("landscape", "--ckpt_path", ckpt(folder), *args)
    (trajectory,) = json.loads((tmp_path / "trajectory.json").read_text()).values()
    assert list(trajectory["models"]) == ["FedGMT", "FedAvg", "FedSAM", "FedGMT without ADMM"]
    paths = {name: np.array(model["coordinates"]) for name, model in trajectory["models"].items()}
    starts = [path[0] for path in paths.values()]
    np.testing.assert_allclose(starts, np.zeros((4, 2)), atol=1e-6)
    ends = {name: tuple(path[-1].round(6)) for name, path in paths.items()}
    assert len(set(ends.values())) == 4


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["flatness", "--config=CONFIG"], "ckpt_path: missing; give a checkpoint"),
        (["landscape"], "ckpt_path: missing; give a checkpoint, such as --ckpt_path runs/"),
        (["interpolate", "--a=CKPT", "--b=CKPT"], "--a: no option; give it by its place: fl-lightning interpolate A B"),
        (["flatness", "--ckpt_path=nowhere.ckpt", "--config=CONFIG"], "nowhere.ckpt: no such file"),
        (["landscape", "--ckpt_path=CKPT", "--kind=plane"], "compare = []: a plane goes through two checkpoints more"),
        (["landscape", "--ckpt_path=CKPT", "--kind=plane", "--clients=[1]"], "the models of three different clients"),
        (["landscape", "--ckpt_path=CKPT", "--kind=plane", "--clients=[1,1,2]"], "of three different clients"),
        (
            ["landscape", "--ckpt_path=CKPT", "--kind=perturbation", "--clients=[1]"],
            "a perturbation is that of checkpoi",
        ),
        (["landscape", "--ckpt_path=CKPT", "--clients=[77]"], "clients = 77: from 0 to 5"),
        (["landscape", "--ckpt_path=CKPT", "--labels=[a,b]"], "labels = ['a', 'b']: give a name for each model, none"),
        (["landscape", "--ckpt_path=CKPT", "--points=1"], "points = 1: give a whole number from 2 to 10,000"),
        (
            ["landscape", "--ckpt_path=CKPT", "--points=99999999999"],
            "points = 99999999999: give a whole number from 2 to",
        ),
        (["interpolate", "CKPT", "CKPT", "--model.net.hidden=9"], "made with model.net"),
        (["flatness", "--ckpt_path=CKPT", "--metrics=[LambdaMin]"], "LambdaMax"),
    ],
)
def test_mistakes(args: list[str], text: str, runs: dict[str, Path]) -> None:
    command = [a.replace("CKPT", ckpt(runs["a"])).replace("CONFIG", str(runs["a"] / "config.yaml")) for a in args]
    with pytest.raises(SystemExit) as end:
        cli(*command)
    assert str(end.value).startswith("error: ") and text in str(end.value) and "\n" not in str(end.value)


@pytest.mark.long
def test_an_interrupt_keeps_what_was_computed(runs: dict[str, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fl_lightning", "landscape", "--ckpt_path", ckpt(runs["a"]), "--points=800"]

    def heard() -> None:  # the tests may run behind a shell that has them ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        [*command, f"--out={tmp_path}"], stdout=subprocess.PIPE, text=True, preexec_fn=heard
    ) as child:
        assert child.stdout is not None
        assert any(line.startswith("surface of") for line in child.stdout)
        time.sleep(2)
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=600)
    assert child.returncode == 130
    (grid,) = json.loads((tmp_path / "surface.json").read_text()).values()
    losses = [v for row in grid["loss"]["train"] for v in row]
    assert 0 < grid["missing"] == sum(v is None for v in losses) < len(losses) == 800**2


@pytest.mark.slow
def test_a_run_says_where_it_keeps_how_it_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--trainer.enable_progress_bar=true", "--trainer.callbacks+=FlatnessMonitor"]
    folder = run("fit", *args, root=tmp_path)
    assert "; protocols: flatness.jsonl\n" in capsys.readouterr().out
    measured = last_measurements(folder)
    text = protocol(measured["lambda_max"])
    assert text.startswith("global model, training data of all clients, stratified sample (1,000), method lanczos")
    text = protocol(measured["discrepancy"])
    assert text.startswith("aggregated and local models") and text.endswith("rho 0.05, steps 1")
    assert {json.loads(line)["seed"] for line in (folder / "flatness.jsonl").read_text().splitlines()} == {0}
