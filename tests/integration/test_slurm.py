"""The batch script on a real SLURM of one node, which the test starts for itself; Debian has it in slurm-wlm."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.runs import assert_same, cli, metrics, newest, state

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm.sh"
DAEMONS = ("slurmctld", "slurmd")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, (*DAEMONS, "sbatch"))) or getpass.getuser() != "root", reason="no SLURM to start"
    ),
]
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
KillWait=60
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 State=UP
PartitionName=grace Nodes={host} PriorityTier=1 GraceTime=30 State=UP
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF State=UP
"""
MINE = """
model: {class_path: SCAFFOLD, init_args: {net: {class_path: DigitsMLP, init_args: {hidden: 8}}}}
data: {class_path: Digits, init_args: {num_clients: 6, batch_size: 32}}
trainer:
  clients_per_round: 3
  max_rounds: 60
  accelerator: cpu
  threads: 1
  engine: sequential
  enable_progress_bar: false
"""
SWEEP = """
program: fl-lightning
method: grid
metric: {name: server/test/acc, goal: maximize}
parameters: {data.batch_size: {values: [8, 16, 32, 64]}}
command: [fl-lightning, fit, --config, mine.yaml, --trainer.max_rounds, 12, --trainer.callbacks+=slow.Slow, "${args}"]
"""
SLOW = '''
import time

from fl_lightning.trainer.callbacks import Callback


class Slow(Callback):
    """Half a second a round."""

    def on_round_end(self, run):
        time.sleep(0.5)
'''


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for endpoint in sockets:
            endpoint.bind(("127.0.0.1", 0))
        return [endpoint.getsockname()[1] for endpoint in sockets]
    finally:
        for endpoint in sockets:
            endpoint.close()


def soon(condition: Callable[[], object], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.5)


