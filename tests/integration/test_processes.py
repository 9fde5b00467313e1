"""Many processes give what one gives, to the bit or to rounding, however they are launched; and they end in peace."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning import Personal, algorithms
from fl_lightning.trainer import program
from fl_lightning.trainer.runtime.collectives import assign
from tests.runs import DIGITS, SCRIPT, assert_same, cli, ended, group, metrics, newest, process, rows, run, state
from tests.trainer.test_program import ONE_BY_ONE

STEPS = st.lists(st.integers(1, 12), min_size=1, max_size=7)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS, processes=st.integers(1, 3))
def test_assign(steps: list[int], processes: int) -> None:
    """The parts are a partition, the same each time; the wait is at most Graham's 4/3 - 1/(3 processes) of the best."""
    parts = assign(steps, processes)
    assert len(parts) == processes and parts[0] and parts == assign(steps, processes)
    assert sorted(itertools.chain(*parts)) == list(range(len(steps)))
    assert all(part == sorted(part) for part in parts)

    def longest(owners: tuple[int, ...]) -> int:
        return max(sum(k for k, o in zip(steps, owners, strict=True) if o == rank) for rank in range(processes))

    def most(parts: list[list[int]]) -> int:
        return max(sum(steps[i] for i in part) for part in parts)

    best = min(longest(owners) for owners in itertools.product(range(processes), repeat=len(steps)))
    assert 3 * processes * most(parts) <= (4 * processes - 1) * best
    wished = assign(steps, processes, [3 * i for i in range(len(steps))])
    assert most(wished) <= most(parts) and wished[0] and sorted(itertools.chain(*wished)) == list(range(len(steps)))


def test_assign_by_hand() -> None:
    assert assign([3, 3, 2, 2, 2], 2) == [[0, 2, 4], [1, 3]]
    assert assign([1, 5, 1], 4) == [[1], [0], [2], []]
    assert assign([2, 2], 1) == [[0, 1]]
    assert assign([2, 2, 2, 2], 2, [1, 3, 4, 6]) == [[2, 3], [0, 1]]  # each to its owner
    assert assign([2, 2, 2, 2], 2, [0, 2, 4, 6]) == [[0, 1], [2, 3]]  # no more work than without
    assert assign([5, 3, 2], 2, [1, 2, 4]) == [[1, 2], [0]]
    assert assign([2], 2, [1]) == [[0], []]  # the first process has some


COHORTS = "[[0,1,2,3,4],[5],[0,5],[1,2,5]]"
"""Odd ones, some smaller than the number of processes, and clients that change process."""

ARGS = [
    "--model.ascent=SAM",
    "--data.eval_batch_size=100",
    "--trainer.sampler=ReplaySampler",
    f"--trainer.sampler.rounds={COHORTS}",
    "--trainer.max_rounds=4",
    "--trainer.callbacks+=FlatnessMonitor",
    "--trainer.callbacks.every_n_rounds=1",
]

