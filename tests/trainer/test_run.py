"""A run and its rounds: dry rounds, transactions, what a run sets and restores, checkpoints as Lightning reads them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from fl_lightning import (
    SAM,
    SCAFFOLD,
    SGD,
    SWA,
    Callback,
    Checkpoints,
    Digits,
    DigitsMLP,
    FedAvg,
    FederatedTrainer,
    FedSAM,
    FedSMOO,
    NaiveFedGloSS,
    UserError,
)
from fl_lightning.trainer.cohort import Cohort
from fl_lightning.trainer.round import Round
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.runtime import collectives
from tests.runs import FORKS, assert_same, last, metrics, newest, state

OPTIONS = {"clients_per_round": 3, "accelerator": "cpu", "engine": "sequential", "enable_progress_bar": False}


def trainer(root: Path, *callbacks: Callback, rounds: int = 5, **options: Any) -> FederatedTrainer:
    return FederatedTrainer(
        **{**OPTIONS, "max_rounds": rounds, "default_root_dir": str(root), **options}, callbacks=list(callbacks)
    )


def data() -> Digits:
    return Digits(num_clients=6, batch_size=32)


def model(make: Any = FedSMOO, **options: Any) -> Any:
    torch.manual_seed(0)
    return make(DigitsMLP(hidden=8), **options)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("make", [FedSMOO, NaiveFedGloSS, SCAFFOLD])
def test_a_round_that_is_not_applied_is_a_dry_run(make: Any, tmp_path: Path) -> None:
    """In every hook, also while another round is open: the run ends as it would have, and the dry round is the next."""
    dry: dict[int, torch.Tensor] = {}

    class Dry(Callback):
        def train(self, run: Run) -> None:
            clients: list[int] = []
            dry_round = Round(run, Cohort.draw(run, run.next_round), lambda result: clients.append(result.client))
            dry[run.rounds_done] = dry_round.train(run.engine).server.w
            assert sorted(set(clients)) == sorted(dry_round.cohort.clients)
            Round(run, Cohort.of(run, [0, 5], run.next_round), perturb=False).train(run.engine)

        def on_round_start(self, run: Run, ctx: Any, cohort: list[int]) -> None:
            self.train(run)

        def on_round_end(self, run: Run) -> None:
            self.train(run)

    plain = trainer(tmp_path / "plain", rounds=3).fit(model(make), data())
    watched = trainer(tmp_path / "watched", Dry(), Servers(), rounds=3).fit(model(make), data())
    assert_same(state(watched.folder.path), state(plain.folder.path))
    for rounds, w in Servers.seen.items():
        if rounds:
            assert torch.equal(dry[rounds - 1], w)


class Servers(Callback):
    seen: dict[int, torch.Tensor] = {}

    def on_round_logged(self, run: Run, metrics: Any) -> None:
        self.seen[run.rounds_done] = run.server.w


HOOKS = ("on_round_start", "on_local_end", "on_round_end", "on_round_logged")


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interruption_in_any_hook_takes_the_round_back(
    hook: str, error: type[BaseException], tmp_path: Path
) -> None:
    class Stop(Callback):
        def stop(self, run: Run, **_: Any) -> None:
            if run.rounds_done == (2 if hook in HOOKS[:2] else 3):
                raise error

    setattr(Stop, hook, lambda self, run, *_, **what: self.stop(run, **what))
    reference = trainer(tmp_path / "whole").fit(model(), data())
    with pytest.raises(error):
        trainer(tmp_path / "broken", Stop()).fit(model(), data())
    broken = newest(tmp_path / "broken")
    assert last(broken)["round"] == 2
    trainer(tmp_path / "broken").fit(model(), data(), "last")
    assert_same(state(broken), state(reference.folder.path))
    assert metrics(broken) == metrics(reference.folder.path)


def test_a_written_checkpoint_is_not_taken_back(tmp_path: Path) -> None:
    class Late(Checkpoints):
        def save(self, run: Run, metrics: Any) -> None:
            super().save(run, metrics)
            if run.rounds_done == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, Late(every_n_rounds=2)).fit(model(), data())
    assert last(newest(tmp_path))["round"] == 4
    reference = trainer(tmp_path / "whole").fit(model(), data())
    trainer(tmp_path).fit(model(), data(), "last")
    assert_same(state(newest(tmp_path)), state(reference.folder.path))


@pytest.mark.slow
def test_what_a_run_sets_it_restores(tmp_path: Path) -> None:
    """The constructor changes neither torch's threads nor its precision; a run restores both, however it ends."""
    torch.set_float32_matmul_precision("medium")
    before = torch.get_num_threads()
    during: list[tuple[int, str]] = []

    class Look(Callback):
        def on_round_end(self, run: Run) -> None:
            during.append((torch.get_num_threads(), torch.get_float32_matmul_precision()))
            raise KeyboardInterrupt

    try:
        fit = trainer(tmp_path, Look(), threads=2, tf32=True)
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (before, "medium")
        with pytest.raises(KeyboardInterrupt):
            fit.fit(model(), data())
        assert during == [(2, "high")]
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (before, "medium")
    finally:
        torch.set_float32_matmul_precision("highest")


