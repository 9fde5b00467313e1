"""Several runs as one batched program: each is what it is alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from fl_lightning import (
    SAM,
    SGD,
    BernoulliSampler,
    Callback,
    Digits,
    DigitsMLP,
    Dirichlet,
    FederatedTrainer,
    FedGMT,
    FlatnessMonitor,
    LocalObjective,
    Personal,
    Trajectory,
    UserError,
    algorithms,
)
from fl_lightning.core import ClientContext, State
from fl_lightning.engine import replay
from fl_lightning.trainer import parallel_runs
from fl_lightning.trainer.run import Run
from tests.algorithms.test_parts import TopK
from tests.runs import DIGITS, assert_same, cli, forked, last, metrics, newest, state

ROUNDS = 4


def run(root: Path, seed: int, engine: str, **options: Any) -> FederatedTrainer:
    return FederatedTrainer(
        **{"max_rounds": ROUNDS, "clients_per_round": 3, "accelerator": "cpu", "threads": 1, "precision": "64-true"}
        | options,
        seed=seed, engine=engine, default_root_dir=str(root), name=f"run_{seed}", enable_progress_bar=False,
    )  # fmt: skip


def model(seed: int, rho: float = 0.1, make: Any = algorithms.SCAFFOLD, **options: Any) -> LocalObjective:
    torch.manual_seed(seed)
    return make(net=DigitsMLP(hidden=8), ascent=SAM(rho), optimizer=SGD(0.1, 0.9), **options)  # type: ignore[no-any-return]


def data() -> Digits:
    return Digits(num_clients=6, batch_size=64, partition=Dirichlet(1.0))


def assert_equal(together: list[FederatedTrainer], alone: list[FederatedTrainer]) -> None:
    for one, other in zip(together, alone, strict=True):
        a, b = state(one.run.folder.path), state(other.run.folder.path)
        assert a.keys() == b.keys()
        for name in a:
            differences = (a[name] - b[name]).abs()
            assert not differences.numel() or float(differences.max()) <= 1e-12 * float(b[name].abs().max()), name
        assert metrics(one.run.folder.path).keys() == metrics(other.run.folder.path).keys()
    assert not torch.equal(state(alone[0].run.folder.path)["server.w"], state(alone[1].run.folder.path)["server.w"])


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("engine", ["graphed", "auto"])
def test_nothing_is_compiled_to_see_whether_one_program_is_faster(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = [run(tmp_path, seed, engine, compile=True, max_rounds=10**4) for seed in range(2)]
    monkeypatch.setattr(replay, "Compiled", None)
    with trainers[0].environment():
        runs = parallel_runs.start(trainers, [model(seed) for seed in range(2)], data(), [None] * 2)
        assert isinstance(parallel_runs.pays(runs), bool)


def test_two_runs_of_one_name_do_not_share_a_folder(tmp_path: Path) -> None:
    """With "last" both would continue in it; the lock holds within a process, too."""
    run(tmp_path, 0, "batched", max_rounds=1).fit(model(0), data())
    with pytest.raises(UserError, match=r"version_0: used by another run \(process \d+\); wait"):
        parallel_runs.fit([run(tmp_path, 0, "batched") for _ in range(2)], [model(0), model(0)], data(), "last")
    assert last(newest(tmp_path))["round"] == 1


@pytest.mark.sampled(quick=12, slow=2)
@pytest.mark.parametrize("engine", ["sequential", "batched", "graphed"])
@pytest.mark.parametrize("make", [algorithms.SCAFFOLD, FedGMT, algorithms.FedGloSS])
def test_seeds(make: Any, engine: str, tmp_path: Path) -> None:
    """Cohorts may have different sizes: a round's jobs change their number."""
    options = {"sampler": BernoulliSampler(0.5)}
    together, alone = ([run(tmp_path / folder, seed, engine, **options) for seed in (0, 1)] for folder in "ab")
    objectives = [model(seed, make=make) for seed in (0, 1)]
    parallel_runs.fit(together, objectives, data())
    for seed, trainer in enumerate(alone):
        trainer.fit(model(seed, make=make), data())
    assert_equal(together, alone)


