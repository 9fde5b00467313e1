"""All engines give the same numbers; what they cannot run they refuse."""

from __future__ import annotations

import multiprocessing
import resource
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning import (
    ASAM,
    LESAM,
    SAM,
    SGD,
    SWA,
    Arrays,
    Augment,
    BernoulliSampler,
    Digits,
    FedAvg,
    FederatedTrainer,
    FedGMT,
    FlatnessMonitor,
    LambdaMax,
    Lion,
    LocalObjective,
    ReplaySampler,
    UserError,
    algorithms,
)
from fl_lightning.algorithms.parts.local_optimizer import Cosine
from fl_lightning.core import Draws
from fl_lightning.engine import ENGINES, BatchedEngine, GraphedEngine, Job, LocalResult, SequentialEngine, choice
from fl_lightning.engine.agreement import check
from fl_lightning.engine.base import changed
from fl_lightning.engine.record import Numbers, RecordedRound
from fl_lightning.trainer.callbacks import Callback
from fl_lightning.trainer.loop import choose_engine
from fl_lightning.trainer.run import Run
from tests.problem import optimizer_for

SIZES = (11, 3, 17, 8, 5)
"""Minibatches of 4: between 1 and 5 steps a client, the last ones short."""


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        )


class Small(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Flatten(), nn.Linear(72, 4), nn.ReLU(), nn.Linear(4, 3))


