"""CIFAR-C: rows and severities, what is refused, and the table and figure of the command line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fl_lightning import SGD, Arrays, Checkpoints, FedAvg, FederatedTrainer, UserError
from fl_lightning.commands.corruptions import evaluate_corruptions, means, run
from fl_lightning.core.rng import numpy_generator
from fl_lightning.data.images import CORRUPTIONS, corrupted_cifar
from fl_lightning.data.samples import Batch
from fl_lightning.results.curves import plot_corruptions, read_corruptions
from tests.runs import cli

N = 12
RNG = numpy_generator(0, "test corruptions")
Y = RNG.permutation(np.repeat(np.arange(3), 4))


def written(folder: Path) -> Path:
    """Writes files in the official layout: image i of corruption c at severity s is grey of value 10 c + s."""
    folder.mkdir(exist_ok=True)
    np.save(folder / "labels.npy", np.tile(Y, 5).astype(np.uint8))
    for c, name in enumerate(CORRUPTIONS):
        grey = np.repeat(10 * c + np.arange(1, 6), N)[:, None, None, None].astype(np.uint8)
        np.save(folder / f"{name}.npy", np.broadcast_to(grey, (5 * N, 32, 32, 3)))
    return folder


def cifar(folder: Path) -> str:
    path = folder / "cifar.npz"
    x = RNG.integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    np.savez(path, x_train=x, y_train=np.arange(30) % 3, x_test=x[:N] ^ 1, y_test=Y)
    return str(path)


def test_official_names() -> None:
    assert len(CORRUPTIONS) == len(set(CORRUPTIONS)) == 19


def test_severities_are_blocks_of_rows(tmp_path: Path) -> None:
    seen = list(corrupted_cifar(str(written(tmp_path)), Y))
    assert [(name, s) for name, s, _ in seen] == [(name, s) for name in CORRUPTIONS for s in range(1, 6)]
    for c, s, x in seen:
        assert x.shape == (N, 32, 32, 3) and (x == 10 * CORRUPTIONS.index(c) + s).all()


def test_accuracy_of_a_known_predictor(tmp_path: Path) -> None:
    """It gets images scaled and normalised, and predicts the corruption's and severity's number modulo 3."""
    data = Arrays(cifar(tmp_path), num_clients=2, mean=[0.5], std=[0.25], eval_batch_size=5)
    data.setup()

    def predict(x: Tensor) -> Tensor:
        return ((x[:, 0, 0, 0] * 0.25 + 0.5) * 255).round().long() % 3

    def accuracy(batches: Iterable[Batch]) -> float:
        return float(torch.cat([predict(x) == y for x, y in batches]).double().mean())

    rows = list(evaluate_corruptions(accuracy, data, str(written(tmp_path / "c"))))
    assert [row[:2] for row in rows] == [("clean", 0), *((c, s) for c in CORRUPTIONS for s in range(1, 6))]
    for row in rows[1:]:
        answer = (10 * CORRUPTIONS.index(row.corruption) + row.severity) % 3
        assert row.acc == pytest.approx(float((answer == Y).mean()))
    assert means(rows)["severity 5"] == pytest.approx(np.mean([r.acc for r in rows if r.severity == 5]))
    assert set(means(rows)) == {"clean", *(f"severity {s}" for s in range(1, 6)), "all"}


def test_what_is_refused(tmp_path: Path) -> None:
    home = "https://github.com/hendrycks/robustness"
    with pytest.raises(
        UserError, match=rf"'gaussian_noise.npy' is missing; expected there [^\n]*labels.npy, from {home}$"
    ):
        corrupted_cifar(str(tmp_path), Y)
    folder = written(tmp_path / "c")
    np.save(folder / "labels.npy", np.repeat(Y, 5))
    with pytest.raises(UserError, match="its 60 labels are not the 12 of data's test set, five times; CIFAR"):
        corrupted_cifar(str(folder), Y)
    written(folder)
    data = Arrays(cifar(tmp_path), num_clients=2)
    data.setup()
    data.y_test = data.y_test.flip(0)
    with pytest.raises(
        UserError, match="its 60 labels are not the 12 of data's test set, five times; CIFAR-10-C goes with CIFAR10"
    ):
        list(evaluate_corruptions(lambda batches: 0.0, data, str(folder)))
    np.save(folder / "fog.npy", np.zeros((N, 32, 32, 3)))
    with pytest.raises(UserError, match=r"fog.npy': float64 \(12, 32, 32, 3\) instead of uint8 \(60, 32, 32, 3\); get"):
        corrupted_cifar(str(folder), Y)
    (folder / "fog.npy").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=rf"^folder = '[^\n]*fog.npy': [^\n]*; get it again from {home}$"):
        corrupted_cifar(str(folder), Y)


def batch_norm_net() -> nn.Module:
    """Returns a net whose running statistics change its predictions."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8, momentum=0.5), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 3),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["average", "local", "reset"])
