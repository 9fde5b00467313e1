"""Street scenes with label maps, divided among clients as in FedDrive: Cityscapes and IDDA."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix

from fl_lightning.core.errors import UserError, require
from fl_lightning.core.losses import enlarged
from fl_lightning.data.augment import Augment
from fl_lightning.data.files import broken, located
from fl_lightning.data.module import Batch, FederatedDataModule
from fl_lightning.data.partition import Given
from fl_lightning.data.stream import Samples

LISTS = "https://github.com/Erosinho13/FedDrive"
IGNORED = 255
"""Class of pixels that do not count."""

CITYSCAPES = {
    label: train
    for train, label in enumerate((7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33))
}
"""The 19 evaluated classes of Cityscapes, by the label ids of its files."""
IDDA16 = {
    1: 2, 2: 4, 4: 11, 5: 5, 6: 0, 7: 0, 8: 1, 9: 8, 10: 13, 11: 3, 12: 7, 13: 6, 16: 15, 17: 14, 18: 12, 19: 9, 20: 10,
}  # fmt: skip
"""FedDrive's 16 classes of IDDA, which are among those of Cityscapes, by the label ids of its files."""
IDDA23 = {label: label - 1 for label in range(1, 24)}
"""All classes of IDDA."""


class Scenes(Samples):
    """Images and their label maps in files; a sample is red, green, blue and class of each pixel, ``(4, H, W)``.

    Args:
        images: The images.
        maps: Their label maps, of one channel.
        size: Height and width that both are brought to, images by bicubic interpolation, maps by that of the nearest.
        classes: Class of each label id; others do not count.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, images: list[Path], maps: list[Path], size: tuple[int, int], classes: dict[int, int]) -> None:
        self.images, self.maps, self.size = images, maps, size
        self.shape = (len(images), 4, *size)
        self._class = np.full(256, IGNORED, np.uint8)
        self._class[list(classes)] = list(classes.values())

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """One sample, ``(4, H, W)``.

        Raises:
            UserError: If a file is no image, or no label map.
        """
        from PIL import Image

        sample, size = np.empty(self.shape[1:], np.uint8), self.size[::-1]
        path = self.images[index]
        try:
            with Image.open(path) as image:
                rgb = image.convert("RGB")
            sample[:3] = np.asarray(rgb if rgb.size == size else rgb.resize(size, Image.Resampling.BICUBIC)).transpose(
                2, 0, 1
            )
            path = self.maps[index]
            with Image.open(path) as labels:
                if labels.mode not in ("L", "P"):
                    raise UserError(f"data.data_dir = '{path}': {labels.mode} in place of one label a pixel; mend it")
                whole = labels if labels.size == size else labels.resize(size, Image.Resampling.NEAREST)
                sample[3] = self._class[np.asarray(whole)]
        except OSError as error:
            raise UserError(f"data.data_dir = '{path}' is no readable image ({error}); mend it") from None
        return sample


class ScaledCrop(Augment):
    """FedDrive's augmentation of images with label maps: random scale and place, flip, on request jitter of colours.

    What lies outside of the image is black and does not count. Interpolation is bilinear, of the label map that of the
    nearest pixel, without smoothing before an image is made smaller.

    Args:
        size: Height and width of the result.
        scale: Least and largest scale: the factor by which the image is enlarged before a part of it is taken (kind
            "rescaled", as on Cityscapes), or the share of its area that is taken and brought to size (kind "area", as
            on IDDA: what does not fit after 10 draws is the central part).
        kind: Which.
        flip: Whether half of the images are mirrored left to right.
        jitter: How far brightness, contrast and saturation go from 1, in this order; FedDrive: 0.4 on Cityscapes.
        granularity: As for Augment.

    Raises:
        UserError: If a number is out of range.
    """

    ASPECT = (3 / 4, 4 / 3)
    DRAWS = 10
    GREY = 74
    """The value that contrast leaves as it is."""

    def __init__(
        self,
        size: tuple[int, int] = (512, 1024),
        scale: tuple[float, float] = (0.5, 1.5),
        kind: Literal["rescaled", "area"] = "rescaled",
        flip: bool = True,
        jitter: float = 0.0,
        granularity: Literal["sample", "batch"] = "sample",
    ) -> None:
        super().__init__(crop=0, flip=flip, granularity=granularity)
        require(min(size) > 0, "data.augment.size", size, "height and width in pixels")
        require(0 < scale[0] <= scale[1], "data.augment.scale", scale, "the least and the largest, above 0")
        require(0 <= jitter <= 1, "data.augment.jitter", jitter, "from 0 (none) to 1")
        self.size, self.scale, self.kind, self.jitter = tuple(size), tuple(scale), kind, jitter

    def draw(self, sizes: list[int], generator: torch.Generator) -> dict[str, Tensor]:
        """See :class:`Augment`; places and sizes are drawn in [0, 1), whatever the size of the images."""
        n = sum(sizes) if self.granularity == "sample" else len(sizes)
        tries = self.DRAWS if self.kind == "area" else 1
        drawn = {
            "scale": torch.rand(n, tries, 2, generator=generator),
            "place": torch.rand(n, 2, generator=generator),
            "colour": torch.rand(n, 3, generator=generator),
        }
        if self.granularity == "batch":
            drawn = {name: v.repeat_interleave(torch.tensor(sizes), dim=0) for name, v in drawn.items()}
        return {**super().draw(sizes, generator), **drawn}

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See :class:`Augment`."""
        return shape[0], *self.size

    def __call__(self, x: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Augment ``(N, 4, H, W)`` uint8, of which the last channel is the class."""
        top, left, height, width = self._parts(x.shape[-2], x.shape[-1], draws)
        x = _resampled(x, top.to(x.device), left.to(x.device), height.to(x.device), width.to(x.device), self.size)
        if self.flip:
            x = torch.where(draws["flip"].to(x.device)[:, None, None, None], x.flip(-1), x)
        if self.jitter:
            rates = 1 + self.jitter * (2 * draws["colour"].to(x.device) - 1)
            x = torch.cat([self._jittered(x[:, :3].float(), rates), x[:, 3:]], 1)
        return x.contiguous(memory_format=torch.channels_last)

    def _parts(self, height: int, width: int, draws: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Top, left, height and width of the part of each image, in its pixels, ``(n,)`` each."""
        low, high = self.scale
        full, out = torch.tensor([height, width]).double(), torch.tensor(self.size).double()
        u = draws["scale"].double()
        if self.kind == "rescaled":
            scaled = torch.ceil(full * (low + (high - low) * u[:, 0, :1]))
            pad = torch.where(scaled < out, (out - scaled).div(2, rounding_mode="floor") + 1, 0)
            start = (draws["place"] * (scaled + 2 * pad - out)).floor() - pad
            pixel = full / scaled
            corner, extent = start * pixel, out * pixel
        else:
            area = height * width * (low + (high - low) * u[..., 0])
            aspect = torch.exp(math.log(self.ASPECT[0]) + math.log(self.ASPECT[1] / self.ASPECT[0]) * u[..., 1])
            tried = torch.stack([(area / aspect).sqrt().round(), (area * aspect).sqrt().round()], -1)
            fits = (tried <= full).all(-1)
            first = fits.double().argmax(1)
            extent = tried[torch.arange(len(u)), first]
            narrow = torch.tensor(
                [min(height, round(width / self.ASPECT[0])), min(width, round(height * self.ASPECT[1]))]
            ).double()
            found = fits.any(1, keepdim=True)
            extent = torch.where(found, extent, narrow)
            place = (draws["place"] * (full - extent + 1)).floor()
            corner = torch.where(found, place, (full - extent).div(2, rounding_mode="floor"))
        return corner[:, 0], corner[:, 1], extent[:, 0], extent[:, 1]

    def _jittered(self, x: Tensor, rates: Tensor) -> Tensor:
        """Colours ``(n, 3, H, W)`` from 0 to 255, as whole numbers after each of the three steps."""
        brightness, contrast, saturation = rates[:, :, None, None, None].unbind(1)
        x = (x * brightness).clamp(0, 255).floor()
        x = (self.GREY + (x - self.GREY) * contrast).clamp(0, 255).floor()
        mean = x.mean(1, keepdim=True)
        return (mean + (x - mean) * saturation).clamp(0, 255).to(torch.uint8)


def _resampled(x: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, size: tuple[int, ...]) -> Tensor:
    """Parts of scenes ``(n, 4, H, W)`` brought to one size; what lies outside is black and does not count."""
    grids, nearest, inside = [], [], []
    for start, extent, out, full in zip((top, left), (height, width), size, x.shape[-2:], strict=True):
        at = (
            start[:, None] + (torch.arange(out, device=x.device) + 0.5) * (extent / out)[:, None]
        )  # (n, out), in pixels
        grids.append((2 * at / full - 1).float())
        nearest.append(at.floor().long().clamp(0, full - 1))
        inside.append((at >= 0) & (at < full))
    n, (rows, columns) = len(x), size
    grid = torch.stack(
        [grids[1][:, None, :].expand(n, rows, columns), grids[0][:, :, None].expand(n, rows, columns)], -1
    )
    rgb = F.grid_sample(x[:, :3].float(), grid, "bilinear", padding_mode="border", align_corners=False).round()
    image = torch.arange(n, device=x.device)[:, None, None]
    label = x[image, 3, nearest[0][:, :, None], nearest[1][:, None, :]][:, None]
    seen = (inside[0][:, :, None] & inside[1][:, None, :])[:, None]
    return torch.cat([(rgb * seen).to(torch.uint8), torch.where(seen, label, IGNORED)], 1)


class MeanIoU(MulticlassConfusionMatrix):
    """Mean over the classes that occur of intersection over union, of all pixels that count (as in FedDrive)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, ignore_index=IGNORED, validate_args=False)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Take in logits ``(n, C, h, w)``, enlarged if need be, and label maps ``(n, H, W)``."""
        super().update(enlarged(preds, target).argmax(1), target)

    def compute(self) -> Tensor:
        """The mean, a scalar."""
        counts: Tensor = super().compute().double()
        true, found = counts.sum(1), counts.sum(0)
        return (counts.diag() / (true + found - counts.diag()))[true > 0].mean()


class Segmentation(FederatedDataModule):
    """Scenes and who has them, from FedDrive's lists. The net answers with logits ``(B, classes, h, w)``.

    Lists are JSON files ``{"users": [...], "user_data": {user: {"x": [images], "y": [label maps]}}}``. Training takes
    the loss PixelCrossEntropy (``model.loss``); evaluation gives ``miou``. FedDrive has drop_last, and
    evaluates SiloBN in batches of 8.

    Args:
        data_dir: Folder that holds the following four.
        train: Folder of the training lists.
        test: Folder of the test lists.
        images: Folder that the paths of images begin in.
        maps: The same of label maps.
        size: Height and width of the scenes.
        classes: Class of each label id.
        eval_size: Height and width that images are brought to for evaluation, while label maps stay; null: as they are.
        num_clients: Number of clients; null: as many as are listed.
        augment: null, or ScaledCrop.
        eval_batch_size: Scenes per batch in evaluation.
        mean: As for FederatedDataModule.
        std: As for FederatedDataModule.
        stream: Read scenes when they are needed: each takes 8 MB in memory.
        **kwargs: As for FederatedDataModule.

    Raises:
        UserError: If a file is missing or broken (on loading or reading), or the augmentation knows no label maps.
    """

    def __init__(
        self,
        data_dir: str,
        train: str,
        test: str,
        images: str,
        maps: str,
        size: tuple[int, int],
        classes: dict[int, int],
        eval_size: tuple[int, int] | None = None,
        num_clients: int | None = None,
        augment: Augment | None = None,
        eval_batch_size: int = 1,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        stream: bool = True,
        **kwargs: Any,
    ) -> None:
        if augment is not None and not isinstance(augment, ScaledCrop):
            raise UserError(f"data.augment = {type(augment).__name__}: knows no label maps; use ScaledCrop or null")
        super().__init__(
            num_clients=1 if num_clients is None else num_clients,
            augment=augment,
            eval_batch_size=eval_batch_size,
            mean=[0.5] if mean is None else mean,
            std=[0.5] if std is None else std,
            stream=stream,
            **kwargs,
        )
        self.data_dir, self.layout = data_dir, (train, test, images, maps)
        self.size, self.classes, self.eval_size = size, classes, eval_size
        self._as_listed = num_clients is None
        self._parts: dict[str, Tensor] = {}

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        *lists, self.images, self.maps = located(
            "data.data_dir", self.data_dir, self.layout, f"{LISTS} and {self.home}"
        )
        train, test = (_listed(folder) for folder in lists)
        bounds = np.cumsum([0, *(len(pairs) for pairs in train.values())]).tolist()
        self.partition = Given([list(range(a, b)) for a, b in pairwise(bounds)])
        if self._as_listed:
            self.num_clients = len(train)
        users = [user for user, pairs in test.items() for _ in pairs]
        self._parts = {user: torch.tensor([other == user for other in users]) for user in test} if len(test) > 1 else {}
        (x, y), (x_test, y_test) = (self._scenes(users) for users in (train, test))
        return x, y, x_test, y_test

    def _scenes(self, users: dict[str, list[tuple[str, str]]]) -> tuple[Scenes, NDArray[np.int64]]:
        """Scenes of all users; in place of a class each has label 0, since classes are those of pixels."""
        pairs = [pair for pairs in users.values() for pair in pairs]
        images, maps = [self.images / image for image, _ in pairs], [self.maps / labels for _, labels in pairs]
        for root, paths in ((self.images, images), (self.maps, maps)):
            if missing := [path for path in paths if not path.is_file()]:
                raise UserError(
                    f"data.data_dir: {len(missing)} of {len(paths)} listed files are missing, such as '{missing[0]}'; "
                    f"the folder '{root.name}' comes from {self.home}"
                )
        return Scenes(images, maps, self.size, self.classes), np.zeros(len(pairs), np.int64)

    home = LISTS
    """Where the scenes are from."""

    def count_classes(self) -> int:
        """See :class:`FederatedDataModule`."""
        return max(self.classes.values()) + 1

    def stored_shape(self) -> tuple[int, ...]:
        """See :class:`FederatedDataModule`."""
        return 3, *self.size

    def pair(self, x: Tensor, y: Tensor, evaluation: bool) -> Batch:
        """Images ``(n, 3, h, w)`` uint8 and label maps ``(n, H, W)`` int64."""
        image, labels = x[:, :3], x[:, 3].long()
        if evaluation and self.eval_size is not None:
            smaller = F.interpolate(image.float(), self.eval_size, mode="bilinear", antialias=True)
            image = smaller.round().clamp(0, 255).to(torch.uint8)
        return image.contiguous(memory_format=torch.channels_last), labels

    def metric(self) -> tuple[str, Metric]:
        """See :class:`FederatedDataModule`."""
        return "miou", MeanIoU(self.num_classes)

    def test_parts(self) -> dict[str, Tensor]:
        """The scenes of each test user, if there are several."""
        return self._parts


class Cityscapes(Segmentation):
    """Cityscapes (https://www.cityscapes-dataset.com/) among FedDrive's clients: 19 classes, scenes of 1024 x 2048.

    FedDrive doubles each client's scenes by mirrored ones; twice the epochs with random flips come near to that.

    Args:
        data_dir: Folder with ``leftImg8bit`` and ``gtFine`` of Cityscapes, and FedDrive's ``<clients>/train`` and
            ``<clients>/test``.
        clients: The division: uniform (146 clients), heterogeneous (144) or class_imbalance (142).
        **kwargs: As for Segmentation.
    """

    home = "https://www.cityscapes-dataset.com/"

    def __init__(
        self,
        data_dir: str = "data/cityscapes",
        clients: Literal["uniform", "heterogeneous", "class_imbalance"] = "heterogeneous",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            data_dir,
            f"{clients}/train",
            f"{clients}/test",
            "leftImg8bit",
            "gtFine",
            (1024, 2048),
            CITYSCAPES,
            **kwargs,
        )


class IDDA(Segmentation):
    """IDDA (https://idda-dataset.github.io/home/) among FedDrive's clients of 48 scenes each, brought to 1024 x 1856.

    Test scenes are of domains seen in training and of others; ``server/test_seen/miou`` and ``server/test_unseen/miou``
    tell them apart, ``server/test/miou`` is that of both together.

    Args:
        data_dir: Folder with ``IDDAsmall``, and FedDrive's ``<clients>/<setting>/train`` and ``.../test``.
        clients: The division: uniform, heterogeneous or class_imbalance.
        setting: What is unseen: country (90 clients), rainy (69) or bus (83).
        remap: FedDrive's 16 classes; otherwise IDDA's own 23.
        eval_size: As for Segmentation; FedDrive evaluates images of 512 x 928.
        **kwargs: As for Segmentation.
    """

    home = "https://idda-dataset.github.io/home/"
    NAMES = {"test_user_same_domain": "seen", "test_user_diff_domain": "unseen"}

    def __init__(
        self,
        data_dir: str = "data/idda",
        clients: Literal["uniform", "heterogeneous", "class_imbalance"] = "heterogeneous",
        setting: Literal["country", "rainy", "bus"] = "country",
        remap: bool = True,
        eval_size: tuple[int, int] | None = (512, 928),
        **kwargs: Any,
    ) -> None:
        super().__init__(
            data_dir,
            f"{clients}/{setting}/train",
            f"{clients}/{setting}/test",
            "IDDAsmall",
            "IDDAsmall",
            (1024, 1856),
            IDDA16 if remap else IDDA23,
            eval_size=eval_size,
            **kwargs,
        )

    def test_parts(self) -> dict[str, Tensor]:
        """See :class:`Segmentation`; "seen" and "unseen"."""
        return {self.NAMES.get(user, user): members for user, members in self._parts.items()}


def _listed(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Image and label map of each scene, by user, from the lists of a folder in the order of their numbers."""

    def number(path: Path) -> tuple[int, str]:
        found = re.search(r"(\d+)$", path.stem)
        return (int(found[1]) if found else 0), path.name

    users: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(folder.glob("*.json"), key=number):
        users |= _read(path)
    if not users:
        raise broken("data.data_dir", folder, "no lists (*.json)", LISTS)
    return users


def _read(path: Path) -> dict[str, list[tuple[str, str]]]:
    try:
        listed = json.loads(path.read_text())["user_data"].items()
        return {user: [(str(x), str(y)) for x, y in zip(data["x"], data["y"], strict=True)] for user, data in listed}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        told = f"no list of users with images x and label maps y ({error!r})"
        raise broken("data.data_dir", path, told, LISTS) from None
