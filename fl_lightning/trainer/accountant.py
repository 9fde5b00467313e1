"""The privacy that rounds with Gaussian noise spend, by the package dp-accounting."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from fl_lightning.core import UserError, ensure
from fl_lightning.trainer.samplers import BernoulliSampler, CohortSampler, UniformSampler

Method = Literal["RDP", "PLD"]
LEAST_NOISE = 0.05
"""The smallest noise multiplier that is looked for."""


@dataclass(frozen=True)
class Accountant:
    """Epsilon of a number of rounds, in each of which a random cohort gives sums with Gaussian noise.

    With `poisson` a client takes part with probability ``size / m``, and its data are there or not (add or remove one).
    Otherwise the cohort has exactly ``size`` clients, and a client's data are replaced by any others (replace one):
    this moves a sum by twice the bound.

    Args:
        m: Number of clients, M.
        size: Expected size of a cohort: q M, or S.
        poisson: Whether the clients of a cohort are drawn independently of each other.
        noise: Standard deviation of the noise over the bound on what a client adds to the sum.
        delta: Probability that epsilon does not hold for.
        releases: Sums that a cohort gives in a round.
        method: RDP (Rényi; Mironov 2017; Wang et al. 2019) or PLD (privacy loss distributions), tighter and slower.
        rounds: Rounds that are planned. PLD is evaluated at fifty of them; between two it is that of the next.
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
        """What differs between two neighbouring federations."""
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

    def least_noise(self, epsilon: float) -> float:
        """Returns the smallest noise, to 1e-4, with which the planned rounds keep an epsilon.

        It takes seconds, the first time in a process.

        Raises:
            UserError: If none does.
        """
        return _least_noise(self, epsilon)

    @property
    def _event(self) -> Any:
        """What a round does, to one client at most once."""
        dp = _dp_accounting()
        shift = 1.0 if self.poisson else 2.0  # dp-accounting takes noise over the change between neighbours
        # the releases of a round are of one cohort: together one Gaussian mechanism on one sample
        event = dp.GaussianDpEvent(self.noise / (shift * math.sqrt(self.releases)))
        if self.poisson:
            return dp.PoissonSampledDpEvent(self.size / self.m, event) if self.size < self.m else event
        return dp.SampledWithoutReplacementDpEvent(self.m, int(self.size), event)


@lru_cache(maxsize=32)
def _least_noise(accountant: Accountant, epsilon: float) -> float:
    """Kept for the runs of a process that differ in other settings, such as the seed."""
    dp = _dp_accounting()
    with _quiet():
        try:
            found = dp.calibrate_dp_mechanism(
                lambda: _fresh(accountant.method, accountant.poisson),
                lambda noise: dp.SelfComposedDpEvent(replace(accountant, noise=noise)._event, accountant.rounds),
                epsilon,
                accountant.delta,
                dp.LowerEndpointAndGuess(LEAST_NOISE, 1.0),
                tol=1e-4,
            )
        except (ValueError, ArithmeticError, dp.mechanism_calibration.NoBracketIntervalFoundError):
            raise UserError(
                f"trainer.privacy.epsilon = {epsilon}: no noise multiplier from {LEAST_NOISE} on gives it over "
                f"{accountant.rounds} rounds; give noise_multiplier"
            ) from None
    return float(found)


@lru_cache(maxsize=32)
def _divergences(event: Any, poisson: bool) -> tuple[Any, Any]:
    """Orders, and the Rényi divergences of one round."""
    with _quiet():
        accountant = _fresh("RDP", poisson).compose(event)
    return accountant.orders, accountant.rdp


@lru_cache(maxsize=256)
def _pld(event: Any, rounds: int, delta: float) -> float:
    return float(_fresh("PLD", poisson=True).compose(event, rounds).get_epsilon(delta))


def _fresh(method: Method, poisson: bool) -> Any:
    dp = _dp_accounting()
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE if poisson else dp.NeighboringRelation.REPLACE_ONE
    return (dp.rdp.RdpAccountant if method == "RDP" else dp.pld.PLDAccountant)(neighboring_relation=relation)


def cohorts(sampler: CohortSampler, m: int) -> dict[str, Any]:
    """How a sampler draws a client, as arguments of `Accountant`.

    Args:
        sampler: Draws the cohorts.
        m: Number of clients.

    Raises:
        UserError: If no amplification by sampling is known for it.
    """
    if type(sampler) is BernoulliSampler:
        return {"m": m, "size": sampler.p * m, "poisson": True}
    if type(sampler) is UniformSampler:
        return {"m": m, "size": float(sampler.clients_per_round), "poisson": False}
    raise UserError(
        f"trainer.sampler = {type(sampler).__name__}: trainer.privacy knows no epsilon of its cohorts; choose "
        "BernoulliSampler or UniformSampler"
    )


def check_method(method: Method, poisson: bool) -> None:
    """Checks that a method covers the sampling.

    Raises:
        UserError: If it does not.
    """
    ensure(
        method == "RDP" or poisson,
        f"trainer.privacy.accountant = {method}: only of cohorts by BernoulliSampler; choose RDP for UniformSampler",
    )


def _dp_accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise UserError("trainer.privacy: needs dp-accounting; pip install 'fl-lightning[privacy]'") from None
    return dp_accounting


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of single orders of Rényi's divergence that do not converge, and are left out of a minimum."""
    log = logging.getLogger("absl")
    before, log.level = log.level, logging.ERROR
    try:
        yield
    finally:
        log.level = before
