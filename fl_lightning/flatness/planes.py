"""Planes in the weight space: where models lie in them, and the plane through three models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.core import require

Array = NDArray[np.float64]


def exact(v: Tensor) -> Tensor:
    """A vector in float64; on the CPU if its device is Apple's MPS, which has no float64."""
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
    """The points of a plane that are nearest to the given weights.

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
        away = w.to(basis) - origin.to(basis)
        coordinates.append((dual @ away).tolist())
        residual.append((away - dual @ away @ basis).norm().item())
    return Projection(np.array(coordinates), np.array(residual))


@dataclass(frozen=True, eq=False)
class Plane:
    """The plane through three models, with orthonormal directions (Garipov et al. 2018, ``plane.py``).

    For FedGMT's Fig. 6: w0 is the start of local training, w2 the end of FedAvg, w1 the end of FedGMT (the paper does
    not specify its three models). The loss over it is ``surface(model, loss, data, plane.origin, plane.directions,
    *plane.grid(), models=...)``.

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
        origin = exact(w0)
        u, v = w2.to(origin) - origin, w1.to(origin) - origin
        u = u / u.norm()
        aside = v.norm()
        for _ in range(2):  # once is not enough if the three are nearly on a line
            v = v - (u @ v) * u
        spans = bool(v.norm() > 1e-6 * aside)  # False, too, if u is NaN because w0 = w2
        require(spans, "models", "three on one line", "give three that span a plane")
        directions = torch.stack([u, v / v.norm()])
        corners = project(torch.stack([origin, w1.to(origin), w2.to(origin)]), origin, directions).coordinates
        return cls(origin, directions, corners)

    def project(self, weights: Tensor) -> Projection:
        """Places of models ``(d,)`` or ``(n, d)``, such as the iterates of a trajectory."""
        return project(weights, self.origin, self.directions)

    def grid(self, n: int = 21, margin: float = 0.2, include: Iterable[Projection] = ()) -> tuple[Array, Array]:
        """Coordinates of a grid around the three models and further ones.

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
