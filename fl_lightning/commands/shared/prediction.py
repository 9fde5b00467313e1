"""Time and memory of a run on this machine: a few of its rounds are measured, and the others estimated from them."""

import contextlib
import copy
import io
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning import IID, FederatedDataModule, FromFile, LocalObjective
from fl_lightning.core import State, UserError, generator, map_tensors, named_tensors
from fl_lightning.engine import contract_of, engine_class
from fl_lightning.trainer import (
    Callback,
    CSVLogger,
    Fabric,
    FederatedTrainer,
    FlatnessMonitor,
    Flight,
    Progress,
    Run,
    by_key,
    cpu_threads,
    evaluate,
    pause,
)
from fl_lightning.trainer.runtime import collectives

FEWEST, MOST, BUDGET = 4, 20, 5.0
"""Fewest and most rounds with clients that are measured, and the seconds after which no further one begins."""

Seconds = dict[str, tuple[int, float]]
"""The work of a run by name: how often it is done, and the seconds of one time."""


def total(parts: Seconds) -> float:
    """Returns the seconds of all parts."""
    return sum(times * seconds for times, seconds in parts.values())


class Clock(Callback):
    """Measures the parts of a run's rounds, and ends the run after some of them.

    It is the first callback; behind each of the others follows a `Lap`.

    Attributes:
        seconds: Seconds by part, and by round from 1.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.rounds = self.trained = 0
        self.began = self.last = time.perf_counter()

    def lap(self, name: str | None = None) -> None:
        """Ends a lap; if it has a name, its seconds count for this part of the round."""
        before, self.last = self.last, time.perf_counter()
        if name is not None:
            self.seconds[name][self.rounds] += self.last - before

    def mean(self, name: str) -> float:
        """Returns the mean seconds of a part over all rounds but the first."""
        times = list(self.seconds[name].values()) or [0.0]
        return fmean(times[1:] or times)

    def on_round_start(self, run: Run, ctx: Any, cohort: list[int]) -> None:
        """Counts the rounds, and begins a lap."""
        self.began = self.began if self.rounds else time.perf_counter()
        self.rounds, self.trained = self.rounds + 1, self.trained + bool(cohort)
        self.lap()

    def on_round_end(self, run: Run) -> None:
        """Reads the round's own clock, evaluates, and ends the run when enough is measured."""
        self.seconds["rest"][self.rounds] = rest = run.metrics["time/orchestration_s"]
        self.seconds["training"][self.rounds] = run.metrics["time/round_s"] - rest
        late = time.perf_counter() - self.began > BUDGET
        for split in ("val", "test") if run.data.val_fraction else ("test",):
            if not late or len(self.seconds[split]) < 2:
                self.lap()
                run.log(evaluate(run, split))
                self.lap(split)
        run.should_stop = self.trained >= MOST or (self.trained >= FEWEST and late)
        self.lap()

    def on_local_end(self, *args: Any, **kwargs: Any) -> None:
        """Begins a lap."""
        self.lap()

    on_round_logged = on_local_end


