"""The privacy budget that rounds with Gaussian noise spend, by the package dp-accounting; the key of the noise."""

import hashlib
import math
import secrets
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core import UserError, imported
from fl_lightning.trainer.participation.samplers import BernoulliSampler, CohortSampler, UniformSampler
from fl_lightning.trainer.runtime.environment import quiet

Method = Literal["RDP", "PLD"]
LEAST_NOISE = 0.05
"""Smallest noise multiplier of the search."""
LARGE = 2.0 ** np.arange(11, 31)
"""Rényi orders beyond dp-accounting's, at which small epsilons have their minimum."""
WARNINGS = "absl"
"""Logger of the warnings about single Rényi orders that do not converge."""


@dataclass(frozen=True)
class Accountant:
    """Computes epsilon of a number of rounds; in each, the server releases sums of a random cohort with Gaussian noise.

    With `poisson`, each client takes part with probability ``size / m``, and neighbouring federations differ by one
    client that is added or removed. Otherwise the cohort has exactly ``size`` clients, and neighbouring federations
    differ by one client whose data are replaced, which moves a sum by twice the bound.

    Args:
        m: Number of clients, M.
        size: Expected size of a cohort: q M, or S.
        poisson: Whether the sampler draws each client independently.
        noise: Standard deviation of the noise, divided by the bound on a client's contribution to the sum.
        delta: δ, the probability with which the ε guarantee may fail.
        releases: Number of releases of a cohort in a round.
        method: RDP (Rényi; Mironov 2017; Wang et al. 2019) or PLD (privacy loss distributions), tighter and slower.
        rounds: Planned number of rounds. PLD is evaluated at fifty of them; a round in between gets the value of the
            next one.
    """

    m: int
    size: float
    poisson: bool
    noise: float
    delta: float
    releases: int = 1
    method: Method = "RDP"
    rounds: int = 1

    @property
    def adjacency(self) -> str:
        """How two neighbouring federations differ, in words."""
        return "one client added or removed" if self.poisson else "one client replaced"

    def epsilon(self, rounds: int) -> float:
        """Returns epsilon after a number of rounds; infinity without noise."""
        if not rounds or not self.noise:
            return math.inf if rounds else 0.0
        if self.method == "RDP":
            orders, spent = _divergences(self._event, self.poisson)
            return float(_dp_accounting().rdp.compute_epsilon(orders, spent * rounds, self.delta)[0])
        step = max(1, self.rounds // 50)
        return _pld(self._event, max(rounds, min(-(-rounds // step) * step, self.rounds)), self.delta)

    @lru_cache(maxsize=32)  # noqa: B019  small and frozen; runs of a process that differ in the seed share the search
    def least_noise(self, epsilon: float) -> float:
        """Returns the smallest noise, to 1e-4, with which the planned rounds stay within ``epsilon``.

        The first call of a process takes seconds.

        Raises:
            UserError: If no noise suffices.
        """
        dp = _dp_accounting()
        with quiet(WARNINGS):
            try:
                return float(
                    dp.calibrate_dp_mechanism(
                        lambda: SimpleNamespace(ledger=dp.NoOpDpEvent(), compose=lambda planned: planned),
                        lambda noise: SimpleNamespace(
                            get_epsilon=lambda _: replace(self, noise=noise).epsilon(self.rounds)
                        ),
                        epsilon,
                        self.delta,
                        dp.LowerEndpointAndGuess(LEAST_NOISE, 1.0),
                        tol=1e-4,
                    )
                )
            except (ValueError, ArithmeticError, dp.mechanism_calibration.NoBracketIntervalFoundError):
                raise UserError(
                    f"trainer.privacy.epsilon = {epsilon}: no noise multiplier from {LEAST_NOISE} on gives it over "
                    f"{self.rounds} rounds; give noise_multiplier"
                ) from None

    @property
    def _event(self) -> Any:
        """The event of one round, which uses each client at most once."""
        dp = _dp_accounting()
        shift = 1.0 if self.poisson else 2.0  # dp-accounting takes noise over the change between neighbours
        # all releases of a round come from one cohort: together they are one Gaussian mechanism on one sample
        event = dp.GaussianDpEvent(self.noise / (shift * math.sqrt(self.releases)))
        if self.poisson:
            return dp.PoissonSampledDpEvent(self.size / self.m, event) if self.size < self.m else event
        return dp.SampledWithoutReplacementDpEvent(self.m, int(self.size), event)


@lru_cache(maxsize=32)
def _divergences(event: Any, poisson: bool) -> tuple[Any, Any]:
    """Returns the orders, and the Rényi divergences of one round: at most those of the Gaussian without sampling.

    dp-accounting finds none, or none above 0, where a sum does not converge, and its bound without replacement may be
    the larger one.
    """
    with quiet(WARNINGS):
        accountant = _fresh("RDP", poisson).compose(event)
    orders = np.append(accountant.orders, LARGE)
    found = np.append(accountant.rdp, np.full(len(LARGE), np.inf))
    whole = orders / (2 * getattr(event, "event", event).noise_multiplier ** 2)
    return orders, np.where(found > 0, np.fmin(found, whole), whole)


@lru_cache(maxsize=256)
def _pld(event: Any, rounds: int, delta: float) -> float:
    return float(_fresh("PLD", poisson=True).compose(event, rounds).get_epsilon(delta))


def _fresh(method: Method, poisson: bool) -> Any:
    dp = _dp_accounting()
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE if poisson else dp.NeighboringRelation.REPLACE_ONE
    return (dp.rdp.RdpAccountant if method == "RDP" else dp.pld.PLDAccountant)(neighboring_relation=relation)


def cohorts(sampler: CohortSampler, m: int) -> dict[str, Any]:
    """Returns how a sampler draws clients, as arguments of `Accountant`.

    Args:
        sampler: Draws the cohorts.
        m: Number of clients.

    Raises:
        UserError: If the accountant knows no amplification by this sampling.
    """
    if type(sampler) is BernoulliSampler:
        return {"m": m, "size": sampler.p * m, "poisson": True}
    if type(sampler) is UniformSampler:
        return {"m": m - sampler.held_out, "size": float(sampler.clients_per_round), "poisson": False}
    raise UserError(
        f"trainer.sampler = {type(sampler).__name__}: trainer.privacy knows no epsilon of its cohorts; choose "
        "BernoulliSampler or UniformSampler"
    )


def _dp_accounting() -> Any:
    needs = "trainer.privacy: needs dp-accounting; pip install 'fl-lightning[privacy]'"
    package, *_ = [imported(f"dp_accounting{part}", needs) for part in ("", ".pld", ".rdp")]
    return package


BYTES = 32
"""Length of a key."""
BLOCK = 1 << 18
"""Numbers that are drawn at once; part of the stream's definition."""
FINENESS = 32
"""The grid's step is between 2^-33 and 2^-32 standard deviations, a power of two."""


@dataclass(frozen=True)
class NoiseKey:
    """The key of a run's noise. Who does not know it cannot tell the noise from independent normal numbers.

    SHAKE-256 (FIPS 202) of the key and the names of a draw gives the bits of this draw, so that no two draws of other
    names, or of another key, share any.

    Args:
        secret: The key, ``BYTES`` bytes; `repr` does not show it.
    """

    secret: bytes = field(repr=False)

    @classmethod
    def fresh(cls) -> "NoiseKey":
        """Returns a new key from the entropy of the operating system."""
        return cls(secrets.token_bytes(BYTES))

    @classmethod
    def of_seed(cls, seed: int) -> "NoiseKey":
        """Returns the key of a public seed, for tests and repeats: it protects nobody."""
        return cls(hashlib.shake_256(f"public seed {seed}".encode()).digest(BYTES))

    def bits(self, n: int, *names: int | str) -> bytes:
        """Returns ``n`` secret bytes, a function of key and names."""
        return hashlib.shake_256(self.secret + repr(names).encode()).digest(n)

    def integer(self, *names: int | str) -> int:
        """Returns a secret integer of 128 bits, a function of key and names."""
        return int.from_bytes(self.bits(16, *names), "little")

    def normal(self, n: int, *names: int | str) -> Tensor:
        """Returns independent standard normal numbers, ``(n,)``, float64 on the CPU: a function of key and names.

        Each is the cosine half of a Box-Muller pair and uses 128 bits of its own. The sine half, from which an attacker
        could compute these bits, is never released.
        """
        blocks = [box_muller(self.bits(16 * min(BLOCK, n - i), *names, i)) for i in range(0, n, BLOCK)]
        return torch.from_numpy(np.concatenate([np.zeros(0), *blocks]))


def box_muller(bits: bytes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Returns a standard normal number for each 16 bytes, float64."""
    words = np.frombuffer(bits, dtype="<u8").astype(np.float64).reshape(2, -1)
    radius, angle = (words[0] + 0.5) * 2.0**-64, words[1] * (2 * math.pi * 2.0**-64)
    # astype rounds the largest words to 2^64: the logarithm is then 0 as it should be, never above
    normal: np.ndarray[tuple[int], np.dtype[np.float64]] = np.sqrt(-2 * np.log(radius)) * np.cos(angle)
    return normal


def grid(std: float) -> float:
    """Returns the step of the grid for noise of this standard deviation: a power of two.

    A clipped upload, cut off to multiples of the step towards 0, is no longer than before. Sums of multiples, and of
    the noise's multiples, are exact in float64 up to 2^20 standard deviations. So the values that a release may take
    are the same for all data, and the low bits of a sum say nothing (Mironov, CCS 2012; "Secure Noise Generation" of
    Google's differential privacy library, to which dp-accounting belongs).
    """
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - FINENESS)


def cut(values: Tensor, step: float) -> Tensor:
    """Returns values cut off to multiples of a grid's step, towards 0."""
    return (values / step).trunc() * step


def rounded(values: Tensor, step: float) -> Tensor:
    """Returns values rounded to multiples of a grid's step."""
    return (values / step).round() * step
