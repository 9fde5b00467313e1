"""Training options: schedules of the learning rate, label smoothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning import SGD, SWA, Augment, Digits, DigitsMLP, FederatedTrainer, FedSAM, UserError
from fl_lightning.algorithms.parts.local_optimizer import Cosine, Cyclic, Poly, Schedule
from fl_lightning.core.flat import FlatSpec
from fl_lightning.core.rng import generator
from fl_lightning.core.state import RoundContext
from fl_lightning.flatness import sharpness
from tests.runs import last, metrics, run


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Poly(1.0), [1, 0.75, 0.5, 0.25]),
        (Poly(), [1, 0.75**0.9, 0.5**0.9, 0.25**0.9]),
        (Poly(0), [1, 1, 1, 1]),
        (Cyclic(2, 0.2), [0.6, 0.2, 0.6, 0.2]),
        (Cyclic(3, 0), [2 / 3, 1 / 3, 0, 2 / 3]),
        (Cyclic(1, 0.5), [0.5] * 4),
        (Cosine(0.1), [1, 0.1 + 0.45 * (1 + 0.5**0.5), 0.55, 0.1 + 0.45 * (1 - 0.5**0.5)]),
    ],
)
def test_schedule_by_hand(schedule: Schedule, expected: list[float]) -> None:
    """There are four rounds; it multiplies the learning rate, and what decays by round."""
    optimizer = SGD(lr=0.2, lr_decay=0.5, schedule=schedule)
    assert [schedule(t, 4) for t in range(4)] == pytest.approx(expected)
    assert [optimizer.lr_at(t, 4) for t in range(4)] == pytest.approx(
        [0.2 * 0.5**t * f for t, f in enumerate(expected)]
    )


def test_cyclic_is_the_cycle_of_swa() -> None:
    """It is so from SWA's start on, with the learning rate at the end in place of a factor."""
    flat, swa, lr = FlatSpec(DigitsMLP()), SWA(start=0, cycle=10, lr_min=1e-4), 0.01
    cyclic = SGD(lr=lr, schedule=Cyclic(10, 1e-4 / lr))
    expected = [swa.local_lr(lr, RoundContext(t, 30, 1, flat)) for t in range(30)]
    assert [cyclic.lr_at(t, 30) for t in range(30)] == pytest.approx(expected)
    assert expected[0] == pytest.approx(0.00901) and expected[9] == expected[19] == 1e-4  # as the official code has it


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Poly(-1), "model.optimizer.schedule.power = -1: give a finite number from 0 to 100"),
        (lambda: Cyclic(0), "model.optimizer.schedule.period = 0: give a whole number of at least 1"),
        (lambda: Cyclic(2, -0.1), "model.optimizer.schedule.floor = -0.1: give a finite number from 0 to 1"),
    ],
)
def test_schedule_out_of_range(make: type, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--model.optimizer.schedule=Poly --model.optimizer.schedule.power=2", [0.5, 0.125]),
        ("--model.optimizer.schedule=Cyclic --model.optimizer.schedule.period=2", [0.2525, 0.005]),
    ],
)
def test_schedule_from_the_command_line(options: str, expected: list[float], tmp_path: Path) -> None:
    folder = run("fit", "--model.optimizer.lr=0.5", *options.split(), root=tmp_path)
    assert [lr for _, lr in metrics(folder)["client/lr"]] == pytest.approx(expected)


class Smoothed(nn.Module):
    """Cross-entropy with smoothed labels, written out; of one class or of Mixup's probabilities."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        target = target if target.is_floating_point() else F.one_hot(target, logits.shape[1]).to(logits)
        smooth = (1 - self.eps) * target + self.eps / logits.shape[1]
        return -(smooth * logits.log_softmax(1)).sum(1)


YAML = """
model:
  init_args:
    loss:
      class_path: torch.nn.CrossEntropyLoss
      init_args: {label_smoothing: 0.1, reduction: none}
data:
  init_args:
    augment: {class_path: Augment, init_args: {crop: 1, mixup: 1.0}}
"""


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("engine", ["sequential", "batched", "graphed"])
def test_label_smoothing(engine: str, tmp_path: Path) -> None:
    """From YAML, with Mixup, a net is trained with smoothed labels, and evaluated (flatness, too) without."""
    (tmp_path / "mine.yaml").write_text(YAML)
    args = ["--trainer.precision=64-true", f"--trainer.engine={engine}", "--trainer.callbacks+=FlatnessMonitor"]
    args += ["--trainer.callbacks.metrics=[Sharpness]", "--model.optimizer.lr=1", "--trainer.max_rounds=6"]
    folder = run("fit", f"--config={tmp_path / 'mine.yaml'}", *args, root=tmp_path / "given", model="FedSAM")

    data = Digits(num_clients=6, batch_size=32, augment=Augment(crop=1, mixup=1.0))
    trainer = FederatedTrainer(
        max_rounds=6, clients_per_round=3, precision="64-true", accelerator="cpu", threads=1, engine="sequential",
        enable_progress_bar=False, default_root_dir=str(tmp_path / "hand"),
    )  # fmt: skip
    torch.manual_seed(generator(0, "initial weights").initial_seed())
    objective = FedSAM(DigitsMLP(hidden=8), loss=Smoothed(0.1), optimizer=SGD(lr=1.0))
    hand = trainer.fit(objective, data)
    weights = {name.removeprefix("net."): value for name, value in last(folder)["state_dict"].items()}
    for name, value in objective.net.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-12)
    assert metrics(folder)["client/train/loss"][-1][1] == pytest.approx(hand.metrics["client/train/loss"])

    x, y = next(data.eval_batches("test", torch.float64))
    plain = F.cross_entropy(objective.net(x), y).item()
    assert metrics(folder)["server/test/loss"][-1][1] == pytest.approx(plain)
    assert hand.metrics["server/test/loss"] != pytest.approx(plain, rel=1e-3)  # a loss of one's own stays
    plain_loss = nn.CrossEntropyLoss(reduction="none")
    rise = sharpness(objective.net, plain_loss, lambda: data.eval_batches("train", torch.float64), 0.05)
    assert metrics(folder)["flatness/sharpness_all"][-1][1] == pytest.approx(rise)
