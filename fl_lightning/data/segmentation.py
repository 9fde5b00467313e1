"""Images with label maps, divided among clients as in FedDrive: Cityscapes and IDDA."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix

from fl_lightning.core import Divisor, PositiveInt, UserError, enlarged, ensure
from fl_lightning.data.augment import IGNORED, Augment, ScaledCrop
from fl_lightning.data.files import corrupt_file, find_files, read_image, read_json, visible
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.partition import Given
from fl_lightning.data.samples import Batch
from fl_lightning.data.streaming import IndexedSamples

LISTS = "https://github.com/Erosinho13/FedDrive"
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
TESTED = {"test_user_same_domain": "seen", "test_user_diff_domain": "unseen"}
"""Names of the parts of IDDA's test set, by their users in FedDrive's lists."""


class MeanIoU(MulticlassConfusionMatrix):
    """Intersection over union of all pixels that count, averaged over the classes that occur (as in FedDrive)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, ignore_index=IGNORED, validate_args=False)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Adds logits ``(n, C, h, w)``, enlarged if necessary, and label maps ``(n, H, W)``."""
        super().update(enlarged(preds, target).argmax(1), target)

    def compute(self) -> Tensor:
        """Returns the mean, a scalar."""
        counts: Tensor = super().compute().double()
        true, predicted = counts.sum(1), counts.sum(0)
        return (counts.diag() / (true + predicted - counts.diag()))[true > 0].mean()


def labelled_images(
    images: Sequence[Path], maps: Sequence[Path], size: tuple[int, int], classes: dict[int, int]
) -> IndexedSamples:
    """Returns files of images and label maps as samples: red, green, blue and class of each pixel, ``(4, H, W)``.

    Args:
        images: The images.
        maps: Their label maps, with one channel.
        size: Height and width to which both are resized: bicubic for images, nearest pixel for maps.
        classes: Class of each label id; other ids do not count.

    Raises:
        UserError: If (on reading) a file is not an image, or not a label map.
    """
    class_of = np.full(256, IGNORED, np.uint8)
    class_of[list(classes)] = list(classes.values())

    def read(index: int) -> NDArray[np.uint8]:
        image = read_image(images[index], "data.data_dir", size, "BICUBIC")
        labels = read_image(maps[index], "data.data_dir", size, "NEAREST", mode=None)
        ensure(
            labels.dtype == np.uint8 and labels.ndim == 2,
            f"data.data_dir = '{maps[index]}': {labels.dtype} {labels.shape} instead of one label a pixel, "
            f"uint8 {size}; replace it",
        )
        return np.stack([*image.transpose(2, 0, 1), class_of[labels]])

    return IndexedSamples("data.data_dir", len(images), read, np.empty((4, *size), np.uint8))


class Segmentation(FederatedDataModule):
    """Images with label maps, and their clients, from FedDrive's lists. Nets return logits ``(B, classes, h, w)``.

    Lists are JSON files ``{"users": [...], "user_data": {user: {"x": [images], "y": [label maps]}}}``. Training needs
    the loss PixelCrossEntropy (``model.loss``); the metric is ``miou``. FedDrive sets drop_last, and evaluates SiloBN
    in batches of 8.

    Args:
        data_dir: Folder that contains the following four.
        train: Folder of the training lists.
        test: Folder of the test lists.
        images: Folder to which the paths of images are relative.
        maps: Folder to which the paths of label maps are relative.
        size: Height and width of the images.
        classes: Class of each label id.
        eval_size: Height and width to which images, but not label maps, are resized for evaluation; null: as they are.
        num_clients: Number of clients; null: as many as are listed.
        augment: null, or ScaledCrop.
        eval_batch_size: Images per batch in evaluation.
        mean: As for FederatedDataModule.
        std: As for FederatedDataModule.
        stream: Read images when they are needed: each takes 8 MB in memory.
        **kwargs: As for FederatedDataModule.

    Raises:
        UserError: If a file is missing or corrupt (on loading or reading), or the augmentation ignores label maps.
    """

    home = LISTS
    """Home page of the images."""

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
        num_clients: PositiveInt | None = None,
        augment: Augment | None = None,
        eval_batch_size: PositiveInt = 1,
        mean: list[float] | None = None,
        std: list[Divisor] | None = None,
        stream: bool = True,
        **kwargs: Any,
    ) -> None:
        ensure(
            augment is None or isinstance(augment, ScaledCrop),
            f"data.augment = {type(augment).__name__}: ignores label maps; use ScaledCrop or null",
        )
        ensure(kwargs.get("partition") is None, "data.partition: the lists name the clients; leave it out")
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
        self.size, self.class_of, self.eval_size = size, classes, eval_size
        self.classes, self._as_listed = self.classes or max(classes.values()) + 1, num_clients is None
        self._parts: dict[str, Tensor] = {}

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        origin = f"{LISTS} and {self.home}"
        *lists, self.images, self.maps = find_files("data.data_dir", self.data_dir, self.layout, origin)
        train, test = (_listed(folder) for folder in lists)
        self.partition = Given.consecutive(map(len, train.values()))
        if self._as_listed:
            self.num_clients = len(train)
        users = [user for user, pairs in test.items() for _ in pairs]
        if len(test) > 1:
            self._parts = {TESTED.get(user, user): torch.tensor([owner == user for owner in users]) for user in test}
        (x, y), (x_test, y_test) = (self._labelled(users) for users in (train, test))
        return x, y, x_test, y_test

    def _labelled(self, users: dict[str, list[tuple[str, str]]]) -> tuple[IndexedSamples, NDArray[np.int64]]:
        """Returns the images of all users, with label 0 for each: here pixels have classes, not images."""
        pairs = [pair for pairs in users.values() for pair in pairs]
        images, maps = [self.images / image for image, _ in pairs], [self.maps / labels for _, labels in pairs]
        for root, paths in ((self.images, images), (self.maps, maps)):
            if missing := [path for path in paths if not path.is_file()]:
                raise UserError(
                    f"data.data_dir: {len(missing)} of {len(paths)} listed files are missing, such as '{missing[0]}'; "
                    f"the folder '{root.name}' comes from {self.home}"
                )
        return labelled_images(images, maps, self.size, self.class_of), np.zeros(len(pairs), np.int64)

    def stored_shape(self) -> tuple[int, ...]:
        """See :class:`FederatedDataModule`."""
        return 3, *self.size

    def pair(self, x: Tensor, y: Tensor, evaluation: bool) -> Batch:
        """Returns images ``(n, 3, h, w)`` uint8 and label maps ``(n, H, W)`` int64."""
        image, labels = x[:, :3], x[:, 3].long()
        if evaluation and self.eval_size is not None:
            smaller = F.interpolate(image.float(), self.eval_size, mode="bilinear", antialias=True)
            image = smaller.round().clamp(0, 255).to(torch.uint8)
        return image.contiguous(memory_format=torch.channels_last), labels

    def metric(self) -> tuple[str, Metric]:
        """See :class:`FederatedDataModule`."""
        return "miou", MeanIoU(self.num_classes)

    def test_parts(self) -> dict[str, Tensor]:
        """Returns the images of each test user if there are several; those of IDDA are "seen" and "unseen"."""
        return self._parts


class Cityscapes(Segmentation):
    """Cityscapes (https://www.cityscapes-dataset.com/) among FedDrive's clients: 19 classes, images of 1024 x 2048.

    FedDrive doubles each client's images by mirrored ones; twice the epochs with random flips approximate that.

    Args:
        data_dir: Folder with ``leftImg8bit`` and ``gtFine`` of Cityscapes, and FedDrive's ``<clients>/train`` and
            ``<clients>/test``.
        clients: The partition: uniform (146 clients), heterogeneous (144) or class_imbalance (142).
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
    """IDDA (https://idda-dataset.github.io/home/) among FedDrive's clients of 48 images each, resized to 1024 x 1856.

    Test images are from domains seen in training and from others: ``server/test_seen/miou`` and
    ``server/test_unseen/miou``; ``server/test/miou`` covers both.

    Args:
        data_dir: Folder with ``IDDAsmall``, and FedDrive's ``<clients>/<setting>/train`` and ``.../test``.
        clients: The partition: uniform, heterogeneous or class_imbalance.
        setting: The unseen domain: country (90 clients), rainy (69) or bus (83).
        remap: Whether to use FedDrive's 16 classes instead of IDDA's own 23.
        eval_size: As for Segmentation; FedDrive evaluates images of 512 x 928.
        **kwargs: As for Segmentation.
    """

    home = "https://idda-dataset.github.io/home/"

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


def _listed(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Returns image and label map of each sample by user, from a folder's lists in the order of their numbers."""
    lists = sorted(visible(folder, "*.json"), key=lambda path: int(re.sub(r".*\D", "", path.stem) or 0))
    parts = [read_json(path, _pairs, LISTS) for path in lists]
    users: dict[str, list[tuple[str, str]]] = {}
    for user, pairs in ((user, pairs) for part in parts for user, pairs in part.items()):
        users.setdefault(user, []).extend(pairs)
    ensure(bool(users), corrupt_file("data.data_dir", folder, "no lists (*.json)", LISTS))
    return users


def _pairs(content: Any) -> dict[str, list[tuple[str, str]]]:
    """Returns image and label map of each sample by user, from the content of a list."""
    entries = content["user_data"].items()
    return {user: [(str(x), str(y)) for x, y in zip(data["x"], data["y"], strict=True)] for user, data in entries}
