"""fl_lightning as a user runs it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from torch import Tensor

import fl_lightning as fl
from benchmarks.harness import Turns
from contest.workloads import BETA, EMA, RHO, TAU, Work, work
from fl_lightning.data.partition import Given
from fl_lightning.trainer.callbacks import Callback, Checkpoints
from fl_lightning.trainer.run import Run

OPTIONS: dict[str, dict[str, float]] = {
    "FedAvg": {},
    "FedSAM": {"rho": RHO},
    "FedSMOO": {"rho": RHO, "beta": BETA},
    "FedGMT": {"beta": BETA, "tau": TAU, "ema_alpha": EMA},
}


class Data(fl.FederatedDataModule):
    """The workload's arrays, divided as for the others; a few of them are the test set, which is not used."""

    def __init__(self, work: Work) -> None:
        self.x, self.y = work.arrays()
        self.scale = work.scale
        super().__init__(
            num_clients=work.clients, partition=Given([part.tolist() for part in work.parts(len(self.y))]),
            batch_size=work.batch, augment=fl.Augment(crop=4, flip=True) if work.augment else None,
        )  # fmt: skip

    def load(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.y, self.x[:500], self.y[:500]


class Steps(Callback):
    """Reports every round's time; those of a program are alike."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.done = turns, 0

    def needs_round(self, t: int) -> bool:
        return t - self.done + 1 >= self.turns.left  # the last one of a turn

    def on_fit_start(self, run: Run) -> None:
        self.turns.ready(engine=run.engine_name)

    def on_round_logged(self, run: Run, metrics: Mapping[str, float]) -> None:
        done, self.done = self.done, run.rounds_done
        for _ in range(done, run.rounds_done):
            self.turns.done(metrics["time/round_s"])


def model_of(work: Work, method: str) -> fl.LocalObjective:
    """Returns the package's algorithm with the workload's net."""
    sgd = fl.SGD(lr=work.lr, momentum=work.momentum)
    return getattr(fl, method)(net=getattr(fl, work.ours)(), optimizer=sgd, **OPTIONS[method])


def run(settings: dict[str, Any], turns: Turns) -> None:
    workload = work(settings)
    never = 10**5  # more rounds than are ever run
    with tempfile.TemporaryDirectory() as folder:
        trainer = fl.FederatedTrainer(
            max_rounds=never, clients_per_round=workload.cohort, local_steps=workload.steps, eval_every=never,
            accelerator="cpu", threads=workload.threads, **settings["trainer"],
            callbacks=[Steps(turns), Checkpoints(every_n_rounds=never)], default_root_dir=folder,
            enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(model_of(workload, settings["method"]), Data(workload))
