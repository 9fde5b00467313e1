"""Samplers of cohorts: the same cohort on every process, a function of (seed, round)."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from torch import Tensor

from fl_lightning.core import (
    Checked,
    Interval,
    NonNegativeInt,
    PositiveInt,
    UserError,
    ensure,
    fits,
    folded,
    numpy_generator,
    require,
)

T = TypeVar("T")


class CohortSampler(Checked, ABC, key="trainer.sampler"):
    """Base of the samplers; a subclass defines ``__call__``."""

    def check(self, rounds: int, m: int) -> None:
        """Checks that every cohort can be drawn, before anything is trained.

        Args:
            rounds: Rounds of the run.
            m: Number of clients.

        Raises:
            UserError: If a round's cohort cannot be drawn.
        """

    @abstractmethod
    def __call__(self, t: int, m: int, seed: int) -> list[int]:
        """Returns the ids of the cohort of round ``t`` among ``m`` clients."""


def draw(sampler: CohortSampler, t: int, m: int, seed: int) -> list[int]:
    """Returns the cohort of round ``t``, checked: a sampler may be the user's own.

    Raises:
        UserError: If it is no list, array or tensor of ids, or an id occurs twice or is not the id of a client.
    """
    drawn: Any = sampler(t, m, seed)
    cohort = drawn.tolist() if isinstance(drawn, np.ndarray | Tensor) else drawn
    ensure(
        isinstance(cohort, Collection)
        and all(type(k) is int or fits(k, int) for k in cohort)
        and len({*cohort}) == len(cohort)
        and (not cohort or (min(cohort) >= 0 and max(cohort) < m)),
        f"trainer.sampler = {type(sampler).__name__}: gives {folded(drawn, 60)} in round {t}; give different ids "
        f"from 0 to {m - 1}",
    )
    return [int(k) for k in cohort]


def check_repeats(sampler: CohortSampler, m: int, seed: int) -> None:
    """Checks that a sampler gives a cohort again, on which resuming, processes, and dry rounds depend.

    Raises:
        UserError: If it does not.
    """
    ensure(
        draw(sampler, 0, m, seed) == draw(sampler, 0, m, seed),
        f"trainer.sampler = {type(sampler).__name__}: gives another cohort of round 0 when it is asked again; make it "
        'a function of t, m and seed, as by fl_lightning.core.numpy_generator(seed, "cohort", t)',
    )


class UniformSampler(CohortSampler):
    """Exactly ``clients_per_round`` clients, without replacement.

    Args:
        clients_per_round: Size of the cohort, S.
        held_out: Number of clients that are never drawn, those of the highest ids; they still count for M.
    """

    def __init__(self, clients_per_round: PositiveInt = 10, held_out: NonNegativeInt = 0) -> None:
        self.clients_per_round, self.held_out = clients_per_round, held_out

    def check(self, rounds: int, m: int) -> None:
        left = m - self.held_out
        ensure(
            self.clients_per_round <= left,
            f"trainer.clients_per_round = {self.clients_per_round} (or that of trainer.sampler, or by "
            f"trainer.clock.over_selection): there are only {left} clients; take at most {left}, or raise "
            "data.num_clients",
        )

    def __call__(self, t: int, m: int, seed: int) -> list[int]:
        draw = numpy_generator(seed, "cohort", t).choice(
            m - self.held_out, self.clients_per_round, replace=False, shuffle=False
        )
        return sorted(draw.tolist())


class BernoulliSampler(CohortSampler):
    """Each client with probability ``p``.

    Args:
        p: Probability of participation.
        redraw: Draw an empty cohort again (FL-Simulator). Under ``trainer.privacy`` it is left empty in any case: no
            epsilon is known of cohorts that are drawn again.
    """

    def __init__(self, p: Annotated[float, Interval("(0, 1]")] = 0.1, redraw: bool = True) -> None:
        self.p, self.redraw = p, redraw

    def check(self, rounds: int, m: int) -> None:
        require(
            self.p * m >= 1e-3,
            "trainer.sampler.p",
            self.p,
            f"with {m} clients almost all cohorts would be empty; raise it",
        )

    def __call__(self, t: int, m: int, seed: int) -> list[int]:
        generator = numpy_generator(seed, "cohort", t)
        while not (cohort := (generator.random(m) < self.p).nonzero()[0].tolist()) and self.redraw:
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
        self.rounds: Sequence[Sequence[int]] = (
            read_trace(rounds, "trainer.sampler.rounds") if isinstance(rounds, str) else rounds
        )

    def check(self, rounds: int, m: int) -> None:
        ensure(
            len(self.rounds) >= rounds,
            f"trainer.sampler.rounds holds {len(self.rounds)} rounds, trainer.max_rounds = {rounds}: "
            f"take {f'max_rounds {len(self.rounds)}, or ' if self.rounds else ''}a longer trace",
        )
        for t, cohort in enumerate(self.rounds):
            ensure(
                0 < len(cohort) == len(set(cohort)) and all(0 <= k < m for k in cohort),
                f"trainer.sampler.rounds[{t}] = {list(cohort)}: give different ids from 0 to {m - 1}, at least one",
            )

    def __call__(self, t: int, m: int, seed: int) -> list[int]:
        ensure(
            t < len(self.rounds),
            f"trainer.sampler.rounds holds {len(self.rounds)} rounds, and cohort {t + 1} is needed; take a longer "
            "trace",
        )
        return list(self.rounds[t])


def read_trace(path: str, key: str) -> list[list[int]]:
    """Returns lists of clients by round from a JSON file; arguments and errors as for `read_setting`."""
    return read_setting(path, key, "a JSON list of lists of ids", json.loads, list[list[int]])


def read_setting(path: str, key: str, form: str, parse: Callable[[str], T], hint: Any = Any) -> T:
    """Returns the content of a file that a setting names.

    Args:
        path: The file.
        key: The setting, for the message.
        form: What the file holds, in words.
        parse: Makes the content from the text.
        hint: The annotation that the content must fit.

    Raises:
        UserError: If it is missing or of another format.
    """
    ensure(Path(path).is_file(), f"{key} = {path}: no such file; give {form}")
    try:
        content = parse(Path(path).read_text())
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{key} = {path}: not {form} ({type(error).__name__}: {error})") from None
    ensure(fits(content, hint), f"{key} = {path}: not {form}")
    return content
