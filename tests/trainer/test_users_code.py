"""Code of a user's own beside features that it knows nothing of: the numbers are right, or one line says why not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fl_lightning as fl
from fl_lightning import Arrays, Callback, FedAvg, FederatedTrainer, FedSAM, Measure, Part, UserError
from fl_lightning.core import State
from fl_lightning.results.compare import compare
from fl_lightning.trainer import parallel_runs
from fl_lightning.trainer.measurements import Measurement, MeasurementContext
from fl_lightning.trainer.run import Run
from tests.runs import measurements

D, CLASSES = 5, 3


def data(sizes: Sequence[int] = (9, 12, 15, 8, 16), batch_size: int = 4) -> Arrays:
    draw = torch.Generator().manual_seed(0)

    def pair(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, D, generator=draw), torch.randint(0, CLASSES, (n,), generator=draw)

    return Arrays(client_arrays=[*map(pair, sizes)], test=pair(20), batch_size=batch_size)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def trainer(root: Path, *callbacks: Callback, **options: Any) -> FederatedTrainer:
    defaults: dict[str, Any] = {"engine": "sequential", "max_rounds": 4, "clients_per_round": 3, "precision": "64-true"}
    fixed: dict[str, Any] = {"accelerator": "cpu", "threads": 1, "enable_progress_bar": False}
    return FederatedTrainer(callbacks=[*callbacks], default_root_dir=str(root), **fixed, **(defaults | options))


def fit(model: fl.LocalObjective, root: Path, *callbacks: Callback, arrays: Arrays | None = None, **more: Any) -> Run:
    return trainer(root, *callbacks, **more).fit(model, arrays or data())


# Hooks that change tensors in place


class DecaysInStep(FedAvg):
    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        g = grad(w)
        w.mul_(0.99)  # in the first step it is what the server sent
        return g, client


class SubtractsAtEnd(FedAvg):
    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        update = received.w
        update -= w
        return {"w": w}, client


class KeepsInPlace(FedAvg):
    client_state: Mapping[str, Any] = {"h": "zeros"}

    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        client.h.add_(w)
        return {"w": w}, client


class StepsInPlace(FedAvg):
    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        w = server.w
        w -= sent.w - uploads.weighted("w")
        return server.replace(w=w)


class SendsInPlace(FedAvg):
    def broadcast(self, server: State, ctx: Any) -> State:
        server.w[0] = 0
        return server


@pytest.mark.parametrize("engine", ["sequential", "batched", "graphed", "auto"])
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (DecaysInStep, "local_step changes w, client.start, received.w"),
        (SubtractsAtEnd, "local_end changes client.start, received.w"),
        (KeepsInPlace, "local_end changes client.h"),
        (StepsInPlace, "server_step changes server.w"),
        (SendsInPlace, "broadcast changes server.w"),
    ],
)
def test_what_changes_in_place_is_refused_before_it_harms(make: Any, what: str, engine: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        fit(make(net()), tmp_path, engine=engine)
    assert str(error.value).startswith(f"{make.__name__}.{what}")
    assert str(error.value).endswith(" in place; compute a new tensor, as v - x in place of v -= x")
    assert not [*tmp_path.glob("*/version_*")]


# Passes


class ByHand(FedAvg):
    """FedSAM, written into the local step."""

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        g = grad(w)
        return grad(w + 0.05 * g / (g.norm(dim=-1, keepdim=True) + 1e-12)), client


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("engine", ["sequential", "graphed"])
def test_passes_of_an_algorithm_of_ones_own_are_counted(engine: Any, tmp_path: Path) -> None:
    """So the clock refuses the same clients, from the first round on."""
    clock = fl.Clock(sec_per_sample=0.1, deadline_s=7.0, sigma=1.0)
    runs = [fit(make(net()), tmp_path, clock=clock, engine=engine) for make in (FedSAM, ByHand)]
    assert runs[1].contract[0].passes == (2, 2)
    for name in ("client/passes", "client/steps", "clock/time_s"):
        assert runs[0].metrics[name] == runs[1].metrics[name]
    assert runs[0].metrics["client/steps"] < fit(FedSAM(net()), tmp_path, engine=engine).metrics["client/steps"]


# Parts


class FreezesBias(Part):
    """Local steps leave the biases where they are."""

    def moving(self, w: Tensor, alone: bool) -> Tensor:
        mask = torch.ones(D * 6 + 6 + 6 * CLASSES + CLASSES, dtype=torch.bool)
        mask[D * 6 : D * 6 + 6] = False
        return mask


@pytest.mark.parametrize("order", [1, -1])
def test_masks_of_several_parts_act_together(order: int, tmp_path: Path) -> None:
    parts = [fl.Personal(epochs_alone=1), FreezesBias()][::order]
    model = FedAvg(net(), parts=parts)
    bias = model.net[0].bias.detach().clone()
    fit(model, tmp_path)
    assert torch.equal(model.net[0].bias.float(), bias)


def test_two_parts_cannot_both_train_clients_by_themselves() -> None:
    with pytest.raises(UserError, match="Personal and Personal both train clients by themselves; take one"):
        FedAvg(net(), parts=[fl.Personal(epochs_alone=1), fl.Personal(["2.weight"], epochs_alone=1)])


class Teacher(FedAvg):
    """The server keeps a slow average of the model, towards which clients are drawn."""

    server_state: Mapping[str, Any] = {"slow": "w0"}
    down = ("w", "slow")

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        return grad(w) + 0.5 * grad(received.slow), client

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        w = uploads.weighted("w")
        return server.replace(w=w, slow=0.5 * server.slow + 0.5 * w)


class TeacherByFunction(Teacher):
    server_state: Mapping[str, Any] = {"slow": lambda w0: w0.clone()}


@pytest.mark.parametrize("parts", [[], ["last:1"]])
def test_a_model_may_be_declared_by_a_function(parts: list[str], tmp_path: Path) -> None:
    """Personal layers of a client are put into it, as into one that is declared by a word."""
    personal = [fl.Personal(parts)] if parts else []
    one, other = (fit(make(net(), parts=personal), tmp_path) for make in (Teacher, TeacherByFunction))
    assert torch.equal(one.server.w, other.server.w)
    assert one.objective.models == other.objective.models


# Names


class Rate(FedAvg):
    """Its setting has the name of a method."""

    def __init__(self, net: nn.Module, lr: float = 0.5) -> None:
        super().__init__(net)
        self.lr = lr  # type: ignore[assignment,method-assign]


class Quantised(FedAvg):
    bits = 8  # type: ignore[assignment]


class Equally(FedAvg):
    default_weighting = "equal"  # type: ignore[assignment]


class Replaced(FedAvg):
    """A function may take the place of a method."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.step_lr = lambda client, ctx: ctx.lr  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Rate, r"Rate\.lr: this attribute hides a method; give it another name"),
        (Quantised, r"Quantised\.bits: this attribute hides a method; give it another name"),
        (Equally, r"Equally: weighting = 'equal'; give samples or uniform"),
    ],
)
def test_names_that_mean_something_else(kind: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        kind(net())
    assert callable(Replaced(net()).step_lr)


@pytest.mark.parametrize("name", ["local_setp", "server_steps", "localend"])
def test_a_misspelt_hook_is_a_warning(name: str) -> None:
    hooks: dict[str, Any] = {
        "local_setp": lambda self, w, grad, client, received, ctx: (2 * grad(w), client),
        "server_steps": lambda self, server, sent, uploads, ctx: server,
        "localend": lambda self, w, client, received, ctx: ({"w": w}, client),
    }
    hook = {"local_setp": "local_step", "server_steps": "server_step", "localend": "local_end"}[name]
    with pytest.warns(UserWarning, match=rf"Mine\.{name}: no hook has this name; did you mean {hook}\?"):
        type("Mine", (FedAvg,), {name: hooks[name]})(net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        type("Mine", (FedAvg,), {name: lambda self, scale: scale})(net())  # of other arguments
        type("Mine", (FedAvg,), {name: hooks[name], hook: hooks[name]})(net())  # beside the hook


def test_a_misspelt_hook_of_a_callback_is_one_warning() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")

        class Watch(fl.Callback):
            def __init__(self) -> None:
                super().__init__()

            def on_round_ends(self, run: Run) -> None: ...

        Watch()
    assert [str(warning.message).partition(":")[0] for warning in shown] == ["Watch.on_round_ends"]


# State of other shapes and dtypes


class Remembers(FedAvg):
    """The server keeps its last steps as a matrix, and sends margins for the loss; clients count in another dtype."""

    client_state: Mapping[str, Any] = {"rounds": lambda w0: torch.zeros(1, dtype=torch.int64)}
    server_state: Mapping[str, Any] = {
        "steps": lambda w0: w0.new_zeros(3, len(w0)),
        "margins": lambda w0: w0.new_zeros(CLASSES),
    }
    down = ("w", "margins")
    factor = 1.0

    def loss_constants(self, client: State, received: State, ctx: Any) -> tuple[Tensor, ...]:
        return (received.margins,)

    def losses(self, logits: Tensor, target: Tensor, *margins: Tensor) -> Tensor:
        return super().losses(logits + margins[0], target)

    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": w * (1 + client.rounds / 100)}, client.replace(rounds=client.rounds + 1 / 3)

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        steps = torch.cat([server.steps[1:], (uploads.weighted("w") - sent.w)[None]])
        return server.replace(
            w=sent.w + steps.mean(0), steps=steps * self.factor, margins=server.margins + steps[-1, :CLASSES]
        )


@pytest.mark.slow
def test_state_of_other_shapes_and_dtypes(tmp_path: Path) -> None:
    """What a client keeps has the dtype of the weights from the first contact on, in programs of rounds, too."""
    first, *others = [
        fit(Remembers(net()), tmp_path, engine=engine, max_rounds=8, eval_every=9, **options)
        for engine, options in (
            ("sequential", {}),
            ("sequential", {"client_memory": 0.0}),
            ("batched", {}),
            ("graphed", {}),
        )
    ]
    assert {row.rounds.dtype for row in first.clients.rows().values()} == {torch.float64}
    for run in others:
        torch.testing.assert_close({**run.server}, {**first.server}, rtol=1e-12, atol=1e-12)
        for k, row in run.clients.rows().items():
            assert torch.equal(row.rounds, first.clients.rows()[k].rounds)


def test_a_matrix_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = Remembers(net())
    model.factor = torch.inf
    with pytest.raises(UserError, match=r"not finite .steps"):
        fit(model, tmp_path)


class Heads(FedAvg):
    """Clients keep, sum up within a round, and upload a matrix: the weights of the last layer."""

    client_state: Mapping[str, Any] = {"own": lambda w0: w0.new_zeros(CLASSES, 6), "sent": lambda w0: w0.new_ones(2, 6)}
    scratch_state: Mapping[str, Any] = {"total": lambda w0: w0.new_zeros(CLASSES, 6)}
    server_state: Mapping[str, Any] = {"head": lambda w0: w0.new_zeros(CLASSES, 6)}
    down = ("w", "head")
    up = ("w", "head")

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        head = ctx.flat.split(w)["2.weight"]
        pull = (head - received.head + client.own).sum((-2, -1))[..., None]
        return grad(w) + 0.01 * pull, client.replace(total=client.total + head)

    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        return {"w": w, "head": client.total}, client.replace(own=client.total / 2, sent=received.head[:2])

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        return super().server_step(server.replace(head=uploads.weighted("head")), sent, uploads, ctx)


class Masks(FedAvg):
    """The server sends a mask and places; clients upload signs, as truths and as integers, and half precision."""

    server_state: Mapping[str, Any] = {
        "mask": lambda w0: torch.arange(len(w0)) % 3 > 0,
        "places": lambda w0: torch.arange(len(w0)).flip(0),
    }
    down = ("w", "mask", "places")
    up = ("w", "signs", "count", "half")

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        return torch.where(received.mask, grad(w), 0.1 * w[..., received.places]), client

    def local_end(self, w: Tensor, client: State, received: State, ctx: Any) -> Any:
        signs = w > 0
        half = torch.full_like(w, 2.0**15, dtype=torch.half)  # two of them are more than its largest number
        return {"signs": signs, "count": signs.sum(-1, keepdim=True), "half": half, "w": w}, client

    def server_step(self, server: State, sent: State, uploads: Any, ctx: Any) -> State:
        assert float(uploads.mean("half")[0]) == 2.0**15
        shift = uploads.weighted("signs") - uploads.mean("count") / len(server.w)
        mask = torch.where(server.places % 2 == ctx.t % 2, server.mask, uploads.mean("signs") > 0.4)
        return server.replace(w=uploads.weighted("w") + 0.1 * shift, mask=mask)


@pytest.mark.filterwarnings("error:.*gives another result")
@pytest.mark.parametrize("kind", [Heads, Masks])
def test_matrices_masks_and_integers_on_all_engines(kind: Any, tmp_path: Path) -> None:
    """Clients take different numbers of steps, and a program has rounds of different widths."""
    schedule = [[0, 1, 2], [4, 3], [2, 3, 0, 4], [1, 2, 4], [3, 1], [0, 4, 1]]
    runs = [
        fit(kind(net()), tmp_path, engine=engine, sampler=fl.ReplaySampler(schedule), max_rounds=6, eval_every=9)
        for engine in ("sequential", "batched", "graphed")
    ]
    for run in runs[1:]:
        torch.testing.assert_close({**run.server}, {**runs[0].server}, rtol=1e-12, atol=1e-12)
        for k, row in run.clients.rows().items():
            torch.testing.assert_close({**row}, {**runs[0].clients.rows()[k]}, rtol=1e-12, atol=1e-12)


def test_masks_and_integers_are_the_same_after_a_resume(tmp_path: Path) -> None:
    whole, half = (fit(Masks(net()), tmp_path, max_rounds=n) for n in (4, 2))
    resumed = trainer(tmp_path).fit(Masks(net()), data(), str(half.folder.last))
    assert resumed.rounds_done == 4
    for name, value in whole.server.items():
        assert resumed.server[name].dtype == value.dtype and torch.equal(resumed.server[name], value)


# Losses that differ in their tensors


class Weighted(nn.Module):
    def __init__(self, weights: Sequence[float], kind: str) -> None:
        super().__init__()
        values = torch.tensor(weights)
        if kind == "buffer":
            self.register_buffer("weights", values)
        else:
            self.weights = nn.Parameter(values, requires_grad=False) if kind == "parameter" else values

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, y, reduction="none") * self.weights[y]


@pytest.mark.parametrize("kind", ["buffer", "parameter", "attribute"])
def test_losses_that_differ_in_tensors_are_two_methods(kind: str, tmp_path: Path) -> None:
    for weights in ([1.0, 1.0, 1.0], [9.0, 1.0, 0.1]):
        for seed in (0, 1):
            fit(FedAvg(net(), loss=Weighted(weights, kind)), tmp_path, seed=seed, max_rounds=1)
    assert len(compare([str(tmp_path)])) == 2


@pytest.mark.parametrize("kind", ["buffer", "parameter", "attribute"])
def test_losses_that_differ_in_tensors_are_no_parallel_runs(kind: str, tmp_path: Path) -> None:
    models = [FedAvg(net(), loss=Weighted([1.0, 1.0, float(i + 1)], kind)) for i in range(2)]
    with pytest.raises(UserError, match=r"model\.loss.*parallel runs must have the same"):
        parallel_runs.fit([trainer(tmp_path, seed=i, name=f"r{i}") for i in range(2)], models, data())


# Callbacks


class Halves(Callback):
    """Lowers the radius of its run."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_round_end(self, run: Run) -> None:
        run.objective.ascent.rho *= self.factor  # type: ignore[union-attr]


@pytest.mark.sampled(quick=6, start=5)
@pytest.mark.parametrize("engine", ["sequential", "batched", "graphed"])
@pytest.mark.parametrize(("rhos", "factors"), [((0.4, 0.8), (0.5, 0.5)), ((0.4, 0.4), (0.5, 0.25))])
def test_a_callbacks_setting_acts_on_its_run_among_parallel_ones(
    rhos: Sequence[float], factors: Sequence[float], engine: Any, tmp_path: Path
) -> None:
    alone = [
        fit(FedSAM(net(), rho=rho), tmp_path, Halves(factor), seed=i, engine=engine)
        for i, (rho, factor) in enumerate(zip(rhos, factors, strict=True))
    ]
    trainers = [trainer(tmp_path, Halves(f), seed=i, name=f"r{i}", engine=engine) for i, f in enumerate(factors)]
    together = parallel_runs.fit(trainers, [FedSAM(net(), rho=rho) for rho in rhos], data())
    for one, other in zip(alone, together, strict=True):
        assert torch.allclose(one.server.w, other.server.w, rtol=0, atol=1e-12)


class BreaksOff(Callback):
    """Ends a run in the middle of a hook, as Ctrl-C in a long measurement does."""

    def on_round_end(self, run: Run) -> None:
        if run.rounds_done == 2:
            raise KeyboardInterrupt


def test_a_setting_is_that_of_the_last_whole_round(tmp_path: Path) -> None:
    whole = fit(FedSAM(net(), rho=0.4), tmp_path / "whole", Halves(0.5))
    first = FedSAM(net(), rho=0.4)
    with pytest.raises(KeyboardInterrupt):
        fit(first, tmp_path / "resumed", Halves(0.5), BreaksOff())
    assert first.ascent.rho == 0.2
    resumed = trainer(tmp_path / "resumed", Halves(0.5)).fit(FedSAM(net(), rho=0.4), data(), ckpt_path="last")
    assert torch.equal(resumed.server.w, whole.server.w)


class Scales(FedAvg):
    """Scales each step by what plain attributes hold."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale, self.pair = torch.tensor(1.0, dtype=torch.float64), (1, (torch.tensor(1.0), "x"))

    def local_step(self, w: Tensor, grad: Any, client: State, received: State, ctx: Any) -> Any:
        return self.scale * self.pair[1][0] * grad(w), client


class Shrinks(Callback):
    def __init__(self, name: str) -> None:
        self.name = name

    def on_round_end(self, run: Run) -> None:
        if self.name == "pair":
            run.objective.pair = (run.rounds_done, (run.objective.pair[1][0] / 2, "x"))  # type: ignore[attr-defined]
        else:
            run.objective.scale = run.objective.scale / 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("name", ["scale", "pair"])
def test_a_checkpoint_has_tensors_and_tuples_that_a_callback_has_changed(
    name: str, engine: Any, tmp_path: Path
) -> None:
    whole = fit(Scales(net=net()), tmp_path / "whole", Shrinks(name), engine=engine)
    with pytest.raises(KeyboardInterrupt):
        fit(Scales(net=net()), tmp_path / "resumed", Shrinks(name), BreaksOff(), engine=engine)
    again = trainer(tmp_path / "resumed", Shrinks(name), engine=engine)
    resumed = again.fit(Scales(net=net()), data(), ckpt_path="last")
    assert torch.equal(resumed.server.w, whole.server.w)
    assert not torch.equal(whole.server.w, fit(Scales(net=net()), tmp_path / "plain", engine=engine).server.w)


class Strengthens(Callback):
    def on_round_end(self, run: Run) -> None:
        run.objective.parts[0].mu = float(run.seed)  # type: ignore[attr-defined]


class Pulls(Part):
    mu: float

    def __init__(self) -> None:
        self.mu = 0.0


def test_a_callback_that_changes_a_part_of_one_parallel_run_is_refused(tmp_path: Path) -> None:
    trainers = [trainer(tmp_path, Strengthens(), seed=i, name=f"r{i}") for i in range(2)]
    with pytest.raises(UserError, match=r"model\.parts\.0\.mu: runs of one program must have the same"):
        parallel_runs.fit(trainers, [FedAvg(net(), parts=[Pulls()]) for _ in range(2)], data())


class Stops(Callback):
    def on_round_end(self, run: Run) -> None:
        run.should_stop = run.rounds_done == 2


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_parallel_run_that_ends_first_keeps_its_model(engine: Any, tmp_path: Path) -> None:
    trainers = [trainer(tmp_path, *[Stops()] * (not i), seed=i, name=f"r{i}", engine=engine) for i in range(2)]
    models = [FedAvg(net()) for _ in range(2)]
    for run, model in zip(parallel_runs.fit(trainers, models, data()), models, strict=True):
        weights = torch.cat([p.detach().reshape(-1) for p in model.net.parameters()])
        assert torch.equal(weights, run.global_model)


class Counts(Callback):
    def on_round_end(self, run: Run) -> None:
        run.log({"client/steps": 0.0})


def test_counters_of_the_trainer_cannot_be_logged(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.log: client/steps is counted by the trainer; give your metric another"):
        fit(FedAvg(net()), tmp_path, Counts())


class Evaluates(Callback):
    def on_local_end(self, run: Run, result: Any) -> None:
        run.evaluate("test")


def test_a_callback_that_evaluates_leaves_the_clients_statistics_in_the_net(tmp_path: Path) -> None:
    values = []
    for callbacks in ([], [Evaluates()]):
        torch.manual_seed(0)
        normed = nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))
        monitor = fl.FlatnessMonitor(every_n_rounds=1, metrics=[fl.ClientLambdaMax()])
        model = FedAvg(normed, buffers="average", optimizer=fl.SGD(lr=0.2))
        run = fit(model, tmp_path, *callbacks, monitor, arrays=data((20,) * 5, 8), max_rounds=2)
        values.append(run.metrics["flatness/client_lambda_max_local"])
    assert values[0] == values[1]


