"""The clock of the clients' devices, and servers that do not wait for all of them."""

import csv
import json
from dataclasses import dataclass
from math import ceil, inf, isfinite
from pathlib import Path
from typing import Annotated, Literal

from torch import Tensor

from fl_lightning.core import (
    Checked,
    Divisor,
    Interval,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    UnitInterval,
    each_once,
    ensure,
    require,
)
from fl_lightning.trainer.participation.samplers import CohortSampler, UniformSampler, read_setting

COLUMNS = ("sec_per_sample", "down_mbps", "up_mbps", "latency_s")


@dataclass(frozen=True)
class Device:
    """A client's device.

    Attributes:
        sec_per_sample: Seconds of the forward pass of one sample.
        down_mbps: Megabits that it receives in a second; infinite: a download takes no time.
        up_mbps: Megabits that it sends in a second.
        latency_s: Seconds that a message travels, whatever its length.
    """

    sec_per_sample: float
    down_mbps: float
    up_mbps: float
    latency_s: float

    def compute_s(self, samples: int, forward: int, backward: int) -> float:
        """Returns the seconds of local training; a backward pass takes as long as two forward passes.

        Args:
            samples: Samples of all minibatches.
            forward: Forward passes of a step.
            backward: Its backward passes.
        """
        return samples * (forward + 2 * backward) * self.sec_per_sample

    def comm_s(self, down: int, up: int) -> float:
        """Returns the seconds in which as many bits are received and sent."""
        return down / (1e6 * self.down_mbps) + up / (1e6 * self.up_mbps) + 2 * self.latency_s


class Clock(Checked, key="trainer.clock"):
    """The seconds that rounds would take on the clients' devices; with a deadline, who is too late for them.

    A client takes the time of its download, local training, and upload: of the samples that it draws, the passes that
    the algorithm makes in a step, and the bits that it exchanges. A phase takes until the server stops waiting: for its
    slowest client, the deadline, or the last of the clients that it wants. ``clock/time_s`` is the time so far;
    ``clock/compute_s``, ``clock/comm_s`` and ``clock/idle_s`` are the sums, over the clients whose uploads arrive, of
    what they compute, exchange, and wait. Without a deadline and over-selection the run stays as it is, to the bit.

    Args:
        devices: CSV file with the columns device, sec_per_sample, down_mbps, up_mbps, latency_s: client i has row i,
            counted from 0, or of fewer rows than clients row i mod rows, in an order drawn by the seed. What is in
            ``device`` is not read. Or a JSON file in FedScale's form, in the order of its entries: ``computation``
            (milliseconds of a sample's forward pass) and ``communication`` (kilobits a second) by device.
        sec_per_sample: Without a file: median of the seconds of a forward pass of one sample. The speeds are those of
            ``trainer.faults.stragglers``, if there are any, otherwise log-normal with ``sigma``.
        sigma: Standard deviation of the logarithm of the speeds.
        down_mbps: Without a file: median of the megabits received in a second; null: a download takes no time.
        up_mbps: The same for an upload.
        bandwidth_sigma: Standard deviation of the logarithm of a client's bandwidth.
        latency_s: Without a file: seconds that a message travels.
        server_s: Seconds of the server in a round.
        deadline_s: Seconds after which the server no longer waits for the clients of a phase; null: it waits for all.
        late: How a client counts that needs longer. lost: it does not. partial: by its model after the whole steps for
            which it has time, with their number as its K; a client without a step takes no part.
        over_selection: Factor of the number of clients that are drawn; as many as without it count, those that are
            done first (1.3 in FedScale).
        max_time_s: Ends the run after so many of these seconds; null: it does not.

    Raises:
        UserError: If there is neither a file nor ``sec_per_sample``, there are both, or the file is not readable.
    """

    def __init__(
        self,
        devices: str | None = None,
        sec_per_sample: Positive | None = None,
        sigma: NonNegative = 0.5,
        down_mbps: Positive | None = None,
        up_mbps: Positive | None = None,
        bandwidth_sigma: NonNegative = 0.5,
        latency_s: NonNegative = 0.0,
        server_s: NonNegative = 0.0,
        deadline_s: Positive | None = None,
        late: Literal["lost", "partial"] = "lost",
        over_selection: Annotated[float, Interval("[1, 100]")] = 1.0,
        max_time_s: Positive | None = None,
    ) -> None:
        key = "trainer.clock"
        ensure(
            (devices is None) != (sec_per_sample is None),
            f"{key}: give either devices, a CSV file, or sec_per_sample, the median seconds of a sample's forward pass",
        )
        self.rows = [] if devices is None else read_devices(devices, f"{key}.devices")
        self.median = Device(sec_per_sample or 0.0, down_mbps or float("inf"), up_mbps or float("inf"), latency_s)
        self.sigma, self.bandwidth_sigma, self.server_s = sigma, bandwidth_sigma, server_s
        self.deadline_s, self.late, self.over_selection = deadline_s, late, over_selection
        self.max_time_s = float("inf") if max_time_s is None else max_time_s

    @property
    def leaves_out(self) -> bool:
        """Whether the server may not wait for all clients."""
        return self.deadline_s is not None or self.over_selection > 1

    @property
    def shortens(self) -> bool:
        """Whether a client may count with fewer steps than it was asked for."""
        return self.deadline_s is not None and self.late == "partial"

    def enlarged(self, sampler: CohortSampler, private: bool = False) -> tuple[CohortSampler, int | None]:
        """Returns the sampler of a run, and how many of its clients count; None: all.

        Args:
            sampler: Draws as many as count.
            private: Whether the run has `GaussianPrivacy`, which divides the sum by the number that is drawn.

        Raises:
            UserError: If the number of clients of a round is not fixed, or the run is private.
        """
        if self.over_selection == 1:
            return sampler, None
        ensure(
            type(sampler) is UniformSampler and not private,
            f"trainer.clock.over_selection = {self.over_selection}: only with UniformSampler, whose number of clients "
            "is fixed, and without trainer.privacy; set it to 1",
        )
        assert isinstance(sampler, UniformSampler)
        wanted = sampler.clients_per_round
        drawn = ceil(round(self.over_selection * wanted, 9))  # 1.1 * 10 is above 11
        return UniformSampler(drawn, sampler.held_out), wanted


