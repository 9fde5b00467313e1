"""Loss landscapes: the data loss along lines and over planes of the weight space.

Everything here is the mean loss F (see ``functional``) and the accuracy at many points, for one or more data sets by
name. Points are made in float64 and rounded to the model's dtype. Weights are flat vectors ``(d,)``; buffers are the
model's own everywhere, so BatchNorm's running statistics are not estimated anew. The model is left as it was.

``KeyboardInterrupt`` ends a measurement early: what was computed is returned, the rest is NaN, and ``missing`` says how
many points that are. Before the first point it is raised as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from fl_lightning.core.errors import require
from fl_lightning.core.flat import FlatSpec, to_radius
from fl_lightning.core.rng import generator
from fl_lightning.flatness.functional import Batches, Loss, Progress, Reduce, gradient, mean_losses

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11

Array = NDArray[np.float64]

Data = Mapping[str, Batches]
"""Data sets by name, such as ``{"train": ..., "test": ...}``; of many processes each one's share of every set."""


# Results


@dataclass(frozen=True, eq=False)
class Projection:
    """Where models lie in a plane.

    Attributes:
        coordinates: ``(n, 2)``.
        residual: Distance of each to the plane, in weight units, ``(n,)``.
    """

    coordinates: Array
    residual: Array


@dataclass(frozen=True, eq=False)
class Values:
    """Loss and accuracy at points of the weight space.

    Attributes:
        loss: The mean loss by data set, float64; NaN where it was not computed.
        accuracy: The share of samples classified rightly, likewise; NaN throughout if the network gives no scores of
            classes.
        missing: Number of points that were not evaluated because of an interrupt.
        protocol: What the caller says of the measurement: data and split, samples, seed and so on.
    """

    loss: Mapping[str, Array]
    accuracy: Mapping[str, Array]
    missing: int
    protocol: Mapping[str, Any]

    def columns(self) -> dict[str, NDArray[Any]]:
        """The coordinates of each point, every one of the shape of a loss."""
        return {"point": np.arange(len(next(iter(self.loss.values()))))}

    def rows(self) -> list[dict[str, Any]]:
        """One row for every point and data set, for a CSV file."""
        columns = self.columns()
        return [
            {"data": name, **dict(zip(columns, at, strict=True)), "loss": loss, "accuracy": accuracy}
            for name in self.loss
            for *at, loss, accuracy in zip(
                *(a.ravel().tolist() for a in (*columns.values(), self.loss[name], self.accuracy[name])), strict=True
            )
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file; numbers that are not finite become None."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True, eq=False)
class Perturbation(Values):
    """Loss against the length of a perturbation; each loss is ``(1 + k, r)``: the gradient's direction first.

    Attributes:
        radii: ``(r,)``.
    """

    radii: Array

    def columns(self) -> dict[str, NDArray[Any]]:
        """Direction and radius, each ``(1 + k, r)``."""
        lines = len(next(iter(self.loss.values())))
        names = np.array(["gradient", *(f"random {i}" for i in range(lines - 1))])
        direction, radius = np.meshgrid(names, self.radii, indexing="ij")
        return {"direction": direction, "radius": radius}

    def along_gradient(self, name: str) -> Array:
        """The loss along the gradient, ``(r,)``."""
        line: Array = self.loss[name][0]
        return line

    def mean(self, name: str) -> Array:
        """Mean loss over the random directions that were evaluated to their end, ``(r,)``."""
        return self._over_random(name, lambda losses: losses.mean(0), least=1)

    def spread(self, name: str) -> Array:
        """Sample standard deviation of the loss over these directions, ``(r,)``."""
        return self._over_random(name, lambda losses: losses.std(0, ddof=1), least=2)

    def _over_random(self, name: str, statistic: Callable[[Array], Array], least: int) -> Array:
        lines = self.loss[name]
        complete = lines[1 : (lines.size - self.missing) // len(self.radii)]
        unknown: Array = self.radii * np.nan
        return statistic(complete) if len(complete) >= least else unknown


@dataclass(frozen=True, eq=False)
class Interpolation(Values):
    """Loss on the line through two models b (γ = 0) and a (γ = 1); each loss is ``(n,)``.

    Attributes:
        gammas: ``(n,)``, ascending, 0 and 1 among them.
    """

    gammas: Array

    def columns(self) -> dict[str, NDArray[Any]]:
        """γ, ``(n,)``."""
        return {"gamma": self.gammas}

    def barrier(self, name: str) -> float:
        """Max over γ in [0, 1] of L(γ) - (γ L(1) + (1-γ) L(0)), over the points measured; 0 if there is none."""
        between = (self.gammas >= 0) & (self.gammas <= 1)
        g, loss = self.gammas[between], self.loss[name][between]
        return float(np.max(loss - (g * loss[-1] + (1 - g) * loss[0])))

    def to_dict(self) -> dict[str, Any]:
        """As ever, with the barrier of each data set."""
        return {**super().to_dict(), "barrier": {name: _plain(self.barrier(name)) for name in self.loss}}


@dataclass(frozen=True, eq=False)
class Surface(Values):
    """Loss over a grid of a plane; each loss is ``(len(y), len(x))``.

    Attributes:
        x: Coordinates along the first direction, ``(nx,)``.
        y: Coordinates along the second, ``(ny,)``.
        models: Models and trajectories by name, projected into the plane.
    """

    x: Array
    y: Array
    models: Mapping[str, Projection] = field(default_factory=dict)

    def columns(self) -> dict[str, NDArray[Any]]:
        """X and y, each ``(ny, nx)``."""
        x, y = np.meshgrid(self.x, self.y)
        return {"x": x, "y": y}

    def normalized_sum(self) -> Array:
        """Sum over the data sets of the loss scaled to [0, 1] on this grid (FedGMT Fig. 6c), ``(ny, nx)``."""
        scaled = [(z - np.nanmin(z)) / (np.nanmax(z) - np.nanmin(z)) for z in self.loss.values()]
        total: Array = np.sum(scaled, axis=0)
        return total


def _plain(value: Any) -> Any:
    """Arrays, mappings and dataclasses as what JSON knows."""
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, Projection):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray):
        return [_plain(v) for v in value] if value.ndim > 1 else [_plain(v) for v in value.tolist()]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