class Twice(nn.Module):
    """A module at two places, and a parameter in two modules."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.first, self.second, self.head = nn.Linear(72, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.third, self.head.weight = self.second, self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(x.flatten(1)).tanh()).tanh()).tanh())[:, :3]  # type: ignore[no-any-return]


def data(batch_size: int | None = 4) -> Arrays:
    rng = np.random.default_rng(0)
    x = [rng.integers(0, 256, (n, 6, 6, 2), dtype=np.uint8).transpose(0, 3, 1, 2) for n in (*SIZES, 8)]
    y = [rng.integers(0, 3, n) for n in (*SIZES, 8)]
    y[0][:3] = 0, 1, 2
    clients = list(zip(x[:-1], y[:-1], strict=True))
    return Arrays(client_arrays=clients, test=(x[-1], y[-1]), batch_size=batch_size, augment=Augment(crop=1))


def train(
    folder: Path,
    objective: LocalObjective,
    engine: str,
    batch: int | None = 4,
    arrays: Arrays | None = None,
    **options: Any,
) -> Run:
    """Three rounds in float64 on ``arrays``, by default on `data` in minibatches of ``batch``."""
    trainer = FederatedTrainer(
        **{"max_rounds": 3, "clients_per_round": 4, "precision": "64-true", **options},
        engine=engine,  # type: ignore[arg-type]
        accelerator="cpu",
        threads=1,
        default_root_dir=str(folder),
        enable_progress_bar=False,
    )
    return trainer.fit(objective, arrays or data(batch))


def assert_close(a: Run, b: Run) -> None:
    """Server state, client rows and logged losses agree up to rounding in float64."""
    rows_a, rows_b = a.clients.rows(), b.clients.rows()
    assert rows_a.keys() == rows_b.keys()
    pairs = [(f"server.{name}", a.server[name], b.server[name]) for name in a.server]
    pairs += [(f"client {k}.{name}", rows_a[k][name], rows_b[k][name]) for k in rows_a for name in rows_a[k]]
    for name, x, y in pairs:
        assert (x - y).abs().max() <= 1e-12 * max(float(y.abs().max()), 1e-3), name
    assert a.metrics["client/train/loss"] == pytest.approx(b.metrics["client/train/loss"], rel=1e-12)


@pytest.mark.sampled(quick=22, slow=4, start=1)
@pytest.mark.parametrize("name", algorithms.__all__)
def test_every_algorithm_on_every_engine(name: str, tmp_path: Path) -> None:
    """Steps and samples differ; momentum, weight decay, clipping, augmentation and a decaying lr are on."""

    def objective() -> LocalObjective:
        optimizer = optimizer_for(name, 0.05, momentum=0.9, weight_decay=1e-3, clip=1.0, lr_decay=0.9)
        return getattr(algorithms, name)(net=Small(), optimizer=optimizer)  # type: ignore[no-any-return]

    sequential = train(tmp_path, objective(), "sequential")
    for engine in ("batched", "graphed"):
        assert_close(train(tmp_path, objective(), engine), sequential)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"local_steps": 6},
        {"client_block": 3},
        {"sampler": BernoulliSampler(0.5), "max_rounds": 5},
        {"batch": None, "local_steps": 2},
    ],
    ids=["steps", "blocks of 3", "cohorts of any size", "full batch"],
)
def test_shapes(options: dict[str, Any], tmp_path: Path) -> None:
    def objective() -> LocalObjective:
        return algorithms.SCAFFOLD(net=Net(), ascent=ASAM(0.1, warmup=2), averaging=SWA(start=1, cycle=1))

    sequential = train(tmp_path, objective(), "sequential", **options)
    for engine in ("batched", "graphed"):
        assert_close(train(tmp_path, objective(), engine, **options), sequential)


@pytest.mark.slow
def test_a_module_at_two_places(tmp_path: Path) -> None:
    """Nor does a measure of flatness leave other weights in it."""
    monitor = FlatnessMonitor(every_n_rounds=1, metrics=[LambdaMax(iterations=2)])
    sequential = train(tmp_path, FedAvg(net=Twice()), "sequential")
    for engine, callbacks in (("batched", []), ("graphed", []), ("sequential", [monitor])):
        assert_close(train(tmp_path, FedAvg(net=Twice()), engine, callbacks=callbacks), sequential)


@pytest.mark.slow
def test_a_record_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round of a warm-up is an input of the record, lr too; a comparison that turns over makes a new one."""
    record, recorded = GraphedEngine._record, list[GraphedEngine]()

    def counted(engine: GraphedEngine, *args: Any) -> Any:
        recorded.append(engine)
        return record(engine, *args)

    monkeypatch.setattr(GraphedEngine, "_record", counted)

    def objective() -> LocalObjective:
        return FedGMT(net=Net(), ascent=SAM(0.1, warmup=4), optimizer=SGD(0.05, lr_decay=0.9))

    options = {"max_rounds": 8, "local_steps": 2, "batch": 2}
    graphed = train(tmp_path, objective(), "graphed", **options)
    assert recorded.count(graphed.engine) == 2  # type: ignore[arg-type]  # before the end of the warm-up, and after it
    assert_close(graphed, train(tmp_path, objective(), "sequential", **options))


@pytest.mark.slow
@pytest.mark.parametrize("number", [float, np.float32, torch.tensor])
def test_a_setting_changed_during_the_run_is_seen(number: Any, tmp_path: Path) -> None:
    class Wider(Callback):
        def on_round_end(self, run: Run) -> None:
            run.objective.ascent.rho = number(0.2 * run.rounds_done)  # type: ignore[union-attr]

    runs = [
        train(tmp_path, FedAvg(net=Net(), ascent=SAM(0.1)), engine, callbacks=[Wider()])
        for engine in ("sequential", "graphed")
    ]
    assert_close(*runs)
    assert not torch.equal(runs[0].server.w, train(tmp_path, FedAvg(net=Net(), ascent=SAM(0.1)), "sequential").server.w)


def test_arithmetic_on_the_recorded_round() -> None:
    numbers = Numbers(3, torch.arange(1.0, 1 + Numbers.MOST))
    t, v = RecordedRound(numbers), torch.full((2,), 4.0)
    assert t < 5 and not t >= 4 and t and 1 - t / 6 == 0.5 and -(2 * t) + 1 < 0
    assert (v * (1 - t / 6)).tolist() == [4, 4] and (t**2 / v).tolist() == [0.5, 0.5]  # of the first two inputs
    assert torch.where(v > 0, 2**t, v).tolist() == [3, 3]
    assert numbers.at(5) == [1 - 5 / 6, 25, 32] + [0] * (Numbers.MOST - 3)
    assert numbers.hold(3) and not any(map(numbers.hold, (0, 2, 4, 5)))
    with pytest.raises(TypeError):
        range(t)  # type: ignore[arg-type]