def read_devices(path: str, key: str) -> list[Device]:
    """Returns the devices of a file.

    Args:
        path: A CSV file, or a JSON file in FedScale's form; see `Clock`.
        key: The setting that names it, for the message.

    Raises:
        UserError: If it is missing or of another format, or a number is not positive.
    """
    scale = Path(path).suffix.lower() == ".json"
    form = f"a CSV file with device, {', '.join(COLUMNS)}"
    form = "a JSON file with computation and communication by device" if scale else form
    devices = read_setting(path, key, form, _of_fedscale if scale else _of_table)
    numbers = all(  # NaN is none, and only a transfer may be infinitely fast
        0 <= device.latency_s < inf and 0 < device.sec_per_sample < inf and device.down_mbps > 0 < device.up_mbps
        for device in devices
    )
    ensure(
        bool(devices) and numbers,
        f"{key} = {path}: speeds are above 0, and times finite; give at least one device, and such numbers",
    )
    return devices


def _of_fedscale(text: str) -> list[Device]:
    entries = json.loads(text, object_pairs_hook=each_once).values()
    speeds = ((float(entry["computation"]) / 1e3, float(entry["communication"]) / 1e3) for entry in entries)
    return [Device(seconds, mbps, mbps, 0.0) for seconds, mbps in speeds]


def _of_table(text: str) -> list[Device]:
    rows = list(csv.DictReader(text.splitlines(), skipinitialspace=True))
    if any(None in row for row in rows):  # as with a comma in place of a decimal point
        raise ValueError("a line has more values than there are columns")
    return [Device(*(float(row[name]) for name in COLUMNS)) for row in rows]


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
        weight = self.weight(staleness)
        ensure(
            hasattr(weight, "__float__") and isfinite(weight),
            f"trainer.asynchronous = {type(self).__name__}: weight({staleness}) returns {weight!r:.40}; return a "
            "finite number",
        )
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
        require(
            staleness != "constant" or decay is None,
            "trainer.asynchronous.decay",
            decay,
            "staleness constant has none; leave it out",
        )
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
