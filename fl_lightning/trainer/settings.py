"""The settings of a trainer, checked, and the devices that they name."""

import atexit
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from fl_lightning.core import (
    Checked,
    Interval,
    NonNegativeInt,
    PositiveInt,
    Size,
    Threads,
    UserError,
    ensure,
    folded,
    require,
)
from fl_lightning.data import FederatedDataModule
from fl_lightning.engine import Engine, EngineName, name_of
from fl_lightning.trainer.aggregation.base import Aggregation, Mean
from fl_lightning.trainer.aggregation.privacy import GaussianPrivacy
from fl_lightning.trainer.participation import NO_FAULTS, Asynchronous, Clock, CohortSampler, Faults, UniformSampler
from fl_lightning.trainer.runtime import (
    Fabric,
    collectives,
    cpu_threads,
    default_actions,
    environment,
    float32_products,
    keep_freed_memory,
    quiet,
    repeatable_convolutions,
    with_starter,
)

Kind = Literal["federated", "centralized"]
"""Kinds of training."""
Precision = Literal["32-true", "64-true", "bf16-mixed"]
"""Precisions of weights and state, and of forward passes."""


class Settings(Checked, key="trainer"):
    """Settings of a `FederatedTrainer`.

    Args:
        max_rounds: Number of rounds, T.
        clients_per_round: Size of the cohort, S, if there is no ``sampler``.
        sampler: Draws the cohorts: UniformSampler, BernoulliSampler, ReplaySampler, or your own.
        faults: How clients fail: dropout, stragglers, availability, corrupted uploads; null: they do not.
        on_divergence: What a round without a finite result does: stop ends the run, which keeps the state before it;
            continue takes it as a round in which nobody answered, and counts it.
        clock: Logs the seconds that the rounds would take on the clients' devices; with a deadline, or more clients
            than are needed, the server does not wait for all.
        asynchronous: A server without rounds, which counts its steps in their place: FedBuff, FedAsync or
            SemiSynchronous; it needs the clock. null: rounds.
        aggregation: Rule that combines the uploads of a cohort into one update: CoordinateMedian, TrimmedMean,
            NormClipping, Krum, MultiKrum, or your own; null: the mean.
        privacy: Client-level differential privacy: GaussianPrivacy or AdaptivePrivacy; null: none.
        local_epochs: Passes of a client over its data, E.
        local_steps: Steps of a client, K; overrides ``local_epochs``.
        max_time: Stops the run after this time, as ``DD:HH:MM:SS`` or ``HH:MM:SS``; a resumed run counts on.
        eval_every: Rounds between two evaluations.
        eval_last: Rounds at the end that are all evaluated; the papers average over 100 of them.
        accelerator: As in ``lightning.Fabric``: auto, cpu, gpu, ...
        strategy: As in ``lightning.Fabric``; with several devices "ddp" launches the processes. The model is not
            wrapped: each process trains its share of the cohort.
        devices: Number of devices (processes) per node; under torchrun the number that it has started.
        num_nodes: Number of nodes; under torchrun that of its nodes.
        precision: 32-true, 64-true, or bf16-mixed (float32 weights and state, bfloat16 forward passes).
        tf32: Let an Nvidia GPU round the factors of float32 products to 10 bits of mantissa, which is much faster.
        threads: CPU threads of each process during a run; null: torch's own number. Small nets run best with 1.
        engine: Runs local training; all engines give the same numbers up to rounding. sequential: one client after
            another; batched: all at once, by vmap; graphed: batched, with the local step recorded and replayed, on a
            GPU as a CUDA graph; debug: sequential, and it names the first value that is not finite; auto: the fastest,
            measured at the start; or a class of your own.
        client_block: Clients that the batched and graphed engines train at once; null: all of a process's share.
        compile: Let the graphed engine compile its record, which takes up to a minute (less if cached) and pays off
            in long runs of tiny nets.
        deterministic: Repeat a run to the bit: cuDNN uses only kernels that do, and several processes sum the uploads
            in cohort order, as one would. Otherwise they reduce each uploaded name at once, which moves less data.
        client_memory: Memory for the clients' state between rounds, in GiB; the rest goes to the run folder.
        seed: Seed of everything drawn during the run: initial weights (from the command line), cohorts, minibatches.
        default_root_dir: Folder of the run folders.
        name: Folder of this experiment's runs; by default model and data.

    Attributes:
        wanted: Number of clients that count in a round, of those that are drawn; None: all.
        fabric: The devices; `launch` starts its processes.
        dtype: Dtype of weights and state.
        config: The resolved config, which the command line sets; empty: a run makes it from its objects.

    Raises:
        UserError: If a setting is out of range, or the devices are not available.
    """

    def __init__(
        self,
        max_rounds: PositiveInt = 100,
        clients_per_round: PositiveInt = 10,
        sampler: CohortSampler | None = None,
        faults: Faults | None = None,
        clock: Clock | None = None,
        asynchronous: Asynchronous | None = None,
        on_divergence: Literal["stop", "continue"] = "stop",
        aggregation: Aggregation | None = None,
        privacy: GaussianPrivacy | None = None,
        local_epochs: Annotated[int, Interval("[1, 1e4]")] = 1,
        local_steps: Size | None = None,
        max_time: str | None = None,
        eval_every: PositiveInt = 1,
        eval_last: PositiveInt = 1,
        accelerator: str = "auto",
        strategy: str = "auto",
        devices: Annotated[int, Interval("[-1, 1024]")] | str = 1,
        num_nodes: PositiveInt = 1,
        precision: Precision = "32-true",
        tf32: bool = False,
        threads: Threads | None = None,
        engine: EngineName | type[Engine] = "auto",
        client_block: PositiveInt | None = None,
        compile: bool = False,
        deterministic: bool = True,
        client_memory: Annotated[float, Interval("[0, 1e6]")] = 1.0,
        seed: NonNegativeInt = 0,
        default_root_dir: str = "runs",
        name: str | None = None,
    ) -> None:
        require(not compile or engine in ("graphed", "auto"), "trainer.compile", compile, "only with engine graphed")
        shown = name if name and name.isprintable() else repr(name)
        require(name is None or _is_below(name), "trainer.name", f"{shown:.60}", "give a folder below default_root_dir")
        require(bool(str(default_root_dir)), "trainer.default_root_dir", "''", "give a folder, such as runs")
        self.max_rounds, self.max_time, self.seed = max_rounds, _seconds(max_time), seed
        self.eval_every, self.eval_last = eval_every, eval_last
        self.sampler = UniformSampler(clients_per_round) if sampler is None else sampler
        self.faults, self.on_divergence = NO_FAULTS if faults is None else faults, on_divergence
        self.clock, self.wanted, self.asynchronous = clock, None, asynchronous
        require(
            type(aggregation) is not Aggregation,
            "trainer.aggregation",
            "Aggregation",
            "give a rule, such as Mean or CoordinateMedian",
        )
        ensure(
            aggregation is None or privacy is None,
            f"trainer.aggregation = {type(aggregation).__name__}: not under trainer.privacy, which sums clipped "
            "uploads; set one of them to null",
        )
        self.aggregation: Aggregation = privacy or aggregation or Mean()
        if privacy is not None:
            self.sampler = privacy.sampler(self.sampler)
        if clock is not None:
            self.sampler, self.wanted = clock.enlarged(self.sampler, privacy is not None)
            ensure(
                clock.deadline_s is None or self.faults.stragglers is None,
                "trainer.clock.deadline_s: trainer.faults.stragglers has a deadline, too; set one of them to null",
            )
        for wrong, problem in (
            (clock is None, "trainer.clock is null, and nobody knows when a client is done; set it to Clock"),
            (
                clock is not None and clock.leaves_out,
                "nobody is late for a round; leave the clock's deadline and over_selection out",
            ),
            (clock is not None and clock.server_s, "the server's steps take no time; set trainer.clock.server_s to 0"),
            (self.faults.stragglers, "trainer.faults.stragglers has a deadline of rounds; set it to null"),
            (
                privacy,
                "trainer.privacy counts on cohorts that are random, and fast clients come more often; leave it out",
            ),
        ):
            ensure(
                asynchronous is None or not wrong, f"trainer.asynchronous = {type(asynchronous).__name__}: {problem}"
            )
        self.local_epochs, self.local_steps = local_epochs, local_steps
        self.default_root_dir, self.name = Path(default_root_dir).expanduser(), name
        self.engine = name_of(engine)
        self.client_block, self.compile = client_block, compile
        self.deterministic, self.client_memory = deterministic, client_memory
        self.threads, self.tf32, self._precision = threads, tf32, precision
        self.dtype = torch.float64 if precision == "64-true" else torch.float32
        self.config: dict[str, Any] = {}
        if "TORCHELASTIC_RUN_ID" in os.environ:
            devices = int(os.environ["LOCAL_WORLD_SIZE"])
            num_nodes = int(os.environ["WORLD_SIZE"]) // devices
        try:
            self.fabric = Fabric(
                accelerator=accelerator, strategy=strategy, devices=devices, num_nodes=num_nodes, precision=precision
            )
        except (ImportError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"trainer.accelerator = {accelerator}, devices = {devices}, strategy = {strategy}, precision = "
                f"{precision}: {folded(error)} (accelerator cpu, devices 1, strategy auto always work)"
            ) from None
        self._launched, self._nodes = False, num_nodes

    @property
    def precision(self) -> Precision:
        """The precision, which the devices were made for: it cannot be set later."""
        return self._precision

    def run_name(self, model: object, data: object, kind: Kind = "federated") -> str:
        """Returns the folder of this experiment's runs: ``name``, by default model and data."""
        middle = "-" if kind == "federated" else f"-{kind}-"
        return self.name or f"{type(model).__name__}{middle}{type(data).__name__}"

    def asked(self, data: FederatedDataModule, client: int) -> int:
        """Returns the number of local steps, K, that a round asks of a client."""
        return data.batches_per_client(client, self.local_epochs, self.local_steps)

    def launch(self) -> None:
        """Starts the processes, at the first call."""
        if not self._launched:
            cluster = getattr(self.fabric.strategy, "cluster_environment", None)
            ensure(
                self._nodes == 1 or type(cluster) is not LightningEnvironment or "MASTER_PORT" in os.environ,
                f"trainer.num_nodes = {self._nodes}: no other node could join; start this command by torchrun or srun "
                "on each, or set MASTER_ADDR, MASTER_PORT and NODE_RANK there, or set num_nodes to 1",
            )
            if self._nodes > 1 and cluster is not None:
                environment.choose_interface(cluster.main_address)
            names = ", ".join(("MASTER_ADDR", *environment.INTERFACES))
            unreached = f"does not reach the others; see their messages, and check {names}"
            # NCCL's errors are exceptions, as gloo's are, so that the rest can save; else torch ends the process
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            # the processes wait for each other in C++, where Python sees no signal
            with quiet(), default_actions(), with_starter(), collectives.lost_process(self.fabric, unreached):
                collectives.join_again(self.fabric)
                self.fabric.launch()
            self._launched = True
            collectives.connect(self.fabric)
            if self.fabric.world_size > 1:
                atexit.register(collectives.shutdown)

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Sets torch's threads and float32 precision and the C library's allocator as this trainer wants them.

        They are restored afterwards. It may be nested.
        """
        self.launch()  # Fabric divides the cores among its processes
        with (
            torch.inference_mode(False),  # whatever the caller has chosen
            torch.enable_grad(),
            cpu_threads(self.threads),
            collectives.lost_process(self.fabric),
            keep_freed_memory(self.fabric.device),
            float32_products(self.tf32),
            repeatable_convolutions(self.deterministic),
        ):
            yield


def _is_below(name: str) -> bool:
    """Returns whether a name is that of a folder below another one, on any file system."""
    parts = Path(name).parts
    fit = all(part != ".." and len(part.encode()) < 256 for part in parts)
    return fit and parts != () and name.isprintable() and not Path(name).is_absolute()


def _seconds(max_time: str | None) -> float | None:
    """Returns the seconds of a time such as ``01:12:00:00``."""
    if max_time is None:
        return None
    right = re.fullmatch(r"(\d+:)?\d+:\d+:\d+", str(max_time)) is not None
    require(right, "trainer.max_time", max_time, "give DD:HH:MM:SS, such as 00:12:00:00")
    units = (1.0, 60.0, 3600.0, 86400.0)
    return sum(unit * int(part) for unit, part in zip(units, reversed(max_time.split(":")), strict=False))