@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    def objective() -> LocalObjective:
        return FedAvg(net=Small(), ascent=LESAM(0.1), optimizer=SGD(0.05, 0.9))

    options = {"local_steps": 2, "batch": 2}
    compiled = train(tmp_path, objective(), "graphed", compile=True, **options)
    assert_close(compiled, train(tmp_path, objective(), "sequential", **options))


class OwnStep(LocalObjective):
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


class LooksAtValues(LocalObjective):
    def local_step(self, w: Tensor, grad: Any, client: Any, received: Any, ctx: Any) -> Any:
        g = grad(w)
        return (g if g.sum() > 0 else -g), client


class CountsRounds(LocalObjective):
    def local_step(self, w: Tensor, grad: Any, client: Any, received: Any, ctx: Any) -> Any:
        return sum(grad(w) for _ in range(1 + ctx.t)), client


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize(
    ("objective", "engine", "says"),
    [
        (OwnStep(net=Net()), "batched", "OwnStep defines training_step; define `losses`"),
        (FedAvg(net=nn.Sequential(Net(), nn.Dropout())), "batched", "cannot be batched .*random"),
        (FedAvg(net=nn.Sequential(Net(), nn.Dropout())), "graphed", "cannot be batched .*random"),
        (LooksAtValues(net=Net()), "batched", "cannot be batched .*Python code depends on values"),
        (LooksAtValues(net=Net()), "graphed", "cannot be batched .*Python code depends on values"),
        (CountsRounds(net=Net()), "graphed", "cannot be batched .*Python code takes ctx.t as a number"),
    ],
    ids=["training_step", "dropout", "dropout graphed", "values", "values graphed", "round"],
)
def test_refuses_what_cannot_be_batched(objective: LocalObjective, engine: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says) as error:
        train(tmp_path, objective, engine)
    assert "sequential" in str(error.value) and "\n" not in str(error.value)
    train(tmp_path, FedAvg(net=Net()), "sequential")


def test_layer_norm_of_bfloat16_is_refused(tmp_path: Path) -> None:
    """torch differentiates it under vmap in one dtype only."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    with pytest.raises(UserError, match=r"cannot be batched .*scalar type.*use sequential"):
        train(tmp_path, FedAvg(net=net), "batched", precision="bf16-mixed")
    train(tmp_path, FedAvg(net=net), "sequential", precision="bf16-mixed")


class Convolved(nn.Module):
    """Notes the dtypes in which its convolution computes under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, *rest = Net()
        self.rest, self.dtypes = nn.Sequential(*rest), set[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if torch.is_autocast_enabled("cpu"):
            self.dtypes.add(y.dtype)
        return self.rest(y)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "batched", "graphed"])
@pytest.mark.parametrize("name", ["FedGMT", "MOON"])  # one teacher for all, and one for each
def test_teachers_compute_in_the_precision_of_the_run(name: str, engine: str, tmp_path: Path) -> None:
    """vmap alone hides convolutions from autocast; on CUDA it mixed dtypes, and failed."""
    objective = getattr(algorithms, name)(net=Convolved())
    train(tmp_path, objective, engine, precision="bf16-mixed", eval_every=99)
    assert objective.net.dtypes == {torch.bfloat16}


