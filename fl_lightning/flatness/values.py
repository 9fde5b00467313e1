"""Results of loss landscapes, and planes in the weight space, where models have places."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.core import json_values, require

Array = NDArray[np.float64]


def exact(v: Tensor) -> Tensor:
    """Returns a vector in float64; on the CPU if its device is Apple's MPS, which has no float64."""
    return (v.cpu() if v.device.type == "mps" else v).double()


@dataclass(frozen=True, eq=False)
class Projection:
    """Places of n models in a plane.

    Attributes:
        coordinates: ``(n, 2)``.
        residual: Distance of each model to the plane, in weight units, ``(n,)``.
    """

    coordinates: Array
    residual: Array


def project(weights: Tensor, origin: Tensor, directions: Tensor) -> Projection:
    """Returns the points of a plane that are nearest to the given weights.

    Args:
        weights: ``(d,)`` or ``(n, d)``.
        origin: ``(d,)``.
        directions: ``(2, d)``; they need not be orthogonal.

    Returns:
        Coordinates and residuals, in float64; n = 1 for a single model.

    Raises:
        UserError: If the directions are parallel or zero.
    """
    basis = exact(directions)
    gram = basis @ basis.T
    spans = bool(torch.linalg.det(gram) > 1e-12 * gram[0, 0] * gram[1, 1])
    require(spans, "directions", "parallel or zero", "give two that span a plane")
    dual = torch.linalg.solve(gram, basis)
    coordinates, residual = [], []
    for w in weights.reshape(-1, basis.shape[-1]):  # one at a time: a trajectory can be long
        offset = w.to(basis) - origin.to(basis)
        coordinates.append((dual @ offset).tolist())
        residual.append((offset - dual @ offset @ basis).norm().item())
    return Projection(np.array(coordinates), np.array(residual))


