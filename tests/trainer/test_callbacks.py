"""Callbacks: early stopping, best checkpoints, state over resumptions, and Lightning's own."""

from __future__ import annotations

import io
import json
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as theirs
import numpy as np
import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fl_lightning import (
    SGD,
    Callback,
    Checkpoints,
    Digits,
    DigitsMLP,
    Faults,
    FedAvg,
    FederatedTrainer,
    FedSAM,
    FlatnessMonitor,
    Progress,
    UniformSampler,
    UserError,
)
from fl_lightning.core import files
from fl_lightning.trainer.run import Run
from tests.runs import assert_same, last, metrics, state

OPTIONS = {"clients_per_round": 3, "accelerator": "cpu", "threads": 1, "enable_progress_bar": False}


def test_a_method_that_is_no_hook_is_named() -> None:
    with pytest.warns(UserWarning, match=r"Counts\.on_round_ended: no hook, .*; did you mean on_round_end") as caught:

        class Counts(Callback):
            def on_round_ended(self, run: Run) -> None: ...
            def on_round_end(self, run: Run) -> None: ...

    assert len(caught) == 1


def fit(
    root: Path, *callbacks: Any, rounds: int = 6, ckpt_path: str | None = None, lr: float = 0.1, **overrides: Any
) -> Run:
    torch.manual_seed(0)
    options = {**OPTIONS, "engine": "sequential", "max_rounds": rounds, "default_root_dir": str(root), **overrides}
    trainer = FederatedTrainer(callbacks=list(callbacks), **options)
    model = FedAvg(DigitsMLP(hidden=8), optimizer=SGD(lr))
    return trainer.fit(model, Digits(num_clients=6, batch_size=32), ckpt_path)


def test_early_stopping_is_lightnings(tmp_path: Path, capsys: Any) -> None:
    """A learning rate of 0 never improves: patience 2 stops after the third measurement; a resumed run remembers."""
    stop = theirs.EarlyStopping("server/test/loss", patience=2)
    run = fit(tmp_path, stop, lr=1e-30, rounds=9)
    assert run.rounds_done == 3 and stop.wait_count == 2
    assert "stopped early: Monitored metric server/test/loss did not improve" in capsys.readouterr().out
    assert last(run.folder.path)["round"] == 3 and json.loads((run.folder.path / "summary.json").read_text())
    assert fit(tmp_path / "other", theirs.EarlyStopping("server/test/loss", patience=2), rounds=4).rounds_done == 4

    # interrupted in the second round, the wait goes on where it was
    class Interrupt(Callback):
        def on_round_end(self, run: Run) -> None:
            if run.rounds_done == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "broken", theirs.EarlyStopping("server/test/loss", patience=2), Interrupt(), lr=1e-30, rounds=9)
    resumed_stop = theirs.EarlyStopping("server/test/loss", patience=2)
    assert fit(tmp_path / "broken", resumed_stop, lr=1e-30, rounds=9, ckpt_path="last").rounds_done == 3

    # once it has stopped, it stays, unless it gets more patience
    for patience, rounds in ((2, 3), (3, 4)):
        resumed_stop = theirs.EarlyStopping("server/test/loss", patience=patience)
        assert fit(tmp_path, resumed_stop, lr=1e-30, rounds=9, ckpt_path="last").rounds_done == rounds


class Counts(Callback):
    def __init__(self) -> None:
        self.rounds = self.runs = 0

    def on_round_end(self, run: Run) -> None:
        self.rounds += 1

    def on_fit_end(self, run: Run) -> None:
        self.runs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rounds = state["rounds"]


def test_callbacks_of_several_trainers_begin_each_run_in_their_first_state(tmp_path: Path) -> None:
    """They do in a loop over seeds; what checkpoints do not keep is the user's own."""
    stop, counts = theirs.EarlyStopping("server/test/loss", patience=2), Counts()
    for runs in (1, 2):
        run = fit(tmp_path, stop, counts, lr=1e-30, rounds=9)
        assert run.rounds_done == counts.rounds == 3 and counts.runs == runs