class Noisy(LocalObjective):
    """Draws in all hooks of a client but those in `without`."""

    client_state = {"h": "zeros"}
    without: tuple[str, ...] = ()

    def local_start(self, client: Any, received: Any, ctx: Any) -> Any:
        return received.w + 0.01 * ctx.randn_like(received.w), client

    def local_step(self, w: Tensor, grad: Any, client: Any, received: Any, ctx: Any) -> Any:
        noise = 0.0 if "step" in self.without else ctx.rand_like(w) + ctx.randn_like(w)
        return grad(w) + 0.1 * noise, client

    def local_end(self, w: Tensor, client: Any, received: Any, ctx: Any) -> Any:
        order = ctx.draw(lambda g: torch.randperm(w.shape[-1], generator=g)).expand(w.shape)
        return {"w": w}, client.replace(h=w.gather(-1, order))


class NoisyEnds(Noisy):
    without = ("step",)


@pytest.mark.slow
def test_random_numbers_of_hooks(tmp_path: Path) -> None:
    """They are the same on every engine, whatever torch's global generator holds, with blocks and ragged clients."""
    alone = train(tmp_path, Noisy(net=Small()), "sequential")
    assert_close(train(tmp_path, Noisy(net=Small()), "batched", client_block=3), alone)
    torch.rand(1)
    assert torch.equal(train(tmp_path, Noisy(net=Small()), "sequential").server.w, alone.server.w)
    assert not torch.equal(train(tmp_path, Noisy(net=Small()), "sequential", seed=1).server.w, alone.server.w)
    with pytest.raises(UserError, match="draws random numbers in a local step, which the record would repeat"):
        train(tmp_path, Noisy(net=Small()), "graphed")
    ends = train(tmp_path, NoisyEnds(net=Small()), "sequential")
    for engine in ("batched", "graphed"):
        assert_close(train(tmp_path, NoisyEnds(net=Small()), engine), ends)


def test_each_moment_and_client_has_a_stream_of_its_own() -> None:
    draws = Draws([(0, 1, 0, 5), (0, 1, 0, 6)], torch.device("cpu"), True)

    def drawn() -> Tensor:
        return draws(lambda g: torch.rand(4, generator=g))

    first = [drawn(), drawn()]
    draws.next_step()
    first += [drawn()]
    draws.next_step()
    first += [drawn()]
    draws.move_to(Draws.END)
    first += [drawn()]
    assert len({float(row[0]) for rows in first for row in rows}) == 10
    draws.move_to(Draws.STEPS + 1)
    assert torch.equal(drawn(), first[3])


class EndDraws(LocalObjective):
    """Draws from torch's global generator."""

    def local_end(self, w: Tensor, client: Any, received: Any, ctx: Any) -> Any:
        return {"w": w + torch.randn_like(w)}, client


def test_the_global_generator_is_seeded_on_sequential(tmp_path: Path) -> None:
    """It is left as it was."""
    runs = []
    for _ in range(2):
        net, before = Small(), torch.manual_seed(len(runs)).get_state()
        runs.append(train(tmp_path, EndDraws(net=net), "sequential"))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(runs[0].server.w, runs[1].server.w)


class NoGradient(LocalObjective):
    def local_step(self, w: Tensor, grad: Any, client: Any, received: Any, ctx: Any) -> Any:
        return 0 * w, client


class OtherLosses(LocalObjective):
    def local_step(self, w: Tensor, grad: Any, client: Any, received: Any, ctx: Any) -> Any:
        return grad(w, self.losses), client


@pytest.mark.parametrize("kind", [NoGradient, OtherLosses])
@pytest.mark.parametrize("engine", ["sequential", "batched", "graphed"])
def test_a_step_without_a_gradient_is_told(kind: type[LocalObjective], engine: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"^{kind.__name__}\.local_step: .*; call grad\(v\) once, without other losses$"
    ):
        train(tmp_path, kind(net=Small()), engine)


@pytest.mark.parametrize("lr", [1e-1, 1e-5, 1e-9])
def test_the_check_sees_mistakes_at_any_learning_rate(lr: float, tmp_path: Path) -> None:
    class NormOfAll(LocalObjective):
        def local_step(self, w: Tensor, grad: Any, client: Any, received: Any, ctx: Any) -> Any:
            g = grad(w)
            return g / (g.norm() + 1e-12), client

    with pytest.raises(UserError, match="something else than for each, in the weights; reduce over the last axis"):
        train(tmp_path, NormOfAll(net=Net(), optimizer=SGD(lr)), "batched", precision="32-true")


