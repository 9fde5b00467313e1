"""Samplers of cohorts: the same cohort on every process, a function of (seed, round)."""

import json
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.core import UserError, ensure, numpy_generator, require


class CohortSampler:
    """Base of the samplers; a subclass defines ``__call__``."""

    def check(self, rounds: int, m: int) -> None:
        """Checks that every cohort can be drawn, before anything is trained.

        Args:
            rounds: Rounds of the run.
            m: Number of clients.

        Raises:
            UserError: If a round's cohort cannot be drawn.
        """

    def __call__(self, t: int, m: int, seed: int) -> list[int]:
        """Ids of the cohort of round ``t`` among ``m`` clients."""
        raise TypeError(f"{type(self).__name__} must define __call__")


class UniformSampler(CohortSampler):
    """Exactly ``clients_per_round`` clients, without replacement.

    Args:
        clients_per_round: Size of the cohort, S.
    """

    def __init__(self, clients_per_round: int = 10) -> None:
        require(clients_per_round >= 1, "trainer.clients_per_round", clients_per_round, "at least 1")
        self.clients_per_round = clients_per_round

    def check(self, rounds: int, m: int) -> None:
        ensure(
            self.clients_per_round <= m,
            f"trainer.clients_per_round = {self.clients_per_round}, but there are only {m} clients: "
            f"take at most {m}, or raise data.num_clients",
        )

    def __call__(self, t: int, m: int, seed: int) -> list[int]:
        draw = numpy_generator(seed, "cohort", t).choice(m, self.clients_per_round, replace=False, shuffle=False)
        return sorted(draw.tolist())


class BernoulliSampler(CohortSampler):
    """Each client with probability ``p``, redrawn if the cohort is empty (FL-Simulator).

    Args:
        p: Probability of participation.
    """

    def __init__(self, p: float = 0.1) -> None:
        require(0 < p <= 1, "trainer.sampler.p", p, "must be above 0 and at most 1")
        self.p = p

    def check(self, rounds: int, m: int) -> None:
        if self.p * m < 1e-3:
            raise UserError(
                f"trainer.sampler.p = {self.p}: with {m} clients almost all cohorts would be empty; raise it"
            )

    def __call__(self, t: int, m: int, seed: int) -> list[int]:
        generator = numpy_generator(seed, "cohort", t)
        while not (cohort := (generator.random(m) < self.p).nonzero()[0].tolist()):
            pass
        return list(cohort)


class ReplaySampler(CohortSampler):
    """Replays a participation trace.

    Args:
        rounds: The cohorts, round by round; or a JSON file that holds such a list of lists.

    Raises:
        UserError: If the file is missing or of another format.
    """

    def __init__(self, rounds: list[list[int]] | str) -> None:
        given = read_trace(rounds, "trainer.sampler.rounds") if isinstance(rounds, str) else rounds
        self.rounds: Sequence[Sequence[int]] = given

    def check(self, rounds: int, m: int) -> None:
        ensure(
            len(self.rounds) >= rounds,
            f"trainer.sampler.rounds holds {len(self.rounds)} rounds, trainer.max_rounds = {rounds}: "
            f"take max_rounds {len(self.rounds)}, or a longer trace",
        )
        for t, cohort in enumerate(self.rounds):
            ensure(
                0 < len(cohort) == len(set(cohort)) and all(0 <= k < m for k in cohort),
                f"trainer.sampler.rounds[{t}] = {list(cohort)}: give different ids from 0 to {m - 1}, at least one",
            )

    def __call__(self, t: int, m: int, seed: int) -> list[int]:
        return list(self.rounds[t])


def read_trace(path: str, key: str) -> list[list[int]]:
    """Returns lists of clients by round from a JSON file.

    Args:
        path: The file.
        key: The setting that names it, for the message.

    Raises:
        UserError: If it is missing or of another format.
    """
    try:
        rounds: list[list[int]] = json.loads(Path(path).read_text())
        if not all(type(k) is int for cohort in rounds for k in cohort):
            raise ValueError("an id is a whole number")
        return rounds
    except FileNotFoundError:
        raise UserError(f"{key} = {path}: no such file; give a JSON list of lists of ids") from None
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"{key} = {path}: not a JSON list of lists of ids ({error})") from None