# Directions


def random_direction(spec: FlatSpec, seed: int, index: int) -> Tensor:
    """A standard normal vector ``(d,)``, float64, on the CPU; it depends on the net's size, seed and index only."""
    return torch.randn(spec.d, generator=generator(seed, "landscape", index), dtype=torch.float64)


def filter_normalized(direction: Tensor, w: Tensor, spec: FlatSpec, *, keep_vectors: bool = False) -> Tensor:
    """The direction with each filter as long as the model's: d_f ‖w_f‖ / (‖d_f‖ + 1e-10).

    Li et al. 2018 and their program (``net_plotter.py``): a filter is one output of a tensor of two dimensions or more.
    Thereby models whose weights differ in scale can be compared.

    Args:
        direction: ``(..., d)``.
        w: Weights of the model, ``(d,)``.
        spec: Their layout.
        keep_vectors: What becomes of tensors of one dimension or none (biases, scales of normalisation): False: zero,
            as in all commands of that program's README (``biasbn``); True: the tensor of ``w`` itself, as without it.

    Returns:
        ``(..., d)``, float64, on the device of ``w``.
    """
    w = w.double()
    direction = direction.to(w)
    parts = []
    weights = spec.split(w)
    for name, d in spec.split(direction).items():
        lead, filters = direction.shape[:-1], weights[name]
        if filters.ndim <= 1:
            part = filters.expand_as(d) if keep_vectors else torch.zeros_like(d)
        else:
            rows, d = filters.flatten(1), d.reshape(*lead, len(filters), -1)
            part = d * (rows.norm(dim=-1, keepdim=True) / (d.norm(dim=-1, keepdim=True) + 1e-10))
        parts.append(part.reshape(*lead, -1))
    return torch.cat(parts, -1)


def random_plane(spec: FlatSpec, w: Tensor, seed: int = 0) -> Tensor:
    """Two filter-normalised random directions, ``(2, d)``.

    The random numbers are the same for all models of a net; their lengths are those of each model's filters.
    """
    return filter_normalized(torch.stack([random_direction(spec, seed, index) for index in range(2)]), w, spec)


# Measurements


