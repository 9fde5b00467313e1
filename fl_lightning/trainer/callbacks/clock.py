"""The seconds that a run would take on the clients' devices."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.core import NonNegative, Positive, State, UserError, ensure, numpy_generator
from fl_lightning.engine import LocalResult
from fl_lightning.trainer.participation.faults import Stragglers
from fl_lightning.trainer.run import Callback, Run
from fl_lightning.trainer.runtime import collectives

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


class Clock(Callback, key="trainer.clock"):
    """Logs the seconds that the rounds would take on the clients' devices; the run itself stays as it is, to the bit.

    A client takes the time of its download, local training, and upload: of the samples that it has drawn, the passes
    that the algorithm makes in a step, and the bits that it exchanges. A round takes as long as its slowest client
    that answers, in each phase. ``clock/time_s`` is the time so far; ``clock/compute_s``, ``clock/comm_s`` and
    ``clock/idle_s`` are the sums over the clients of what they compute, exchange, and wait for the slowest one.

    Args:
        devices: CSV file with the columns device, sec_per_sample, down_mbps, up_mbps, latency_s: client i has row i, or
            of fewer rows than clients row i mod rows, in an order drawn by the seed. Or a JSON file in FedScale's form:
            ``computation`` (milliseconds of a sample's forward pass) and ``communication`` (kilobits a second) by
            device.
        sec_per_sample: Without a file: median of the seconds of a forward pass of one sample. The speeds are those of
            ``trainer.faults.stragglers``, if there are any, otherwise log-normal with ``sigma``.
        sigma: Standard deviation of the logarithm of the speeds.
        down_mbps: Without a file: median of the megabits received in a second; null: a download takes no time.
        up_mbps: The same for an upload.
        bandwidth_sigma: Standard deviation of the logarithm of a client's bandwidth.
        latency_s: Without a file: seconds that a message travels.
        server_s: Seconds of the server in a round.

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
    ) -> None:
        key = "trainer.clock"
        given = "give either devices, a CSV file, or sec_per_sample, the median seconds of a sample's forward pass"
        ensure((devices is None) != (sec_per_sample is None), f"{key}: {given}")
        self.rows = [] if devices is None else read_devices(devices, f"{key}.devices")
        self.median = Device(sec_per_sample or 0.0, down_mbps or float("inf"), up_mbps or float("inf"), latency_s)
        self.sigma, self.bandwidth_sigma, self.server_s = sigma, bandwidth_sigma, server_s
        self._devices = dict[int, Device]()
        self._spent = dict[int, dict[int, tuple[float, float]]]()

    def device(self, client: int, run: Run) -> Device:
        """Returns a client's device, a function of the file or of (seed, client)."""
        if client not in self._devices:
            self._devices[client] = self._drawn(client, run)
        return self._devices[client]

    def _drawn(self, client: int, run: Run) -> Device:
        n, m = len(self.rows), run.data.num_clients
        if n:
            return self.rows[client if n >= m else numpy_generator(run.seed, "devices").permutation(n)[client % n]]
        speeds = run.settings.faults.stragglers or Stragglers(1.0, sigma=self.sigma)
        bandwidth = float(numpy_generator(run.seed, "bandwidth", client).lognormal(0.0, self.bandwidth_sigma))
        of = self.median
        seconds = of.sec_per_sample / speeds.speed(client, run.seed)
        return Device(seconds, of.down_mbps * bandwidth, of.up_mbps * bandwidth, of.latency_s)

    def on_fit_start(self, run: Run) -> None:
        self._devices = {}

    def on_round_start(self, run: Run, ctx: Any, cohort: list[int]) -> None:
        self._spent = {}

    def on_local_end(self, run: Run, result: LocalResult) -> None:
        objective, ctx, device = run.objective, result.ctx, self.device(result.client, run)
        alone = ctx.phase == objective.phases  # training before the round, without an exchange
        samples = sum(run.data.batch_sizes(len(run.data.clients[result.client]), ctx.K))
        computed = device.compute_s(samples, *((1, 1) if alone else objective.passes))
        down, up = objective.bits(State(result.received), up=False), objective.bits(result.upload, up=True)
        before = self._spent.setdefault(0 if alone else ctx.phase, {}).get(result.client, (0.0, 0.0))
        exchanged = 0.0 if alone else device.comm_s(down, up)
        self._spent[0 if alone else ctx.phase][result.client] = before[0] + computed, before[1] + exchanged

    def on_round_end(self, run: Run) -> None:
        spent = {"time_s": self.server_s, "compute_s": 0.0, "comm_s": 0.0, "idle_s": 0.0}
        for phase in range(run.objective.phases):
            found = collectives.all_gather_dict(run.fabric, self._spent.get(phase, {})).values()
            slowest = max((compute + comm for compute, comm in found), default=0.0)
            spent["time_s"] += slowest
            for compute, comm in found:
                spent["compute_s"] += compute
                spent["comm_s"] += comm
                spent["idle_s"] += slowest - (compute + comm)
        run.log({f"clock/{name}": run.metrics.get(f"clock/{name}", 0.0) + value for name, value in spent.items()})


def read_devices(path: str, key: str) -> list[Device]:
    """Returns the devices of a file.

    Args:
        path: A CSV file, or a JSON file in FedScale's form; see `Clock`.
        key: The setting that names it, for the message.

    Raises:
        UserError: If it is missing or of another format, or a number is not positive.
    """
    try:
        text = Path(path).read_text()
        if path.endswith(".json"):
            found: list[Mapping[str, Any]] = [
                {"sec_per_sample": float(of["computation"]) / 1e3, "latency_s": 0.0,
                 **dict.fromkeys(("down_mbps", "up_mbps"), float(of["communication"]) / 1e3)}
                for of in json.loads(text).values()
            ]  # fmt: skip
        else:
            found = list(csv.DictReader(text.splitlines()))
        devices = [Device(*(float(row[name]) for name in COLUMNS)) for row in found]
    except FileNotFoundError:
        raise UserError(f"{key} = {path}: no such file; give a CSV file with device, {', '.join(COLUMNS)}") from None
    except (KeyError, ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
        form = f"not a CSV file with device, {', '.join(COLUMNS)}"
        raise UserError(f"{key} = {path}: {form} ({type(error).__name__}: {error})") from None
    positive = all(of.latency_s >= 0 < min(of.sec_per_sample, of.down_mbps, of.up_mbps) for of in devices)
    ensure(
        bool(devices) and positive, f"{key} = {path}: speeds are above 0; give at least one device, and such numbers"
    )
    return devices
