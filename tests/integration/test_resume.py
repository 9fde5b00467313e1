"""A run that was broken off goes on to the same bits as one that never was."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning import (
    ASAM,
    SWA,
    Arrays,
    BernoulliSampler,
    Callback,
    Checkpoints,
    DeltaEpsilon,
    Digits,
    DigitsMLP,
    Dirichlet,
    Discrepancy,
    FederatedTrainer,
    FlatnessMonitor,
    LambdaMax,
    LocalObjective,
    ServerMomentum,
    Updates,
    UserError,
    WandbLogger,
    algorithms,
)
from fl_lightning.core import files
from fl_lightning.trainer.callbacks import checkpoints
from fl_lightning.trainer.run import Run
from tests.runs import DIGITS, FORKS, assert_same, killed, last, metrics, newest, run, state
from tests.soak import Soak

ROUNDS = 6
LAST = Path("checkpoints", "last.ckpt")


class Stop(Callback):
    """Breaks off in the middle of a round, when ``at`` rounds are done and one client has trained."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.at, self.error = at, error

    def on_local_end(self, run: Run, result: Any) -> None:
        if run.rounds_done == self.at:
            raise self.error


def make(name: str) -> LocalObjective:
    torch.manual_seed(3)
    net = DigitsMLP(hidden=8)
    if name == "everything":
        averaging = SWA(start=2, cycle=2)
        return algorithms.SCAFFOLD(net, ascent=ASAM(warmup=4), server_update=ServerMomentum(0.5), averaging=averaging)
    return getattr(algorithms, name)(net=net)  # type: ignore[no-any-return]


def fit(
    root: Path, name: str, *callbacks: Callback, ckpt_path: str | None = None, monitor: bool = False, **options: Any
) -> Path:
    measures = [LambdaMax(samples=100), Discrepancy(), Updates(), DeltaEpsilon(rho=0.1)]
    data = Digits(num_clients=6, batch_size=32, partition=Dirichlet(1.0))
    trainer = FederatedTrainer(
        **{"max_rounds": ROUNDS, "clients_per_round": 3, "accelerator": "cpu", "threads": 1, "engine": "sequential"}
        | options,
        callbacks=[Checkpoints(every_n_rounds=2), *([FlatnessMonitor(2, measures)] if monitor else []), *callbacks],
        default_root_dir=str(root),
        enable_progress_bar=False,
    )
    return trainer.fit(make(name), data, ckpt_path).folder.path


MONITORED = ("FedAvg", "FedGAMMA", "NaiveFedGloSS", "everything")


@pytest.mark.sampled(quick=41, slow=6, start=1)
@pytest.mark.parametrize("name", [*algorithms.__all__, "everything"])
def test_same_bits(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sampler": BernoulliSampler(0.5), "engine": "graphed"} if name == "everything" else {}
    options["monitor"] = name in MONITORED
    uninterrupted = fit(tmp_path / "whole", name, **options)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "broken", name, Stop(3, KeyboardInterrupt), **options)
    broken = newest(tmp_path / "broken")
    assert last(broken)["round"] == 3
    assert state(broken).keys() == state(uninterrupted).keys()
    assert not torch.equal(state(broken)["server.w"], state(uninterrupted)["server.w"])
    assert fit(tmp_path / "broken", name, ckpt_path="last", **options) == broken
    assert_same(state(broken), state(uninterrupted))
    assert metrics(broken) == metrics(uninterrupted)
    assert [at for at, _ in metrics(uninterrupted)["client/train/loss"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedASAM", "FedGF"])
def test_the_chosen_engine_goes_on_without_a_check(name: str, tmp_path: Path) -> None:
    """Nothing has been computed before its first record."""
    uninterrupted = fit(tmp_path / "whole", name, engine="graphed")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "broken", name, Stop(3, KeyboardInterrupt), engine="graphed")
    broken = fit(tmp_path / "broken", name, engine="auto", ckpt_path="last")
    assert_same(state(broken), state(uninterrupted))


class Halve(Callback):
    def on_round_end(self, run: Run) -> None:
        run.objective.optimizer.lr *= 0.5


def test_settings_that_a_callback_changes(tmp_path: Path) -> None:
    uninterrupted = fit(tmp_path / "whole", "FedSAM", Halve())
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "broken", "FedSAM", Halve(), Stop(3, KeyboardInterrupt))
    broken = fit(tmp_path / "broken", "FedSAM", Halve(), ckpt_path="last")
    assert_same(state(broken), state(uninterrupted))
    assert metrics(broken) == metrics(uninterrupted)
    assert metrics(uninterrupted)["client/lr"][-1][1] == metrics(uninterrupted)["client/lr"][0][1] / 2**5
    lr = [[line for line in file.read_text().splitlines() if "lr: " in line] for file in broken.glob("config*.yaml")]
    assert len(lr) == 2 and lr[0] == lr[1]