def test_a_process_without_a_client_compares_nothing(tmp_path: Path) -> None:
    """Such is the second of two processes in a first round with one client."""
    engine = train(tmp_path, FedAvg(Small()), "batched", max_rounds=1).engine
    check(engine, engine, [])


class Entropy(LocalObjective):
    """Adds the entropy of a minibatch's mean prediction, padding included."""

    def batch_loss(self, output: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        p = output.softmax(-1).mean(0)
        return super().batch_loss(output, target, *args, **kwargs) + (p * p.log()).sum()


@pytest.mark.parametrize(
    ("make", "sizes", "refused"),
    [
        (lambda: Entropy(nn.Linear(6, 4)), (8, 8, 8, 8, 10, 11), True),  # one is short, in the last round
        (lambda: Entropy(nn.Linear(6, 4)), (8, 8, 8, 12, 4, 8), False),  # none is short
        (lambda: FedAvg(nn.Linear(6, 4)), (8, 8, 8, 8, 10, 11), False),
        (
            lambda: FedAvg(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False))),
            (8, 8, 8, 8, 10, 11),
            True,
        ),
    ],
)
@pytest.mark.parametrize("engine", ["batched", "graphed"])
def test_a_term_over_a_minibatch_may_not_see_padding(
    engine: str, make: Any, sizes: Sequence[int], refused: bool, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    clients = [(draw.normal(size=(n, 6)), np.arange(n) % 4) for n in sizes]

    def trained(engine: str) -> Tensor:
        torch.manual_seed(0)
        trainer = FederatedTrainer(
            max_rounds=2, sampler=ReplaySampler([[0, 1, 2], [0, 4, 5]]), engine=engine, precision="64-true", threads=1,
            accelerator="cpu", default_root_dir=str(tmp_path), enable_progress_bar=False,
        )  # fmt: skip
        test = draw.normal(size=(8, 6)), np.arange(8) % 4
        return trainer.fit(make(), Arrays(client_arrays=clients, test=test, batch_size=4)).server.w

    if refused:
        with pytest.raises(UserError, match="leave padding, whose weight is 0, out of a term over a minibatch"):
            trained(engine)
    else:
        torch.testing.assert_close(trained(engine), trained("sequential"), rtol=0, atol=1e-12)


class Doubtful(nn.Sequential):
    """ReLU, MaxPool, and biases whose gradient is zero but for rounding, of which Lion takes the sign."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        )


class Casting(nn.Sequential):
    """Does not run in float64."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Flatten(), nn.Linear(72, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())  # type: ignore[no-any-return]


@pytest.mark.sampled(quick=4)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("net", [Doubtful, Casting])
def test_the_check_raises_no_false_alarm(net: type[nn.Module], precision: str, tmp_path: Path) -> None:
    for optimizer in (SGD(1e-6), Lion(1e-3), SGD(0.1, momentum=0.9)):
        objective = FedAvg(net=net(), optimizer=optimizer, ascent=SAM(0.1))
        run = train(tmp_path, objective, "batched", precision=precision, max_rounds=1)
        assert run.server.w.dtype == torch.float32 == next(objective.net.parameters()).dtype


@pytest.mark.parametrize("seed", [5, 10, 52])
def test_an_upload_may_be_a_known_vector_but_for_rounding(seed: int, tmp_path: Path) -> None:
    """FedSMOO's s after one step is mu + s_hat - s_hat."""
    draw = np.random.default_rng(seed)
    clients = [(draw.normal(size=(n, 6)), draw.integers(3, size=n)) for n in (7, 12, 5, 9, 16)]
    torch.manual_seed(seed)
    objective = algorithms.FedSMOO(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), warmup=3)
    arrays = Arrays(client_arrays=clients, test=(draw.normal(size=(6, 6)), np.arange(6) % 3), batch_size=4)
    train(tmp_path, objective, "batched", arrays=arrays, seed=seed, clients_per_round=3, max_rounds=6)