class Options(TypedDict, total=False):
    """What every measurement takes by name and hands to :func:`evaluate`, where it is described."""

    per_pass: int
    reduce: Reduce | None
    progress: Progress | None
    protocol: Mapping[str, Any] | None


def evaluate(
    model: nn.Module,
    loss: Loss,
    data: Data,
    point: Callable[[int], Tensor],
    n: int,
    *,
    per_pass: int = 4,
    reduce: Reduce | None = None,
    progress: Progress | None = None,
    protocol: Mapping[str, Any] | None = None,
) -> Values:
    """Loss and accuracy at ``n`` points.

    Args:
        model: The network.
        loss: Per-sample losses.
        data: Data sets by name.
        point: Flat weights of the i-th point, ``(d,)``; asked for in order, once each.
        n: Number of points.
        per_pass: Points that share a pass over the data: more where reading takes long. They are in memory together,
            and an interrupt loses at most so many. The numbers do not depend on it.
        reduce: Sums up over the processes, as in :func:`~fl_lightning.flatness.mean_loss`.
        progress: Told after every pass over the data how many points are done, and of how many.
        protocol: Kept with the result.

    Returns:
        The values; each loss and accuracy is ``(n,)``.

    Raises:
        UserError: If ``data`` or a data set is empty, ``n`` or ``per_pass`` is not positive, a point has not as many
            weights as the network, or ``loss`` does not return one value per sample.
    """
    require(len(data) > 0, "data", dict(data), "at least one data set")
    require(per_pass >= 1, "per_pass", per_pass, "at least 1")
    require(n >= 1, "points", n, "at least 1")
    d, done = FlatSpec(model).d, 0
    values = {name: np.full((2, n), np.nan) for name in data}
    try:
        while done < n:
            until = min(done + per_pass, n)
            points = torch.stack([point(i) for i in range(done, until)])
            require(points.shape[1:] == (d,), "weights", f"{tuple(points.shape[1:])}", f"the network has ({d},)")
            found = {name: mean_losses(model, loss, batches, points, reduce=reduce) for name, batches in data.items()}
            for name, measured in found.items():
                values[name][:, done:until] = torch.stack(measured)
            done = until
            if progress is not None:
                progress(done, n)
    except KeyboardInterrupt:
        if not done:
            raise
    losses, accuracies = ({name: both[i] for name, both in values.items()} for i in range(2))
    return Values(losses, accuracies, n - done, dict(protocol or {}))


def along(
    model: nn.Module,
    loss: Loss,
    data: Data,
    at: Tensor,
    direction: Tensor,
    radii: ArrayLike,
    **options: Unpack[Options],
) -> Values:
    """F(w + r d) on a line.

    Args:
        model: The network.
        loss: Per-sample losses.
        data: Data sets by name.
        at: w, ``(d,)``.
        direction: d, ``(d,)``, of any length.
        radii: r, ``(n,)``, in units of the direction's length.
        **options: As of :func:`evaluate`.

    Returns:
        The values, each ``(n,)``.

    Raises:
        UserError: As :func:`evaluate`.
    """
    r = _numbers(radii)
    return evaluate(model, loss, data, _affine(at, direction[None], r[:, None]), len(r), **options)