def test_settings_of_numpy_are_numbers_in_a_checkpoint(tmp_path: Path) -> None:
    model = FedSAM(DigitsMLP(hidden=8), rho=np.logspace(-2, -1, 2)[0])
    trainer = FederatedTrainer(max_rounds=1, default_root_dir=str(tmp_path), **OPTIONS)
    run = trainer.fit(model, Digits(num_clients=6, batch_size=32))
    assert type(last(run.folder.path)["hyper_parameters"]["rho"]) is float


def test_a_state_that_no_checkpoint_takes_is_refused_at_once(tmp_path: Path) -> None:
    class Best(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"best": [np.float64(1.0)]}

    with pytest.raises(UserError, match=r"^callbacks of the run\.Best\.best: a numpy\.float64; a checkpoint takes"):
        fit(tmp_path, Best())
    assert not list(tmp_path.rglob("version_*"))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 1, 1.5, 1j, "a", b"a", bytearray(b"a"), [1, (2, {3})], {"a": {1: 2}}, OrderedDict(a=1),
        Counter("a"), torch.zeros(2), nn.Parameter(torch.zeros(2)), torch.Size([1]), torch.float32,
        torch.device("cpu"), np.float64(1), np.zeros(2), np.bool_(True), deque([1]), defaultdict(int), Path("a"),
        frozenset([1]), range(3), Fraction(1, 2), theirs.EarlyStopping("x"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_a_checkpoint_takes_can_be_read(value: Any, tmp_path: Path) -> None:
    """What it does not take cannot."""
    files.save(tmp_path / "x", {"a": [value]})
    try:
        files.check_plain("x", {"a": [value]})
    except UserError:
        with pytest.raises(ValueError, match="not readable"):
            files.load(tmp_path / "x")
    else:
        files.load(tmp_path / "x")


def test_a_metric_that_clients_have_not_measured_yet_is_awaited(tmp_path: Path) -> None:
    """Nobody answers in the first round."""
    faults = Faults(available=[[], list(range(6))])
    monitor = Checkpoints(monitor="client/train/loss")
    run = fit(tmp_path, monitor, rounds=4, faults=faults, sampler=UniformSampler(2), on_divergence="continue")
    assert run.rounds_done == 4 and monitor.best
    with pytest.raises(UserError, match="no such metric"):
        fit(tmp_path, Checkpoints(monitor="client/train/lss", mode="min"), rounds=4)


@pytest.mark.parametrize(
    "callback", [theirs.EarlyStopping("server/tset/loss"), Checkpoints(monitor="server/tset/loss")]
)
def test_unknown_metric_to_monitor(callback: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"monitor = server/tset/loss: no such metric; choose from .*server/test/loss"):
        fit(tmp_path, callback)


@pytest.mark.parametrize(
    ("callback", "remedy"),
    [
        (theirs.ModelCheckpoint(), "ModelCheckpoint: a callback of lightning.Trainer; use Checkpoints"),
        (theirs.Timer("00:01:00:00"), "use trainer.max_time"),
        (theirs.RichProgressBar(), "use Progress"),
        (theirs.LearningRateMonitor(), "client/lr"),
        (theirs.BatchSizeFinder(), "write a subclass of fl_lightning.Callback"),
        ("Curves", "str is not a callback"),
    ],
)
def test_other_lightning_callbacks_are_refused(callback: Any, remedy: str) -> None:
    with pytest.raises(UserError, match=remedy):
        FederatedTrainer(callbacks=[callback], accelerator="cpu")


def test_a_callback_may_stop_the_run(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_round_end(self, run: Run) -> None:
            run.should_stop = run.rounds_done == 2

    run = fit(tmp_path, Stop())
    assert run.rounds_done == 2 and last(run.folder.path)["round"] == 2
    early = fit(tmp_path / "early", Stop(), eval_every=5, enable_progress_bar=True)  # its last round is evaluated
    assert early.rounds_done == 2 and json.loads((early.folder.path / "summary.json").read_text())["evaluations"] == 1


def test_max_time_counts_over_resumptions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer.max_time = soon: give DD:HH:MM:SS"):
        FederatedTrainer(max_time="soon")
    assert FederatedTrainer(max_time="01:02:03:04", accelerator="cpu").max_time == 93784

    class Interrupt(Callback):
        def on_round_end(self, run: Run) -> None:
            if run.rounds_done == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Interrupt(), max_time="00:00:01:00")
    path = next(tmp_path.glob("*/*/checkpoints/last.ckpt"))
    content = torch.load(path, weights_only=True)
    assert 0 < content["elapsed"] < 60
    files.save(path, {**content, "elapsed": 61.0})
    assert fit(tmp_path, max_time="00:00:01:00", ckpt_path="last").rounds_done == 2
    assert fit(tmp_path, max_time="00:00:10:00", ckpt_path="last").rounds_done == 6


def test_a_run_without_progress_ends_with_one_line(tmp_path: Path, capsys: Any) -> None:
    run = fit(tmp_path, rounds=1)
    assert capsys.readouterr().out == f"results: {run.folder.path}\n"


@pytest.mark.parametrize("rows", [0, 2, 8])
def test_the_live_table_shows_the_last_rounds(rows: int, tmp_path: Path) -> None:
    progress = Progress(rows=rows)
    progress.console = Console(file=io.StringIO(), force_terminal=True)
    fit(tmp_path, progress, rounds=3)
    table = progress._view().renderables[0]
    assert isinstance(table, Table) and table.row_count == min(rows, 3)


@pytest.mark.slow
def test_the_live_table_fits_the_terminal(tmp_path: Path) -> None:
    """It has as many rounds as there are lines; numbers are whole; columns that do not fit are named."""
    progress = Progress()
    progress.console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, _environ={})
    run = fit(tmp_path, progress, FlatnessMonitor(every_n_rounds=2), rounds=40)
    final = {name: pairs[-1][1] for name, pairs in metrics(run.folder.path).items()}
    for width, height in ((80, 24), (120, 40), (40, 10)):  # the terminal may change its size
        progress.console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, _environ={})
        screen = Console(file=io.StringIO(), width=width)
        screen.print(progress._view())
        assert isinstance(screen.file, io.StringIO)
        shown = screen.file.getvalue()
        *rows, _ = shown.splitlines()
        assert max(map(len, rows)) <= width and len(rows) < height
        cells = [line.split() for line in rows if line.split()[0].isdecimal()]
        assert len(cells) == min(40, height - 6) and cells[-1][0] == "40" and "…" not in shown
        assert float(cells[-1][1]) == pytest.approx(final["server/test/acc"], abs=1e-4)
        assert ("too wide, see metrics.csv: " in shown) == (width == 40)
        if width >= 80:
            assert float(cells[-1][-1]) == pytest.approx(final["flatness/discrepancy"], rel=1e-3, abs=1e-4)