def told(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextmanager
def daemons(root: Path) -> Iterator[None]:
    children = []
    try:
        for name in DAEMONS:
            with (root / f"{name}.log").open("w") as log:
                command = [name, "-D", "-f", str(root / "slurm.conf")]
                children.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        yield
    finally:
        for child in reversed(children):
            child.terminate()
        for child in children:
            child.wait(60)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes a working folder from which jobs can be submitted."""
    (root := tmp_path / "slurm").mkdir()
    for name in ("state", "spool"):
        (root / name).mkdir()
    (root / "slurm.conf").write_text(CONF.format(host=socket.gethostname(), ports=free_ports(2), root=root))
    (work := tmp_path / "work").mkdir()
    (work / "mine.yaml").write_text(MINE)
    (work / "slow.py").write_text(SLOW)
    (bin := tmp_path / "bin").mkdir()
    (bin / "fl-lightning").write_text(f'#!/bin/sh\nexec {sys.executable} -m fl_lightning "$@"\n')
    (bin / "fl-lightning").chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", str(root / "slurm.conf"))
    monkeypatch.setenv("PATH", f"{bin}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(work)
    with daemons(root):
        soon(lambda: "idle" in subprocess.run(["sinfo", "-h"], capture_output=True, text=True).stdout)
        try:
            yield work
        finally:
            told("scancel", "--user=root")
            soon(lambda: not told("squeue", "-h"))


SIZES = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1", "--time=20"]
SETTINGS = ["mine.yaml", "--trainer.callbacks+=slow.Slow"]


def submit(*args: str, partition: str = "low") -> str:
    options = ["--parsable", "--output=out.txt", "--comment=kept", f"--partition={partition}"]
    return told("sbatch", *SIZES, *options, str(SCRIPT), *SETTINGS, *args).strip()


def shown(job: str, key: str) -> str:
    fields = dict(pair.partition("=")[::2] for pair in told("scontrol", "show", "job", job).split())
    return fields[key]


def rounds(work: Path) -> int:
    logs = [*work.glob("runs/mine/version_*/metrics.csv")]
    return max((len(path.read_text().splitlines()) - 1 for path in logs), default=0)


@pytest.mark.long
def test_job_goes_on_after_its_time_limit_and_a_preemption(slurm: Path) -> None:
    """It is the same job with the same options, in one run, to the bits of a run without SLURM."""
    job = submit()
    soon(lambda: rounds(slurm) >= 3)
    told("scancel", "--signal=USR1", job)  # what --signal=USR1@300 sends, and to whom
    soon(lambda: shown(job, "Restarts") == "1")
    before = rounds(slurm)
    soon(lambda: rounds(slurm) >= before + 3)
    high = told("sbatch", "--parsable", "--partition=high", "--cpus-per-task=2", "--output=high.txt", "--wrap=sleep 1")
    soon(lambda: shown(job, "Restarts") == "2")
    assert shown(job, "Comment") == "kept" and shown(job, "TimeLimit") == "00:20:00"
    soon(lambda: shown(job, "JobState") == "COMPLETED")
    assert shown(high.strip(), "JobState") == "COMPLETED"
    log = (slurm / "out.txt").read_text()
    assert [log.count(text) for text in ("auto: no run", "auto: runs/mine/version_0, round", "Traceback")] == [1, 2, 0]
    (folder,) = slurm.glob("runs/mine/*")
    cli("fit", "--config=mine.yaml", "--trainer.default_root_dir=alone")
    assert_same(state(folder), state(newest(slurm / "alone")))
    assert metrics(folder).keys() == metrics(newest(slurm / "alone")).keys()


@pytest.mark.long
def test_cancelled_job_ends(slurm: Path) -> None:
    """It is saved; the same command goes on, and one of another config does not take its run."""
    job = submit()
    soon(lambda: rounds(slurm) >= 3)
    told("scancel", job)
    soon(lambda: not told("squeue", "-h"))
    assert shown(job, "JobState") == "CANCELLED" and shown(job, "Restarts") == "0"
    job = submit("--model.optimizer.lr=0.5", "--trainer.max_rounds=2")
    soon(lambda: shown(job, "JobState") == "COMPLETED")
    job = submit()
    soon(lambda: shown(job, "JobState") == "COMPLETED")
    log = (slurm / "out.txt").read_text()
    assert [log.count(text) for text in ("auto: no run", "auto: runs/mine/version_0, round")] == [2, 1]


def test_job_that_has_not_trained_does_not_start_again(slurm: Path) -> None:
    """The signal comes while Python still imports."""
    job = submit()
    soon(lambda: shown(job, "JobState") == "RUNNING")
    soon(lambda: told("squeue", "-h", "--steps"))
    time.sleep(1)
    told("scancel", "--signal=USR1", job)
    soon(lambda: shown(job, "JobState") in ("FAILED", "COMPLETED"))
    assert shown(job, "Restarts") == "0" and not rounds(slurm)


@pytest.mark.long
def test_preemption_with_a_grace_time_starts_the_job_again(slurm: Path) -> None:
    job = submit(partition="grace")
    soon(lambda: rounds(slurm) >= 3)
    told("sbatch", "--partition=high", "--cpus-per-task=2", "--output=high.txt", "--wrap=sleep 1")
    soon(lambda: shown(job, "JobState") == "COMPLETED", 400)
    assert shown(job, "Restarts") == "1"
    log = (slurm / "out.txt").read_text()
    assert [log.count(text) for text in ("auto: no run", "auto: runs/mine/version_0, round")] == [1, 1]


@pytest.mark.long
def test_array_of_jobs_shares_a_sweep(slurm: Path) -> None:
    """What one leaves that goes back into the queue, the array ends to the bits of a sweep without SLURM."""
    (slurm / "sweep.yaml").write_text(SWEEP)
    options = [*SIZES, "--ntasks-per-node=1", "--array=1-2", "--parsable", "--output=out_%a.txt"]
    array = told("sbatch", *options, str(SCRIPT), "sweep", "sweep.yaml").strip()
    logs = slurm / "runs" / "sweep"
    soon(lambda: sum(3 < len(log.read_text().splitlines()) < 13 for log in logs.glob("*/*/metrics.csv")) == 2)
    told("scancel", "--signal=USR1", f"{array}_1")
    soon(lambda: shown(f"{array}_1", "Restarts") == "1")
    soon(lambda: not told("squeue", "-h"))
    assert [shown(f"{array}_{task}", "JobState") for task in (1, 2)] == ["COMPLETED"] * 2
    assert all(", server/test/acc" in (slurm / f"out_{task}.txt").read_text() for task in (1, 2))
    cli("sweep", "sweep.yaml", "--out=alone")
    trials = [folder.name for folder in (slurm / "alone/sweep").iterdir() if folder.is_dir()]
    assert len(trials) == 4
    for trial in trials:
        assert_same(state(logs / trial / "version_0"), state(slurm / "alone/sweep" / trial / "version_0"))