def test_blocks_hold_clients_of_like_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sorted stably: clients of equal length stay in their order; the results come in the cohort's."""
    blocks: list[list[int]] = []
    trained = BatchedEngine._train_block

    def watching(self: BatchedEngine, jobs: Any) -> Any:
        blocks.append([len(job.minibatches) for job in jobs])
        return trained(self, jobs)

    sequential = train(tmp_path, algorithms.SCAFFOLD(net=Small()), "sequential", clients_per_round=5)
    monkeypatch.setattr(BatchedEngine, "_train_block", watching)
    run = train(
        tmp_path, algorithms.SCAFFOLD(net=Small()), "batched", clients_per_round=5, client_block=2, max_rounds=3
    )
    assert_close(run, sequential)
    sizes = [sorted(lengths) for lengths in blocks[-3:]]
    assert sizes == [[3, 5], [2, 2], [1]]  # 5, 3, 2, 2 and 1 steps: 8 x 2 of width 2 in place of up to 11 x 2


def test_out_of_memory_halves_what_was_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block has three clients, but eight rows."""
    trained = BatchedEngine._train_block
    failures = [1]

    def fails(self: BatchedEngine, jobs: Any) -> Any:
        results = trained(self, jobs)
        if len(jobs) == 3 and failures.pop() if failures else False:
            raise torch.OutOfMemoryError("simulated")
        return results

    arrays = Digits(num_clients=20, batch_size=64)
    objective = FedAvg(net=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    monkeypatch.setattr(BatchedEngine, "_train_block", fails)
    with pytest.warns(UserWarning, match="out of memory with 8 clients at once: 4 from now on"):
        run = train(tmp_path, objective, "batched", arrays=arrays, clients_per_round=11, client_block=8, max_rounds=1)
    assert isinstance(run.engine, BatchedEngine) and run.engine.width == 4


def test_changed_settings_stay_in_the_copy() -> None:
    """So do those of modules, and of parts of parts."""
    optimizer = SGD(schedule=Cosine(0.1))
    objective = FedAvg(net=Small(), loss=nn.CrossEntropyLoss(label_smoothing=0.1), ascent=SAM(0.1), optimizer=optimizer)
    loss = objective.loss
    new = {"loss.label_smoothing": 0.5, "ascent.rho": 0.2, "optimizer.schedule.floor": 0.3, "optimizer.lr": 0.4}
    copy: Any = changed(objective, new)
    assert [copy.loss.label_smoothing, copy.ascent.rho, copy.optimizer.schedule.floor, copy.optimizer.lr] == [
        0.5,
        0.2,
        0.3,
        0.4,
    ]
    assert objective.loss is loss and loss.label_smoothing == 0.1 and objective.ascent.rho == 0.1  # type: ignore[union-attr]
    assert optimizer.schedule.floor == 0.1 and objective.optimizer is optimizer and optimizer.lr == 0.1  # type: ignore[union-attr]


def test_engines_by_name() -> None:
    assert {name: kind.name for name, kind in ENGINES.items()} == {name: name for name in ENGINES}
    message = r"^trainer\.engine = fast: give one of auto, sequential, batched, graphed, debug or a subclass of Engine$"
    with pytest.raises(UserError, match=message):
        FederatedTrainer(max_rounds=1, clients_per_round=1, engine="fast")


@pytest.mark.parametrize(
    ("lr", "what"), [(1e160, r"round 1, client \d, local step 2 of \d: the (loss|gradient) is not finite")]
)
def test_debug_engine_names_the_first_value(lr: float, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what):
        train(tmp_path, FedAvg(net=Net(), optimizer=SGD(lr)), "debug", local_steps=3)
    calm = train(tmp_path, FedAvg(net=Net()), "debug")
    assert torch.equal(calm.server.w, train(tmp_path, FedAvg(net=Net()), "sequential").server.w)


class Counted(Small):
    """Counts its forward passes, as Python makes them: one for a block of clients, none when a record is replayed."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.passes += 1
        return super().forward(x)


