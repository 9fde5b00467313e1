"""However a run stops, its last round is evaluated and measured once; and what a callback declares and forgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks as theirs
import pytest
import torch

from fl_lightning import (
    SCAFFOLD,
    SGD,
    Callback,
    Checkpoints,
    Curves,
    Digits,
    DigitsMLP,
    FedAvg,
    FederatedTrainer,
    FlatnessMonitor,
    GaussianPrivacy,
    Progress,
    Results,
    Trajectory,
    UserError,
)
from fl_lightning.trainer import parallel_runs
from fl_lightning.trainer.measurements import Discrepancy, LambdaMax, Updates
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.storage.run_folder import check_unused
from tests.runs import DIGITS, assert_same, ended, forked, group, metrics, newest, state

OPTIONS = {"clients_per_round": 3, "accelerator": "cpu", "threads": 1, "enable_progress_bar": False}
LAST = 4
"""Round after which the runs stop: neither evaluated nor measured otherwise."""


def trainer(root: Path, *callbacks: Any, **overrides: Any) -> FederatedTrainer:
    options = {**OPTIONS, "engine": "sequential", "max_rounds": 20, "eval_every": 5, "default_root_dir": str(root)}
    return FederatedTrainer(callbacks=list(callbacks), **{**options, **overrides})


def model(make: Any = SCAFFOLD, lr: float = 0.1) -> Any:
    torch.manual_seed(0)
    return make(DigitsMLP(hidden=8), optimizer=SGD(lr))


def data() -> Digits:
    return Digits(num_clients=6, batch_size=32)


def monitor(every: int = 5) -> FlatnessMonitor:
    return FlatnessMonitor(every, metrics=[LambdaMax(samples=100), Discrepancy(samples=100), Updates()])


class StopAt(Callback):
    """Ends the run in a round, in any hook; counts its hooks by round."""

    def __init__(self, rounds: int = LAST, hook: str = "on_round_end") -> None:
        self.rounds, self.hook = rounds, hook
        self.calls: list[tuple[str, int]] = []

    def called(self, hook: str, run: Run) -> None:
        self.calls.append((hook, run.rounds_done))
        if hook == self.hook and run.rounds_done == self.rounds:
            run.should_stop = True

    def on_round_end(self, run: Run) -> None:
        self.called("on_round_end", run)

    def on_last_round(self, run: Run) -> None:
        self.called("on_last_round", run)

    def on_round_logged(self, run: Run, metrics: Any) -> None:
        self.called("on_round_logged", run)


def measured(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What the last round that was done must have of evaluation and flatness."""
    columns = metrics(folder)
    return {name: values[-1:] for name, values in columns.items() if name.startswith(("server/", "flatness/"))}


def stopping(how: str, root: Path) -> FederatedTrainer:
    best = Checkpoints(every_n_rounds=5, monitor="server/test/acc")
    match how:
        case "callback":
            return trainer(root, StopAt(), monitor(), best)
        case "logged":  # a stop that comes after the round's metrics are written ends the run one round later
            return trainer(root, StopAt(LAST - 1, "on_round_logged"), monitor(), best)
        case "early stopping":
            stop = theirs.EarlyStopping("client/train/loss", patience=LAST - 1, min_delta=1e9)
            return trainer(root, stop, monitor(), best)
        case _:
            return trainer(root, Late(), monitor(), best, max_time="00:01:00:00")


class Late(Callback):
    """Sets the clock of a run an hour forward in a round."""

    def on_round_end(self, run: Run) -> None:
        run._opened -= 3600.0 * (run.rounds_done == LAST)


@pytest.mark.parametrize("how", ["callback", "logged", "early stopping", "time"])
def test_the_last_round_of_a_stopped_run_is_that_of_a_run_of_so_many_rounds(how: str, tmp_path: Path) -> None:
    """Model, clients and all that is measured agree to the bit: local models and the pseudo-gradient, too."""
    stopped = stopping(how, tmp_path / "stopped").fit(model(), data())
    best = Checkpoints(every_n_rounds=5, monitor="server/test/acc")
    reference = trainer(tmp_path / "whole", monitor(), best, max_rounds=LAST).fit(model(), data())
    assert stopped.rounds_done == LAST
    assert_same(state(stopped.folder.path), state(reference.folder.path))
    logged = measured(stopped.folder.path)
    assert logged == measured(reference.folder.path)
    assert all(values[0][0] == LAST for values in logged.values())
    assert {"flatness/lambda_max", "flatness/discrepancy", "flatness/pseudo_gradient_cosine"} < logged.keys()
    assert json.loads((stopped.folder.path / "summary.json").read_text())["final"] == logged["server/test/acc"][0][1]
    assert torch.load(stopped.folder.best, weights_only=True)["round"] == LAST
    lines = [json.loads(line) for line in (stopped.folder.path / "flatness.jsonl").read_text().splitlines()]
    assert {line["round"] for line in lines} == {LAST} and len({line["name"] for line in lines}) == len(lines)


