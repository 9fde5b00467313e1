"""Loss landscapes against closed forms and direct evaluation, and what their figures look like."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.core.errors import UserError
from fl_lightning.core.figures import COLUMN, PAGE, save_figure
from fl_lightning.core.flat import FlatSpec
from fl_lightning.flatness import (
    Interpolation,
    Perturbation,
    Plane,
    Projection,
    Reduce,
    Surface,
    Values,
    evaluate,
    filter_normalized,
    gradient,
    interpolate,
    mean_loss,
    mean_losses,
    perturbation_curves,
    plots,
    project,
    random_direction,
    random_plane,
    surface,
)
from tests.flatness.test_flatness import CE, Data, Quadratic, cnn, data, mlp, on_each, output, symmetric

GRID = np.linspace(-1, 1, 5)


def weights(net: nn.Module) -> Tensor:
    return FlatSpec(net).vector(net)


def other(net: nn.Module, seed: int = 5) -> Tensor:
    w = weights(net)
    return w + 0.3 * torch.randn(w.shape, generator=torch.Generator().manual_seed(seed), dtype=w.dtype)


class Wells(nn.Module):
    """F(w) = (w_0² - 1)² + w_1², for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.w[0] ** 2 - 1) ** 2 + self.w[1] ** 2).expand(len(x))


# Directions


@pytest.mark.parametrize("make", [mlp, cnn])
def test_filters_get_the_norms_of_the_model(make: Any) -> None:
    net = make()
    spec, w = FlatSpec(net), weights(net)
    raw = torch.stack([random_direction(spec, 3, i) for i in range(2)])
    for d, before in zip(filter_normalized(raw, w, spec), raw, strict=True):
        for name, part in spec.split(d).items():
            model, drawn = (spec.split(v)[name] for v in (w, before))
            if model.ndim <= 1:
                assert not part.any()
                continue
            for f, model_f, drawn_f in zip(part, model, drawn, strict=True):
                assert f.norm().item() == pytest.approx(model_f.norm().item(), rel=1e-9)
                torch.testing.assert_close(f / f.norm(), drawn_f / drawn_f.norm(), rtol=1e-12, atol=1e-14)


def test_random_directions_are_shared_by_all_models() -> None:
    net = mlp()
    spec = FlatSpec(net)
    assert torch.equal(random_direction(spec, 1, 0), random_direction(FlatSpec(mlp(torch.float32)), 1, 0))
    drawn = [random_direction(spec, seed, index) for seed, index in ((1, 0), (1, 1), (2, 0))]
    assert all(abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.3 for a, b in itertools.pairwise(drawn))
    assert torch.stack(drawn).std().item() == pytest.approx(1, abs=0.1)
    # twice the weights: the same picture, twice as large
    torch.testing.assert_close(random_plane(spec, 2 * weights(net)), 2 * random_plane(spec, weights(net)))


def test_a_filter_of_zeros_has_no_direction() -> None:
    spec = FlatSpec(mlp())
    assert not filter_normalized(random_direction(spec, 0, 0), torch.zeros(spec.d), spec).any()
    assert not filter_normalized(torch.zeros(spec.d), weights(mlp()), spec).any()


# Values


def test_many_points_are_what_each_is_alone() -> None:
    net, batches = mlp(), data((5, 7))
    points = torch.stack([other(net, seed) for seed in range(3)])
    losses, accuracies = mean_losses(net, CE, batches, points)
    assert losses.tolist() == [mean_loss(net, CE, batches, w) for w in points]
    x, y = (torch.cat(part) for part in zip(*batches(), strict=True))
    for w, accuracy in zip(points, accuracies, strict=True):
        copy = mlp().eval()
        FlatSpec(copy).load(copy, w)
        assert accuracy.item() == (copy(x).argmax(1) == y).double().mean().item()


def test_accuracy_is_unknown_without_classes() -> None:
    _, accuracy = mean_losses(Wells(), output, data(), torch.ones(1, 2))
    assert accuracy.isnan().all()


