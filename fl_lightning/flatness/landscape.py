"""Loss landscapes: the data loss along lines and over planes of the weight space.

Every function computes the mean loss F (see ``functional``) and the accuracy at many points, for one or more data sets
by name. Points are computed in float64 and rounded to the model's dtype. Weights are flat vectors ``(d,)``; buffers are
the model's own everywhere: BatchNorm's running statistics are not estimated at each point. The model is not changed.

``KeyboardInterrupt`` ends a measurement early: the result holds the points computed so far, the rest is NaN, and
``missing`` counts it. Before the first point it propagates.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from fl_lightning.core import FlatSpec, Interval, PositiveInt, checked, generator, require, to_radius
from fl_lightning.flatness.functional import Batches, Loss, Progress, Reduce, gradient, mean_losses
from fl_lightning.flatness.values import Array, Interpolation, Perturbation, Surface, Values, exact, project

Data = Mapping[str, Batches]
"""Data sets by name, such as ``{"train": ..., "test": ...}``; with several processes each one's share of every set."""


@checked
def evaluate(
    model: nn.Module,
    loss: Loss,
    data: Data,
    point: Callable[[int], Tensor],
    n: int,
    *,
    per_pass: PositiveInt = 4,
    reduce: Reduce | None = None,
    progress: Progress | None = None,
    protocol: Mapping[str, Any] | None = None,
    classes: int | None = None,
) -> Values:
    """Returns loss and accuracy at ``n`` points.

    Args:
        model: The network.
        loss: Per-sample losses.
        data: Data sets by name.
        point: Returns the flat weights of the i-th point, ``(d,)``; called in order, once per point.
        n: Number of points.
        per_pass: Number of points that share a pass over the data; use more if reading is slow. They are in memory
            together, and an interrupt loses at most this many. The results do not depend on it.
        reduce: Sums over the processes, as in :func:`~fl_lightning.flatness.mean_loss`.
        progress: Called after every pass over the data with the number of points done, and of all points.
        protocol: Stored in the result.
        classes: As in :func:`~fl_lightning.flatness.mean_losses`.

    Returns:
        The values; each loss and accuracy is ``(n,)``.

    Raises:
        UserError: If ``data`` or a data set is empty, ``n`` or ``per_pass`` is not positive, a point has not as many
            weights as the network, or ``loss`` does not return one value per sample.
    """
    require(len(data) > 0, "data", dict(data), "at least one data set")
    require(n >= 1, "points", n, "give at least 1")
    done = 0
    values = {name: np.full((2, n), np.nan) for name in data}
    try:
        while done < n:
            stop = min(done + per_pass, n)
            points = torch.stack([point(i) for i in range(done, stop)])
            measurements = {
                name: mean_losses(model, loss, batches, points, reduce=reduce, classes=classes)
                for name, batches in data.items()
            }
            for name, measured in measurements.items():
                values[name][:, done:stop] = torch.stack(measured).numpy()
            done = stop
            if progress is not None:
                progress(done, n)
    except KeyboardInterrupt:
        if not done:
            raise
    losses, accuracies = ({name: both[i] for name, both in values.items()} for i in range(2))
    return Values(losses, accuracies, n - done, dict(protocol or {}))


