"""Clients that fail, the same on every process: dropout, availability, stragglers, corrupted uploads."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor

from fl_lightning.core import (
    Checked,
    ClientContext,
    Fraction,
    Interval,
    NonNegative,
    Positive,
    Upload,
    ensure,
    generator,
    numpy_generator,
    require,
    to_device,
)
from fl_lightning.results.metrics import write_table
from fl_lightning.trainer.participation.samplers import read_trace


@dataclass(frozen=True)
class Attendance:
    """Which of the clients that were asked answer in a phase.

    Attributes:
        steps: Local steps of each client whose upload arrives, by id.
        receivers: Number of clients that received the server's state.
        dropped: Clients that do not answer.
        late: Clients that miss the deadline; those of them in ``steps`` upload what they have done.
        times: With a clock: the seconds in which each client in ``steps`` computes, and those in which it exchanges.
        seconds: With a clock: the time until the server stops waiting; None: it has no rounds.
    """

    steps: dict[int, int] = field(default_factory=dict)
    receivers: int = 0
    dropped: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    times: dict[int, tuple[float, float]] = field(default_factory=dict)
    seconds: float | None = 0.0


class Stragglers(Checked, key="trainer.faults.stragglers"):
    """Clients of different speeds, and a deadline.

    A client's speed is drawn once, by (seed, client). At speed v it has taken ``floor(v * deadline)`` local steps at
    the deadline of a phase, or all of its K.

    Args:
        deadline: When the server stops waiting, in local steps of a client of speed 1.
        late: How a client counts that has not finished by then. partial: by its model after the steps done, with
            their number as its K; a client without a step takes no part. lost: it does not count.
        sigma: Standard deviation of the logarithm of a speed; the median is 1.
        speeds: Range from which speeds are drawn uniformly, in place of the log-normal distribution.

    Raises:
        UserError: If a setting is out of range.
    """

    def __init__(
        self,
        deadline: Positive,
        late: Literal["partial", "lost"] = "partial",
        sigma: NonNegative = 0.5,
        speeds: list[Positive] | None = None,
    ) -> None:
        require(
            speeds is None or (len(speeds) == 2 and speeds[0] <= speeds[1]),
            "trainer.faults.stragglers.speeds",
            speeds,
            "give the lowest, above 0, and the highest, as in [0.5, 2]",
        )
        self.deadline, self.late, self.sigma, self.speeds = deadline, late, sigma, speeds

    def speed(self, client: int, seed: int) -> float:
        """Returns the client's speed, in local steps for one of a client of speed 1."""
        draw = numpy_generator(seed, "speed", client)
        speeds = self.speeds
        return float(draw.lognormal(0.0, self.sigma) if speeds is None else draw.uniform(speeds[0], speeds[1]))

    def steps(self, client: int, asked: int, seed: int) -> int:
        """Returns the number of local steps of a phase that count, at most ``asked``."""
        done = min(asked, int(self.speed(client, seed) * self.deadline + 1e-9))
        return done if done == asked or self.late == "partial" else 0


class Corrupt(Checked, key="trainer.faults.corrupt"):
    """Changes uploads on their way to the server; the client itself keeps its own state.

    Each uploaded entry differs from what the server knows, its reference, by Δ. The reference is the entry of the same
    name that was sent to the client, such as the model ``w``; for an update, of which nothing was sent, it is zero.

    Args:
        share: Share of all clients, rounded to a whole number of them, at least one.
        kind: nan: every number is NaN. sign_flip: the reference ``- factor Δ``. scale: the reference ``+ factor Δ``.
            noise: Gaussian noise is added whose expected norm is ``factor ‖Δ‖``.
        factor: As above.
        each_round: Whether these clients are drawn in every round; otherwise once.

    Raises:
        UserError: If a setting is out of range.
    """

    def __init__(
        self,
        share: Annotated[float, Interval("(0, 1]")],
        kind: Literal["nan", "sign_flip", "scale", "noise"] = "nan",
        factor: Positive = 1.0,
        each_round: bool = False,
    ) -> None:
        require(
            kind != "scale" or factor != 1,
            "trainer.faults.corrupt.factor",
            factor,
            "with kind scale give another than 1",
        )
        self.share, self.kind, self.factor, self.each_round = share, kind, factor, each_round

    def clients(self, t: int, m: int, seed: int) -> frozenset[int]:
        """Returns which of ``m`` clients are corrupted in round ``t``."""
        return _chosen(max(1, round(self.share * m)), m, seed, t + 1 if self.each_round else 0)

    def __call__(
        self, upload: Upload, received: Mapping[str, Tensor], client: int, ctx: ClientContext, seed: int
    ) -> Upload:
        """Returns the upload as it arrives.

        Args:
            upload: What the client uploads.
            received: What was sent to it.
            client: Its id.
            ctx: Its context.
            seed: Seed of the run.
        """
        if client not in self.clients(ctx.stream, ctx.m, seed):
            return upload
        draw = generator(seed, "corrupt", ctx.stream, ctx.phase, client)
        return {name: self._changed(value, received.get(name), draw) for name, value in upload.items()}

    def _changed(self, value: Tensor, known: Tensor | None, draw: torch.Generator) -> Tensor:
        reference = torch.zeros_like(value) if known is None else known
        delta = value - reference
        match self.kind:
            case "nan":
                return torch.full_like(value, float("nan"))
            case "sign_flip":
                return reference - self.factor * delta
            case "scale":
                return reference + self.factor * delta
        size: Tensor = self.factor * torch.linalg.vector_norm(delta) / math.sqrt(value.numel())
        return value + size * to_device(torch.randn(value.shape, generator=draw, dtype=value.dtype), value.device)


