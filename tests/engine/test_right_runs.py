"""Guards that compare numbers refuse no right run: 200 of them, drawn by a seed, many from a flat trained model."""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import Digits, DigitsMLP, FederatedTrainer, FlatnessMonitor, LambdaMax, LocalObjective, algorithms
from tests.problem import optimizer_for

CASES = random.Random(41).sample(
    [
        *product(
            algorithms.__all__,
            ("sequential", "batched", "graphed"),
            ("fresh", "init_weights", "checkpoint", "resumed"),
            ("32-true", "bf16-mixed", "64-true", "cast"),
        )
    ],
    200,
)


class Cast(DigitsMLP):
    """A net that computes in bfloat16 whatever the precision of the run, and returns the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, last = (layer for layer in self.modules() if isinstance(layer, nn.Linear))
        h = x.flatten(1).bfloat16()
        h = nn.functional.linear(h, hidden.weight.to(h.dtype), hidden.bias.to(h.dtype)).relu()
        return last(h.to(x.dtype)).bfloat16().to(x.dtype)  # type: ignore[no-any-return]


@cache
def flat() -> dict[str, Tensor]:
    """Weights whose loss on all of the digits is below 1e-4."""
    torch.manual_seed(0)
    net, data = DigitsMLP(16), Digits(num_clients=2)
    data.setup()
    x, y = map(torch.cat, zip(*data.eval_batches("train", torch.float32), strict=True))
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    loss = torch.ones(())
    while loss > 1e-4:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach() for name, value in net.state_dict().items()}


@pytest.mark.sampled(quick=213, slow=29, start=3)
@pytest.mark.parametrize(("name", "engine", "start", "precision"), CASES)
def test_no_right_run_is_refused(name: str, engine: str, start: str, precision: str, tmp_path: Path) -> None:
    def objective(init_weights: dict[str, Tensor] | str | None = None) -> LocalObjective:
        torch.manual_seed(1)
        net = (Cast if precision == "cast" else DigitsMLP)(16)
        return getattr(algorithms, name)(net=net, optimizer=optimizer_for(name, 0.05), init_weights=init_weights)  # type: ignore[no-any-return]

    def fit(model: LocalObjective, rounds: int = 1, ckpt_path: str | None = None) -> Path:
        trainer = FederatedTrainer(
            max_rounds=rounds,
            clients_per_round=3,
            precision="32-true" if precision == "cast" else precision,
            engine=engine,
            callbacks=[FlatnessMonitor(metrics=[LambdaMax()])],
            accelerator="cpu",
            threads=1,
            default_root_dir=str(tmp_path),
            enable_progress_bar=False,
        )
        return trainer.fit(model, Digits(num_clients=5, batch_size=64), ckpt_path).folder.path / "checkpoints/last.ckpt"

    checkpoint = fit(objective(None if start == "fresh" else flat()))
    if start == "checkpoint":
        fit(objective(str(checkpoint)))
    elif start == "resumed":
        fit(objective(flat()), 2, str(checkpoint))
