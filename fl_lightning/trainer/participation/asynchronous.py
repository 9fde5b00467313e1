"""Servers without rounds: when they step, and how they weigh models that are old."""

from math import isfinite
from typing import Literal

from torch import Tensor

from fl_lightning.core import (
    Checked,
    Divisor,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    UnitInterval,
    ensure,
    require,
)


class Asynchronous(Checked, key="trainer.asynchronous"):
    """Base of the asynchronous servers, whose clients train from the model that they have received at their start.

    The clock of the clients' devices says when each is done. Members of the cohorts that the sampler draws start one
    after another as soon as another client is done; who still trains is passed over.

    Args:
        buffer: Number of uploads after which the server steps; None: it steps by time.
        period_s: Seconds from one step to the next; None: it steps by uploads.
        concurrency: Number of clients that train at once; null: as many as the first cohort has.
        max_staleness: Number of server steps since a client's start beyond which its upload is lost; null: any.

    Raises:
        UserError: If both or none of ``buffer`` and ``period_s`` are given.
    """

    def __init__(
        self,
        buffer: PositiveInt | None,
        period_s: Positive | None,
        concurrency: PositiveInt | None,
        max_staleness: NonNegativeInt | None,
    ) -> None:
        ensure((buffer is None) != (period_s is None), "trainer.asynchronous: give either buffer or period_s")
        self.buffer, self.period_s = buffer, period_s
        self.concurrency, self.max_staleness = concurrency, max_staleness

    def weight(self, staleness: int) -> float:
        """Returns the weight of an upload, given the number of server steps since its client's start."""
        return 1.0

    def seen(self, upload: Tensor, received: Tensor, now: Tensor, staleness: int) -> Tensor:
        """Returns a client's upload as the server's step takes it: ``now + s (upload - received)``.

        Args:
            upload: What the client has uploaded.
            received: What it received of the same name; of buffers, which are mixed, ``now``.
            now: What a client would receive now.
            staleness: As for `weight`.
        """
        weight, name = self.weight(staleness), type(self).__name__
        problem = f"weight({staleness}) returns {weight!r:.40}; return a finite number"
        ensure(hasattr(weight, "__float__") and isfinite(weight), f"trainer.asynchronous = {name}: {problem}")
        return upload if weight == 1 and received is now else now + weight * (upload - received)


class FedBuff(Asynchronous):
    """The server adds the mean of a buffer of updates (Nguyen et al., AISTATS 2022).

    ``w <- w + lr sum p_i s_i (w_i - received_i)`` with ``s_i = (1 + staleness)^-exponent``; ``model.server_update``
    has lr and other steps, ``model.weighting`` the weights p_i.

    Args:
        buffer: Number of uploads in a step, K.
        concurrency: Number of clients that train at once; null: as many as the first cohort has.
        exponent: The exponent of the weight; 0: all weigh alike.
        max_staleness: Number of server steps since a client's start beyond which its upload is lost; null: any.
    """

    def __init__(
        self,
        buffer: PositiveInt = 10,
        concurrency: PositiveInt | None = None,
        exponent: NonNegative = 0.5,
        max_staleness: NonNegativeInt | None = None,
    ) -> None:
        super().__init__(buffer, None, concurrency, max_staleness)
        self.exponent = exponent

    def weight(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.exponent)


class SemiSynchronous(FedBuff):
    """The server steps every so many seconds, as FedBuff, with what has arrived since; if nothing has, it waits on.

    Args:
        period_s: Seconds from one step to the next.
        concurrency: As for `FedBuff`.
        exponent: As for `FedBuff`.
        max_staleness: As for `FedBuff`.
    """

    def __init__(
        self,
        period_s: Divisor,
        concurrency: PositiveInt | None = None,
        exponent: NonNegative = 0.5,
        max_staleness: NonNegativeInt | None = None,
    ) -> None:
        Asynchronous.__init__(self, None, period_s, concurrency, max_staleness)
        self.exponent = exponent


class FedAsync(Asynchronous):
    """The server mixes each model with its own as it arrives (Xie et al., 2019): ``w <- (1 - a s) w + a s w_i``.

    Args:
        alpha: Weight of a model that is not old, a.
        staleness: How it falls: polynomial, ``s = (1 + staleness)^-decay``; hinge, 1 up to ``grace`` and then
            ``1 / (decay (staleness - grace) + 1)``; constant, 1.
        decay: As above; null: 0.5 for polynomial, 10 for hinge.
        grace: As above.
        concurrency: As for `FedBuff`.
        max_staleness: As for `FedBuff`.
    """

    def __init__(
        self,
        alpha: UnitInterval = 0.6,
        staleness: Literal["polynomial", "hinge", "constant"] = "polynomial",
        decay: NonNegative | None = None,
        grace: NonNegativeInt = 4,
        concurrency: PositiveInt | None = None,
        max_staleness: NonNegativeInt | None = None,
    ) -> None:
        super().__init__(1, None, concurrency, max_staleness)
        constant = staleness == "constant" and decay is not None
        require(not constant, "trainer.asynchronous.decay", decay, "staleness constant has none; leave it out")
        self.alpha, self.staleness, self.grace = alpha, staleness, grace
        self.decay = (10.0 if staleness == "hinge" else 0.5) if decay is None else decay

    def weight(self, staleness: int) -> float:
        match self.staleness:
            case "polynomial":
                return self.alpha * float((1 + staleness) ** -self.decay)
            case "hinge":
                return self.alpha / (self.decay * max(staleness - self.grace, 0) + 1)
        return self.alpha

    def seen(self, upload: Tensor, received: Tensor, now: Tensor, staleness: int) -> Tensor:
        """Returns the mix ``now + a s (upload - now)``."""
        return super().seen(upload, now, now, staleness)