MANY = '''
import os
import signal

import numpy as np
import torch
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from fl_lightning import SCAFFOLD, Digits, UserError
from fl_lightning.trainer.callbacks import Callback
from fl_lightning.data import Dirichlet


class Uneven(Dirichlet):
    """Skewed labels, and sizes as 1 : 2 : 3 : ..."""

    def split(self, labels, num_clients, num_classes, seed):
        indices = np.concatenate(super().split(labels, num_clients, num_classes, seed))
        ends = np.arange(1, num_clients + 1).cumsum() * len(indices)
        return np.split(indices, ends[:-1] // (num_clients * (num_clients + 1) // 2))


class Parts(Digits):
    """The last of the test samples are evaluated on their own, too; the last client owns none of them."""

    def load(self):
        self.test_clients = np.arange(360) % (self.num_clients - 1)
        return super().load()

    def test_parts(self):
        n = torch.arange(len(self.y_test))
        return {"late": n >= 200, "first": n < 1}  # of which the second process has none


class Largest(Metric):
    """Keeps all outputs until the end."""

    def __init__(self):
        super().__init__()
        self.add_state("outputs", [], "cat")

    def update(self, preds, target):
        self.outputs.append(preds)

    def compute(self):
        return dim_zero_cat(self.outputs).max(1).values.mean()


class Wild(SCAFFOLD):
    """Its smallest client's first upload is not finite."""

    def local_end(self, w, client, received, ctx):
        upload, client = super().local_end(w, client, received, ctx)
        return {**upload, "w": torch.full_like(w, float("nan"))} if ctx.t == 0 and ctx.n_k < 100 else upload, client


class Unordered(SCAFFOLD):
    """Each process reads the uploads in an order of its own, as from a set."""

    def server_step(self, server, sent, uploads, ctx):
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            uploads.weighted("w")
        return super().server_step(server, sent, uploads, ctx)


class FailOn(Callback):
    """Fails in the third round."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_local_end(self, run, result):
        if result.ctx.t == 2 and run.fabric.world_size > 1 and run.fabric.global_rank == self.rank:
            raise RuntimeError("a fault of one process")


class Killed(Callback):
    """Kills one process in the third round."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_local_end(self, run, result):
        if result.ctx.t == 2 and run.fabric.world_size > 1 and run.fabric.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


class KilledOnce(Killed):
    """Kills it, and not the process that takes its place."""

    def on_local_end(self, run, result):
        if result.ctx.t == 2 and run.fabric.global_rank == self.rank and not os.path.exists("killed"):
            open("killed", "w").close()
            super().on_local_end(run, result)


class Interrupted(Callback):
    """Every process is interrupted in the sixth round, when it has trained a client."""

    def on_local_end(self, run, result):
        if result.ctx.t == 5:
            os.kill(os.getpid(), signal.SIGTERM)


class Seen(Callback):
    """Notes the rounds after which it is called, and needs none; if wanted a logger ends the run with round 5."""

    def __init__(self, stops: bool = False) -> None:
        self.stops = stops

    def needs_round(self, t):
        return False

    def on_fit_start(self, run):
        log = run.loggers[0].log_metrics

        def log_metrics(metrics, step=None):
            run.should_stop |= self.stops and step == 4
            log(metrics, step)

        run.loggers[0].log_metrics = log_metrics

    def on_round_logged(self, run, metrics):
        with open(f"seen_{run.fabric.world_size}_{run.fabric.global_rank}", "a") as file:
            print(run.rounds_done, file=file)


class Full(SCAFFOLD):
    """The second process once runs out of memory, in the second round of a program."""

    full = False

    def local_end(self, w, client, received, ctx):
        several = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        if several and ctx.t == 2 and not self.full:
            self.full = True
            raise MemoryError
        return super().local_end(w, client, received, ctx)


class Crowded(Digits):
    """The second process has no memory for the minibatches of a program."""

    def minibatch_table(self, clients, *more):
        several = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        if several and len(clients) > 5:
            raise MemoryError
        return super().minibatch_table(clients, *more)


class KilledIn(SCAFFOLD):
    """The second process is killed in the second program."""

    def local_end(self, w, client, received, ctx):
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1 and ctx.t == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local_end(w, client, received, ctx)


class Mistaken(Callback):
    """The user's mistake, met in the first round by one process or by all."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def on_round_end(self, run):
        if self.rank is None or run.fabric.global_rank == self.rank:
            raise UserError("mine = 3: use 4")
'''
METRICS = (
    "--trainer.callbacks.metrics=[{{class_path: LambdaMax, init_args: {{samples: {}}}}}, Discrepancy, Updates, "
    "ClientLambdaMax, {{class_path: DeltaEpsilon, init_args: {{rho: 0.1}}}}, "
    "{{class_path: ClientEvaluation, init_args: {{local_models: true}}}}]"
)
UNEVEN = ["--data.partition=many.Uneven", "--data.partition.alpha=1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a working folder that is empty but for the classes of ``many.py``."""
    (tmp_path / "many.py").write_text(MANY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "many", raising=False)
    return tmp_path


def launch(size: int, *args: str, cwd: Path, nodes: int = 1) -> Path:
    """Runs processes to a good and quiet end; returns their one run folder, below ``cwd / "many"``."""
    sizes = [*processes(size), f"--trainer.num_nodes={nodes}"]
    with group(size, *args, *sizes, f"--trainer.default_root_dir={cwd / 'many'}", cwd=cwd, nodes=nodes) as children:
        assert_quiet(ended(children))
    (folder,) = (cwd / "many").glob("*/*")
    return folder


def assert_quiet(texts: list[tuple[str, str]]) -> None:
    for sign in ("terminate called", "process_group", "Traceback", "Warning"):
        assert sign not in str(texts)


def processes(n: int) -> list[str]:
    return [f"--trainer.devices={n}", "--trainer.strategy=ddp"]


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "fl_lightning"]