@dataclass(frozen=True, eq=False)
class Plane:
    """The plane through three models, with orthonormal directions (Garipov et al. 2018, ``plane.py``).

    FedGMT's Fig. 6 has such a plane; the paper does not specify its three models. ``fl-lightning landscape`` takes as
    w0 the start of local training, as w1 the end of FedGMT, and as w2 the end of FedAvg. The loss over it is
    ``surface(model, loss, data, plane.origin, plane.directions, *plane.grid(), models=...)``.

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
    def through(cls, w0: Tensor, w1: Tensor, w2: Tensor) -> "Plane":
        """Returns the plane through three models, each ``(d,)``.

        Raises:
            UserError: If they lie on one line.
        """
        origin = exact(w0)
        u, v = w2.to(origin) - origin, w1.to(origin) - origin
        u, v_norm = u / u.norm(), v.norm()
        for _ in range(2):  # once is not enough if the three are nearly on a line
            v = v - (u @ v) * u
        # False, too, if u is NaN because w0 = w2
        require(bool(v.norm() > 1e-6 * v_norm), "models", "three on one line", "give three that span a plane")
        directions = torch.stack([u, v / v.norm()])
        corners = project(torch.stack([origin, w1.to(origin), w2.to(origin)]), origin, directions).coordinates
        return cls(origin, directions, corners)

    def project(self, weights: Tensor) -> Projection:
        """Returns the places of models ``(d,)`` or ``(n, d)``, such as the iterates of a trajectory."""
        return project(weights, self.origin, self.directions)

    def grid(self, n: int = 21, margin: float = 0.2, include: Iterable[Projection] = ()) -> tuple[Array, Array]:
        """Returns coordinates of a grid around the three models and further ones.

        Args:
            n: Number of points in each direction.
            margin: Added at each end, as a share of the extent: 0.2 gives Garipov's -0.2 to 1.2 (if w1 lies between w0
                and w2 along u).
            include: Further models or trajectories.

        Returns:
            x ``(n,)`` and y ``(n,)``, in weight units.
        """
        points = np.concatenate([self.corners, *(p.coordinates for p in include)])
        low, high = points.min(0), points.max(0)
        low, high = low - margin * (high - low), high + margin * (high - low)
        return np.linspace(low[0], high[0], n), np.linspace(low[1], high[1], n)


@dataclass(frozen=True, eq=False)
class Values:
    """Loss and accuracy at points of the weight space.

    Attributes:
        loss: The mean loss by data set, float64; NaN where it was not computed.
        accuracy: The share of samples classified correctly, likewise; NaN throughout if the network's outputs are not
            scores of classes.
        missing: Number of points that were not evaluated because of an interrupt.
        protocol: The caller's description of the measurement: data and split, samples, seed and so on.
    """

    loss: Mapping[str, Array]
    accuracy: Mapping[str, Array]
    missing: int
    protocol: Mapping[str, Any]

    def columns(self) -> dict[str, NDArray[Any]]:
        """Returns the coordinates of the points by name, each of the shape of a loss."""
        return {"point": np.arange(len(next(iter(self.loss.values()))))}

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row per point and data set, for a CSV file."""
        columns = self.columns()
        return [
            {"data": name, **dict(zip(columns, at, strict=True)), "loss": loss, "accuracy": accuracy}
            for name in self.loss
            for *at, loss, accuracy in zip(
                *(a.ravel().tolist() for a in (*columns.values(), self.loss[name], self.accuracy[name])), strict=True
            )
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for a JSON file; non-finite numbers become None."""
        return dict(json_values(self))


@dataclass(frozen=True, eq=False)
class Perturbation(Values):
    """Loss against the length of a perturbation; each loss is ``(1 + k, r)``, the gradient's direction first.

    Attributes:
        radii: ``(r,)``.
    """

    radii: Array

    def columns(self) -> dict[str, NDArray[Any]]:
        """Returns direction and radius, each ``(1 + k, r)``."""
        random = range(len(next(iter(self.loss.values()))) - 1)
        names = np.array(["gradient", *(f"random {i}" for i in random)])
        return dict(zip(("direction", "radius"), np.meshgrid(names, self.radii, indexing="ij"), strict=True))

    def along_gradient(self, name: str) -> Array:
        """Returns the loss along the gradient, ``(r,)``."""
        return np.asarray(self.loss[name][0])

    def mean(self, name: str) -> Array:
        """Returns the mean loss over the random directions that were evaluated completely, ``(r,)``."""
        return self._over_random(name, lambda losses: losses.mean(0), least=1)

    def spread(self, name: str) -> Array:
        """Returns the sample standard deviation of the loss over these directions, ``(r,)``."""
        return self._over_random(name, lambda losses: losses.std(0, ddof=1), least=2)

    def _over_random(self, name: str, statistic: Callable[[Array], Array], least: int) -> Array:
        lines = self.loss[name]
        complete = lines[1 : (lines.size - self.missing) // len(self.radii)]
        return statistic(complete) if len(complete) >= least else np.full(len(self.radii), np.nan)


@dataclass(frozen=True, eq=False)
class Interpolation(Values):
    """Loss on the line through two models b (γ = 0) and a (γ = 1); each loss is ``(n,)``.

    Attributes:
        gammas: ``(n,)``, ascending, 0 and 1 among them.
    """

    gammas: Array

    def columns(self) -> dict[str, NDArray[Any]]:
        """Returns γ, ``(n,)``."""
        return {"gamma": self.gammas}

    def barrier(self, name: str) -> float:
        """Returns the maximum over γ in [0, 1] of L(γ) - (γ L(1) + (1-γ) L(0)), 0 if the loss is never above the line.

        After an interrupt it is that of the points measured, and NaN if an end is not among them.
        """
        between = (self.gammas >= 0) & (self.gammas <= 1)
        g, loss = self.gammas[between], self.loss[name][between]
        excess = loss - (g * loss[-1] + (1 - g) * loss[0])
        return float(np.nanmax(excess) if self.missing and np.isfinite(loss[[0, -1]]).all() else np.max(excess))

    def to_dict(self) -> dict[str, Any]:
        """Returns what :class:`Values` does, and the barrier of each data set."""
        return {**super().to_dict(), "barrier": {name: json_values(self.barrier(name)) for name in self.loss}}


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
        """Returns x and y, each ``(ny, nx)``."""
        return dict(zip(("x", "y"), np.meshgrid(self.x, self.y), strict=True))

    def normalized_sum(self) -> Array:
        """Returns the sum over the data sets of the loss, scaled to [0, 1] here (FedGMT Fig. 6c), ``(ny, nx)``.

        A loss that is the same everywhere adds 0.
        """
        scaled = [(z - np.nanmin(z)) / (np.nanmax(z) - np.nanmin(z) or 1.0) for z in self.loss.values()]
        return np.asarray(np.sum(scaled, axis=0))
