"""The privacy budget that rounds with Gaussian noise spend, by the package dp-accounting."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

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
    divergences = np.append(accountant.rdp, np.full(len(LARGE), np.inf))
    unsampled = orders / (2 * getattr(event, "event", event).noise_multiplier ** 2)
    return orders, np.where(divergences > 0, np.fmin(divergences, unsampled), unsampled)


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