def test_clean_row_is_the_number_of_test(tmp_path: Path, policy: Any) -> None:
    """It is so with running statistics, too, which are no parameters; each corruption is the test set itself."""
    x = np.clip(40 * np.arange(3)[np.arange(90) % 3, None, None, None] + RNG.integers(60, 140, (90, 32, 32, 3)), 0, 255)
    path, y = tmp_path / "cifar.npz", np.arange(90) % 3
    x = x.astype(np.uint8)
    np.savez(path, x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    folder = tmp_path / "c"
    folder.mkdir()
    np.save(folder / "labels.npy", np.tile(y[60:], 5))
    for name in CORRUPTIONS:
        np.save(folder / f"{name}.npy", np.tile(x[60:], (5, 1, 1, 1)))

    torch.manual_seed(0)
    data = Arrays(str(path), num_clients=2, batch_size=8, eval_batch_size=7)
    trainer = FederatedTrainer(
        max_rounds=4, clients_per_round=2, accelerator="cpu", callbacks=[Checkpoints()], enable_progress_bar=False,
        default_root_dir=str(tmp_path / "runs"),
    )  # fmt: skip
    trainer.fit(FedAvg(net=batch_norm_net(), optimizer=SGD(lr=0.05), buffers=policy), data)
    (last,) = (tmp_path / "runs").rglob("last.ckpt")

    def model() -> FedAvg:  # without the statistics of an earlier evaluation
        torch.manual_seed(0)
        return FedAvg(net=batch_norm_net(), buffers=policy)

    expected = trainer.test(model(), data, str(last))["server/test/acc"]
    evaluated = model()
    rows = run(trainer, evaluated, data, str(folder), str(last))
    assert rows[0] == ("clean", 0, expected)
    assert len(rows) == 96 and {row.acc for row in rows} == {expected}
    assert expected > 0.5
    fresh = batch_norm_net()
    fresh.load_state_dict({**fresh.state_dict(), **dict(evaluated.net.named_parameters())})
    with torch.no_grad():
        predicted = torch.cat([fresh.eval()(x).argmax(1) == y for x, y in data.eval_batches("test")])
    assert float(predicted.double().mean()) < expected  # the initial statistics give another number


@pytest.mark.slow
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        "--model=FedAvg", "--model.net=HsuCNN",
        "--data=Arrays", f"--data.path={cifar(tmp_path)}", "--data.num_clients=2", "--trainer.accelerator=cpu",
        f"--trainer.default_root_dir={tmp_path / 'runs'}", "--trainer.clients_per_round=2",
        "--trainer.max_rounds=1", "--trainer.enable_progress_bar=false", "--trainer.callbacks=[]",
    ]  # fmt: skip
    cli("fit", *settings)
    folder = f"--folder={written(tmp_path / 'c')}"
    (last,) = (tmp_path / "runs").rglob("last.ckpt")
    cli("corruptions", f"--ckpt_path={last}", folder)  # by the config of its run
    (table,) = (tmp_path / "runs").rglob("corruptions.csv")
    rows = read_corruptions(table)
    assert len(rows) == 1 + 19 * 5 and table.parent.name == "version_0"
    assert f"all {means(rows)['all']:.4f}" in capsys.readouterr().out
    with Image.open(table.with_suffix(".png")) as image:
        assert min(image.size) > 300
    figure = plot_corruptions({"a": table, "b": rows})
    assert [axes.get_title() for axes in figure.axes] == ["severity 5", "mean over severities"]
    heights = [bar.get_height() for bar in figure.axes[0].containers[1]]
    np.testing.assert_allclose(heights, [100 * row.acc for row in rows if row.severity == 5])
    with pytest.raises(SystemExit, match=r"^error: folder = [^\n]*gaussian_noise.npy' is missing[^\n]*$"):
        cli("corruptions", *settings, f"--folder={tmp_path}")