class Patient(Callback):
    """Halves the rate in each fourth round that it sees."""

    def __init__(self) -> None:
        self.seen, self.name = 0, "patient"

    def on_round_end(self, run: Run) -> None:
        self.seen += 1
        run.objective.optimizer.lr *= 1 if self.seen % 4 else 0.5


class Remembering(Patient):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


def test_what_a_callback_forgets_is_a_warning(tmp_path: Path) -> None:
    for kind in (Patient, Remembering):
        uninterrupted = fit(tmp_path / kind.__name__ / "whole", "FedAvg", kind(), max_rounds=5)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / kind.__name__, "FedAvg", kind(), Stop(3, KeyboardInterrupt), max_rounds=5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            broken = fit(tmp_path / kind.__name__, "FedAvg", kind(), ckpt_path="last", max_rounds=5)
        messages = [str(warning.message) for warning in caught if "trainer.callbacks" in str(warning.message)]
        assert torch.equal(state(broken)["server.w"], state(uninterrupted)["server.w"]) == (kind is Remembering)
        begins_anew = "trainer.callbacks: Patient.seen changed before the checkpoint, which lacks it, and begins anew;"
        assert [message.startswith(begins_anew) for message in messages] == [True] * (kind is Patient)


def test_broken_off_twice_and_by_an_error(tmp_path: Path) -> None:
    uninterrupted = fit(tmp_path / "whole", "SCAFFOLD")
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "broken", "SCAFFOLD", Stop(1, ZeroDivisionError))
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "broken", "SCAFFOLD", Stop(5, KeyboardInterrupt), ckpt_path="last")
    broken = newest(tmp_path / "broken")
    assert last(broken)["round"] == 5
    fit(tmp_path / "broken", "SCAFFOLD", ckpt_path=str(broken / LAST))
    assert_same(state(broken), state(uninterrupted))
    assert metrics(broken) == metrics(uninterrupted)


def test_rounds_after_the_checkpoint_are_logged_once(tmp_path: Path) -> None:
    """A run that died hard has rows after its last checkpoint, the last of them cut short."""
    uninterrupted = fit(tmp_path / "whole", "FedDyn")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "broken", "FedDyn", Stop(2, KeyboardInterrupt))
    broken = newest(tmp_path / "broken")
    checkpoint = (broken / LAST).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "broken", "FedDyn", Stop(5, KeyboardInterrupt), ckpt_path="last")
    (broken / LAST).write_bytes(checkpoint)
    log = broken / "metrics.csv"
    log.write_text(log.read_text()[:-30])
    fit(tmp_path / "broken", "FedDyn", ckpt_path="last")
    assert_same(state(broken), state(uninterrupted))
    assert metrics(broken) == metrics(uninterrupted)