class LateHalf(algorithms.FedAvg):
    """From half of all rounds on it trains with half of the gradient."""

    def local_gradient(self, w: Tensor, grad: Any, client: State, received: State, ctx: ClientContext) -> Tensor:
        g = super().local_gradient(w, grad, client, received, ctx)
        return g / 2 if 2 * ctx.t >= ctx.rounds else g


@pytest.mark.parametrize("make", [LateHalf, algorithms.FedScar])
def test_runs_of_different_length(make: Any, tmp_path: Path) -> None:
    """Hooks see the number of rounds of their own run."""

    def objective(seed: int) -> LocalObjective:
        torch.manual_seed(seed)
        return make(DigitsMLP(hidden=8))  # type: ignore[no-any-return]

    together, alone = ([run(tmp_path / folder, t, "batched", max_rounds=t) for t in (2, 4)] for folder in "ab")
    parallel_runs.fit(together, [objective(trainer.seed) for trainer in together], data())
    for trainer in alone:
        trainer.fit(objective(trainer.seed), data())
    assert_equal(together, alone)


@pytest.mark.sampled(quick=3, slow=2)
@pytest.mark.parametrize("engine", ["sequential", "batched", "graphed"])
def test_values(engine: str, tmp_path: Path) -> None:
    """Runs may differ in numbers of ascent, optimizer and algorithm, and in learning rates."""
    numbers = [(0.05, 0.1, 0.5), (0.2, 0.05, 2.0)]

    def objective(rho: float, lr: float, beta: float) -> LocalObjective:
        torch.manual_seed(0)
        return FedGMT(DigitsMLP(hidden=8), ascent=SAM(rho), optimizer=SGD(lr), beta=beta)

    together, alone = ([run(tmp_path / folder / str(i), 0, engine) for i in (0, 1)] for folder in "ab")
    parallel_runs.fit(together, [objective(*n) for n in numbers], data())
    assert together[0].run.varied.keys() == {"beta", "ascent.rho", "optimizer.lr"}
    for trainer, n in zip(alone, numbers, strict=True):
        trainer.fit(objective(*n), data())
    assert_equal(together, alone)


@pytest.mark.sampled(quick=14, slow=3, start=1)
@pytest.mark.parametrize("engine", ["batched", "graphed"])
@pytest.mark.parametrize(
    ("name", "number"),
    [("FedGMT", "gamma"), ("FedGMT", "tau"), ("FedNTD", "gamma"), ("FedNTD", "tau"), ("MOON", "mu"), ("MOON", "tau"),
     ("FedDecorr", "beta")],
)  # fmt: skip
def test_numbers_of_a_loss(name: str, number: str, engine: str, tmp_path: Path) -> None:
    """Each client's loss has the number of its own run."""
    together, alone = ([run(tmp_path / folder / str(i), 0, engine) for i in (0, 1)] for folder in "ab")
    objectives = [[model(0, make=getattr(algorithms, name), **{number: value}) for value in (0.3, 2.0)] for _ in "ab"]
    parallel_runs.fit(together, objectives[0], data())
    for trainer, objective in zip(alone, objectives[1], strict=True):
        trainer.fit(objective, data())
    assert_equal(together, alone)


def test_number_that_decides_is_told(tmp_path: Path) -> None:
    """Without weight decay a step is another one."""
    trainers = [run(tmp_path, seed, "batched") for seed in (0, 1)]
    models = [FedGMT(DigitsMLP(hidden=8), optimizer=SGD(weight_decay=decay)) for decay in (0.0, 0.1)]
    with pytest.raises(UserError, match=r"cannot be batched .* use sequential"):
        parallel_runs.fit(trainers, models, data())


def test_parts_that_differ_are_told(tmp_path: Path) -> None:
    """They hold no number that one program takes from each run; equal ones are no hindrance."""
    trainers = [run(tmp_path, seed, "batched") for seed in (0, 1)]
    with pytest.raises(UserError, match=r"model.parts: parallel runs must have the same; start them one by one"):
        parallel_runs.fit(trainers, [model(0, parts=[TopK(rate)]) for rate in (0.1, 0.2)], data())
    parallel_runs.fit(trainers, [model(seed, parts=[TopK(), Personal(["3.*"])]) for seed in (0, 1)], data())
    assert [trainer.run.rounds_done for trainer in trainers] == [ROUNDS, ROUNDS]


