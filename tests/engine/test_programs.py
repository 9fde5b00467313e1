"""Runs of a process share machine code if their records are equal, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from fl_lightning import FedAvg, LocalObjective, algorithms
from fl_lightning.engine import replay
from fl_lightning.engine.replay import compiled
from fl_lightning.trainer import loop
from fl_lightning.trainer.run import Run
from tests.engine.test_engines import Small, train
from tests.problem import optimizer_for

Owner = Callable[[LocalObjective], Any]
OWNERS: dict[str, Owner] = {"": lambda x: x, "ascent": lambda x: x.ascent, "optimizer": lambda x: x.optimizer}
OPTIMIZERS = ("FedAvg", "FedMuon", "FedAdamW")
"""Algorithms with different optimizers."""
OTHER_CODE = {"relaxed_init", "warmup", "ns_steps", "kappa", "momentum", "weight_decay"}
"""Settings on which operations depend, and the two of SGD that torch multiplies and adds at once, without rounding."""
DECORR = ("FedDecorr", "", "beta", 0.9 * 0.1)
"""A number that vmap makes a tensor of."""


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The programs that are compiled; they run as recorded, since the compiler takes half a minute for each."""
    programs: list[Any] = []
    monkeypatch.setattr(replay, "Compiled", lambda program: programs.append(program) or program)
    monkeypatch.setattr(loop.engine, "check", lambda *_: None)
    compiled.cache_clear()
    yield programs
    compiled.cache_clear()


def assert_same_bits(one: Run, other: Run) -> None:
    states = [{"server": run.server, **run.clients.rows()} for run in (one, other)]
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        for name, value in state.items():
            assert torch.equal(value, states[1][key][name]), (key, name)


def numbers(owner: Any) -> dict[str, float]:
    """The numeric settings of an objective or a part, each changed a little."""
    settings = {name: v for name, v in vars(owner or object).items() if type(v) in (int, float) and name[0] != "_"}
    return {name: v + 1 if isinstance(v, int) else 0.9 * v or 0.05 for name, v in settings.items()}


@pytest.mark.sampled(slow=8, start=7)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "FedProx" else pytest.mark.slow) for n in algorithms.__all__]
)
def test_a_setting_changes_what_it_changes_without_the_cache(name: str, tmp_path: Path, programs: list[Any]) -> None:
    """So does each number of an algorithm, its ascent and its optimizer, after a run with the setting as it was."""

    def run(path: str = "", setting: str = "", value: float = 0) -> Run:
        optimizer = optimizer_for(name, 0.05, momentum=0.9, weight_decay=1e-3, clip=1.0, lr_decay=0.9)
        objective = getattr(algorithms, name)(net=Small(), optimizer=optimizer)
        if setting:
            setattr(OWNERS[path](objective), setting, value)
        return train(tmp_path, objective, "graphed", compile=True, local_steps=2, max_rounds=2)

    sample = getattr(algorithms, name)(net=Small(), optimizer=optimizer_for(name, 0.05))
    paths = [path for path in OWNERS if path != "optimizer" or name in OPTIMIZERS]
    changes = [(path, *change) for path in paths for change in numbers(OWNERS[path](sample)).items()]
    alone = []
    for change in changes:
        compiled.cache_clear()
        alone.append(run(*change))
    compiled.cache_clear()
    before = run()
    programs.clear()
    assert_same_bits(run(), before)
    assert not programs, "an equal run compiles nothing"
    for change, expected in zip(changes, alone, strict=True):
        assert_same_bits(run(*change), expected)
        assert not programs or change[1] in OTHER_CODE or (name, *change) == DECORR
        programs.clear()


class HalfFrozen(nn.Sequential):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        body = nn.Linear(72, 8).requires_grad_(False)
        torch.manual_seed(0)
        super().__init__(nn.Flatten(), body, nn.ReLU(), nn.Linear(8, 3))


class Held(LocalObjective):
    """Holds a tensor that its constructor has made."""

    def __init__(self, value: float, net: nn.Module) -> None:
        super().__init__(net)
        self.pull = torch.tensor([value], dtype=torch.float64)

    def local_step(self, w: Tensor, grad: Any, client: Any, received: Any, ctx: Any) -> Any:
        return grad(w) + self.pull * (w - client.start), client


@pytest.mark.parametrize(
    "make",
    [lambda i: FedAvg(net=HalfFrozen(i)), lambda i: Held(0.1 + 0.1 * i, Small())],
    ids=["frozen", "held"],
)
def test_tensors_that_a_record_holds_are_inputs_of_its_code(
    make: Callable[[int], LocalObjective], tmp_path: Path, programs: list[Any]
) -> None:
    """So runs whose frozen layers differ share it."""
    runs = [train(tmp_path, make(i), "graphed", compile=True, local_steps=2) for i in range(2)]
    assert len(programs) == 1
    assert not torch.equal(runs[0].server.w, runs[1].server.w)
    assert_same_bits(runs[1], train(tmp_path, make(1), "graphed", local_steps=2))


def test_dtypes_and_steps_have_code_of_their_own(tmp_path: Path, programs: list[Any]) -> None:
    for options in ({}, {"precision": "32-true"}, {"precision": "bf16-mixed"}, {"local_steps": 3}):
        train(tmp_path, FedAvg(net=Small()), "graphed", **{"compile": True, "local_steps": 2, **options})  # type: ignore[arg-type]
    assert len(programs) == 4


def test_settings_of_torch_have_code_of_their_own() -> None:
    def key() -> tuple[Any, ...]:
        return replay.Program.of(symbolic_trace(lambda x: x + 1), [torch.zeros(2, dtype=torch.float32)])[0].key

    threads, dtype, precision = torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
    changes: list[tuple[Callable[[Any], object], Any, Any]] = [
        (torch.set_num_threads, threads + 1, threads),
        (torch.set_default_dtype, torch.bfloat16, dtype),
        (torch.set_float32_matmul_precision, "medium", precision),
        (torch.use_deterministic_algorithms, True, False),
    ]
    before = key()
    for change, value, restored in changes:
        try:
            change(value)
            assert key() != before, change
        finally:
            change(restored)
    assert key() == before


@pytest.mark.slow
def test_tensors_of_other_strides_have_code_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for some strides would read the wrong numbers of others."""
    monkeypatch.undo()
    add, x = replay.Compiled(symbolic_trace(lambda x, y: (x + 2 * y,))), torch.arange(6.0).view(2, 3)
    for y in (x + 1, (x + 1).T.contiguous().T, torch.ones(3).expand(2, 3), x + 3):
        assert torch.equal(add(x, y)[0], x + 2 * y)


@pytest.mark.slow
def test_compiled_code_is_kept_in_the_users_folder(tmp_path: Path) -> None:
    """Each kind of processor has its own. torch chooses another one when it is imported, hence a new process."""
    code = "import fl_lightning; from fl_lightning.engine.replay import Compiled; Compiled(lambda x: x)\n"
    code += "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"
    variables = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    env = {**variables, "XDG_CACHE_HOME": str(tmp_path), "ATEN_CPU_CAPABILITY": "default"}
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert Path(output.strip()).parent == tmp_path / "fl_lightning" / "inductor"
    assert output.strip().endswith("_DEFAULT_")
