"""Results of loss landscapes: losses and accuracies at points of the weight space, as rows and as plain values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.flatness.planes import Array, Projection


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
        """The coordinates of the points by name, each of the shape of a loss."""
        return {"point": np.arange(len(next(iter(self.loss.values()))))}

    def rows(self) -> list[dict[str, Any]]:
        """One row per point and data set, for a CSV file."""
        columns = self.columns()
        return [
            {"data": name, **dict(zip(columns, at, strict=True)), "loss": loss, "accuracy": accuracy}
            for name in self.loss
            for *at, loss, accuracy in zip(
                *(a.ravel().tolist() for a in (*columns.values(), self.loss[name], self.accuracy[name])), strict=True
            )
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file; non-finite numbers become None."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True, eq=False)
class Perturbation(Values):
    """Loss against the length of a perturbation; each loss is ``(1 + k, r)``, the gradient's direction first.

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
        """Mean loss over the random directions that were evaluated completely, ``(r,)``."""
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
        """As for :class:`Values`, with the barrier of each data set."""
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
    """Mappings, projections and arrays as JSON values."""
    if isinstance(value, Projection):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
