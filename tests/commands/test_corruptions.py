"""CIFAR-C: rows and severities, what is refused, and the table and figure by the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fl_lightning import Arrays, UserError
from fl_lightning.commands.corruptions import (
    CORRUPTIONS,
    CorruptedCIFAR,
    evaluate_corruptions,
    means,
    plot_corruptions,
    read,
)
from fl_lightning.core.rng import numpy_generator
from tests.runs import cli

N = 12
RNG = numpy_generator(0, "test corruptions")
Y = RNG.permutation(np.repeat(np.arange(3), 4))


def written(folder: Path, corruptions: tuple[str, ...] = CORRUPTIONS) -> Path:
    """Files in the official layout: image i of corruption c at severity s is grey of value 10 c + s."""
    folder.mkdir(exist_ok=True)
    np.save(folder / "labels.npy", np.tile(Y, 5).astype(np.uint8))
    for c, name in enumerate(corruptions):
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
    seen = list(CorruptedCIFAR(str(written(tmp_path))))
    assert [(name, s) for name, s, *_ in seen] == [(name, s) for name in CORRUPTIONS for s in range(1, 6)]
    for c, s, x, y in seen:
        assert x.shape == (N, 32, 32, 3) and (x == 10 * CORRUPTIONS.index(c) + s).all()
        np.testing.assert_array_equal(y, Y)


def test_accuracy_of_a_known_predictor(tmp_path: Path) -> None:
    """It sees images scaled and normalised, and answers the corruption's and severity's number modulo 3."""
    data = Arrays(cifar(tmp_path), num_clients=2, mean=[0.5], std=[0.25], eval_batch_size=5)
    data.setup()

    def predict(x: Tensor) -> Tensor:
        value = ((x[:, 0, 0, 0] * 0.25 + 0.5) * 255).round().long()
        return torch.nn.functional.one_hot(value % 3, 7)  # more outputs than classes

    rows = evaluate_corruptions(predict, data, str(written(tmp_path / "c")), CORRUPTIONS[:4], (1, 5))
    assert [row[:2] for row in rows] == [("clean", 0), *((c, s) for c in CORRUPTIONS[:4] for s in (1, 5))]
    for row in rows[1:]:
        answer = (10 * CORRUPTIONS.index(row.corruption) + row.severity) % 3
        assert row.acc == pytest.approx(float((answer == Y).mean()))
    assert means(rows)["severity 5"] == pytest.approx(np.mean([r.acc for r in rows if r.severity == 5]))
    assert set(means(rows)) == {"clean", "severity 1", "severity 5", "all"}


def test_what_is_refused(tmp_path: Path) -> None:
    home = "https://github.com/hendrycks/robustness"
    with pytest.raises(
        UserError, match=rf"'gaussian_noise.npy' is missing; expected there [^\n]*labels.npy, from {home}$"
    ):
        CorruptedCIFAR(str(tmp_path))
    with pytest.raises(UserError, match="corruptions = fogg: choose from gaussian_noise"):
        CorruptedCIFAR(str(tmp_path), ["fogg"])
    with pytest.raises(UserError, match="severities = 6: choose from 1, 2, 3, 4, 5"):
        CorruptedCIFAR(str(tmp_path), ["fog"], [6])
    folder = written(tmp_path / "c", ("fog",))
    np.save(folder / "labels.npy", np.repeat(Y, 5))
    with pytest.raises(UserError, match=r"labels.npy': labels \(60,\) are not those of a test set five times"):
        CorruptedCIFAR(str(folder), ["fog"])
    written(folder, ("fog",))
    data = Arrays(cifar(tmp_path), num_clients=2)
    data.setup()
    data.y_test = data.y_test.flip(0)
    with pytest.raises(
        UserError, match="its 12 labels are not the 12 of data's test set; CIFAR-10-C goes with CIFAR10"
    ):
        evaluate_corruptions(lambda x: x, data, str(folder), ["fog"])
    np.save(folder / "fog.npy", np.zeros((N, 32, 32, 3)))
    with pytest.raises(
        UserError, match=r"fog.npy': float64 \(12, 32, 32, 3\) in place of uint8 \(60, 32, 32, 3\); get"
    ):
        CorruptedCIFAR(str(folder), ["fog"])
    (folder / "fog.npy").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=rf"^folder = '[^\n]*fog.npy': [^\n]*; get it anew from {home}$"):
        CorruptedCIFAR(str(folder), ["fog"])


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
    rows = read(table)
    assert len(rows) == 1 + 19 * 5 and table.parent.name == "version_0"
    assert f"all {means(rows)['all']:.4f}" in capsys.readouterr().out
    with Image.open(table.with_suffix(".png")) as image:
        assert min(image.size) > 300
    figure = plot_corruptions({"a": table, "b": rows})
    assert [axes.get_title() for axes in figure.axes] == ["severity 5", "mean over severities"]
    heights = [bar.get_height() for bar in figure.axes[0].containers[1]]
    np.testing.assert_allclose(heights, [row.acc for row in rows if row.severity == 5])
    with pytest.raises(SystemExit, match=r"^error: folder = [^\n]*gaussian_noise.npy' is missing[^\n]*$"):
        cli("corruptions", *settings, f"--folder={tmp_path}")