def test_lightning_loads_our_checkpoints(tmp_path: Path) -> None:
    run = trainer(tmp_path, rounds=2).fit(model(FedSAM, rho=0.2, averaging=SWA(start=1)), data())
    loaded = FedSAM.load_from_checkpoint(run.folder.last, net=DigitsMLP(hidden=8))
    assert torch.equal(loaded.flat.vector(loaded.net), run.global_model)


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("options", [{}, {"ascent": SAM(0.1), "averaging": SWA(start=2)}], ids=["SGD", "SAM + SWA"])
def test_centralized_training_resumes_to_the_bit(options: Any, tmp_path: Path) -> None:
    """So do momentum, learning-rate decay, shuffling and dropout; its checkpoint is not one of `fit`."""

    def central() -> FedAvg:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(64, 10))
        return FedAvg(net, optimizer=SGD(0.1, momentum=0.9, lr_decay=0.9), **options)

    class Stop(Callback):
        def on_round_end(self, run: Run) -> None:
            if run.rounds_done == 4:
                raise ZeroDivisionError

    reference = trainer(tmp_path / "whole").centralized(central(), data())
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path / "broken", Stop()).centralized(central(), data())
    broken = newest(tmp_path / "broken")
    assert last(broken)["round"] == 3
    with pytest.raises(UserError, match=r"of centralized training; continue it with `fl-lightning centralized`"):
        trainer(tmp_path / "broken").fit(central(), data(), str(broken / "checkpoints/last.ckpt"))
    assert trainer(tmp_path / "broken").centralized(central(), data(), "last").folder.path == broken
    assert_same(state(broken), state(reference.folder.path))
    assert metrics(broken) == metrics(reference.folder.path)
    federated = trainer(tmp_path / "fit").fit(central(), data())
    with pytest.raises(UserError, match=r"of federated training; continue it with `fl-lightning fit`"):
        trainer(tmp_path / "fit").centralized(central(), data(), str(federated.folder.last))


def test_a_resumed_run_holds_its_clients_rows_once(tmp_path: Path) -> None:
    trainer(tmp_path, Checkpoints(every_n_rounds=1)).fit(model(SCAFFOLD), data())
    run = trainer(tmp_path, rounds=6).start(model(SCAFFOLD), data(), "last")
    rows = (len(run.clients), run.objective.flat.d)
    assert rows[0] > 1 and run.restored["round"] == 5
    tensors = [v for v in gc.get_objects() if type(v) is torch.Tensor and not v.is_meta]  # torch 2.9 keeps those
    assert not [v for v in tensors if v.shape == rows]


@pytest.mark.skipif(not FORKS, reason="a fork cannot train here")
@pytest.mark.parametrize("error", [UserError("mine"), ZeroDivisionError("mine"), KeyboardInterrupt()])
def test_an_error_of_the_first_process_reaches_the_others(error: BaseException) -> None:
    """Whatever it is: otherwise they would wait for its result."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    context = multiprocessing.get_context("fork")
    queue: Any = context.SimpleQueue()
    children = [context.Process(target=_fails, args=(rank, port, error, queue)) for rank in (0, 1)]
    for child in children:
        child.start()
    errors = dict(queue.get() for _ in children)
    for child in children:
        child.join()
    ours = isinstance(error, UserError)
    assert errors[0] == (type(error), str(error))
    assert errors[1] == (UserError, "mine" if ours else f"process 0: {error!r}")


def _fails(rank: int, port: str, error: BaseException, queue: Any) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({**address, **{name: str(value) for name, value in ranks.items()}})
    rank_zero_only.rank = rank  # Lightning reads it when it is imported

    def fails() -> None:
        raise error

    processes = FederatedTrainer(**OPTIONS, devices=2, strategy="ddp")
    processes.launch()
    try:
        collectives.on_rank_zero(processes.fabric, fails)
    except BaseException as raised:
        queue.put((rank, (type(raised), str(raised))))
    finally:
        collectives.shutdown()


def test_a_model_is_trained_by_one_run(tmp_path: Path) -> None:
    """Its net holds the weights of the run, from which a second one would begin unseen; a checkpoint may continue."""
    objective, first = model(FedAvg), trainer(tmp_path, rounds=1)
    run = first.fit(objective, data())
    with pytest.raises(UserError, match=r"model = FedAvg: a run has trained it; make a new one, FedAvg\(model.net\)"):
        first.fit(objective, data())
    assert newest(tmp_path) == run.folder.path
    trainer(tmp_path, rounds=2).fit(objective, data(), ckpt_path=str(run.folder.last))
    trainer(tmp_path, rounds=1).fit(FedAvg(objective.net), data())