@checked
def perturbation_curves(
    model: nn.Module,
    loss: Loss,
    data: Data,
    at: Tensor | None = None,
    radii: ArrayLike | None = None,
    *,
    directions: Annotated[int, Interval("[2, inf)")] = 10,
    seed: int = 0,
    **options: Any,
) -> Perturbation:
    """Returns F(w + r d) against the length r of a perturbation (FedGF Fig. 5).

    The paper does not state its directions. Here the first is ∇F/‖∇F‖ of the first data set, so r is a distance; the
    others are random and filter-normalised, so r is relative to the filters' norms. The directions are the same for all
    data sets.

    Args:
        model: The network.
        loss: Per-sample losses.
        data: Data sets by name; the gradient is that of the first.
        at: w, ``(d,)``; by default the model's own.
        radii: r, ``(r,)``; by default 21 from 0 to 1.
        directions: Number of random directions k, at least 2.
        seed: Seed of the random directions, which are the same for all models of a net before normalisation.
        **options: ``per_pass``, ``reduce``, ``progress``, ``protocol`` and ``classes`` of :func:`evaluate`.

    Returns:
        The curves; each loss is ``(1 + k, r)``.

    Raises:
        UserError: As :func:`evaluate`, or if there are fewer than two directions.
    """
    require(len(data) > 0, "data", dict(data), "at least one data set")
    spec = FlatSpec(model)
    w = exact(spec.vector(model) if at is None else at)
    r = _numbers(np.linspace(0, 1, 21) if radii is None else radii)
    first = gradient(model, loss, next(iter(data.values())), w, reduce=options.get("reduce"))

    @lru_cache(maxsize=1)  # only one direction is in memory
    def direction(line: int) -> Tensor:
        if line == 0:
            return to_radius(exact(first), 1.0)
        return filter_normalized(random_direction(spec, seed, line - 1), w, spec)

    def point(i: int) -> Tensor:
        line, k = divmod(i, len(r))
        return w + float(r[k]) * direction(line).to(w)

    values = evaluate(model, loss, data, point, (1 + directions) * len(r), **options)
    return Perturbation(**_shaped(values, 1 + directions, len(r)), radii=r)


@checked
def interpolate(
    model: nn.Module,
    loss: Loss,
    data: Data,
    a: Tensor,
    b: Tensor,
    gammas: ArrayLike | None = None,
    **options: Any,
) -> Interpolation:
    """Returns the loss on the line through two models, at w = γ a + (1-γ) b (FedGloSS Eq. 8, Fig. 9).

    Args:
        model: The network.
        loss: Per-sample losses.
        data: Data sets by name.
        a: Weights of γ = 1, ``(d,)``.
        b: Weights of γ = 0, ``(d,)``.
        gammas: γ, ``(n,)``; by default 61 from -1 to 2. 0 and 1 are added if missing.
        **options: ``per_pass``, ``reduce``, ``progress``, ``protocol`` and ``classes`` of :func:`evaluate`.

    Returns:
        Values and barrier. The ends are measured first, so that an interrupted measurement has a barrier.

    Raises:
        UserError: As :func:`evaluate`, or if the models have different sizes.
    """
    g = np.union1d(_numbers(np.linspace(-1, 2, 61) if gammas is None else gammas).round(12), [0.0, 1.0])
    require(a.shape == b.shape, "b", f"{tuple(b.shape)}", f"a has {tuple(a.shape)}; give weights of one network")
    start = exact(b)
    order = np.argsort(~np.isin(g, [0.0, 1.0]), kind="stable")  # the ends first: the barrier needs them
    line = _affine(start, (a.to(start) - start)[None], g[order, None])
    return Interpolation(**_shaped(evaluate(model, loss, data, line, len(g), **options), len(g), order=order), gammas=g)


