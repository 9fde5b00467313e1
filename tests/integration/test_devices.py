"""What can be shown of a GPU without one: where tensors lie, what the host waits for, and that no number changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fl_lightning as fl
from fl_lightning import Augment, LocalObjective, algorithms
from fl_lightning.core import State, generator
from fl_lightning.data import minibatches
from fl_lightning.engine.replay import CudaGraph
from fl_lightning.trainer.run import Run
from tests.devices import Device
from tests.engine.test_engines import Small, data
from tests.problem import optimizer_for
from tests.runs import metrics

NEVER = 10**5
BATCHED = ("batched", "graphed")


class Trained(NamedTuple):
    """A run, and its clients' rows."""

    run: Run
    rows: dict[int, State]


def fit(folder: Path, make: Callable[[], LocalObjective], device: Device | None = None, **options: Any) -> Trained:
    """Trains on a device that is simulated, or on the CPU."""
    settings = {
        "max_rounds": 2, "clients_per_round": 3, "local_steps": 2, "engine": "sequential", "precision": "64-true",
        "eval_every": NEVER, "default_root_dir": str(folder), "name": "run", **options,
    }  # fmt: skip
    module, ckpt_path = settings.pop("data", data)(), settings.pop("ckpt_path", None)
    with device or nullcontext():
        if device is None:
            trainer = fl.FederatedTrainer(accelerator="cpu", threads=1, enable_progress_bar=False, **settings)
        else:
            trainer = device.trainer(**settings)
        torch.manual_seed(0)
        run = trainer.fit(make(), module, ckpt_path)
        return Trained(run, run.clients.rows())


def objective(name: str = "FedSAM", **options: Any) -> Callable[[], LocalObjective]:
    optimizer = optimizer_for(name, 0.05, momentum=0.9, weight_decay=1e-3, clip=1.0, lr_decay=0.9)
    return lambda: getattr(algorithms, name)(net=Small(), optimizer=optimizer, **options)  # type: ignore[no-any-return]


def events(folder: Path, make: Callable[[], LocalObjective], **options: Any) -> Device:
    device = Device()
    fit(folder, make, device, **options)
    return device


def more(after: Device, before: Device, kind: str) -> Counter[str]:
    """Counts by how much there is more of a kind of event, by file."""
    counts: Counter[str] = Counter()
    for event, n in (after.events - before.events).items():
        if event.kind == kind:
            counts[event.where.partition(":")[0]] += n
    return counts


def assert_same(a: Trained, b: Trained) -> None:
    """Asserts that two runs are the same, bit for bit."""
    for name in b.run.server:
        assert torch.equal(a.run.server[name], b.run.server[name]), name
    for client, row in b.rows.items():
        assert all(torch.equal(a.rows[client][name], row[name]) for name in row)
    assert metrics(a.run.folder.path) == metrics(b.run.folder.path)


@pytest.mark.slow
@pytest.mark.sampled(slow=29, start=5)
@pytest.mark.parametrize("engine", ["sequential", *BATCHED])
@pytest.mark.parametrize("name", algorithms.__all__)
def test_every_algorithm_on_a_simulated_device(name: str, engine: str, tmp_path: Path) -> None:
    """No mixture is there, and no wait in a local step; the numbers are those of the CPU.

    A phase waits for which uploads are finite and their losses, and for whether the server's new state is finite; a
    round for its end, since its time is measured. A program waits once, whatever its length; what
    the server sums over kept rows is never a program.
    """
    few, many = (Device() for _ in range(2))
    fit(tmp_path / "few", objective(name), few, engine=engine)
    trained = fit(tmp_path / "many", objective(name), many, engine=engine, max_rounds=3, local_steps=4)
    phases, kept = trained.run.objective.phases, trained.run.objective.sums_over_kept
    waits = more(many, few, "wait")
    del waits["trainer/storage/client_store.py"]  # the checkpoint at the end has more clients
    del waits["trainer/storage/checkpoint.py"]  # and the norms after one more round
    program = engine != "sequential" and phases == 1 and not kept
    phase_waits = {} if program else {"trainer/received.py": 2 * phases}
    assert waits == {**phase_waits, "trainer/round.py": 1}
    assert not few.count("mixture") + many.count("mixture")
    checked = 6  # three steps, in the first and in the last round
    assert many.launches["graph"] == (3 * 4 * phases + checked if engine == "graphed" else 0)
    assert_same(trained, fit(tmp_path / "cpu", objective(name), engine=engine, max_rounds=3, local_steps=4))