class Relaxes(Callback):
    def __init__(self, to: float) -> None:
        self.to = to

    def on_round_end(self, run: Run) -> None:
        run.objective.relaxed_init = self.to


def test_relaxed_initialization_may_end_in_a_run_and_not_begin(tmp_path: Path) -> None:
    assert fit(FedAvg(net(), relaxed_init=0.1), tmp_path, Relaxes(0.0)).rounds_done == 4
    with pytest.raises(UserError, match=r"model\.relaxed_init = 0\.2: was 0 when the run began"):
        fit(FedAvg(net()), tmp_path, Relaxes(0.2))


def test_parallel_runs_have_one_precision(tmp_path: Path) -> None:
    trainers = [trainer(tmp_path, seed=i, name=f"r{i}", precision=p) for i, p in enumerate(("64-true", "32-true"))]
    with pytest.raises(UserError, match=r"trainer\.precision: parallel runs must have the same"):
        parallel_runs.fit(trainers, [FedAvg(net()) for _ in range(2)], data())


class NormAsTensor(Measure):
    """Its numbers are as torch returns them."""

    def compute(self, context: MeasurementContext) -> list[Measurement]:
        norm = context.model.norm()
        return [Measurement(name="norm", value=norm, error=norm / 10)]  # type: ignore[arg-type]


def test_a_measure_may_return_tensors(tmp_path: Path) -> None:
    run = fit(FedAvg(net()), tmp_path, fl.FlatnessMonitor(metrics=[NormAsTensor()]), max_rounds=1)
    (measurement,) = measurements(run.folder.path / "flatness.jsonl")
    assert measurement["value"] == run.metrics["flatness/norm"] == float(run.global_model.norm())
    assert measurement["error"] == pytest.approx(measurement["value"] / 10)