def perturbation_curves(
    model: nn.Module,
    loss: Loss,
    data: Data,
    at: Tensor | None = None,
    radii: ArrayLike | None = None,
    *,
    directions: int = 10,
    seed: int = 0,
    **options: Unpack[Options],
) -> Perturbation:
    """Loss against the length of a perturbation (FedGF Fig. 5): F(w + r d), along the gradient and random directions.

    The paper does not state its directions. Here the first is ∇F/‖∇F‖ of the first data set, so that r is a distance;
    the others are random and filter-normalised, so that r is relative to the filters' norms. All data sets are
    measured in the same directions.

    Args:
        model: The network.
        loss: Per-sample losses.
        data: Data sets by name; the gradient is that of the first.
        at: w, ``(d,)``; by default the model's own.
        radii: r, ``(r,)``; by default 21 from 0 to 1.
        directions: Number of random directions k, at least 2.
        seed: Of the random directions; they are the same for all models of a net, before they are normalised.
        **options: As of :func:`evaluate`.

    Returns:
        The curves; each loss is ``(1 + k, r)``.

    Raises:
        UserError: As :func:`evaluate`, or if there are fewer than two directions.
    """
    require(directions >= 2, "directions", directions, "at least 2, for their spread")
    require(len(data) > 0, "data", dict(data), "at least one data set")
    spec = FlatSpec(model)
    w = (spec.vector(model) if at is None else at).double()
    r = _numbers(np.linspace(0, 1, 21) if radii is None else radii)
    first = gradient(model, loss, next(iter(data.values())), w, reduce=options.get("reduce"))

    @lru_cache(maxsize=1)  # one direction at a time is in memory
    def direction(line: int) -> Tensor:
        if line == 0:
            return to_radius(first.double(), 1.0)
        return filter_normalized(random_direction(spec, seed, line - 1), w, spec)

    def point(i: int) -> Tensor:
        line, k = divmod(i, len(r))
        return w + float(r[k]) * direction(line).to(w)

    values = evaluate(model, loss, data, point, (1 + directions) * len(r), **options)
    return Perturbation(**_shaped(values, 1 + directions, len(r)), radii=r)


def interpolate(
    model: nn.Module,
    loss: Loss,
    data: Data,
    a: Tensor,
    b: Tensor,
    gammas: ArrayLike | None = None,
    **options: Unpack[Options],
) -> Interpolation:
    """Loss on the line through two models, at w = γ a + (1-γ) b (FedGloSS Eq. 8, Fig. 9).

    Args:
        model: The network.
        loss: Per-sample losses.
        data: Data sets by name.
        a: Weights of γ = 1, ``(d,)``.
        b: Weights of γ = 0, ``(d,)``.
        gammas: γ, ``(n,)``; by default 61 from -1 to 2. 0 and 1 are added if they are not among them.
        **options: As of :func:`evaluate`.

    Returns:
        Values and barrier.

    Raises:
        UserError: As :func:`evaluate`.
    """
    given = _numbers(np.linspace(-1, 2, 61) if gammas is None else gammas)
    g = np.union1d(given.round(12), [0.0, 1.0])
    start = b.double()
    values = evaluate(model, loss, data, _affine(start, (a.to(start) - start)[None], g[:, None]), len(g), **options)
    return Interpolation(**_shaped(values, len(g)), gammas=g)


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
    **options: Unpack[Options],
) -> Surface:
    """Loss over a plane, at w + x d_1 + y d_2 (Li et al. 2018).

    To compare models, use :func:`random_plane` of each with the same seed. A local model on its own and on all data:
    two data sets at the local weights.

    Args:
        model: The network.
        loss: Per-sample losses.
        data: Data sets by name.
        at: w, ``(d,)``.
        directions: d_1 and d_2, ``(2, d)``: :func:`random_plane`, or those of a :class:`Plane`.
        x: Coordinates along d_1, ``(nx,)``; by default 51 from -1 to 1.
        y: Coordinates along d_2, ``(ny,)``; by default those of ``x``.
        models: Further models ``(d,)`` or trajectories ``(n, d)`` by name, to be projected into the plane.
        **options: As of :func:`evaluate`.

    Returns:
        The surface; each loss is ``(ny, nx)``.

    Raises:
        UserError: As :func:`evaluate`, or if the directions do not span a plane and there are models to project.
    """
    xs = _numbers(np.linspace(-1, 1, 51) if x is None else x)
    ys = xs if y is None else _numbers(y)
    grid = np.stack([a.ravel() for a in np.meshgrid(xs, ys)], -1)
    projected = {name: project(w, at, directions) for name, w in (models or {}).items()}
    values = evaluate(model, loss, data, _affine(at, directions, grid), len(grid), **options)
    return Surface(**_shaped(values, len(ys), len(xs)), x=xs, y=ys, models=projected)