@lru_cache(maxsize=4)
def _chosen(n: int, m: int, seed: int, t: int) -> frozenset[int]:
    """Returns ``n`` of ``m`` clients, a function of seed and round."""
    return frozenset(numpy_generator(seed, "corrupt clients", t).choice(m, n, replace=False, shuffle=False).tolist())


class Faults(Checked, key="trainer.faults"):
    """Says how clients fail, as a function of (seed, round, phase, client); a fault that is not set does not happen.

    A client that does not answer keeps the state that it had, and nothing of it is in averages, logged loss or server
    state: the round is that of the clients that answer. A round in which nobody answers changes nothing but counts.

    Args:
        drop_before: Probability that a client that was drawn is not there: it receives nothing.
        drop_after: Probability that a client receives and trains, and its upload is lost. With two phases it holds for
            each phase, and a client that is lost in the first phase takes no part in the second.
        available: For each round the clients that can answer, or a JSON file that holds such a list of lists; after
            the last round it starts again with the first.
        stragglers: Speeds and a deadline.
        corrupt: Changes uploads on their way to the server.

    Raises:
        UserError: If a setting is out of range, or the file is missing or of another format.
    """

    def __init__(
        self,
        drop_before: Fraction = 0.0,
        drop_after: Fraction = 0.0,
        available: list[list[int]] | str | None = None,
        stragglers: Stragglers | None = None,
        corrupt: Corrupt | None = None,
    ) -> None:
        key = "trainer.faults.available"
        self.available = read_trace(available, key) if isinstance(available, str) else available
        require(self.available != [], key, [], "give at least one round")
        self.drop_before, self.drop_after = drop_before, drop_after
        self.stragglers, self.corrupt = stragglers, corrupt

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of what is counted by client, in addition to refused uploads; none where nothing fails."""
        missing = self.drop_before or self.drop_after or self.available is not None
        return ("dropped", "late") if missing or self.stragglers or self.corrupt else ()

    def check(self, m: int) -> None:
        """Checks that the clients that are named are among ``m``.

        Raises:
            UserError: If one is not.
        """
        for t, clients in enumerate(self.available or ()):
            ensure(
                len(clients) == len(set(clients)) and all(0 <= k < m for k in clients),
                f"trainer.faults.available[{t}] = {list(clients)!s:.60}: give different ids from 0 to {m - 1}",
            )

    def attendance(self, clients: Sequence[int], steps: Sequence[int], t: int, phase: int, seed: int) -> Attendance:
        """Returns which clients answer.

        Args:
            clients: Clients drawn for the round; in a later phase, those that have answered in the phase before.
            steps: Local steps that each is asked for.
            t: The round, from 0.
            phase: The phase, from 0.
            seed: Seed of the run.
        """
        asked = dict(zip(clients, steps, strict=True))
        present = [k for k in asked if phase or self._is_there(k, t, seed)]
        attendance = Attendance({}, len(present), [k for k in asked if k not in set(present)])
        for k in present:
            if self.drop_after and numpy_generator(seed, "drop after", t, phase, k).random() < self.drop_after:
                attendance.dropped.append(k)
                continue
            done = asked[k] if self.stragglers is None else self.stragglers.steps(k, asked[k], seed)
            if done:
                attendance.steps[k] = done
            if done < asked[k] and not phase:
                attendance.late.append(k)
        return attendance

    def _is_there(self, client: int, t: int, seed: int) -> bool:
        online = self.available is None or client in self.available[t % len(self.available)]
        return online and (
            not self.drop_before or numpy_generator(seed, "drop before", t, client).random() >= self.drop_before
        )


NO_FAULTS = Faults()
"""Every client answers."""

Failures = Mapping[str, Mapping[int, int]]
"""How often each client failed, by kind (refused, dropped, late) and id."""
LINES = 10
"""Clients named on the console in a run, and in a line; all are in ``clients.csv``."""


def counted(before: Failures, failed: Mapping[str, Sequence[int]]) -> Failures:
    """Returns the counts after another round; those before stay as they are.

    Args:
        before: The counts.
        failed: Clients that failed in the round, by kind.
    """
    new = {kind: Counter(clients) for kind, clients in failed.items() if clients}  # in two phases, two failures
    return {**before, **{kind: dict(Counter(before.get(kind, {})) + counts) for kind, counts in new.items()}}


def failure_lines(before: Failures, t: int, refused: Sequence[int]) -> list[str]:
    """Returns a line that names the clients that are refused for the first time, until `LINES` clients were named.

    Args:
        before: The counts before the round.
        t: The round, from 0.
        refused: Clients that are refused in it.
    """
    known = before.get("refused", {})
    new = sorted(set(refused) - known.keys())
    if not new or len(known) >= LINES:
        return []
    return [
        f"round {t + 1}: not finite and left out: {listed('client', new)} (each is named once; counts are in "
        "clients.csv)"
    ]


def listed(what: str, ids: Sequence[int]) -> str:
    """Returns a text such as "clients 1, 2", which names at most `LINES` of them."""
    more = f" and {len(ids) - LINES} more" if len(ids) > LINES else ""
    return f"{what}{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids[:LINES]))}{more}"


def write_failures(path: Path, failures: Failures) -> None:
    """Writes the table of all clients that failed, if there are any."""
    kinds = ("dropped", "late", "refused")
    if clients := sorted({client for counts in failures.values() for client in counts}):
        rows = ([k, *(failures.get(kind, {}).get(k, 0) for kind in kinds)] for k in clients)
        write_table(path, ["client", *kinds], rows)
