"""Two processes give the same bits as one, and end in peace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import DIGITS, SCRIPT, assert_same, metrics, newest, process, run, state

COHORTS = "[[0,1,2,3,4],[5],[0,5],[1,2,5]]"
"""Odd ones, one smaller than the number of processes, and clients that change process."""

ARGS = [
    "--model.ascent=SAM",
    "--data.eval_batch_size=100",
    "--trainer.sampler=Trace",
    f"--trainer.sampler.rounds={COHORTS}",
    "--trainer.max_rounds=4",
    "--trainer.callbacks+=FlatnessMonitor",
    "--trainer.callbacks.every_n_rounds=1",
    "--trainer.callbacks.hessian_samples=300",
]


def test_two_processes(tmp_path: Path) -> None:
    one = run("fit", *ARGS, root=tmp_path / "one", model="SCAFFOLD")
    two = ["--trainer.devices=2", "--trainer.strategy=ddp", f"--trainer.default_root_dir={tmp_path / 'two'}"]
    with process(SCRIPT, "fit", "--model=SCAFFOLD", *DIGITS, *ARGS, *two, cwd=tmp_path) as child:
        out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    for sign in ("terminate called", "destroy_process_group", "Traceback"):
        assert sign not in out + err
    assert len(list((tmp_path / "two").glob("*/*"))) == 1
    there = newest(tmp_path / "two")
    assert_same(state(there), state(one))
    assert state(one)["ids"].tolist() == [0, 1, 2, 3, 4, 5]
    logged, expected = metrics(there), metrics(one)
    assert logged.keys() == expected.keys()
    assert "flatness/lambda_max" in logged and "flatness/discrepancy" in logged
    for name, values in expected.items():
        assert [at for at, _ in logged[name]] == [at for at, _ in values] == [1, 2, 3, 4]
        tolerance = 1e-6 if name.startswith("server/") else 1e-9  # float32 sums over batches, by process
        assert [v for _, v in logged[name]] == pytest.approx([v for _, v in values], rel=tolerance), name


FAULTY = """
from fl_lightning.callbacks import Callback

class FailOn(Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_local_end(self, trainer, result):
        if result.ctx.t == 1 and trainer.fabric.global_rank == self.rank:
            raise RuntimeError("a fault of one process")
"""


def test_a_fault_of_one_process_ends_all(tmp_path: Path) -> None:
    """No process waits for one that is gone; what was done is saved."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    args = ["--trainer.max_rounds=3", "--trainer.callbacks+=faulty.FailOn", "--trainer.callbacks.rank=0"]
    two = ["--trainer.devices=2", "--trainer.strategy=ddp", f"--trainer.default_root_dir={tmp_path / 'two'}"]
    with process(SCRIPT, "fit", "--model=FedAvg", *DIGITS, *args, *two, cwd=tmp_path) as child:
        out, err = child.communicate(timeout=120)
    assert child.returncode not in (0, None)
    assert "a fault of one process" in out + err
    assert int(state(newest(tmp_path / "two"))["round"]) == 1