@pytest.mark.slow
def test_two_processes_stop_and_measure_alike(tmp_path: Path) -> None:
    """Both train their share of the last round again; one of them alone has asked for the end."""
    (tmp_path / "stops.py").write_text(STOPS)
    args = [*DIGITS, "--trainer.max_rounds=9", "--trainer.eval_every=5", "--trainer.callbacks+=stops.Stop"]
    args += ["--trainer.callbacks+=FlatnessMonitor", "--trainer.callbacks.every_n_rounds=5", "--model=SCAFFOLD"]
    ddp_args = ["--trainer.devices=2", "--trainer.strategy=ddp", f"--trainer.default_root_dir={tmp_path / 'two'}"]
    with group(2, "fit", *args, *ddp_args, cwd=tmp_path) as children:
        ended(children)
    with forked("fit", *args, f"--trainer.default_root_dir={tmp_path / 'one'}", cwd=tmp_path) as child:
        ended([child])
    one, two = newest(tmp_path / "one"), newest(tmp_path / "two")
    assert_same(state(two), state(one))
    a, b = measured(one), measured(two)
    assert a.keys() == b.keys() and {t for values in b.values() for t, _ in values} == {LAST}
    for name, ((_, value),) in a.items():
        assert b[name][0][1] == pytest.approx(value, rel=1e-4), name


STOPS = f"""
from fl_lightning import Callback

class Stop(Callback):
    def on_round_end(self, run):
        run.should_stop = run.rounds_done == {LAST} and run.fabric.is_global_zero
"""


def test_each_hook_is_called_once_a_round(tmp_path: Path) -> None:
    stop, record = StopAt(), Trajectory()
    run = trainer(tmp_path, stop, record, monitor()).fit(model(), data())
    rounds = [(hook, k) for k in range(1, LAST + 1) for hook in ("on_round_end", "on_round_logged")]
    assert stop.calls == [*rounds[:-1], ("on_last_round", LAST), rounds[-1]]
    assert [len(entries) for entries in (record.server, record.local)] == [LAST + 1, LAST]
    assert [t for t, _ in metrics(run.folder.path)["server/test/acc"]] == [LAST]
    # a last round that is due is measured as ever
    due = trainer(tmp_path / "due", StopAt(5), monitor()).fit(model(), data())
    assert [t for t, _ in metrics(due.folder.path)["flatness/lambda_max"]] == [5]


@pytest.mark.slow
def test_a_budget_that_is_spent(tmp_path: Path) -> None:
    options: dict[str, Any] = {"clip": 1.0, "noise_multiplier": 3.0}
    open_ended = trainer(tmp_path / "open", privacy=GaussianPrivacy(**options), max_rounds=LAST)
    spent = open_ended.fit(model(uniform), data()).metrics["privacy/epsilon"]
    budget = GaussianPrivacy(**options, epsilon=spent * 1.0001)
    run = trainer(tmp_path / "budget", monitor(), privacy=budget).fit(model(uniform), data())
    logged = measured(run.folder.path)
    assert run.rounds_done == LAST and {t for values in logged.values() for t, _ in values} == {LAST}
    assert {"server/test/acc", "flatness/lambda_max", "flatness/discrepancy"} < logged.keys()


def uniform(net: Any, optimizer: Any) -> FedAvg:
    return FedAvg(net, optimizer=optimizer, weighting="uniform")


def test_centralized_and_parallel_runs_stop_alike(tmp_path: Path) -> None:
    central = trainer(tmp_path / "central", StopAt(), FlatnessMonitor(5)).centralized(model(FedAvg), data())
    assert central.rounds_done == LAST
    assert {t for values in measured(central.folder.path).values() for t, _ in values} == {LAST}
    trainers = [trainer(tmp_path, StopAt(LAST + k), monitor(), name=f"run_{k}", seed=k) for k in (0, 1)]
    runs = parallel_runs.fit(trainers, [model(), model()], data())
    for k, run in enumerate(runs):
        assert {t for values in measured(run.folder.path).values() for t, _ in values} == {LAST + k}


def test_centralized_training_diverges_with_the_message_of_federated(tmp_path: Path) -> None:
    wild = trainer(tmp_path, max_rounds=3)
    with pytest.raises(
        UserError, match=r"round 1: the new global state is not finite \(w, first in .*‖w‖.*lower model"
    ):
        wild.centralized(model(FedAvg, lr=1e30), data())
    assert wild.run.rounds_done == 0 and not wild.run.folder.last.exists()
    with pytest.raises(UserError, match=r"trainer.on_divergence = continue: .*set it to stop"):
        trainer(tmp_path, on_divergence="continue").centralized(model(FedAvg), data())


# A callback and the runs of its trainer