def test_weights_of_another_network_are_refused() -> None:
    net, w = mlp(), other(mlp())
    with pytest.raises(UserError, match=r"^at: \(3,\) does not fit "):
        mean_loss(net, CE, data(), torch.zeros(3))
    with pytest.raises(UserError, match=r"^b = \(3,\): a has "):
        interpolate(net, CE, {"all": data()}, w, torch.zeros(3))
    with pytest.raises(UserError, match=rf"^directions = \(1, {len(w)}\): give \(2, {len(w)}\)"):
        surface(net, CE, {"all": data()}, w, w[None], GRID)


def test_batches_that_normalize_themselves_are_refused() -> None:
    """The loss would depend on how the data are divided."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(UserError, match="BatchNorm without running statistics"):
        mean_loss(net, CE, data())


@pytest.mark.parametrize("per_pass", [1, 3, 100])
@pytest.mark.parametrize("sizes", [(12,), (1, 9, 2)])
def test_surface_holds_the_loss_at_every_point(per_pass: int, sizes: tuple[int, ...]) -> None:
    net, w = mlp(), other(mlp())
    plane = random_plane(FlatSpec(net), w, 7)
    sets = {"one": data(sizes), "two": data((4,))}
    landscape = surface(net, CE, sets, w, plane, GRID, GRID[:3], per_pass=per_pass)
    for name, batches in sets.items():
        assert landscape.loss[name].shape == landscape.accuracy[name].shape == (3, 5)
        for (i, y), (j, x) in ((a, b) for a in enumerate(GRID[:3]) for b in enumerate(GRID)):
            expected = mean_loss(net, CE, batches, w + x * plane[0] + y * plane[1])
            assert landscape.loss[name][i, j] == pytest.approx(expected, rel=1e-12)
    assert landscape.missing == 0


def test_centre_of_a_surface_is_the_model_itself() -> None:
    net, batches = mlp(torch.float32), data((5, 7), torch.float32)
    landscape = surface(net, CE, {"train": batches}, weights(net), random_plane(FlatSpec(net), weights(net)), GRID)
    assert landscape.loss["train"][2, 2] == mean_loss(net, CE, batches)


def test_surface_of_a_quadratic() -> None:
    torch.manual_seed(0)
    a, b, w = symmetric([-1.0, 0.5, 4.0]), torch.randn(3).double(), torch.randn(3).double()
    net, d = Quadratic(a, b, w), torch.randn(2, 3).double()
    landscape = surface(net, output, {"train": data((2, 5))}, w, d, GRID, 2 * GRID[1:])
    for i, y in enumerate(landscape.y):
        for j, x in enumerate(landscape.x):
            p = w + x * d[0] + y * d[1]
            assert landscape.loss["train"][i, j] == pytest.approx((3 + b @ p + p @ a @ p / 2).item(), rel=1e-12)
    default = surface(net, output, {"train": data((1,))}, w, d, per_pass=500)
    assert default.loss["train"].shape == (51, 51) and (default.x == default.y).all()
    assert (default.x[0], default.x[25], default.x[-1]) == (-1, 0, 1)
    points = [w + r * d[0] for r in GRID]
    line = evaluate(net, output, {"train": data()}, points.__getitem__, len(points)).loss["train"]
    np.testing.assert_allclose(line, [(3 + b @ p + p @ a @ p / 2).item() for p in points], rtol=1e-12)


# Interpolation


def test_no_barrier_in_a_convex_loss() -> None:
    torch.manual_seed(1)
    net = Quadratic(symmetric([0.1, 1.0, 5.0]), torch.randn(3).double())
    a, b = torch.randn(2, 3).double()
    line = interpolate(net, output, {"train": data()}, a, b)
    assert line.barrier("train") == pytest.approx(0, abs=1e-14)
    assert line.barrier("train") >= 0
    assert (len(line.gammas), line.gammas[0], line.gammas[-1]) == (61, -1, 2)
    for gamma, loss in zip(line.gammas, line.loss["train"], strict=True):
        assert loss == pytest.approx(mean_loss(net, output, data(), gamma * a + (1 - gamma) * b), rel=1e-12)


def test_barrier_between_two_wells() -> None:
    """On the line w_0 = 2γ-1 the loss is (w_0²-1)² + w_1², largest between the ends at γ = 1/2."""
    a, b = torch.tensor([1.0, 0.0]).double(), torch.tensor([-1.0, 0.0]).double()
    assert interpolate(Wells(), output, {"train": data()}, a, b).barrier("train") == pytest.approx(1, abs=1e-12)
    # the ends' own difference is no barrier: here L(1) = 4, L(0) = 0, and L - line = (w_0²-1)² + 4γ² - 4γ
    a = torch.tensor([1.0, 2.0]).double()
    line = interpolate(Wells(), output, {"train": data()}, a, b, np.linspace(0, 1, 101))
    g = line.gammas
    assert line.barrier("train") == pytest.approx((((2 * g - 1) ** 2 - 1) ** 2 + 4 * g**2 - 4 * g).max(), abs=1e-12)


def test_ends_of_a_line_are_exact_and_always_there() -> None:
    net, batches = mlp(torch.float32), data((5, 7), torch.float32)
    a, b = other(net, 1), other(net, 2) * 1e3
    line = interpolate(net, CE, {"train": batches, "test": data(dtype=torch.float32)}, a, b, [0.3, -0.5, 1.5])
    assert line.gammas.tolist() == [-0.5, 0, 0.3, 1, 1.5]
    assert line.loss["train"][[1, 3]].tolist() == [mean_loss(net, CE, batches, w) for w in (b, a)]
    assert list(line.loss) == list(line.accuracy) == ["train", "test"]


# Perturbation


def test_perturbation_along_gradient_and_random_directions() -> None:
    net, radii = mlp(), [0.0, 0.1, 0.5]
    spec, w = FlatSpec(net), other(mlp())
    sets = {"train": data((5, 7)), "test": data((4,))}
    curves = perturbation_curves(net, CE, sets, w, radii, directions=3, seed=4)
    g = gradient(net, CE, sets["train"], w)
    lines = [g / g.norm(), *(filter_normalized(random_direction(spec, 4, i), w, spec) for i in range(3))]
    for name, batches in sets.items():
        expected = [[mean_loss(net, CE, batches, w + r * d) for r in radii] for d in lines]
        np.testing.assert_allclose(curves.loss[name], expected, rtol=1e-12)
        np.testing.assert_allclose(curves.along_gradient(name), expected[0], rtol=1e-12)
        np.testing.assert_allclose(curves.mean(name), np.mean(expected[1:], axis=0), rtol=1e-12)
        np.testing.assert_allclose(curves.spread(name), np.std(expected[1:], axis=0, ddof=1), rtol=1e-9, atol=1e-15)
    default = perturbation_curves(net, CE, {"train": data((2,))})
    assert default.loss["train"].shape == (11, 21) and default.radii[-1] == 1


# Planes


coordinates = st.lists(st.floats(-3, 3).filter(lambda v: abs(v) > 0.01), min_size=4, max_size=4)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), coordinates)
def test_plane_holds_its_models_and_measures_what_lies_outside(seed: int, numbers: list[float]) -> None:
    draw = torch.Generator().manual_seed(seed)
    w0, w1, w2, off = torch.randn(4, 30, generator=draw, dtype=torch.float64)
    plane = Plane.through(w0, w1, w2)
    basis = plane.directions
    torch.testing.assert_close(basis @ basis.T, torch.eye(2).double(), rtol=0, atol=1e-14)
    points = torch.from_numpy(plane.corners) @ basis + plane.origin
    torch.testing.assert_close(points, torch.stack([w0, w1, w2]), rtol=0, atol=1e-13)
    dx, dy = (w2 - w0).norm().item(), plane.corners[1, 1]
    np.testing.assert_allclose(plane.corners[[0, 2]], [[0, 0], [dx, 0]], atol=1e-13)
    assert dy > 0
    # points with known coordinates and a known distance to the plane
    off = off - basis.T @ (basis @ off)
    c = np.array(numbers).reshape(2, 2)
    projection = plane.project(torch.from_numpy(c) @ basis + plane.origin + off)
    np.testing.assert_allclose(projection.coordinates, c, atol=1e-12)
    np.testing.assert_allclose(projection.residual, off.norm().item(), rtol=1e-12)


def test_oblique_directions_are_projected_by_least_squares() -> None:
    torch.manual_seed(0)
    origin, (d1, d2), w = torch.randn(6).double(), torch.randn(2, 6).double(), torch.randn(6).double()
    expected = torch.linalg.lstsq(torch.stack([d1, d2], 1), (w - origin)[:, None])
    projection = project(w, origin, torch.stack([d1, d2]))
    np.testing.assert_allclose(projection.coordinates[0], expected.solution[:, 0], rtol=1e-10)
    nearest = origin + expected.solution[:, 0] @ torch.stack([d1, d2])
    assert projection.residual[0] == pytest.approx((w - nearest).norm().item(), rel=1e-10)


def test_garipov_grid() -> None:
    w0, w2 = torch.zeros(4), torch.tensor([2.0, 0, 0, 0])
    x, y = Plane.through(w0, torch.tensor([0.5, 3.0, 0, 0]), w2).grid()
    np.testing.assert_allclose(x, 2 * np.linspace(-0.2, 1.2, 21), atol=1e-12)
    np.testing.assert_allclose(y, 3 * np.linspace(-0.2, 1.2, 21), atol=1e-12)
    plane = Plane.through(w0, torch.tensor([0.5, 3.0, 0, 0]), w2)
    x, y = plane.grid(5, 0.0, include=[plane.project(torch.tensor([[7.0, -1, 5, 0], [0, 9, 0, 0]]))])
    assert (x[0], x[-1], y[0], y[-1], len(x)) == (0, 7, -1, 9, 5)


def test_surface_over_a_plane_passes_through_its_models() -> None:
    net, batches = mlp(), data()
    ends = [other(net, seed) for seed in range(3)]
    plane = Plane.through(*ends)
    models = {"all": torch.stack(ends), "second": ends[1]}
    x, y = (np.unique(plane.corners[:, i].round(15)) for i in range(2))
    landscape = surface(net, CE, {"train": batches}, plane.origin, plane.directions, x, y, models=models)
    np.testing.assert_allclose(landscape.models["all"].coordinates, plane.corners, atol=1e-12)
    assert landscape.models["second"].residual.shape == (1,) and landscape.models["all"].residual.max() < 1e-12
    for w, (cx, cy) in zip(ends, plane.corners, strict=True):
        value = landscape.loss["train"][abs(y - cy).argmin(), abs(x - cx).argmin()]
        assert value == pytest.approx(mean_loss(net, CE, batches, w), rel=1e-9)


def test_models_on_a_line_span_no_plane() -> None:
    w = torch.randn(5)
    for third in (w, w + 2 * torch.ones(5), w + 1e-12):
        with pytest.raises(ValueError, match="one line"):
            Plane.through(w, third, w + torch.ones(5))
    with pytest.raises(ValueError, match="one line"):
        Plane.through(w, w + 1, w)
    with pytest.raises(ValueError, match="parallel"):
        project(w, w, torch.stack([w, -2 * w]))


def test_normalized_sum() -> None:
    first, second = np.array([[1.0, 3.0], [2.0, 1.0]]), np.array([[10.0, 20.0], [10.0, np.nan]])
    blank = {name: np.zeros((2, 2)) for name in "ab"}
    landscape = Surface({"a": first, "b": second}, blank, 1, {}, np.arange(2.0), np.arange(2.0))
    np.testing.assert_allclose(landscape.normalized_sum(), [[0, 2], [0.5, np.nan]])
    flat = Surface({"a": first, "b": np.ones((2, 2))}, blank, 0, {}, np.arange(2.0), np.arange(2.0))
    np.testing.assert_allclose(flat.normalized_sum(), [[0, 1], [0.5, 0]])


# Many processes, interrupts, what is left behind


def test_processes_share_the_samples() -> None:
    """Each has some batches, the last one none; all get what a lone process gets."""
    batches = data((5, 3, 4))
    a, b = other(mlp(), 1), other(mlp(), 2)

    def measure(net: nn.Module, batches: Data, reduce: Reduce | None) -> list[Values]:
        sets, plane = {"x": batches, "y": batches}, random_plane(FlatSpec(net), a)
        return [
            surface(net, CE, sets, a, plane, GRID, reduce=reduce),
            interpolate(net, CE, sets, a, b, GRID, reduce=reduce),
            perturbation_curves(net, CE, sets, a, GRID, directions=2, reduce=reduce),
        ]

    parts = [lambda: list(batches())[::2], lambda: list(batches())[1:2], list]
    alone = measure(mlp(), batches, None)
    for mine in on_each(3, lambda net, rank, reduce: measure(net, parts[rank], reduce)):
        for theirs, expected in zip(mine, alone, strict=True):
            for name in ("x", "y"):
                np.testing.assert_allclose(theirs.loss[name], expected.loss[name], rtol=1e-9)
                assert theirs.accuracy[name].tolist() == expected.accuracy[name].tolist()


def stop_after(points: int) -> Any:
    def progress(done: int, total: int) -> None:
        if done >= points:
            raise KeyboardInterrupt

    return progress


def test_interrupt_keeps_what_was_computed() -> None:
    net, w, sets = mlp(), other(mlp()), {"train": data(), "test": data((4,))}
    plane = random_plane(FlatSpec(net), w)
    complete = surface(net, CE, sets, w, plane, GRID)
    partial = surface(net, CE, sets, w, plane, GRID, per_pass=2, progress=stop_after(7))
    assert partial.missing == 25 - 8
    for name in sets:
        assert partial.loss[name].ravel()[:8].tolist() == complete.loss[name].ravel()[:8].tolist()
        assert np.isnan(partial.loss[name].ravel()[8:]).all() and np.isnan(partial.accuracy[name].ravel()[8:]).all()
    passes = 0

    def interrupted() -> Iterable[tuple[Tensor, Tensor]]:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise KeyboardInterrupt
        return data()()

    # in the middle of a point: neither data set has it
    partial = surface(net, CE, {"test": data((4,)), "train": interrupted}, w, plane, GRID, per_pass=1)
    assert partial.missing == 23 and all(np.isfinite(v).sum() == 2 for v in partial.loss.values())
    passes = 2
    with pytest.raises(KeyboardInterrupt):  # nothing was computed
        surface(net, CE, {"train": interrupted}, w, plane, GRID)


def test_interrupted_curves_say_what_they_know() -> None:
    net, sets = mlp(), {"train": data()}
    complete = perturbation_curves(net, CE, sets, radii=GRID, directions=3)
    partial = perturbation_curves(net, CE, sets, radii=GRID, directions=3, per_pass=1, progress=stop_after(17))
    assert partial.missing == 3
    np.testing.assert_allclose(partial.mean("train"), complete.loss["train"][1:3].mean(0))  # the third was not finished
    first = perturbation_curves(net, CE, sets, radii=GRID, directions=3, per_pass=1, progress=stop_after(5))
    assert np.isfinite(first.along_gradient("train")).all() and np.isnan(first.mean("train")).all()
    a, b = other(net, 1), other(net, 2)
    line = interpolate(net, CE, sets, a, b, GRID, per_pass=1)
    short = interpolate(net, CE, sets, a, b, GRID, per_pass=1, progress=stop_after(4))  # 0, 1, -1 and -0.5
    assert short.missing == 1 and np.isnan(short.loss["train"]).tolist() == [False, False, False, True, False]
    np.testing.assert_array_equal(np.delete(short.loss["train"], 3), np.delete(line.loss["train"], 3))
    np.testing.assert_array_equal(np.delete(short.accuracy["train"], 3), np.delete(line.accuracy["train"], 3))
    assert short.barrier("train") == 0
    assert math.isnan(interpolate(net, CE, sets, a, b, GRID, per_pass=1, progress=stop_after(1)).barrier("train"))


def test_barrier_of_the_points_measured() -> None:
    """It lies between two wells, up to γ = 0.3 of the way; a loss that is not finite is not left out."""
    a, b = torch.tensor([1.0, 0.0]).double(), torch.tensor([-1.0, 0.0]).double()
    line = interpolate(
        Wells(), output, {"train": data()}, a, b, np.linspace(0, 1, 11), per_pass=1, progress=stop_after(5)
    )
    assert line.missing == 6 and line.barrier("train") == pytest.approx((0.4**2 - 1) ** 2, abs=1e-12)
    complete = replace(line, missing=0)
    assert math.isnan(complete.barrier("train"))


def test_progress_counts_points() -> None:
    seen: list[tuple[int, int]] = []
    net = mlp()
    evaluate(
        net, CE, {"a": data(), "b": data()}, lambda i: weights(net), 7, per_pass=3, progress=lambda *n: seen.append(n)
    )
    assert seen == [(3, 7), (6, 7), (7, 7)]


def test_nothing_is_touched() -> None:
    net = nn.Sequential(mlp(), nn.BatchNorm1d(3).double())
    net[0][3].eval()  # type: ignore[index]
    x, y = next(iter(data((12,))()))
    loader = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)  # draws from the global state

    def state() -> list[object]:
        return [
            {k: v.clone().numpy().tobytes() for k, v in net.state_dict().items()},
            [m.training for m in net.modules()],
        ]

    w, before, rng = weights(net), state(), torch.get_rng_state()
    sets = {"train": lambda: loader}
    surface(net, CE, sets, w, random_plane(FlatSpec(net), w), GRID)
    interpolate(net, CE, sets, w, w + 1, GRID)
    perturbation_curves(net, CE, sets, radii=GRID, directions=2)
    surface(net, CE, sets, w, random_plane(FlatSpec(net), w), GRID, per_pass=1, progress=stop_after(2))
    assert state() == before and torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is None for p in net.parameters())


def test_errors() -> None:
    net, sets = mlp(), {"train": data()}
    w = weights(net)
    with pytest.raises(ValueError, match="data = "):
        interpolate(net, CE, {}, w, w)
    with pytest.raises(ValueError, match="data = "):
        perturbation_curves(net, CE, {})
    with pytest.raises(ValueError, match="no sample"):
        interpolate(net, CE, {"train": list}, w, w)
    with pytest.raises(ValueError, match=r"^at: \(\d+,\) does not fit "):
        interpolate(net, CE, sets, w[1:], w[1:])
    with pytest.raises(ValueError, match="per_pass"):
        evaluate(net, CE, sets, lambda i: w, 3, per_pass=0)
    with pytest.raises(ValueError, match="points"):
        evaluate(net, CE, sets, lambda i: w, 0)
    with pytest.raises(ValueError, match="directions"):
        perturbation_curves(net, CE, sets, directions=1)
    with pytest.raises(ValueError, match="not finite"):
        plots.plot_surface({"a": Surface({"t": np.full((5, 5), np.nan)}, {}, 25, {}, GRID, GRID)})
    with pytest.raises(ValueError, match="data sets"):
        plots.plot_surface({"a": paraboloid(), "b": paraboloid(names=("x",))})


# Files


def test_rows_and_dictionaries(tmp_path: Path) -> None:
    net, protocol = mlp(), {"data": "train", "samples": 12}
    w, sets = other(mlp()), {"train": data(), "test": data((4,))}
    plane = random_plane(FlatSpec(net), w)
    measurements: list[Any] = [
        surface(
            net,
            CE,
            sets,
            w,
            plane,
            GRID,
            GRID[:2],
            protocol=protocol,
            models={"m": w},
            per_pass=1,
            progress=stop_after(3),
        ),
        interpolate(net, CE, sets, w, 2 * w, GRID, protocol=protocol),
        perturbation_curves(net, CE, sets, w, GRID, directions=2, protocol=protocol),
        evaluate(net, CE, sets, lambda i: i * w, 4, protocol=protocol),
    ]
    keys = [["x", "y"], ["gamma"], ["direction", "radius"], ["point"]]
    for measurement, columns in zip(measurements, keys, strict=True):
        rows = measurement.rows()
        assert list(rows[0]) == ["data", *columns, "loss", "accuracy"]
        assert len(rows) == 2 * measurement.loss["train"].size
        back = json.loads(json.dumps(measurement.to_dict(), allow_nan=False))
        assert back["protocol"] == protocol and back["missing"] == measurement.missing
        np.testing.assert_array_equal(np.array(back["loss"]["test"], dtype=float), measurement.loss["test"])
        with (tmp_path / "rows.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    assert measurements[0].missing == 7
    row = measurements[0].rows()[1]
    assert (row["x"], row["y"], row["loss"]) == (GRID[1], GRID[0], measurements[0].loss["train"][0, 1])
    assert measurements[0].to_dict()["models"]["m"]["coordinates"] == [[0, 0]]
    assert measurements[1].to_dict()["barrier"]["train"] == measurements[1].barrier("train")
    assert {r["direction"] for r in measurements[2].rows()} == {"gradient", "random 0", "random 1"}


# Figures


def paraboloid(scale: float = 1.0, names: tuple[str, ...] = ("train", "test"), stretch: float = 1.0) -> Surface:
    x, y = np.linspace(-1, 1, 15), stretch * np.linspace(-1, 1, 11)
    z = 0.05 + scale * (x[None] ** 2 + (y[:, None] / stretch) ** 2 / 2)
    path = np.stack([np.linspace(-0.5, 0.5, 9), stretch * np.linspace(0, 0.4, 9)], -1)
    models = {"start": Projection(path[:1], np.zeros(1)), "FedAvg": Projection(path, np.zeros(9))}
    return Surface({n: (i + 1) * z for i, n in enumerate(names)}, dict.fromkeys(names, z), 0, {}, x, y, models)


def interrupted(landscape: Surface) -> Surface:
    for values in landscape.loss.values():
        values.ravel()[100:] = np.nan
    return landscape


def line() -> Interpolation:
    g = np.linspace(-1, 2, 31)
    loss = {"train": 0.01 + np.exp(-8 * (g - 0.5) ** 2), "test": 0.02 + np.exp(-4 * (g - 0.5) ** 2)}
    return Interpolation(loss, {name: 1 / (1 + v) for name, v in loss.items()}, 0, {}, g)


def curves(scale: float) -> Perturbation:
    r = np.linspace(0, 1, 11)
    return Perturbation({"train": 0.1 + scale * np.arange(1, 6)[:, None] * r**2}, {}, 0, {}, r)


eigenvalues = np.append(np.geomspace(1e-3, 1e2, 40), [-0.1, 0])
FIGURES = {
    "contour": lambda: plots.plot_surface({"FedAvg": paraboloid(), "FedSAM": paraboloid(9)}),
    "contour-five": lambda: plots.plot_surface({c: paraboloid(names=("train",)) for c in "abcde"}),
    "3d": lambda: plots.plot_surface({"FedAvg": interrupted(paraboloid(names=("train",)))}, "3d"),
    "plane": lambda: plots.plot_plane(interrupted(paraboloid()), total=True),
    "plane-flat": lambda: plots.plot_plane(paraboloid(names=("client 3",), stretch=0.05)),
    "interpolation": lambda: plots.plot_interpolation({"": line()}, ("FedAvg", "FedGloSS")),
    "perturbation": lambda: plots.plot_perturbation({"FedAvg": curves(2), "FedSAM": curves(0.1)}),
    "spectrum": lambda: plots.plot_spectrum({"FedAvg": eigenvalues, "FedSAM": eigenvalues / 9}),
    "density": lambda: plots.plot_density({c: (GRID, np.exp(-k * GRID**2)) for k, c in enumerate(["a", "b"])}),
}


@pytest.mark.slow
def test_a_figure_is_written_the_same_again(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^figure = a int: give a Figure of matplotlib$"):
        save_figure(3, tmp_path / "a")  # type: ignore[arg-type]
    files = [save_figure(FIGURES["perturbation"](), tmp_path / name) for name in "ab"]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def texts(figure: Figure) -> list[Text]:
    return [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]


@pytest.mark.sampled(quick=12, slow=2)
@pytest.mark.parametrize("name", FIGURES)
def test_figure_is_fit_to_print(name: str, tmp_path: Path) -> None:
    figure = FIGURES[name]()
    pdf, png = save_figure(figure, tmp_path / "new" / "a.figure")
    assert [f.name for f in (pdf, png)] == ["a.figure.pdf", "a.figure.png"]
    content = pdf.read_bytes()
    assert content.startswith(b"%PDF-") and content.rstrip().endswith(b"%%EOF") and b"/Type3" not in content
    width, height = figure.get_size_inches()
    assert width in (COLUMN, PAGE) and height < 9
    with Image.open(png) as image:
        image.load()
        assert image.size == pytest.approx((300 * width, 300 * height), abs=1)
    assert {t.get_fontsize() >= 7 for t in texts(figure)} == {True}
    box = figure.get_tightbbox()  # whatever is drawn lies on the paper
    assert box.x0 > -0.01 and box.y0 > -0.01 and box.x1 < width + 0.01 and box.y1 < height + 0.01


@pytest.mark.parametrize("kind", ["contour", "3d"])
def test_models_side_by_side_share_colours_and_levels(kind: Any) -> None:
    surfaces = {"FedAvg": paraboloid(0.1), "FedSAM": paraboloid(30)}
    figure = plots.plot_surface({name: replace(landscape, models={}) for name, landscape in surfaces.items()}, kind)
    *panels, _ = figure.axes  # one bar
    titles = ["FedAvg, train", "FedSAM, train", "FedAvg, test", "FedSAM, test"]
    assert [axes.get_title() for axes in panels] == titles
    if kind == "3d":
        assert len({axes.get_zlim() for axes in panels}) == 1  # type: ignore[attr-defined]
    else:
        fills = [axes.collections[0] for axes in panels]
        assert len({tuple(fill.levels) for fill in fills}) == 1 and len({fill.get_clim() for fill in fills}) == 1
        assert all(axes.texts for axes in panels)


def test_contours_have_labels_unless_paths_would_cross_them() -> None:
    landscape = paraboloid(30, ("train",))
    drawn = [plots.plot_surface({"a": variant}).axes[0] for variant in (replace(landscape, models={}), landscape)]
    assert len(drawn[0].texts) >= 3 and not drawn[1].texts


def test_contours_have_no_label_that_the_edge_cuts() -> None:
    z = np.add.outer(8 * GRID, GRID)
    z[GRID < 0.9] = 0  # short lines along the upper edge
    axes = plots.plot_surface({"a": Surface({"train": z}, {}, 0, {}, GRID, GRID)}).axes[0]
    assert axes.texts and np.abs([text.get_position() for text in axes.texts]).max() < 0.8


@pytest.mark.parametrize("kind", ["contour", "3d"])
def test_levels_of_a_flat_model_differ(kind: Any) -> None:
    z = 1.92325 + 1e-7 * np.add.outer(GRID**2, GRID**2)
    figure = plots.plot_surface({"a": Surface({"train": z}, {}, 0, {}, GRID, GRID)}, kind)
    figure.draw_without_rendering()
    for axis in (figure.axes[-1].yaxis, *([figure.axes[0].zaxis] if kind == "3d" else [])):  # type: ignore[attr-defined]
        labels = [t.get_text() for t in axis.get_ticklabels()]
        assert len({*labels}) == len(labels) > 2
        assert [float(label) for label in labels] == pytest.approx(axis.get_ticklocs(), abs=1e-9, rel=0)


def test_a_sum_of_scaled_losses_has_an_even_scale() -> None:
    """It nears 0 where both losses are smallest; how near says nothing."""
    losses = {name: np.add.outer(GRID**2, (GRID - at) ** 2) for name, at in (("client 3", 0), ("train", 0.5))}
    figure = plots.plot_plane(Surface(losses, {}, 0, {}, GRID, GRID), total=True)
    norms = {axes.get_title(): type(axes.collections[0].norm).__name__ for axes in figure.axes if axes.get_title()}
    assert norms["sum"] == "Normalize"


def test_values_that_blow_up_do_not_hide_the_rest() -> None:
    z = np.outer(np.linspace(0.1, 1, 5), np.ones(5))
    z[0, 0], z[0, 1], z[4, 4] = 1e12, np.inf, np.nan  # the median is 0.55
    figure = plots.plot_surface({"a": Surface({"train": z}, {}, 0, {}, GRID, GRID)})
    low, high = figure.axes[0].collections[0].get_clim()
    assert low == pytest.approx(0.1) and high == pytest.approx(550)
    assert figure.axes[1].get_ylabel().startswith("loss, cut at")


def test_legend_shows_the_barrier_and_lines_differ_by_more_than_colour() -> None:
    figure = plots.plot_interpolation({"": line()})
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["train (barrier 0.865)", "test (barrier 0.632)"]
    one, two = figure.axes[0].lines[:2]
    assert one.get_linestyle() != two.get_linestyle() and one.get_marker() != two.get_marker()


@pytest.mark.slow
def test_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "landscapes.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})
    drawn = {"surface", "surface_3d", "plane", "interpolation", "perturbation"}
    assert {f.stem for f in tmp_path.glob("*.pdf")} == {f.stem for f in tmp_path.glob("*.png")} == drawn


@pytest.mark.slow
def test_matplotlib_is_loaded_only_to_draw() -> None:
    code = "import sys, fl_lightning.flatness.plots as p; print('matplotlib.figure' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