class Holder(LocalObjective):
    """Holds a number, and what its constructor has made of it."""

    def __init__(self, number: float, made: Any) -> None:
        torch.manual_seed(0)
        super().__init__(DigitsMLP(hidden=8))
        self._number, self.made = number, made

    def local_step(self, w: Any, grad: Any, client: Any, received: Any, ctx: Any) -> Any:
        return self._number * grad(w), client


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Holder(1.0, [x]),
        lambda x: Holder(1.0, {"mu": x}),
        lambda x: Holder(1.0, torch.tensor(x)),
        lambda x: Holder(1.0, np.array([x, x])),
        lambda x: Holder(1.0, SGD(x)),
        lambda x: Holder(1.0, [SGD(0.1), SGD(x)]),
        lambda x: Holder(1.0, lambda v: x * v),
        lambda x: Holder(1.0, torch.nn.LeakyReLU(x)),
        lambda x: FedGMT(torch.nn.Sequential(DigitsMLP(hidden=8), torch.nn.LeakyReLU(x))),
    ],
    ids=["list", "dict", "tensor", "array", "object", "second", "closure", "module", "net"],
)
def test_runs_that_differ_in_what_is_made_of_a_number_are_no_program(make: Any) -> None:
    """The clients of all runs train by the first one's objective."""
    assert parallel_runs.differing([make(0.1), make(0.1)]) == []
    with pytest.raises(UserError, match=r"^model\.(made|net\.1): parallel runs must have the same"):
        parallel_runs.differing([make(0.1), make(0.2)])


class Hidden(torch.nn.Module):
    """Holds a layer that is no part of it, so that it is neither trained nor stored, and an LSTM."""

    def __init__(self, hidden: Any, seed: int) -> None:
        super().__init__()
        self.hidden, self.lstm = [hidden], torch.nn.LSTM(2, 2)
        torch.manual_seed(seed)
        torch.nn.init.normal_(self.lstm.weight_hh_l0)


def test_weights_that_are_no_parameters_of_the_net_are_compared() -> None:
    """An LSTM holds references to its own, which each run has."""
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    assert parallel_runs.differing([LocalObjective(Hidden(layers[0], seed)) for seed in range(2)]) == []
    with pytest.raises(UserError, match=r"^model\.net\.hidden: parallel runs must have the same"):
        parallel_runs.differing([LocalObjective(Hidden(layer, 0)) for layer in layers])


def test_a_number_that_is_not_public_is_that_of_each_run(tmp_path: Path) -> None:
    together, alone = ([run(tmp_path / folder / str(i), 0, "batched") for i in (0, 1)] for folder in "ab")
    parallel_runs.fit(together, [Holder(x, None) for x in (0.5, 1.5)], data())
    for trainer, x in zip(alone, (0.5, 1.5), strict=True):
        trainer.fit(Holder(x, None), data())
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one.run.server.w, other.run.server.w, rtol=0, atol=1e-12)
    assert not torch.equal(alone[0].run.server.w, alone[1].run.server.w)