@pytest.mark.slow
@pytest.mark.sampled(slow=2)
@pytest.mark.parametrize("engine", ["sequential", *BATCHED])
def test_neither_copies_nor_waits_in_a_step(engine: str, tmp_path: Path) -> None:
    base, steps, clients, evaluated = (
        events(tmp_path / str(i), objective(), engine=engine, **{"local_steps": 3, **options})
        for i, options in enumerate([{}, {"local_steps": 5}, {"clients_per_round": 5}, {"eval_every": 1}])
    )  # with three steps or more the check of an engine takes three
    assert steps.events == base.events
    more_launches = steps.launches - base.launches
    assert engine != "graphed" or more_launches == {"graph": 4}  # of two rounds: two steps more in each
    assert not more(clients, base, "wait") - Counter({"engine/agreement.py": NEVER})  # once a client
    assert more(evaluated, base, "wait") == {"algorithms/metrics.py": 1, "trainer/evaluation.py": 1}


class Normed(nn.Sequential):
    """A net with BatchNorm and Dropout."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)
        )


def _augmented(**options: Any) -> Callable[[], fl.Arrays]:
    def make() -> fl.Arrays:
        module = data()
        module.augment = Augment(**options)
        return module

    return make


def _streamed() -> fl.Arrays:
    module = data()
    module.stream = True
    return module


CASES: dict[str, tuple[Callable[[], LocalObjective], dict[str, Any]]] = {
    **{policy: (lambda policy=policy: fl.FedAvg(net=Normed(), buffers=policy), {"eval_every": 1})  # type: ignore[misc]
       for policy in ("average", "reset", "local")},
    "cutout and window": (objective(), {"data": _augmented(window=6, crop=0, cutout=2), "engine": "batched"}),
    "mixup": (objective(), {"data": _augmented(mixup=1.0), "engine": "graphed"}),
    "streamed": (objective(), {"data": _streamed}),
    "rows on disk": (objective("SCAFFOLD"), {"client_memory": 0.0}),
    "swa": (objective("SCAFFOLD", averaging=fl.SWA(start=1, cycle=1)), {}),
    "full batch": (objective(), {"data": lambda: data(None), "engine": "batched"}),
    "faults": (objective("SCAFFOLD"), {"faults": fl.Faults(drop_after=0.3, corrupt=fl.Corrupt(0.3, "noise"))}),
    "median": (objective(), {"aggregation": fl.CoordinateMedian()}),
    "trimmed": (objective(), {"aggregation": fl.TrimmedMean()}),
    "clipped": (objective(), {"aggregation": fl.NormClipping()}),
    "krum": (objective(), {"aggregation": fl.MultiKrum(share=0.0)}),
    "private": (objective("FedAvg", weighting="uniform"),
                {"privacy": fl.AdaptivePrivacy(noise_multiplier=1.0, noise_seed=0), "clients_per_round": 5}),
    "adamw": (lambda: fl.FedAvg(net=Small(), optimizer=fl.AdamW(state="keep")), {}),
    "frozen": (lambda: fl.FedSAM(net=fl.Frozen(Small(), ["3"])), {"engine": "batched"}),
    "adapters": (lambda: fl.FedSAM(net=fl.LoRA(Small(), ["1"], trained=["3"])), {"engine": "graphed"}),
    "bf16": (objective(), {"precision": "bf16-mixed"}),
}  # fmt: skip
WAITS = {
    "private": {"trainer/aggregation/privacy.py": 8},  # its metrics and the clip
}
"""In two rounds, beyond those of every run."""
OPTIONAL = (
    "aggregation",
    "rules",
    "faults",
    "privacy",
    "adaptive",
    "augment",
    "minibatches",
)


def test_indices_and_draws_are_moved_once_a_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds whatever the number of chunks; and the host never waits."""
    with Device() as device:
        module = _augmented(crop=1, window=5, cutout=2, mixup=0.7)()
        module.setup()
        module.to(device.device)
        clients = [module.client_batches(k, 2, None, generator(0, "batches", k), torch.float32) for k in range(5)]
        blocks = []
        for size in (minibatches.CHUNK, 1):
            monkeypatch.setattr(minibatches, "CHUNK", size)
            device.events.clear()
            blocks.append([*minibatches.blocks(clients, 6, 4)])
            assert device.count("copy") == 9  # indices, six draws, weights, active steps
            assert not device.count("wait")
    (block,), steps = blocks
    assert len(steps) == len(block.x) > 2
    for name, v in vars(block).items():
        assert torch.equal(v, torch.cat([getattr(step, name) for step in steps]))


CASE = [pytest.param(case, marks=pytest.mark.slow if case == "adapters" else ()) for case in CASES if case != "bf16"]