class Lap(Callback):
    """Stands behind another callback, and counts the seconds of its hooks.

    Args:
        clock: The clock.
        name: Name of the other callback.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name

    def on_round_end(self, run: Run, *args: Any, **kwargs: Any) -> None:
        """Ends the lap."""
        self.clock.lap(self.name)

    on_round_start = on_local_end = on_round_logged = on_round_end


@dataclass(frozen=True)
class Measured:
    """The first rounds of a run on one process of this machine.

    Attributes:
        run: The run after these rounds.
        clock: The seconds that they took.
        step: Seconds of a local step; of the batched engines, of a step of a block.
        memory: Peak of this process's main memory, in bytes.
    """

    run: Run
    clock: Clock
    step: float
    memory: int

    def parts(
        self,
        trainer: FederatedTrainer,
        rounds: int,
        steps: Sequence[Sequence[int]],
        world: int,
    ) -> Seconds:
        """Works out the parts of a run on the same kind of device.

        Args:
            trainer: Its trainer.
            rounds: Its rounds; fewer than the trainer's if the clock ends it.
            steps: Local steps of each client of some of its cohorts.
            world: Its number of processes.
        """
        clock, engine, skipped = self.clock, self.run.engine_name, trainer.max_rounds - rounds
        busiest = fmean(makespan(cohort, world, engine, trainer.client_block) for cohort in steps)
        evaluations = due(rounds, trainer.eval_every, max(1, trainer.eval_last - skipped))
        first = sum(max(0.0, laps[1] - clock.mean(name)) for name, laps in clock.seconds.items())
        parts: Seconds = {
            "first round, once more": (1, first),
            "local training": (rounds, busiest * self.step),
            "orchestration, logs": (rounds, clock.mean("rest")),
            **{
                f"evaluation ({split})": (evaluations, clock.mean(split) / world)
                for split in ("val", "test")
                if split in clock.seconds
            },
        }
        for name, callback in by_key(trainer.callbacks).items():  # Checkpoints is the last one
            seconds = clock.mean(name) / (world if isinstance(callback, FlatnessMonitor) else 1)
            every = getattr(callback, "every_n_rounds", 1)
            if every is None:
                every = math.ceil(pause(seconds) * rounds / total(parts))
            parts[name] = due(rounds, every), seconds
        return parts


def measure(
    trainer: FederatedTrainer, model: LocalObjective, data: FederatedDataModule, threads: int | None = None
) -> Measured:
    """Trains the first rounds of a copy of a run, on one process and in a temporary folder; the data are loaded.

    Args:
        trainer: The trainer.
        model: The local objective.
        data: The clients' data.
        threads: CPU threads; None: the trainer's.
    """
    clock, trial = Clock(), copy.copy(trainer)
    trial.callbacks = [clock]
    for name, original in by_key(trainer.callbacks).items():
        if not isinstance(original, Progress):
            callback = copy.deepcopy(original)
            if hasattr(callback, "every_n_rounds"):
                callback.every_n_rounds = 1
            trial.callbacks += [callback, Lap(clock, name)]
    trial.loggers, trial.threads, trial.max_time = [CSVLogger()], threads or trainer.threads, None
    trial.eval_every, trial.eval_last = trainer.max_rounds, 1  # the clock evaluates
    trial.fabric = Fabric(accelerator=trainer.fabric.device.type, devices=1, precision=trainer.precision)
    with tempfile.TemporaryDirectory(prefix="fl_lightning_plan_") as folder, contextlib.redirect_stdout(io.StringIO()):
        trial.default_root_dir = Path(folder)
        run = trial.fit(copy.deepcopy(model), data)
    rounds = islice(ahead(run), clock.rounds)
    steps = [makespan(round_.steps, 1, run.engine_name, trial.client_block) for round_ in rounds]
    begin = 1 if any(steps[1:]) else 0  # the first round warms up
    seconds = list(clock.seconds["training"].values())
    return Measured(run, clock, sum(seconds[begin:]) / max(sum(steps[begin:]), 1), peak_memory())


def data_or_like(data: FederatedDataModule) -> tuple[FederatedDataModule, str | None]:
    """Returns data that are set up: the data themselves, or random ones of the published numbers and shape.

    Nothing is downloaded. Random samples are divided evenly if the file of the partition is missing, too.

    Args:
        data: The data; they are set up if their files are there.

    Returns:
        The data, and why they are random ones; None if they are not.

    Raises:
        UserError: If files are missing, and the data set is not a published one whose shape is known.
    """
    try:
        return _with(data, data.load()), None
    except UserError as error:
        if data.published is None:
            raise
        return data_like(data, data.stream), str(error)


def data_like(data: FederatedDataModule, stream: bool = True) -> FederatedDataModule:
    """Returns data of the published numbers and shape that are set up, without a look at the files.

    Args:
        data: The data; they are loaded if nothing is published of them.
        stream: Keep one sample in memory for all.

    Raises:
        UserError: If nothing is published of the data, and their files are missing.
    """
    if data.published is None:
        return _with(data, data.load())
    lost = isinstance(data.partition, FromFile) and not Path(data.partition.path).is_file()
    return _with(data, data.published.random(stream), stream=stream, partition=IID() if lost else data.partition)


def _with(data: FederatedDataModule, loaded: tuple[Any, Any, Any, Any], **settings: Any) -> FederatedDataModule:
    """Returns a copy with other settings that is set up with samples that are loaded already."""
    copied = copy.copy(data)
    vars(copied).update(load=lambda: loaded, prepare_data=lambda: None, **settings)
    copied.setup()
    return copied


ELEMENTS = 20_000
"""Numbers in the samples of the step that an estimate by arithmetic measures, so that its memory is small."""


class Step(NamedTuple):
    """A forward and a backward pass of a batch on this machine.

    Attributes:
        seconds: Seconds of a sample.
        memory: Peak of this process's main memory, in bytes.
    """

    seconds: float
    memory: int

    @classmethod
    def measure(cls, trainer: FederatedTrainer, model: LocalObjective, data: FederatedDataModule) -> "Step":
        """Measures the second of two steps; the data are set up, and the model stays as it is."""
        fabric, net = trainer.fabric, copy.deepcopy(model.net)
        x, _ = next(iter(data.client_batches(0, 1, 1, generator(0, "step"), trainer.dtype)))
        elements = sum(v[:1].numel() for v in named_tensors(x, "").values())
        n = max(2, min(data.batch_size or ELEMENTS, ELEMENTS // elements))
        x = map_tensors(lambda v: v[:1].expand(n, *v.shape[1:]).to(fabric.device), x)
        net.to(fabric.device, trainer.dtype).train()
        with cpu_threads(trainer.threads):
            for _ in range(2):
                begin = time.perf_counter()
                with fabric.autocast():
                    out = net(x)
                heads = out if isinstance(out, tuple) else (out,)  # BiSeNetV2 has several in training
                torch.autograd.backward([head.float().mean() for head in heads])
                heads[0].sum().item()  # waits for the device
                seconds = time.perf_counter() - begin
        return cls(seconds / n, peak_memory())

    def run(self, trainer: FederatedTrainer, model: LocalObjective, data: FederatedDataModule, clients: float) -> float:
        """Works out the seconds of a run's training and evaluation.

        Args:
            trainer: Its trainer.
            model: Its local objective, of the same net.
            data: Its data, set up.
            clients: Clients of a round.
        """
        (forward, backward), steps = contract_of(model)[0].passes, trainer.local_steps
        passes = model.phases * (forward + 2 * backward) / 3  # a backward pass takes as long as two forward passes
        samples = data.client_sizes.float().mean().item()
        trained = steps * (data.batch_size or samples) if steps else trainer.local_epochs * samples
        evaluations = due(trainer.max_rounds, trainer.eval_every, trainer.eval_last)
        evaluated = evaluations * len(data.y_test) / 3
        return self.seconds * (trainer.max_rounds * clients * trained * passes + evaluated)


class Ahead(NamedTuple):
    """A round that is not trained, or a step of an asynchronous server.

    Attributes:
        clients: The clients whose uploads arrive in its last phase.
        steps: Local steps of those of its first phase.
        late: Number of clients that are too late.
        bits: Bits on the wire.
        time_s: ``clock/time_s`` at its end; 0 without a clock.
    """

    clients: list[int]
    steps: list[int]
    late: int
    bits: int
    time_s: float


def ahead(run: Run) -> Iterator[Ahead]:
    """Yields the rounds of a run from the first one on, until its clock ends it."""
    settings, data, timing, phases = run.settings, run.data, run.timing, range(run.objective.phases)
    steps = cache(lambda k: settings.asked(data, k))
    wire = [run.contract[phase].bits for phase in phases]
    metrics, saved = dict[str, float](), dict[str, Any]()
    for t in range(run.max_rounds):
        if settings.asynchronous is not None and timing is not None:
            flight = Flight(run, settings.asynchronous, timing, t, saved)
            saved, metrics, late = flight.after(State({})), flight.metrics(), len(flight.failed["late"])
            clients = [task.client for task in flight.arrived]
            first, numbers = [steps(k) for k in clients], [(flight.started, len(clients))]
        else:
            clients, attendances = run.drawn(t), []
            for phase in phases:
                attendance = settings.faults.attendance(clients, [steps(k) for k in clients], t, phase, run.seed)
                attendances.append(attendance if timing is None else timing.attendance(attendance, phase))
                clients = [*attendances[-1].steps]
            first = [*attendances[0].steps.values()]
            numbers = [(attendance.receivers, len(attendance.steps)) for attendance in attendances]
            late = sum(len(attendance.late) for attendance in attendances)
            metrics = {} if timing is None else timing.metrics(metrics, attendances)
        bits = sum(n * size for pair in zip(numbers, wire, strict=True) for n, size in zip(*pair, strict=True))
        yield Ahead(clients, first, late, bits, metrics.get("clock/time_s", 0.0))
        if timing is not None and metrics["clock/time_s"] >= timing.clock.max_time_s:
            return


def row_bytes(model: LocalObjective, w: Tensor) -> int:
    """Returns the bytes of the state that a client keeps between rounds.

    Args:
        model: The local objective.
        w: Weights, ``(d,)``.
    """
    return sum(value.nbytes for value in State.initial(model.client_inits(), w, w).values())


def due(rounds: int, every: int, last: int = 1) -> int:
    """Returns how often something happens that is due every so many rounds and in each of the ``last``."""
    last = min(last, rounds)
    return (rounds - last) // every + last


def makespan(steps: Sequence[int], world: int, engine: str = "sequential", block: int | None = None) -> int:
    """Returns the local steps that the busiest process makes one after another.

    Args:
        steps: Steps of each client of the cohort.
        world: Number of processes.
        engine: The engine; the batched ones train clients of similar length in a block, until the longest is done.
        block: Clients of a block; None: all.
    """
    size = (block or max(len(steps), 1)) if engine_class(engine).trains_several else 1
    parts = (sorted((steps[p] for p in part), reverse=True) for part in collectives.assign(steps, world))
    return max(sum(part[::size]) for part in parts)  # the longest of each block


def peak_memory() -> int:
    """Returns the most main memory that this process has had, in bytes; 0 on systems other than Linux."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _amount(value: float, **units: float) -> str:
    name, size = next((unit for unit in units.items() if value >= unit[1]), [*units.items()][-1])
    return f"{value / size:{',.0f' if value >= 999.5 * size else '.3g'}} {name}"


as_time: Callable[[float], str] = partial(_amount, h=3600.0, min=60.0, s=1.0, ms=1e-3)
as_bytes: Callable[[float], str] = partial(_amount, GB=1e9, MB=1e6, kB=1e3)