@pytest.mark.slow
def test_wandb_run_keeps_its_id(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, "FedAvg", Stop(3, KeyboardInterrupt), loggers=[WandbLogger()])
    (first,) = newest(tmp_path).glob("wandb/offline-run-*/run-*.wandb")
    fit(tmp_path, "FedAvg", ckpt_path="last", loggers=[WandbLogger()])
    files = set(newest(tmp_path).glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert {path.name for path in files} == {first.name}


@pytest.mark.slow
@pytest.mark.parametrize("every", [7, pytest.param(None, marks=pytest.mark.skipif(not FORKS, reason="is patched"))])
def test_kill_9(every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process is killed with its children between two checkpoints, by rounds or by time."""
    rounds = "--trainer.max_rounds=60"
    saves = [] if every is None else ["--trainer.callbacks+=Checkpoints", f"--trainer.callbacks.every_n_rounds={every}"]
    monkeypatch.setattr(checkpoints, "PAUSE", 0.0)
    broken = killed("fit", "--model=SCAFFOLD", *DIGITS, rounds, *saves, root=tmp_path / "broken")
    rounds_done = last(broken)["round"]
    assert rounds_done % (every or 1) == 0 and 0 < rounds_done < 60
    assert run("fit", rounds, *saves, "--ckpt_path=last", root=tmp_path / "broken", model="SCAFFOLD") == broken
    uninterrupted = run("fit", rounds, *saves, root=tmp_path / "whole", model="SCAFFOLD")
    assert_same(state(broken), state(uninterrupted))
    assert metrics(broken) == metrics(uninterrupted)
    assert [at for at, _ in metrics(broken)["comm/total_bits"]] == list(range(1, 61))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kills"), [("forked", 10), ("two processes", 2)])
def test_kills_at_random_moments(kind: str, kills: int, tmp_path: Path) -> None:
    soak = Soak(tmp_path)
    soak.kill(kind, kills)
    assert soak.kills[kind] == kills and soak.runs[kind] and not soak.losses


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Lets no file grow above 100 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_write_that_fails_leaves_the_previous_file(tmp_path: Path, small_disk: None) -> None:
    path = tmp_path / "checkpoints" / "last.ckpt"
    files.save(path, torch.arange(10.0))
    with pytest.raises(UserError, match=r"last\.ckpt: cannot be written \(File too large\); check the disk"):
        files.save(path, torch.zeros(100_000))
    assert torch.equal(files.load(path), torch.arange(10.0))
    assert [file.name for file in path.parent.iterdir()] == ["last.ckpt"]


class Unsavable:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError


def test_state_that_cannot_be_saved_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    class Odd(Callback):
        round = 0

        def state_dict(self) -> dict[str, Any]:
            return {"odd": Unsavable()} if self.round == 4 else {}

        def load_state_dict(self, state: Any) -> None:
            pass

        def on_round_start(self, run: Run, ctx: Any, cohort: list[int]) -> None:
            self.round = ctx.t + 1

    with pytest.raises(UserError, match=r"^callbacks of the run\.Odd\.odd: a tests\.\S+Unsavable; a checkpoint takes"):
        fit(tmp_path, "SCAFFOLD", Odd())
    assert last(newest(tmp_path))["round"] == 2
    fit(tmp_path, "SCAFFOLD", ckpt_path="last")
    assert_same(state(newest(tmp_path)), state(fit(tmp_path / "whole", "SCAFFOLD")))


def test_longer_run_goes_on(tmp_path: Path) -> None:
    """A finished run can be made longer; nothing is trained if there is nothing left to do."""
    fit(tmp_path, "FedAvg", max_rounds=3)
    longer = fit(tmp_path, "FedAvg", max_rounds=5, ckpt_path="last")
    assert last(longer)["round"] == 5
    assert_same(state(longer), state(fit(tmp_path / "whole", "FedAvg", max_rounds=5)))
    before = metrics(longer)
    assert fit(tmp_path, "FedAvg", max_rounds=5, ckpt_path="last") == longer
    assert metrics(longer) == before


@pytest.mark.slow
def test_an_average_begins_again_if_it_had_begun_too_early(tmp_path: Path) -> None:
    """It begins at three quarters of 4 rounds, and of 8: until then the model itself is evaluated."""

    class Seen(Callback):
        def __init__(self) -> None:
            self.averaged = dict[int, bool]()

        def on_round_end(self, run: Run) -> None:
            self.averaged[run.rounds_done] = not torch.equal(run.global_model, run.server.w)

    options = {"max_rounds": 4, "clients_per_round": 3, "accelerator": "cpu", "default_root_dir": str(tmp_path)}
    data, seen = Digits(num_clients=6, batch_size=32), Seen()
    algorithm = partial(algorithms.FedAvg, averaging=SWA(start=0.75))
    FederatedTrainer(**options).fit(algorithm(DigitsMLP(hidden=8)), data)
    FederatedTrainer(**{**options, "max_rounds": 8}, callbacks=[seen]).fit(algorithm(DigitsMLP(hidden=8)), data, "last")
    assert seen.averaged == {5: False, 6: False, 7: True, 8: False}  # the first model that it collects is the last one


@pytest.mark.slow
def test_auto_continues_the_run_of_the_same_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes no newer one of its name; another config begins anew, and a finished run is left as it is."""

    def auto(*args: str) -> str:
        run("fit", *args, "--ckpt_path=auto", root=tmp_path)
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("auto: ")]
        return line

    saves = ["--trainer.callbacks+=Checkpoints", "--trainer.callbacks.every_n_rounds=2"]
    folder = tmp_path / "FedAvg-Digits"
    assert auto(*saves) == f"auto: no run of this config in {folder}; a new one begins"
    assert auto("--model.optimizer.lr=0.5").endswith("a new one begins")
    assert auto("--trainer.max_rounds=4").endswith("a new one begins")
    before = (folder / "version_0/checkpoints/last.ckpt").read_bytes()
    assert auto(*saves) == auto("--trainer.threads=2") == f"auto: {folder}/version_0, round 2"
    assert (folder / "version_0/checkpoints/last.ckpt").read_bytes() == before
    assert auto("--model.optimizer.lr=0.5") == f"auto: {folder}/version_1, round 2"
    assert {path.name for path in folder.iterdir()} == {"version_0", "version_1", "version_2"}
    with pytest.raises(SystemExit, match="error: ckpt_path = auto: give a checkpoint, last or best"):
        run("test", "--ckpt_path=auto", root=tmp_path)


def test_other_data_are_refused(tmp_path: Path) -> None:
    folder = fit(tmp_path, "FedAvg", max_rounds=1)
    x = torch.zeros(12, 1, 8, 8)
    data = Arrays(client_arrays=[(x, torch.arange(12) % 10)] * 6, test=(x, torch.arange(12) % 10))
    trainer = FederatedTrainer(max_rounds=2, accelerator="cpu", default_root_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"made with data = .* put its files and partition back"):
        trainer.fit(make("FedAvg"), data, str(folder / LAST))