@pytest.mark.sampled(quick=7, slow=5)
@pytest.mark.parametrize("case", [*CASE, "bf16"])
def test_what_else_a_run_uses(case: str, tmp_path: Path) -> None:
    """The numbers are those of the CPU; options wait for the device where they must, for no upload and no noise."""
    (make, options), device = CASES[case], Device()
    assert_same(fit(tmp_path / "device", make, device, **options), fit(tmp_path / "cpu", make, **options))
    waits = more(device, Device(), "wait")
    assert {file: n for file, n in waits.items() if Path(file).stem in OPTIONAL} == WAITS.get(case, {})


@pytest.mark.sampled(quick=14, slow=4)
@pytest.mark.parametrize("case", CASE)
def test_without_float64(case: str, tmp_path: Path) -> None:
    """Apple's MPS refuses float64: sums are float32 there, so metrics differ in their last digits."""
    make, options = CASES[case]
    options = {"precision": "32-true", **options}
    device, cpu = (
        fit(tmp_path / "mps", make, Device("mps"), **options).run,
        fit(tmp_path / "cpu", make, **options).run,
    )
    for name in cpu.server:
        assert torch.allclose(device.server[name], cpu.server[name], rtol=1e-4, atol=1e-6), name
    assert device.metrics["client/train/loss"] == pytest.approx(cpu.metrics["client/train/loss"], rel=1e-5)


@pytest.mark.sampled(quick=3, slow=2)
@pytest.mark.parametrize("engine", ["sequential", *BATCHED])
def test_resume_on_a_device(engine: str, tmp_path: Path) -> None:
    """Checkpoint and rows go through the host, in memory and on disk."""
    options = {"engine": engine, "eval_every": 1, "client_memory": 0.0 if engine == "sequential" else 1.0}
    broken = fit(tmp_path / "device", objective("SCAFFOLD"), Device(), **options)
    last = str(broken.run.folder.last)
    resumed = fit(tmp_path / "device", objective("SCAFFOLD"), Device(), ckpt_path=last, max_rounds=4, **options)
    uninterrupted = fit(tmp_path / "cpu", objective("SCAFFOLD"), max_rounds=4, **options)
    assert resumed.run.rounds_done == 4
    assert_same(resumed, uninterrupted)


MEASURES: dict[str, Callable[[], list[Any]]] = {
    "hessian": lambda: [fl.LambdaMax(), fl.HessianTrace(probes=6), fl.Spectrum(3), fl.ClientLambdaMax(iterations=5)],
    "sharpness": lambda: [fl.Sharpness(), fl.AdaptiveSharpness(), fl.Discrepancy(), fl.CohortLoss(), fl.Updates()],
    "density": lambda: [fl.SpectralDensity(probes=1, steps=8)],
    "lpf": lambda: [fl.LPF(draws=3)],
    "clients": lambda: [fl.ClientEvaluation()],
    "critical": lambda: [fl.CriticalSharpness()],
}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["cuda", "mps"])
@pytest.mark.parametrize("name", MEASURES)
def test_flatness_on_a_device(name: str, kind: str, tmp_path: Path) -> None:
    precision = "64-true" if kind == "cuda" else "32-true"
    device, cpu = (
        fit(
            tmp_path / place, objective(), Device(kind) if place == "device" else None, max_rounds=1,
            precision=precision, callbacks=[fl.FlatnessMonitor(1, MEASURES[name]())],
        ).run
        for place in ("device", "cpu")
    )  # fmt: skip
    values = {n: value for n, value in cpu.metrics.items() if n.startswith(("flatness/", "server/clients/"))}
    assert values
    for name, value in values.items():
        exact = {"rel": 0.0, "abs": 0.0} if kind == "cuda" else {"rel": 1e-3, "abs": 1e-4}
        assert device.metrics[name] == pytest.approx(value, nan_ok=True, **exact), name