def test_auto_measures_and_keeps_its_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still but for forward passes: a sequential round takes 16, a batched one 4, a graphed one 0."""
    pass_s = 1e-3
    monkeypatch.setattr(choice, "time", SimpleNamespace(perf_counter=lambda: Counted.passes * pass_s))
    short = train(tmp_path, FedAvg(net=Net()), "auto", max_rounds=2)
    assert short.engine_name == "sequential"  # too short to measure
    assert "engine:" not in capsys.readouterr().out
    assert torch.load(short.folder.last, weights_only=True)["engine"] == "sequential"

    def long() -> Run:
        trainer = FederatedTrainer(
            max_rounds=100_000, clients_per_round=4, precision="64-true", local_steps=4, accelerator="cpu", threads=1,
            default_root_dir=str(tmp_path),
        )  # fmt: skip
        return trainer.start(FedAvg(net=Counted()), data(batch_size=2))

    run = long()
    before = run.server.w.clone()
    choose_engine([run])
    out = capsys.readouterr().out
    assert run.engine_name == run.engine.name == "graphed"
    assert "engine: graphed (sequential 16.0 ms a round, batched 4.0 and 0.0 s once, graphed 0.0 and " in out
    assert torch.equal(run.server.w, before) and len(run.clients) == 0
    run = long()
    run.restored = {"engine": "batched"}  # a checkpoint's
    choose_engine([run])
    assert run.engine_name == run.engine.name == "batched" and capsys.readouterr().out == ""
    pass_s = 0.03
    run = long()
    choose_engine([run])
    assert run.engine_name == "sequential" and "a local step takes 30 ms" in capsys.readouterr().out


class StillDropout(nn.Sequential):
    """Its Dropout is frozen in eval mode, as users do; in train mode it would zero every input."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Flatten(), nn.Dropout(1.0), nn.Linear(72, 3))
        self[1].eval()


@pytest.mark.parametrize("engine", ["sequential", "batched", "graphed"])
def test_modes_of_submodules_are_kept(engine: str, tmp_path: Path) -> None:
    """They are in local training, for a teacher and in evaluation."""
    for objective in (FedAvg(net=StillDropout()), FedGMT(net=StillDropout())):
        trained = train(tmp_path, objective, engine, max_rounds=1)
        assert [module.training for module in objective.net.modules()] == [True, True, False, True]
        assert not torch.equal(objective.flat.split(trained.server.w)["2.weight"], StillDropout()[2].weight.double())
    if engine == "sequential":  # a net in eval mode is trained in train mode
        net = StillDropout().eval()
        trained = train(tmp_path, FedAvg(net=net), engine, max_rounds=1)
        weight = trained.objective.flat.split(trained.server.w)["2.weight"]
        assert net.training and torch.equal(weight, StillDropout()[2].weight.double())


class Starved(Callback):
    """Leaves this process 256 MiB more than it has before anything is trained."""

    def check(self, run: Run) -> None:
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (has + 2**28, -1))