@checked
def surface(
    model: nn.Module,
    loss: Loss,
    data: Data,
    at: Tensor,
    directions: Tensor,
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    models: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Surface:
    """Returns the loss over a plane, at w + x d_1 + y d_2 (Li et al. 2018).

    To compare models, use :func:`random_plane` of each with the same seed. To compare a client's data with all data,
    pass two data sets at its local weights.

    Args:
        model: The network.
        loss: Per-sample losses.
        data: Data sets by name.
        at: w, ``(d,)``.
        directions: d_1 and d_2, ``(2, d)``: :func:`random_plane`, or those of a :class:`Plane`.
        x: Coordinates along d_1, ``(nx,)``; by default 51 from -1 to 1.
        y: Coordinates along d_2, ``(ny,)``; by default those of ``x``.
        models: Further models ``(d,)`` or trajectories ``(n, d)`` by name, which are projected into the plane.
        **options: ``per_pass``, ``reduce``, ``progress``, ``protocol`` and ``classes`` of :func:`evaluate`.

    Returns:
        The surface; each loss is ``(ny, nx)``.

    Raises:
        UserError: As :func:`evaluate`, if the directions are not two vectors of the size of w, or if they do not span a
            plane and there are models to project.
    """
    xs = _numbers(np.linspace(-1, 1, 51) if x is None else x)
    ys = xs if y is None else _numbers(y)
    require(directions.shape == (2, *at.shape), "directions", f"{tuple(directions.shape)}", f"give {(2, *at.shape)}")
    grid = np.stack([a.ravel() for a in np.meshgrid(xs, ys)], -1)
    projected = {name: project(w, at, directions) for name, w in (models or {}).items()}
    values = evaluate(model, loss, data, _affine(at, directions, grid), len(grid), **options)
    return Surface(**_shaped(values, len(ys), len(xs)), x=xs, y=ys, models=projected)


# Directions


def random_direction(spec: FlatSpec, seed: int, index: int) -> Tensor:
    """Draws a standard normal vector ``(d,)``, float64, on the CPU, from the net's size, seed and index only."""
    return torch.randn(spec.d, generator=generator(seed, "landscape", index), dtype=torch.float64)


def filter_normalized(direction: Tensor, w: Tensor, spec: FlatSpec) -> Tensor:
    """Returns the direction with each filter as long as the model's: d_f ‖w_f‖ / (‖d_f‖ + 1e-10).

    So do Li et al. 2018 and their program (``net_plotter.py``). A filter is one output of a tensor of two dimensions or
    more; the direction of other tensors (biases, scales of normalisation) becomes zero, as in all commands of that
    program's README (``biasbn``). This makes models comparable whose weights differ in scale.

    Args:
        direction: ``(..., d)``.
        w: Weights of the model, ``(d,)``.
        spec: Their layout.

    Returns:
        ``(..., d)``, float64, on the device of ``w``.
    """
    w, lead, parts = exact(w), direction.shape[:-1], []
    for d, filters in zip(spec.split(direction.to(w)).values(), spec.split(w).values(), strict=True):
        if filters.ndim > 1:
            rows, d = filters.flatten(1), d.reshape(*lead, len(filters), -1)
            d = d * (rows.norm(dim=-1, keepdim=True) / (d.norm(dim=-1, keepdim=True) + 1e-10))
        else:
            d = torch.zeros_like(d)
        parts.append(d.reshape(*lead, -1))
    return torch.cat(parts, -1)


@checked
def random_plane(spec: FlatSpec, w: Tensor, seed: int = 0) -> Tensor:
    """Returns two filter-normalised random directions, ``(2, d)``.

    The random numbers are the same for all models of a net; the lengths are those of each model's filters.
    """
    return filter_normalized(torch.stack([random_direction(spec, seed, index) for index in range(2)]), w, spec)


def _numbers(values: ArrayLike) -> Array:
    return np.atleast_1d(np.asarray(values, dtype=np.float64))


def _affine(at: Tensor, directions: Tensor, coordinates: Array) -> Callable[[int], Tensor]:
    """Returns the points at + Σ_j coordinates[i, j] directions[j], in float64, so that the ends of a line are exact."""
    origin = exact(at)
    basis, c = directions.to(origin), torch.from_numpy(coordinates).to(origin.device)
    return lambda i: origin + c[i] @ basis


def _shaped(values: Values, *shape: int, order: Any = slice(None)) -> dict[str, Any]:
    """Returns the fields of ``values``, each loss and accuracy reshaped; point i has the ``order[i]``-th place."""
    place = np.argsort(np.arange(np.prod(shape))[order])
    return {
        "loss": {name: v[place].reshape(shape) for name, v in values.loss.items()},
        "accuracy": {name: v[place].reshape(shape) for name, v in values.accuracy.items()},
        "missing": values.missing,
        "protocol": values.protocol,
    }