class Mine(Callback):
    """A user's own, which remembers everything and has no `state_dict`."""

    seen: list[int] | None = None

    def __init__(self, limit: int = 3) -> None:
        self.limit, self.total = limit, 0

    def on_round_end(self, run: Run) -> None:
        self.total += 1
        self.seen = [*(self.seen or []), run.rounds_done]
        if self.total == self.limit:
            run.should_stop = True


@pytest.mark.slow
def test_a_second_run_of_a_trainer_is_as_the_first(tmp_path: Path) -> None:
    """It has callbacks of the package, Lightning's, and a user's; the second run is worse, and stops later."""
    mine, record = Mine(), Trajectory()
    best = Checkpoints(every_n_rounds=2, monitor="server/test/acc", save_top_k=2)
    stop = theirs.EarlyStopping("server/test/loss", patience=2)
    callbacks = [monitor(2), mine, record, best, stop, Curves(), Progress(), Results()]
    twice = trainer(tmp_path / "twice", *callbacks, eval_every=1)
    twice.fit(model(), data())
    assert mine.seen == [1, 2, 3] and len(best.best) == 2
    second = twice.fit(model(lr=1e-6), data())
    assert mine.seen == [1, 2, 3] and mine.total == 3 and len(record.server) == 4
    fresh = [monitor(2), Mine(), Trajectory(), Checkpoints(2, monitor="server/test/acc", save_top_k=2)]
    alone = trainer(tmp_path / "once", *fresh, theirs.EarlyStopping("server/test/loss", patience=2), eval_every=1)
    expected = alone.fit(model(lr=1e-6), data())
    assert metrics(second.folder.path) == metrics(expected.folder.path)
    assert best.best == fresh[3].best and second.folder.best.exists()
    assert sorted(p.name for p in second.folder.path.rglob("*.ckpt")) == sorted(
        p.name for p in expected.folder.path.rglob("*.ckpt")
    )
    assert stop.wait_count == alone.callbacks[-2].inner.wait_count  # type: ignore[attr-defined]
    # a run that is continued by the same trainer goes on with what its callbacks have saved
    twice.max_rounds = 5
    mine.limit = 99
    assert twice.fit(model(lr=1e-6), data(), "last").rounds_done == 5


@pytest.mark.parametrize(
    ("callback", "rounds"),
    [
        (FlatnessMonitor(3, metrics=[LambdaMax()]), [2, 5]),
        (FlatnessMonitor(3, metrics=[Updates()]), [1, 2, 4, 5]),  # it tracks the pseudo-gradient
        (Checkpoints(2), [1, 3, 5]),
        (Checkpoints(), []),
        (Checkpoints(2, monitor="server/test/acc"), [0, 1, 2, 3, 4, 5]),
        (Results(), []),
        (Curves(), []),
        (Progress(), []),
        (Trajectory(), [0, 1, 2, 3, 4, 5]),
        (Mine(), [0, 1, 2, 3, 4, 5]),
        (type("Quiet", (Callback,), {"on_fit_end": lambda self, run: None})(), []),
    ],
)
def test_the_rounds_that_a_callback_needs(callback: Callback, rounds: list[int]) -> None:
    assert [t for t in range(6) if callback.needs_round(t)] == rounds


def test_the_rounds_that_a_run_needs(tmp_path: Path) -> None:
    """Those of its callbacks, the last one, and with a callback that sees local training those that are evaluated."""
    quiet = trainer(tmp_path, FlatnessMonitor(4, metrics=[LambdaMax()]), Checkpoints(100), max_rounds=13, eval_last=2)
    run = quiet.start(model(), data())
    assert [t for t in range(13) if run.needs_round(t)] == [3, 4, 7, 9, 11, 12]
    run.callbacks = [Checkpoints(100)]
    assert [t for t in range(13) if run.needs_round(t)] == [12]


def test_a_run_whose_end_fails_is_closed(tmp_path: Path) -> None:
    """In parallel runs, too, its lock is released, and its callbacks hear of the error, as do the other runs."""

    class Fails(Callback):
        def __init__(self) -> None:
            self.errors: list[BaseException] = []

        def on_fit_end(self, run: Run) -> None:
            raise ZeroDivisionError

        def on_exception(self, run: Run, error: BaseException) -> None:
            self.errors.append(error)

    failing, other = Fails(), StopAt(99)
    trainers = [trainer(tmp_path, c, name=f"run_{k}", max_rounds=2 + k) for k, c in enumerate((failing, other))]
    with pytest.raises(ZeroDivisionError):
        parallel_runs.fit(trainers, [model(), model()], data())
    assert [type(error) for error in failing.errors] == [ZeroDivisionError]
    for path in tmp_path.rglob("last.ckpt"):
        check_unused(path.parents[1])  # the lock of each run was released
    assert len(list(tmp_path.rglob("last.ckpt"))) == 2
