"""What tests share: one thread, and the small problem of the golden trajectories."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from lightning.fabric.utilities import registry
from sklearn import datasets
from torch import nn

from fl_lightning import (
    SGD,
    AdamW,
    Arrays,
    FederatedTrainer,
    LocalObjective,
    LocalOptimizer,
    Muon,
    ReplaySampler,
    Trajectory,
)
from fl_lightning.trainer.run import Run
from fl_lightning.trainer.storage import provenance

torch.set_num_threads(1)
torch.ones((), requires_grad=True).backward()  # were the first one recorded, no fork of this process could train
settings.register_profile("same every time", derandomize=True)  # --hypothesis-profile=default draws other cases
settings.load_profile("same every time")
registry.entry_points = cache(registry.entry_points)  # Fabric reads all packages' for each trainer that is made
datasets.load_digits = cache(datasets.load_digits)  # a text file of 1,797 lines
os.fsync = lambda descriptor: None  # tests kill processes, not machines: what a process has written stays
_git, ROOT = provenance._git, Path(__file__).parents[1]
_git_here = cache(_git)
provenance._git = lambda folder, *args: (_git_here if folder == ROOT else _git)(
    folder, *args
)  # once: nobody commits now
CACHE = tempfile.TemporaryDirectory()
os.environ["HF_DATASETS_CACHE"] = CACHE.name  # not in the home of who runs the tests
for _size in ("COLUMNS", "LINES"):  # readline, which pytest imports, sets them for the processes that it starts
    os.environ.pop(_size, None)
GOLDEN = Path(__file__).parent / "golden"


def optimizer_for(algorithm: str, lr: float, **options: Any) -> LocalOptimizer:
    """Returns SGD, or the optimizer that the algorithm takes, with the options that it has."""
    kind: Any = {"LocalMuon": Muon, "FedMuon": Muon, "FedAdamW": AdamW}.get(algorithm, SGD)
    return kind(lr, **{name: value for name, value in options.items() if kind is not AdamW or name != "momentum"})  # type: ignore[no-any-return]


def trajectory(name: str) -> dict[str, Any]:
    """Returns the arrays of an official program's run (tests/golden/README.md)."""
    with np.load(GOLDEN / "trajectories.npz") as z:
        return {key.removeprefix(f"{name}/"): z[key] for key in z.files if key.startswith(f"{name}/")}


class GoldenNet(nn.Module):
    """The net of the golden trajectories: 1,220 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.fc1 = nn.Linear(64, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


class Golden:
    """The problem that the official codes were run on, and our runs of it."""

    def __init__(self, folder: Path) -> None:
        with np.load(GOLDEN / "problem.npz") as z:
            self.arrays = [(z[f"client{k}_x"], z[f"client{k}_y"]) for k in range(4)]
            self.test = (z["test_x"], z["test_y"])
            self.schedule = z["schedule"].tolist()
            self.init = {key[5:]: torch.from_numpy(z[key]) for key in z.files if key.startswith("init/")}
        self.folder = folder

    def net(self) -> GoldenNet:
        net = GoldenNet()
        net.load_state_dict(self.init)
        return net

    def run(
        self,
        objective: LocalObjective,
        dtype: Any = np.float64,
        callbacks: Any = (),
        ckpt_path: str | None = None,
        **trainer: Any,
    ) -> tuple[Run, Trajectory]:
        """Trains by three full-batch steps a client, by the participation schedule of the file."""
        arrays = [(x.astype(dtype), y) for x, y in self.arrays]
        data = Arrays(client_arrays=arrays, test=(self.test[0].astype(dtype), self.test[1]), batch_size=None)
        record = Trajectory()
        options: dict[str, Any] = {
            "sampler": ReplaySampler(self.schedule),
            "max_rounds": len(self.schedule),
            "local_steps": 3,
            "precision": "64-true" if dtype == np.float64 else "32-true",
            "accelerator": "cpu",
            "engine": "sequential",
            "enable_progress_bar": False,
            "default_root_dir": str(self.folder),
        }
        fit = FederatedTrainer(callbacks=[record, *callbacks], **{**options, **trainer})
        return fit.fit(objective, data, ckpt_path), record


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    return Golden(tmp_path)