def project(weights: Tensor, origin: Tensor, directions: Tensor) -> Projection:
    """The points of a plane that are nearest to given weights.

    Args:
        weights: ``(d,)`` or ``(n, d)``.
        origin: ``(d,)``.
        directions: ``(2, d)``; they need not be orthogonal.

    Returns:
        Coordinates and residuals, in float64; of one model with n = 1.

    Raises:
        UserError: If the directions are parallel or zero.
    """
    basis = directions.double()
    gram = basis @ basis.T
    spans = bool(torch.linalg.det(gram) > 1e-12 * gram[0, 0] * gram[1, 1])
    require(spans, "directions", "parallel or zero", "give two that span a plane")
    dual = torch.linalg.solve(gram, basis)
    coordinates, residual = [], []
    for w in weights.reshape(-1, basis.shape[-1]):  # one at a time: a trajectory can be long
        away = w.to(basis) - origin.to(basis)
        coordinates.append((dual @ away).tolist())
        residual.append((away - dual @ away @ basis).norm().item())
    return Projection(np.array(coordinates), np.array(residual))


@dataclass(frozen=True, eq=False)
class Plane:
    """The plane through three models, with orthonormal directions (Garipov et al. 2018, ``plane.py``).

    For FedGMT's Fig. 6: w0 the model that local training starts from, w2 where FedAvg ends, w1 where FedGMT does. (The
    paper does not say which three it took.) The loss over it is ``surface(model, loss, data, plane.origin,
    plane.directions, *plane.grid(), models=...)``.

    Attributes:
        origin: w0, ``(d,)``, float64.
        directions: u = (w2-w0)/‖w2-w0‖ and v, the part of w1-w0 that is orthogonal to u, normalised; ``(2, d)``,
            float64.
        corners: Coordinates of w0, w1, w2, in weight units, ``(3, 2)``.
    """

    origin: Tensor
    directions: Tensor
    corners: Array

    @classmethod
    def through(cls, w0: Tensor, w1: Tensor, w2: Tensor) -> Plane:
        """The plane through three models, each ``(d,)``.

        Raises:
            UserError: If they lie on one line.
        """
        origin = w0.double()
        u, v = w2.to(origin) - origin, w1.to(origin) - origin
        u = u / u.norm()
        aside = v.norm()
        for _ in range(2):  # once is not enough if the three are nearly on a line
            v = v - (u @ v) * u
        spans = bool(v.norm() > 1e-6 * aside)  # not so, either, if u is NaN because w0 = w2
        require(spans, "models", "three on one line", "give three that span a plane")
        directions = torch.stack([u, v / v.norm()])
        corners = project(torch.stack([origin, w1.to(origin), w2.to(origin)]), origin, directions).coordinates
        return cls(origin, directions, corners)

    def project(self, weights: Tensor) -> Projection:
        """Where models ``(d,)`` or ``(n, d)`` lie, such as the iterates of a trajectory."""
        return project(weights, self.origin, self.directions)

    def grid(
        self, n: int = 21, margin: float = 0.2, include: Iterable[Projection] = ()
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Coordinates of a grid around the three models, and around what else is to be seen.

        Args:
            n: Points in each direction.
            margin: Added at each end, as a share of the extent: 0.2 gives Garipov's -0.2 to 1.2 (where w1 lies between
                w0 and w2 along u).
            include: Further models or trajectories.

        Returns:
            x ``(n,)`` and y ``(n,)``, in weight units.
        """
        points = np.concatenate([self.corners, *(p.coordinates for p in include)])
        low, high = points.min(0), points.max(0)
        low, high = low - margin * (high - low), high + margin * (high - low)
        return np.linspace(low[0], high[0], n), np.linspace(low[1], high[1], n)


def _numbers(values: ArrayLike) -> Array:
    return np.atleast_1d(np.asarray(values, dtype=np.float64))


def _affine(at: Tensor, directions: Tensor, coordinates: Array) -> Callable[[int], Tensor]:
    """The points at + Σ_j coordinates[i, j] directions[j], in float64: so that no end of a line is off by rounding."""
    origin = at.double()
    basis, c = directions.to(origin), torch.from_numpy(coordinates).to(origin.device)
    return lambda i: origin + c[i] @ basis


def _shaped(values: Values, *shape: int) -> dict[str, Any]:
    """The fields of ``values``, each loss and accuracy of another shape."""
    return {
        "loss": {name: v.reshape(shape) for name, v in values.loss.items()},
        "accuracy": {name: v.reshape(shape) for name, v in values.accuracy.items()},
        "missing": values.missing,
        "protocol": values.protocol,
    }