def test_what_the_simulation_refuses() -> None:
    """Otherwise the tests above would show nothing."""
    with Device() as device:
        host, cuda = torch.ones(3), torch.ones(3).to("cuda")
        assert cuda.is_cuda and (cuda * 2 + torch.tensor(1.0)).is_cuda and not host.is_cuda
        assert cuda[1:].is_cuda and torch.zeros(3, device=cuda.device).is_cuda and not cuda.cpu().is_cuda
        zero, one, mask = torch.tensor(0.0), torch.tensor(1.0), cuda > 0
        for mixture in (
            lambda: cuda + host, lambda: torch.stack([cuda, host]), lambda: host.add_(cuda), lambda: zero.add_(cuda[0]),
            lambda: cuda.clamp(zero, one), lambda: torch.addcmul(cuda, cuda, one), lambda: cuda.lerp(cuda, one),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="same device"):
                mixture()
        with pytest.raises(TypeError, match="numpy"):
            cuda.numpy()
        device.events.clear()
        for waits in (
            cuda.sum().item, lambda: float(cuda[0]), cuda.tolist, cuda.cpu, lambda: cuda[cuda > 0], cuda.nonzero,
            lambda: bool(cuda.any()), lambda: torch.tensor([1.0], device="cuda"), lambda: cuda[torch.tensor([0])],
            lambda: host.to(cuda), lambda: cuda.new_tensor(1.0), lambda: host.copy_(cuda),
            lambda: torch.where(mask, cuda, zero), lambda: cuda.masked_fill(mask, cuda[0]), lambda: cuda.unique(),
            lambda: torch.zeros(1 << 16).to("cuda", non_blocking=True), lambda: cuda.repeat_interleave(mask.long()),
        ):  # fmt: skip
            before = device.count("wait")
            waits()
            assert device.count("wait") == before + 1
        before = device.count("wait")
        for tensor in (
            torch.where(mask, cuda, 0), cuda.masked_fill(mask, zero), cuda.maximum(zero), one / cuda, one * cuda[0],
            cuda.clamp(min=zero), cuda.repeat_interleave(mask.long(), output_size=3),
        ):  # fmt: skip
            assert tensor.is_cuda
        assert host.to("cuda", non_blocking=True).sum().is_cuda and device.count("copy") == 1
        assert torch.zeros(1 << 16).pin_memory().to("cuda", non_blocking=True).is_cuda and device.count("copy") == 2
        assert device.count("wait") == before
    with Device("mps") as device, pytest.raises(TypeError, match="float64"):
        torch.ones(3).to(device.device).double()


ZERO = torch.zeros(())
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a value is read": lambda x: x * float(x.sum()),
    "a branch": lambda x: x if x.sum() > 0 else -x,
    "a number of the host in where": lambda x: torch.where(x > 0, x, ZERO),
    "a tensor of the host": lambda x: x + torch.ones(3),
    "a copy that waits": lambda x: x + torch.ones(3).to(x.device),
    "a copy that does not wait": lambda x: x + torch.ones(3).to(x.device, non_blocking=True),
    "values of Python": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "indices of the host": lambda x: x[torch.tensor([2, 1, 0])],
    "a mask": lambda x: x[x > 0],
    "a copy to the host": lambda x: x.cpu().to(x.device),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_capture_refuses(wrong: str) -> None:
    with Device() as device:
        x = torch.ones(3).to(device.device)
        step = WRONG[wrong]
        with pytest.raises(RuntimeError, match="same device" if wrong == "a tensor of the host" else "capturing"):
            CudaGraph(lambda x, y: (step(x),))((x,), (), (x[None],))


def test_a_capture_keeps_the_numbers_of_the_host() -> None:
    """They are arguments of kernels; what the host computes meanwhile is not repeated."""
    number = torch.tensor(2.0)
    with Device() as device:
        x = torch.ones(3).to(device.device)
        graph = CudaGraph(lambda x, y: (x * (number + 1),))
        assert graph((x,), (), (x[None],))[0].tolist() == [3.0] * 3
        number.fill_(7.0)
        assert graph((x,), (), (x[None],))[0].tolist() == [3.0] * 3
        (again,) = CudaGraph(graph.function)((x,), (), (x[None],))
        assert again.tolist() == [8.0] * 3


def test_a_captured_step_is_repeated_on_new_values() -> None:
    """A step is one launch, whatever the number of steps; only more of them than ever before are captured again."""

    def step(w: Tensor, m: Tensor, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return m, w + g * x.sum(0)  # new values of w and m, which change places

    counts, launches = (3, 3, 1, 2, 5, 4), []
    with Device() as device, torch.no_grad():
        graph = CudaGraph(step)
        for seed, n in enumerate(counts):
            torch.manual_seed(seed)
            w, m, g = torch.randn(3, 4).to("cuda").unbind()
            xs = torch.randn(n, 4, 2).to("cuda").transpose(1, 2)  # of another memory format
            before = device.launches.copy()
            end = graph((w, m), (g,), (xs,))
            launches.append(device.launches - before)
            for x in xs:
                w, m = m, w + g * x.sum(0)
            assert torch.equal(end[0], w) and torch.equal(end[1], m)
    assert [counter["capture"] for counter in launches] == [1, 0, 0, 0, 1, 0]
    assert [counter["graph"] for counter in launches] == list(counts)
    assert len({sum(launches[i].values()) - counts[i] for i in (1, 2, 3, 5)}) == 1  # the same but for the steps