@pytest.mark.slow
def test_one_diverges_the_others_go_on(tmp_path: Path) -> None:
    """What was broken off is resumed, wherever each run was."""
    trainers = [run(tmp_path, seed, "batched") for seed in (0, 1, 2)]
    objectives = [model(seed) for seed in (0, 1, 2)]
    objectives[1].optimizer.lr = 1e200
    with pytest.raises(UserError, match=r"1 of 3 runs broke off; .*run_1.version_0: round 1: .* not finite"):
        parallel_runs.fit(trainers, objectives, data())
    assert [trainer.run.rounds_done for trainer in trainers] == [ROUNDS, 0, ROUNDS]

    class Stop(Callback):
        def on_local_end(self, run: Run, result: Any) -> None:
            if run.rounds_done == 2:
                raise KeyboardInterrupt

    root = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        parallel_runs.fit([run(root, s, "batched", callbacks=[Stop()] * (s == 1)) for s in (0, 1)],
                  [model(s) for s in (0, 1)], data())  # fmt: skip
    assert [last(root / f"run_{s}/version_0")["round"] for s in (0, 1)] == [3, 2]
    resumed = [run(root, s, "batched") for s in (0, 1)]
    parallel_runs.fit(resumed, [model(s) for s in (0, 1)], data(), "last")
    references = [run(tmp_path / "whole", s, "batched") for s in (0, 1)]
    parallel_runs.fit(references, [model(s) for s in (0, 1)], data())
    assert [trainer.run.folder.path for trainer in resumed] == [root / f"run_{s}/version_0" for s in (0, 1)]
    for one, other in zip(resumed, references, strict=True):
        assert_same(state(one.run.folder.path), state(other.run.folder.path))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: model(0, make=algorithms.FedDyn), "model.class_path"),
        (lambda: FedGMT(DigitsMLP(hidden=9)), "model.net: parallel runs must have the same"),
        (lambda: FedGMT(DigitsMLP(hidden=8), optimizer=SGD(clip=1.0)), "model.optimizer.clip = None, 1.0: .* numbers"),
        (lambda: FedGMT(DigitsMLP(hidden=8), ascent=SAM(0.1)), "model.ascent: .* same"),
    ],
    ids=["class", "net", "none", "part"],
)
def test_what_cannot_be_one_program_is_told(make: Any, says: str, tmp_path: Path) -> None:
    trainers = [run(tmp_path, seed, "batched") for seed in (0, 1)]
    with pytest.raises(UserError, match=says):
        parallel_runs.fit(trainers, [FedGMT(DigitsMLP(hidden=8)), make()], data())
    assert not list(tmp_path.iterdir())


def test_a_callback_with_state_serves_one_run(tmp_path: Path) -> None:
    """Shared, an EarlyStopping would count the rounds of both runs; one that keeps nothing may be shared."""

    class Seen(Callback):
        names: ClassVar[list[str]] = []

        def on_round_end(self, run: Run) -> None:
            self.names.append(run.name)

    def fit(*callbacks: Any) -> None:
        trainers = [run(tmp_path, seed, "batched", max_rounds=1, callbacks=list(callbacks)) for seed in (0, 1)]
        parallel_runs.fit(trainers, [model(0), model(1)], data())

    for shared in (EarlyStopping("server/test/loss"), FlatnessMonitor(), Trajectory()):
        with pytest.raises(UserError, match=f"parallel runs share one {type(shared).__name__}, .* give each trainer"):
            fit(Seen(), shared)
    assert not list(tmp_path.iterdir())
    fit(Seen())
    assert Seen.names == ["run_0", "run_1"]


@pytest.mark.slow
def test_command_line(tmp_path: Path) -> None:
    args = ["--model=FedSAM", *DIGITS, "--trainer.engine=batched", f"--trainer.default_root_dir={tmp_path}"]
    with forked("fit", *args, "--seeds=3,5", "--values=model.rho=0.01,0.1", cwd=tmp_path) as child:
        out, err = child.communicate(timeout=600)
    assert child.returncode == 0, err
    assert "4 runs" in out
    runs = {folder.parent.name for folder in tmp_path.glob("FedSAM-Digits/*/version_0")}
    assert runs == {f"rho_{rho}_seed_{seed}" for rho in (0.01, 0.1) for seed in (3, 5)}
    # the config of a run is that of the same run alone
    member = tmp_path / "FedSAM-Digits/rho_0.1_seed_5/version_0"
    cli("fit", f"--config={member / 'config.yaml'}", f"--trainer.default_root_dir={tmp_path / 'alone'}")
    torch.testing.assert_close(state(newest(tmp_path / "alone" / "FedSAM-Digits")), state(member), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("arg", "says"),
    [
        ("--seeds=0,x", "seeds = 0,x"),
        ("--seeds=1,1", "seeds = 1,1.*different"),
        ("--values=0.1,0.2", "values = 0.1,0.2"),
        ("--values=model.roh=0.1,0.2", "model.roh.*no such setting"),
    ],
)
def test_faulty_arguments_are_told(arg: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=says):
        cli("fit", "--model=FedSAM", *DIGITS, f"--trainer.default_root_dir={tmp_path}", arg)
    assert not list(tmp_path.iterdir())
