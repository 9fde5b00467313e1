"""Segmentation: FedDrive's lists, label maps, augmentation, losses of pixels, and mean intersection over union."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning import (
    IDDA,
    IID,
    SAM,
    Augment,
    Cityscapes,
    FedAvg,
    FederatedTrainer,
    LocalObjective,
    PixelCrossEntropy,
    ScaledCrop,
    UserError,
)  # fmt: skip
from fl_lightning.core.rng import generator, numpy_generator
from fl_lightning.data.segmentation import CITYSCAPES, IDDA16, MeanIoU
from fl_lightning.trainer.run import Run
from tests.engine.test_engines import assert_close
from tests.generated import lists, scene
from tests.runs import cli

RNG = numpy_generator(0, "test driving")
SIZE = (16, 32)
IMAGES = RNG.integers(0, 256, (12, *SIZE, 3), dtype=np.uint8)
MAPS = RNG.integers(0, 34, (12, *SIZE), dtype=np.uint8)


def cityscapes(root: Path, **kwargs: Any) -> Cityscapes:
    """Writes ten scenes of three clients, two of another city to test; as a word list 2 sorts behind list 10."""
    pairs = []
    for i in range(12):
        city = "train/ulm/ulm" if i < 10 else "val/bonn/bonn"
        pairs.append((f"{city}_{i:06}_000019_leftImg8bit.png", f"{city}_{i:06}_000019_gtFine_labelIds.png"))
        if not (root / "gtFine" / pairs[-1][1]).exists():
            scene(root, f"leftImg8bit/{pairs[-1][0]}", f"gtFine/{pairs[-1][1]}", (IMAGES[i], MAPS[i]))
    if not (root / "heterogeneous").exists():
        train = {"all_data_2.json": {"ulm0": pairs[:2], "ulm1": pairs[2:7]}, "all_data_10.json": {"ulm2": pairs[7:10]}}
        lists(root / "heterogeneous" / "train", train)
        lists(root / "heterogeneous" / "test", {"all_data_0.json": {"test_user": pairs[10:]}})
    data = Cityscapes(str(root), **{"batch_size": 2, **kwargs})
    data.size = SIZE
    return data


def test_a_partition_beside_the_lists_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.partition: the lists name the clients; leave it out$"):
        cityscapes(tmp_path, partition=IID())


def train_ids(labels: Any) -> Any:
    table = np.full(256, 255)
    table[list(CITYSCAPES)] = list(CITYSCAPES.values())
    return table[labels]


def test_a_user_of_two_lists_has_the_samples_of_both(tmp_path: Path) -> None:
    cityscapes(tmp_path)
    path = tmp_path / "heterogeneous" / "train" / "all_data_10.json"
    path.write_text(path.read_text().replace("ulm2", "ulm0"))
    data = cityscapes(tmp_path)
    data.setup()
    assert data.client_sizes.tolist() == [5, 5] and len(data.y_train) == 10


@pytest.mark.parametrize("stream", [False, True])
def test_cityscapes(stream: bool, tmp_path: Path) -> None:
    data = cityscapes(tmp_path, stream=stream)
    data.setup()
    assert data.num_clients == 3 and [part.tolist() for part in data.clients] == [[0, 1], [2, 3, 4, 5, 6], [7, 8, 9]]
    assert (data.num_classes, data.input_shape) == (19, (3, *SIZE))
    batches = list(data.eval_batches("test", torch.float64))
    assert [len(x) for x, _ in batches] == [1, 1]
    for i, (x, y) in enumerate(batches, 10):
        np.testing.assert_allclose(x[0].movedim(0, -1), IMAGES[i] / 255 * 2 - 1, atol=1e-12)
        assert y.dtype == torch.int64
        np.testing.assert_array_equal(y[0], train_ids(MAPS[i]))
    x, y = next(iter(data.client_batches(0, 1, None, generator(0, "batches"), torch.float32)))
    assert x.shape == (2, 3, *SIZE) and y.shape == (2, *SIZE)


def test_idda_has_seen_and_unseen_domains(tmp_path: Path) -> None:
    pairs = [(f"T{i:02}_CN_A/RGB/{i}.jpg", f"T{i:02}_CN_A/Semantic/{i}.png") for i in range(12)]
    for i, (image, labels) in enumerate(pairs):
        scene(tmp_path / "IDDAsmall", image, labels, (IMAGES[i], MAPS[i]))
    home = tmp_path / "uniform" / "rainy"
    lists(home / "train", {"train.json": {f"client{k}": pairs[3 * k : 3 * k + 3] for k in range(3)}})
    test = {"test_user_diff_domain": pairs[9:10], "test_user_same_domain": pairs[10:]}
    lists(home / "test", {"test.json": test})
    data = IDDA(str(tmp_path), "uniform", "rainy", eval_size=(8, 16), eval_batch_size=2)
    data.size = SIZE
    run = train(data, FedAvg(net=Net(16), loss=PixelCrossEntropy()), "sequential", tmp_path)
    parts = {name: members.tolist() for name, members in data.test_parts().items()}
    assert parts == {"unseen": [True, False, False], "seen": [False, True, True]}
    assert data.num_classes == max(IDDA16.values()) + 1 == 16
    seen, unseen, both = (run.metrics[f"server/test{part}/miou"] for part in ("_seen", "_unseen", ""))
    x = torch.cat([x for x, _ in data.eval_batches("test", torch.float64)])
    assert x.shape == (3, 3, 8, 16)
    logits = F.interpolate(run.evaluator.logits(run.global_model, x), size=SIZE, mode="bilinear")
    y = torch.cat([y for _, y in data.eval_batches("test")])
    assert y.shape == (3, *SIZE)
    for value, part in ((unseen, slice(0, 1)), (seen, slice(1, 3)), (both, slice(0, 3))):
        assert value == pytest.approx(iou(logits.argmax(1)[part], y[part], 16))


def iou(predicted: Tensor, true: Tensor, classes: int) -> float:
    """Computes the mean over classes, pixel by pixel."""
    counts = true != 255
    values = []
    for c in range(classes):
        either = (((predicted == c) | (true == c)) & counts).sum()
        if (true == c).any():
            values.append(float(((predicted == c) & (true == c)).sum() / either))
    return float(np.mean(values))


def test_mean_iou_counts_classes_that_occur() -> None:
    true = torch.tensor([[[0, 0, 1, 255]]])
    predicted = torch.tensor([[[0, 2, 1, 2]]])  # class 2 is found, but never there
    metric = MeanIoU(4)
    metric.update(F.one_hot(predicted, 4).movedim(-1, 1).float(), true)
    assert float(metric.compute()) == pytest.approx((1 / 2 + 1) / 2)


class Net(nn.Module):
    """Logits of half the size, and in training those of another head."""

    def __init__(self, classes: int = 19, auxiliary: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.side = nn.Conv2d(3, classes, 2, 2), nn.Conv2d(3, classes, 4, 4)
        self.auxiliary = auxiliary

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return (self.conv(x), self.side(x)) if self.training and self.auxiliary else self.conv(x)


def train(data: Any, objective: LocalObjective, engine: str, folder: Path) -> Run:
    trainer = FederatedTrainer(
        max_rounds=2, clients_per_round=2, engine=engine, accelerator="cpu", threads=1, precision="64-true",  # type: ignore[arg-type]
        default_root_dir=str(folder / "runs"), enable_progress_bar=False, callbacks=[],
    )  # fmt: skip
    return trainer.fit(objective, data)


@pytest.mark.slow
def test_engines_agree(tmp_path: Path) -> None:
    """They do with auxiliary heads, the hardest pixels, SAM, and augmentation of images with their maps."""

    def run(engine: str) -> Run:
        data = cityscapes(tmp_path, augment=ScaledCrop((8, 12), (0.5, 1.5), jitter=0.4))
        objective = FedAvg(net=Net(auxiliary=True), loss=PixelCrossEntropy(0.25), ascent=SAM(0.1))
        return train(data, objective, engine, tmp_path)

    sequential = run("sequential")
    assert 0 <= sequential.metrics["server/test/miou"] <= 1 and "server/test/acc" not in sequential.metrics
    for engine in ("batched", "graphed"):
        assert_close(run(engine), sequential)


# Loss


@pytest.mark.parametrize("hardest", [None, 0.25, 1.0])
def test_pixel_cross_entropy_by_hand(hardest: float | None) -> None:
    rng = torch.Generator().manual_seed(0)
    heads = [torch.randn(3, 5, 4, 6, generator=rng).double() for _ in range(3)]
    y = torch.randint(5, (3, 4, 6), generator=rng)
    y[0, :2], y[2] = 255, 255
    want = torch.zeros(3).double()
    for logits in heads:
        for i in range(3):
            pixels = [
                float(-logits[i, :, a, b].log_softmax(0)[y[i, a, b]]) if y[i, a, b] != 255 else 0.0
                for a in range(4) for b in range(6)
            ]  # fmt: skip
            kept = sorted(pixels)[-int((hardest or 1) * 24) :]
            n = len(kept) if hardest else max(1, int((y[i] != 255).sum()))
            want[i] += sum(kept) / n
    loss = PixelCrossEntropy(hardest)
    torch.testing.assert_close(loss(tuple(heads), y), want, rtol=1e-12, atol=1e-12)
    small = F.interpolate(heads[0], size=(8, 12), mode="bilinear")
    large = F.interpolate(y[:, None].float(), size=(8, 12)).long()[:, 0]
    assert torch.equal(loss(heads[0], large), loss(small, large))
    with pytest.raises(UserError, match=r"model.loss.hardest = 0: give a finite number above 0"):
        PixelCrossEntropy(0)


# Augmentation

SCENES = torch.from_numpy(RNG.integers(0, 256, (5, 4, 16, 24), dtype=np.uint8))


def cropped(augment: ScaledCrop, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    drawn = augment.draw([3, 2], torch.Generator().manual_seed(seed))
    return augment(SCENES, drawn), drawn


def test_scale_one_is_a_plain_crop() -> None:
    full, _ = cropped(ScaledCrop((16, 24), (1.0, 1.0), flip=False))
    assert torch.equal(full, SCENES)
    out, _ = cropped(ScaledCrop((8, 10), (1.0, 1.0), flip=False))
    for image, result in zip(SCENES, out, strict=True):
        fits = [
            (i, j) for i in range(9) for j in range(15) if torch.equal(image[:, i : i + 8, j : j + 10], result)
        ]  # fmt: skip
        assert len(fits) == 1


@pytest.mark.parametrize("scale", [0.6, 1.0, 1.7])
def test_rescaled_is_resize_pad_and_crop(scale: float) -> None:
    """It is what FedDrive does for Cityscapes, one image after another."""
    augment = ScaledCrop((14, 20), (scale, scale), flip=False)
    out, drawn = cropped(augment)
    height, width = (int(np.ceil(n * scale)) for n in (16, 24))
    for image, result, place in zip(SCENES, out, drawn["place"], strict=True):
        raw = image[None].float()
        rgb = F.interpolate(raw[:, :3], (height, width), mode="bilinear").round()
        label = F.interpolate(raw[:, 3:], (height, width), mode="nearest-exact")
        pads = [(want - have) // 2 + 1 if have < want else 0 for want, have in ((14, height), (20, width))]
        sides = [pads[1], pads[1], pads[0], pads[0]]
        padded = torch.cat([F.pad(rgb, sides), F.pad(label, sides, value=255)], 1)[0]
        top = int(place[0] * (padded.shape[1] - 14))
        left = int(place[1] * (padded.shape[2] - 20))
        want = padded[:, top : top + 14, left : left + 20]
        assert (result[:3].float() - want[:3]).abs().max() <= 1  # a half may be rounded either way
        assert (result[3] == want[3]).float().mean() > 0.9  # or lie between two pixels
        if scale < 1:
            assert ((result[:3] == 0).all(0) & (result[3] == 255)).sum() > 20


def test_area_takes_parts_of_the_image() -> None:
    augment = ScaledCrop((8, 12), (0.2, 3.0), kind="area", flip=False)
    drawn = augment.draw([400], torch.Generator().manual_seed(0))
    (top, left), (height, width) = (v.T for v in augment._parts(16, 24, drawn))
    assert (top >= 0).all() and (left >= 0).all() and (top + height <= 16).all() and (left + width <= 24).all()
    full = (height == 16) & (width == 21)  # the central part of aspect 4/3
    assert 0 < full.sum() < 400 and (left[full] == 1).float().mean() > 0.9
    area, aspect = (height * width / 384)[~full], (width / height)[~full]
    assert area.min() > 0.17 and area.max() <= 1 and aspect.min() > 0.65 and aspect.max() < 1.5
    ramp = torch.arange(24, dtype=torch.uint8).expand(400, 4, 16, 24)
    out = augment(ramp, drawn)
    for i in range(0, 400, 40):  # columns run evenly from the left to the right edge of the part
        want = left[i] + (torch.arange(12) + 0.5) * width[i] / 12 - 0.5
        assert (out[i, 0, 0] - want.clamp(0, 23)).abs().max() <= 0.51
        assert (out[i, 3, 0] != 255).all()


def test_flip_and_jitter() -> None:
    plain, drawn = cropped(ScaledCrop((16, 24), (1.0, 1.0)))
    assert 0 < drawn["flip"].sum() < 5
    for image, result, flip in zip(SCENES, plain, drawn["flip"], strict=True):
        assert torch.equal(result, image.flip(-1) if flip else image)
    out, drawn = cropped(ScaledCrop((16, 24), (1.0, 1.0), flip=False, jitter=0.4))
    assert torch.equal(out[:, 3], SCENES[:, 3])
    for image, result, colour in zip(SCENES.numpy(), out.numpy(), drawn["colour"].numpy(), strict=True):
        brightness, contrast, saturation = 0.6 + 0.8 * colour
        table = np.clip(np.arange(256) * brightness, 0, 255).astype(np.uint8)
        x = table[image[:3]]
        x = np.clip(74 + (np.arange(256) - 74) * contrast, 0, 255).astype(np.uint8)[x].astype(float)
        want = np.clip(saturation * x + (1 - saturation) * x.mean(0), 0, 255).astype(np.uint8)
        assert np.abs(result[:3].astype(int) - want).max() <= 1 and (result[:3] != want).mean() < 0.01


# Mistakes


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.augment = Augment: ignores label maps; use ScaledCrop or null"):
        Cityscapes(augment=Augment())
    paths = "heterogeneous/train, heterogeneous/test, leftImg8bit, gtFine, from https://github.com/Erosinho13"
    with pytest.raises(UserError, match=rf"^data.data_dir = '[^']*': 'heter[^']*' is missing; expected there {paths}"):
        Cityscapes(str(tmp_path)).setup()
    data = cityscapes(tmp_path)
    data.setup()
    path = tmp_path / "gtFine/train/ulm/ulm_000003_000019_gtFine_labelIds.png"
    Image.fromarray(IMAGES[3]).save(path)
    with pytest.raises(UserError, match=r"labelIds.png': uint8 [^\n]*, 3\) instead of one label a pixel"):
        list(data.eval_batches([3]))
    path.write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"labelIds.png' is not a readable image"):
        list(data.eval_batches([3]))
    path.unlink()
    with pytest.raises(
        UserError, match=r"1 of 10 listed files are missing, such as '[^\n]*; the folder 'gtFine' comes"
    ):
        Cityscapes(str(tmp_path)).setup()
    (tmp_path / "heterogeneous" / "test" / "all_data_0.json").write_text('{"users": []}')
    with pytest.raises(UserError, match=r"all_data_0.json': has no 'user_data'"):
        cityscapes(tmp_path).setup()
    with pytest.raises(UserError, match=r"data.augment.jitter = 2: give a finite number from 0 to 1"):
        ScaledCrop(jitter=2)


def test_net_and_loss_must_be_for_pixels(tmp_path: Path) -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 32, 19))
    with pytest.raises(UserError, match=r"gives outputs of shape \(1, 19\) for 19 classes"):
        train(cityscapes(tmp_path), FedAvg(net=flat, loss=PixelCrossEntropy()), "sequential", tmp_path)
    with pytest.raises(UserError, match=r"model.loss = CrossEntropyLoss (cannot take logits|gives a value of shape)"):
        train(cityscapes(tmp_path), FedAvg(net=Net()), "sequential", tmp_path)


def test_command_line_knows_the_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli(
            "fit", "--model=FedAvg", "--model.net=HsuCNN", "--data=Cityscapes", "--print_config",
            "--model.loss=PixelCrossEntropy", "--model.loss.hardest=0.25",
            "--data.augment=ScaledCrop", "--data.augment.jitter=0.4",
        )  # fmt: skip
    assert exit.value.code in (0, None)
    assert "jitter: 0.4" in capsys.readouterr().out