BANNER = re.compile("Initializing distributed|distributed_backend=|All distributed processes|-*$")
"""What Lightning says when processes have found each other."""


def assert_metrics(distributed: Path, single: Path, rounding: float) -> None:
    """Compares names, rounds and values; sums over batches, by process, are equal to ``rounding``, others to 1e-12."""
    logged, expected = metrics(distributed), metrics(single)
    assert logged.keys() == expected.keys() > {"flatness/lambda_max", "flatness/discrepancy"}
    for name, values in expected.items():
        rounds = (
            [2, 3, 4] if name.endswith(("_cosine", "_epsilon")) else [1, 2, 3, 4]
        )  # the first round has none before it
        assert [at for at, _ in logged[name]] == [at for at, _ in values] == rounds
        tolerance = rounding if name.startswith(("server/", "flatness/", "client/test/")) else 1e-12
        assert [v for _, v in logged[name]] == pytest.approx([v for _, v in values], tolerance, tolerance), name
    a, b = (
        np.genfromtxt(folder / "client_evaluation.csv", delimiter=",", skip_header=1)
        for folder in (distributed, single)
    )
    np.testing.assert_allclose(a, b, rounding, rounding)
    assert len(a) in (4 * 5, 4 * 6) and np.isfinite(a).all()


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    """Evaluation, too, is shared, though 400 samples are one batch."""
    args = [*ARGS, METRICS.format(300), "--data=many.Parts", "--data.eval_batch_size=400"]
    args += ["--model.metrics=[many.Largest]"]
    single = run("fit", *args, root=folder / "one", model="many.Unordered")
    distributed = launch(2, "fit", "--model=many.Unordered", *DIGITS, *args, cwd=folder)
    assert_same(state(distributed), state(single))
    assert state(single)["ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert_metrics(distributed, single, 1e-5)
    assert {"server/test_late/acc", "server/test_first/Largest"} < metrics(single).keys()
    assert len((distributed / "client_evaluation.csv").read_text().splitlines()) == 1 + 4 * 5


PROGRAMS = [
    "--trainer.engine=graphed",
    *(f"--trainer.{name}={value}" for name, value in {"max_rounds": 22, "eval_every": 10, "eval_last": 1}.items()),
    "--trainer.callbacks+=many.Seen",
    "--trainer.callbacks+=Checkpoints",
    "--trainer.callbacks.every_n_rounds=7",
]
SHARED = [[0, 1, 2, 3, 4], [5, 1], [0, 5, 3], [1, 2, 5]]
"""Cohorts of which each process has some, and clients that change process."""


@pytest.mark.parametrize(
    ("model", "cohorts", "more"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("FedSMOO", SHARED, ()),
                ("FedAvg", [*SHARED, [5], *SHARED], ()),
                ("SCAFFOLD", [[5], *SHARED], ["--trainer.engine=batched"]),
                ("FedDyn", SHARED, UNEVEN),
                ("FedSAM", SHARED, ["--trainer.faults=Faults", "--trainer.faults.drop_after=0.2"]),
                ("many.Full", SHARED, ["--trainer.engine=batched"]),
            )
        ),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("FedGMT", SHARED, ["--trainer.compile=true"]),
                ("FedAvg", SHARED, ["--model.parts=[{class_path: Compress, init_args: {rate: 0.2}}]"]),
                ("FedSAM", SHARED, ["--model.parts=[Personal]"]),
                (
                    "FedSAM",
                    SHARED,
                    ["--model.averaging=SWA", "--trainer.clock=Clock", "--trainer.clock.sec_per_sample=0.01"],
                ),
                ("FedDyn", SHARED, ["--data.val_fraction=0.2", "--trainer.precision=64-true"]),
                *((name, SHARED, ()) for name in algorithms.__all__ if name not in ONE_BY_ONE),
            )
        ),
    ],
)
def test_programs_of_two_processes(
    model: str, cohorts: list[list[int]], more: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trains its share of the clients of a program, to the bits of single rounds of one process."""
    args = [*PROGRAMS, "--trainer.sampler=ReplaySampler", f"--trainer.sampler.rounds={(cohorts * 6)[:22]}", *more]
    distributed = launch(2, "fit", f"--model={model}", *DIGITS, *args, cwd=folder)
    monkeypatch.setattr(program, "TAKEN_BACK", 0)
    single = run("fit", *args, root=folder / "one", model=model)
    assert_same(state(distributed), state(single))
    assert metrics(distributed).keys() == metrics(single).keys()
    seen = [(folder / f"seen_{place}").read_text().split() for place in ("2_0", "2_1", "1_0")]
    assert seen[0] == seen[1] and len(seen[0]) < len(seen[2]) == 22


@pytest.mark.slow
def test_a_logger_ends_a_program_of_two_processes(folder: Path) -> None:
    """It ends one round later, as in single rounds."""
    args = [*PROGRAMS[:4], "--trainer.callbacks+=many.Seen", "--trainer.callbacks.stops=true"]
    single = run("fit", *args, root=folder / "one", model="SCAFFOLD")
    distributed = launch(2, "fit", "--model=SCAFFOLD", *DIGITS, *args, cwd=folder)
    assert_same(state(distributed), state(single))
    assert int(state(distributed)["round"]) == 5
    seen = [(folder / f"seen_{place}").read_text().split() for place in ("2_0", "2_1", "1_0")]
    assert seen == [["1", "5"]] * 3


@pytest.mark.long
def test_a_process_that_is_killed_in_a_program(folder: Path) -> None:
    """The other one ends, and one process goes on from the last checkpoint."""
    args, root = [*PROGRAMS, "--trainer.engine=batched"], f"--trainer.default_root_dir={folder / 'two'}"
    with group(2, "fit", "--model=many.KilledIn", *DIGITS, *args, *processes(2), root, cwd=folder) as children:
        errors = [child.communicate(timeout=600)[1] for child in children]
    assert [child.returncode for child in children] == [1, -signal.SIGKILL], errors
    assert "error: process 0 has lost another one" in errors[0]
    assert int(state(newest(folder / "two"))["round"]) == 7
    resumed = run("fit", *args, "--ckpt_path=last", root=folder / "two", model="many.KilledIn")
    assert_same(state(resumed), state(run("fit", *args, root=folder / "one", model="many.KilledIn")))


@pytest.mark.slow
def test_a_process_without_memory_for_a_program(folder: Path) -> None:
    """Nobody waits for it."""
    root = f"--trainer.default_root_dir={folder / 'two'}"
    args = ["--model=SCAFFOLD", *DIGITS, "--data=many.Crowded", *PROGRAMS, *processes(2), root]
    with group(2, "fit", *args, cwd=folder) as children:
        errors = [child.communicate(timeout=600)[1] for child in children]
    assert [child.returncode for child in children] == [1, 1], errors
    assert "error: process 0 has lost another one" in errors[0] and "MemoryError" in errors[1]


@pytest.mark.long
def test_three_unequal_processes(folder: Path) -> None:
    """The third has no sample for lambda_max; a refused client is refused."""
    args = [*ARGS, *UNEVEN, METRICS.format(2)]
    single = run("fit", *args, root=folder / "one", model="many.Wild")
    distributed = launch(3, "fit", "--model=many.Wild", *DIGITS, *args, cwd=folder)
    assert_same(state(distributed), state(single))
    assert_metrics(distributed, single, 1e-5)
    assert [refused for _, refused in metrics(distributed)["client/refused"]] == [1, 0, 0, 0]


@pytest.mark.slow
def test_two_nodes_by_sums(folder: Path) -> None:
    """Without ``deterministic``, on two nodes (both here), they are equal to rounding in float64."""
    args = [*ARGS, *UNEVEN, METRICS.format(300), "--trainer.precision=64-true"]
    single = run("fit", *args, root=folder / "one", model="many.Wild")
    sums = "--trainer.deterministic=false"
    distributed = launch(1, "fit", "--model=many.Wild", *DIGITS, *args, sums, cwd=folder, nodes=2)
    assert_close(state(distributed), state(single))
    assert_metrics(distributed, single, 1e-9)
    assert [refused for _, refused in metrics(distributed)["client/refused"]] == [1, 0, 0, 0]


def assert_close(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    """Asserts that all differences are within 1e-12 of the largest entry."""
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() <= 1e-12 * b[name].abs().max(), name


@pytest.mark.long
@pytest.mark.parametrize("launcher", [[SCRIPT], [sys.executable, *TORCHRUN]], ids=["fabric", "torchrun"])
def test_launchers(folder: Path, launcher: list[str]) -> None:
    """Fabric and torchrun start new processes."""
    args = ["fit", "--model=SCAFFOLD", *DIGITS, *processes(2), f"--trainer.default_root_dir={folder / 'many'}"]
    with process(*launcher, *args, cwd=folder) as child:
        assert_quiet(ended([child]))
    assert_same(state(newest(folder / "many")), state(run("fit", root=folder / "one", model="SCAFFOLD")))


WAITS = """
import subprocess, sys, time
from fl_lightning.trainer.runtime.signals import with_starter

with with_starter():
    if sys.argv[1:]:
        print("waits", flush=True)
    else:
        subprocess.Popen([sys.executable, __file__, "second"])
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="by prctl")
@pytest.mark.parametrize(
    ("fit", "number"),
    [
        (False, signal.SIGKILL),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, signal.SIGTERM), (True, signal.SIGKILL))),
        pytest.param(True, signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_who_waits_for_others_ends_with_the_first_process(folder: Path, fit: bool, number: int) -> None:
    """It ends whether it waits already or is still being started; else it would hold the pipes open."""
    (folder / "waits.py").write_text(WAITS)
    root = f"--trainer.default_root_dir={folder / 'many'}"
    command = [SCRIPT, "fit", *DIGITS, *processes(2), root] if fit else [sys.executable, str(folder / "waits.py")]
    with process(*command, cwd=folder) as child:
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        while child.poll() is None and not children.read_text():
            time.sleep(0.01)
        if not fit:
            assert child.stdout is not None and child.stdout.readline() == "waits\n"
        os.kill(child.pid, number)
        assert child.communicate(timeout=300) == ("", "")
        assert child.returncode in (-number, 128 + number)  # the latter of a run, which stops when its round has ended


@pytest.mark.slow
def test_torchrun_goes_on_after_a_kill(folder: Path) -> None:
    """It does so by itself; started again by hand with three processes in place of two, it goes on, too."""
    root = f"--trainer.default_root_dir={folder / 'many'}"
    args = ["fit", "--model=SCAFFOLD", *DIGITS, "--trainer.max_rounds=4", root]
    args += ["--trainer.callbacks+=many.KilledOnce", "--trainer.callbacks.rank=1", "--ckpt_path=auto"]
    args += ["--trainer.callbacks+=Checkpoints", "--trainer.callbacks.every_n_rounds=2"]

    with process(sys.executable, *TORCHRUN[:-2], "--max-restarts=1", *TORCHRUN[-2:], *args, cwd=folder) as child:
        output = str(ended([child]))
    assert output.count("auto: no run of this config") == output.count("version_0, round 2") == 1
    expected = state(run("fit", "--trainer.max_rounds=4", root=folder / "one", model="SCAFFOLD"))
    assert_same(state(newest(folder / "many")), expected)
    (folder / "killed").unlink()
    args[args.index(root)] = f"--trainer.default_root_dir={folder / 'more'}"
    with group(2, *args, *processes(2), cwd=folder) as children:
        assert [(child.communicate(timeout=600), child.returncode)[1] for child in children] == [1, -signal.SIGKILL]
    with group(3, *args, *processes(3), cwd=folder) as children:
        assert "version_0, round 2" in str(ended(children))
    assert_same(state(newest(folder / "more")), expected)
    assert len([*folder.glob("m*/*/version_*")]) == 2


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(
    ("model", "fault", "rank"),
    [
        ("SCAFFOLD", "Killed", 0),
        ("FedAvg", "Killed", 1),
        *(
            pytest.param("SCAFFOLD", *case, marks=pytest.mark.slow)
            for case in [("Killed", 1), ("FailOn", 0), ("FailOn", 1)]
        ),
    ],
)
def test_the_end_of_one_process_ends_all(folder: Path, model: str, fault: str, rank: int) -> None:
    """No process waits for one that is gone, but says so; what was done is saved, and one process goes on from it.

    If a process is killed, with which rows are lost, or that writes the checkpoints, this is the last checkpoint.
    """
    args = [*UNEVEN, "--trainer.max_rounds=4", f"--trainer.callbacks+=many.{fault}", f"--trainer.callbacks.rank={rank}"]
    if fault == "FailOn":
        args += ["--trainer.engine=graphed"]
    elif model == "SCAFFOLD":
        args += ["--trainer.callbacks+=Checkpoints", "--trainer.callbacks.every_n_rounds=1"]
    root = f"--trainer.default_root_dir={folder / 'two'}"
    with group(2, "fit", f"--model={model}", *DIGITS, *args, *processes(2), root, cwd=folder) as children:
        errors = [child.communicate(timeout=600)[1] for child in children]
    assert children[rank].returncode == (-signal.SIGKILL if fault == "Killed" else 1), errors
    assert ("a fault of one process" in errors[rank]) is (fault == "FailOn")
    assert children[1 - rank].returncode == 1
    start = "error (process 1): process 1" if rank == 0 else "error: process 0"
    lost = f"{start} has lost another one, which has failed or was killed; see its own message, and continue from the "
    reported = [line for line in errors[1 - rank].splitlines() if not BANNER.match(line)]
    assert reported == [f"{lost}last checkpoint by --ckpt_path last"]
    assert int(state(newest(folder / "two"))["round"]) == 2
    resumed = run("fit", *args, "--ckpt_path=last", root=folder / "two", model=model)
    assert_same(state(resumed), state(run("fit", *args, root=folder / "one", model=model)))


@pytest.mark.sampled(slow=8)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "memory"),
    [*itertools.product(("FedSMOO", "SCAFFOLD"), (0, 0.00001, 1)), ("FedRep", 1), ("FedScarl", 0.00001)],
)
def test_rows_live_with_any_number_of_processes(folder: Path, model: str, memory: float) -> None:
    """In memory, on disk or both, killed on 4, interrupted on 2, ended on 3, they are as on one process."""
    saves = ["--trainer.callbacks+=Checkpoints", "--trainer.callbacks.every_n_rounds=2"]
    args = [
        *UNEVEN,
        f"--trainer.client_memory={memory}",
        "--trainer.clients_per_round=5",
        "--trainer.max_rounds=9",
        *saves,
    ]
    root = f"--trainer.default_root_dir={folder / 'many'}"
    options: dict[str, Any] = {}
    if model == "FedRep":
        options = {"parts": [Personal(epochs_alone=1)]}
        model, args = "FedAvg", [*args, "--model.parts+=Personal", "--model.parts.epochs_alone=1"]

    def start(size: int, *more: str) -> list[int | None]:
        with group(
            size, "fit", f"--model={model}", *DIGITS, *args, *more, *processes(size), root, cwd=folder
        ) as children:
            for child in children:
                child.communicate(timeout=600)
            return [child.returncode for child in children]

    assert -signal.SIGKILL in start(4, "--trainer.callbacks+=many.Killed", "--trainer.callbacks.rank=1")
    assert int(state(newest(folder / "many"))["round"]) == 2
    interrupted = ["--trainer.callbacks+=many.Interrupted", "--ckpt_path=last"]
    assert start(2, *interrupted) == [128 + signal.SIGTERM] * 2
    assert int(state(newest(folder / "many"))["round"]) == 5  # the last complete round, not the last checkpoint
    assert start(3, "--ckpt_path=last") == [0] * 3
    single = run("fit", *args, root=folder / "one", model=model)
    assert_same(rows(newest(folder / "many"), **options), rows(single, **options))
    server, expected = ({k: v for k, v in state(x).items() if "server" in k} for x in (newest(folder / "many"), single))
    assert_same(server, expected)
    assert not [*(folder / "many").rglob("rows_*")]


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        ("null", "error: mine"),
        pytest.param("0", "error: mine", marks=pytest.mark.slow),
        pytest.param("1", "error (process 1): mine", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_is_reported_once(folder: Path, rank: str, message: str) -> None:
    """The first process reports it if it meets it, otherwise the one that does."""
    args = [*DIGITS, "--trainer.callbacks+=many.Mistaken", f"--trainer.callbacks.rank={rank}", *processes(2)]
    with group(2, "fit", "--model=FedAvg", *args, cwd=folder) as children:
        outputs = ended(children, 1)
    assert f"{message} = 3: use 4" in [line for _, err in outputs for line in err.splitlines()]
    assert str(outputs).count("mine = 3") == 1


def test_a_mistake_in_the_arguments_is_told_once(folder: Path) -> None:
    """Every process reads them, before they know of each other."""
    with group(2, "fit", "--model=FedAvgg", *DIGITS, cwd=folder) as children:
        (_, line), other = ended(children, 1)
    assert line.startswith("error: model = FedAvgg: ") and other == ("", "")


@pytest.mark.parametrize(
    ("env", "start"),
    [
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "error: model"),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, None),
        ({"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, "error (process 2): model"),
        ({"RANK": "2", "LOCAL_RANK": "0"}, "error (process 2): model"),
        ({"LOCAL_RANK": "1"}, None),
    ],
)
def test_who_tells(env: dict[str, str], start: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the processes of a cluster know of each other, the first of each node tells."""
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit:
        cli("fit", "--model=FedAvgg", *DIGITS)
    assert exit.value.code == 1 if start is None else str(exit.value.code).startswith(start)


PRIVATE = [
    "--model=FedAvg",
    "--model.weighting=uniform",
    "--trainer.sampler=BernoulliSampler",
    "--trainer.sampler.p=0.5",
    "--trainer.privacy=AdaptivePrivacy",
    "--trainer.privacy.noise_multiplier=1",
    "--trainer.privacy.delta=0.1",
    "--trainer.max_rounds=4",
]


@pytest.mark.slow
def test_private_run_on_two_processes(tmp_path: Path) -> None:
    """The process that aggregates draws the noise, and all draw the same cohorts, also those of a secret key."""
    single = run("fit", *PRIVATE, "--trainer.privacy.noise_seed=3", root=tmp_path / "one")
    for name, seed in (("same", ["--trainer.privacy.noise_seed=3"]), ("secret", [])):
        args = [*DIGITS, *PRIVATE, *seed, *processes(2), f"--trainer.default_root_dir={tmp_path / name}"]
        with group(2, "fit", *args, cwd=tmp_path) as children:
            ended(children)
    assert_same(state(newest(tmp_path / "same")), state(single))
    assert not torch.equal(state(newest(tmp_path / "secret"))["server.w"], state(single)["server.w"])