def starved(folder: Path, engine: Any, results: Any) -> None:
    """Trains 64 clients in blocks of 4; then at once, which needs more memory than there is.

    What an engine imports and keeps when it first trains lies in memory before the limit counts.
    """
    for block, limits in ((4, []), (None, [Starved()])):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3000), nn.ReLU(), nn.Linear(3000, 10))
        trainer = FederatedTrainer(
            max_rounds=1, clients_per_round=64, engine=engine, client_block=block, precision="64-true", local_steps=1,
            accelerator="cpu", threads=1, default_root_dir=folder, enable_progress_bar=False, callbacks=limits,
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as caught:
            run = trainer.fit(FedAvg(net=net, optimizer=SGD(0.1)), Digits(num_clients=64, batch_size=4))
        messages = [str(warning.message) for warning in caught if "out of memory" in str(warning.message)]
        results.send((run.global_model.numpy(), messages))


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits and sizes of processes as Linux has them")
@pytest.mark.parametrize("engine", ["batched", "graphed"])
def test_a_block_that_does_not_fit_is_halved(engine: str, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")  # a fork has what its parent has freed, beside the limit
    receiver, sender = spawn.Pipe(duplex=False)
    child = spawn.Process(target=starved, args=(tmp_path, engine, sender))
    child.start()
    sender.close()  # so that a child that fails ends recv
    (blocks, nothing), (w, messages) = receiver.recv(), receiver.recv()
    child.join()
    assert messages[0].startswith("out of memory with 64 clients at once: 32 from now on") and not nothing
    np.testing.assert_allclose(w, blocks, rtol=1e-12, atol=1e-14)


@pytest.mark.long
def test_memory_is_flat(tmp_path: Path) -> None:
    """Over 200 rounds nothing is kept: neither tensors nor records."""
    import gc

    from fl_lightning import Callback

    class Count(Callback):
        def __init__(self) -> None:
            self.tensors: list[int] = []

        def on_round_logged(self, run: Run, metrics: Any) -> None:
            if run.rounds_done in (50, 200):
                gc.collect()
                self.tensors.append(sum(v.numel() for v in gc.get_objects() if type(v) is Tensor))

    for engine in ("sequential", "batched", "graphed"):
        count = Count()
        train(
            tmp_path, algorithms.FedSMOO(net=Small()), engine, max_rounds=200, eval_every=200, local_steps=1,
            sampler=None, clients_per_round=5, callbacks=[count],
        )  # fmt: skip
        assert count.tensors[1] <= count.tensors[0] * 1.01, engine


class Backwards(SequentialEngine):
    """Trains the last client first."""

    name = "backwards"

    def train(self, jobs: Sequence[Job]) -> list[LocalResult]:  # type: ignore[override]
        return [*super().train(jobs[::-1])][::-1]


class Wrong(Backwards):
    """Changes what it uploads."""

    def train(self, jobs: Sequence[Job]) -> list[LocalResult]:
        results = super().train(jobs)
        return [replace(result, upload={**result.upload, "w": result.upload["w"] * 1.001}) for result in results]


@pytest.mark.slow
def test_an_engine_of_ones_own(tmp_path: Path) -> None:
    """It has the bits of the sequential one, its class is in config and checkpoint, and a wrong one is refused."""
    sequential, custom = (train(tmp_path, FedAvg(Small()), engine) for engine in ("sequential", Backwards))  # type: ignore[arg-type]
    assert torch.equal(sequential.server.w, custom.server.w)
    path = f"{__name__}.Backwards"
    assert custom.engine_name == custom.config["trainer"]["engine"] == path and type(custom.engine) is Backwards
    reference = train(tmp_path, FedAvg(Small()), "sequential", max_rounds=4)
    options: dict[str, Any] = {"clients_per_round": 4, "precision": "64-true", "accelerator": "cpu", "max_rounds": 4}
    for engine in (Backwards, "auto"):  # that of the checkpoint
        trainer = FederatedTrainer(engine=engine, default_root_dir=str(tmp_path), **options)
        resumed = trainer.fit(FedAvg(Small()), data(4), str(custom.folder.last))
        assert torch.equal(resumed.server.w, reference.server.w) and type(resumed.engine) is Backwards
    with pytest.raises(UserError, match=r"trainer.engine = backwards: FedAvg gives .* something else"):
        train(tmp_path, FedAvg(Small()), Wrong)  # type: ignore[arg-type]
    assert FederatedTrainer(engine=SequentialEngine).engine == "sequential"

    class Inner(Backwards):
        """Is defined in a function."""

    with pytest.raises(UserError, match=r"Inner: cannot be imported .*; give a class at the top level of a module"):
        FederatedTrainer(engine=Inner)