def test_the_end_of_a_run_is_ten_lines(tmp_path: Path) -> None:
    """It has the headline with its rounds, and no protocol, which is in flatness.jsonl; TERM=dumb gets plain lines."""
    progress = Progress(min_seconds=3600)
    dumb = {"TERM": "dumb", "COLUMNS": "80"}
    progress.console = Console(file=io.StringIO(), force_terminal=True, width=80, _environ=dumb)
    run = fit(tmp_path, progress, FlatnessMonitor(every_n_rounds=2), rounds=20)
    assert isinstance(progress.console.file, io.StringIO)
    _, last = progress.console.file.getvalue().split("round 20/20")
    end = re.split("discrepancy.*\n", last, maxsplit=1)[1]  # the round's line is as wide as the terminal, or two lines
    wide = Console(file=io.StringIO(), force_terminal=True, width=120, _environ={**dumb, "COLUMNS": "120"})
    progress.console = wide
    progress.on_fit_end(run)
    assert isinstance(wide.file, io.StringIO)
    for width, shown in ((80, end), (120, wide.file.getvalue())):
        lines = shown.splitlines()
        assert len(lines) <= 10 and all(len(line) <= width for line in lines[:-1])
        assert any(line.startswith("last 2 of 20 rounds: mean test accuracy") for line in map(plain, lines))
        assert "flatness.jsonl" in shown and "weight decay" not in shown
        assert [len(line.split()) for line in map(plain, lines) if line.startswith("lambda_max")] == [2]  # no best
        assert plain(lines[-1]) == f"results: {run.folder.path}"


def plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line).strip()


class Scores(Callback):
    """Logs given scores, one a round."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores

    def on_round_end(self, run: Run) -> None:
        run.log({"mine/score": self.scores[run.rounds_done - 1]})


def test_best_checkpoint(tmp_path: Path) -> None:
    """The best round by a metric, or the best three, are kept, and a run goes on from it as ever."""
    scores = Scores(3, 5, 4, float("nan"), 1, 2)
    run = fit(tmp_path, scores, Checkpoints(monitor="mine/score", mode="max"))
    names = {path.name: torch.load(path, weights_only=True)["round"] for path in run.folder.checkpoints.iterdir()}
    assert names == {"last.ckpt": 6, "best.ckpt": 2}
    top = fit(tmp_path / "top", scores, Checkpoints(monitor="mine/score", mode="min", save_top_k=3))
    names = {path.name: torch.load(path, weights_only=True)["round"] for path in top.folder.checkpoints.iterdir()}
    assert names == {"last.ckpt": 6, "best.ckpt": 5, "round_1.ckpt": 1, "round_5.ckpt": 5, "round_6.ckpt": 6}
    reference = state(run.folder.path)
    resumed = fit(tmp_path, scores, Checkpoints(monitor="mine/score", mode="max"), ckpt_path="best")
    assert resumed.folder.path == run.folder.path
    assert_same(state(run.folder.path), reference)
    with pytest.raises(UserError, match="ckpt_path = best: no such checkpoint"):
        fit(tmp_path / "none", ckpt_path="best")
    with pytest.raises(UserError, match=r"Checkpoints\.monitor: missing; save_top_k"):
        Checkpoints(save_top_k=3)
    kept = fit(tmp_path / "all", scores, Checkpoints(1, keep_all=True, monitor="mine/score", mode="max"), rounds=2)
    fit(tmp_path / "all", scores, Checkpoints(monitor="mine/score", mode="max"), ckpt_path="last")
    assert {"round_1.ckpt", "round_2.ckpt"} <= {path.name for path in kept.folder.checkpoints.iterdir()}


def test_two_callbacks_of_a_class_keep_their_own_state(tmp_path: Path) -> None:
    class Sum(Callback):
        def __init__(self, step: int) -> None:
            self.step, self.total = step, 0

        def on_round_end(self, run: Run) -> None:
            self.total += self.step
            if run.rounds_done == 4 and self.step == 1 and run.checkpoint is None:
                raise KeyboardInterrupt

        def state_dict(self) -> dict[str, Any]:
            return {"total": self.total}

        def load_state_dict(self, saved: Any) -> None:
            self.total = saved["total"]  # as any callback does: it is not called without a state

    one, ten = Sum(1), Sum(10)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, ten, one)
    assert (one.total, ten.total) == (3, 30)  # the broken round is undone
    one, ten = Sum(1), Sum(10)
    fit(tmp_path, ten, one, ckpt_path="last")
    assert (one.total, ten.total) == (6, 60)


def test_a_trainer_fits_twice(tmp_path: Path) -> None:
    """Each run chooses its engine."""
    trainer = FederatedTrainer(max_rounds=2, engine="auto", default_root_dir=str(tmp_path), **OPTIONS)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        runs.append(trainer.fit(FedSAM(DigitsMLP(hidden=8)), Digits(num_clients=6, batch_size=32)))
        assert trainer.engine == "auto" and runs[-1].engine_name == "sequential"  # too short to be worth a choice
    assert metrics(runs[0].folder.path) == metrics(runs[1].folder.path)
