"""Landmarks-User-160k: photographs; each client is a photographer."""

import csv
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.core import PositiveInt, Size, UserError
from fl_lightning.data.files import find_files, read_rows
from fl_lightning.data.images import ImageFiles
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.partition import Natural, Partition

HOME = "https://github.com/google-research/google-research/tree/master/federated_vision_datasets"
PHOTOS = "https://github.com/cvdfoundation/google-landmark"


class Landmarks(FederatedDataModule):
    """Landmarks-User-160k (Hsu et al. 2020): 164,172 photographs of 2,028 landmarks by 1,262 users; 19,526 to test.

    ``federated_train.csv`` (``user_id,image_id,class``) and ``test.csv`` (``image_id,class``) name the images, which
    belong to the training part of Google Landmarks v2: ``<image_id>.jpg``, or as published ``a/b/c/<image_id>.jpg``, by
    the first three letters. Each user is a client. The small variant gld23k has the same format, with 233 clients.

    Args:
        data_dir: Folder with the two CSV files.
        images: Folder with the photographs; null: ``images`` in data_dir.
        image_size: Height and width, in pixels, that every image is resized to (bilinear). The papers do not
            give theirs; Google's own example has 224.
        num_clients: Number of clients.
        partition: Partition that replaces the division by users; null makes each user a client.
        stream: Read photographs when they are needed: in memory they take 28 GB at 224 pixels.
        **kwargs: As for FederatedDataModule.

    Raises:
        UserError: If a file is missing or corrupt (on loading or reading).
    """

    published = (164_172, 19_526)

    def __init__(
        self,
        data_dir: str = "data/landmarks",
        images: str | None = None,
        image_size: Size = 224,
        num_clients: PositiveInt = 1262,
        partition: Partition | None = None,
        stream: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_clients=num_clients, partition=partition, stream=stream, **kwargs)
        self.data_dir = data_dir
        self.images = Path(data_dir, "images") if images is None else Path(images)
        self.image_size = image_size
        self._by_user = partition is None

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        files = find_files("data.data_dir", self.data_dir, ("federated_train.csv", "test.csv"), HOME)
        train, test = _rows(files[0], ("user_id", "image_id", "class")), _rows(files[1], ("image_id", "class"))
        if self._by_user:
            self.partition = Natural([row["user_id"] for row in train])
        y_train, y_test = (np.array([int(row["class"]) for row in rows]) for rows in (train, test))
        return self._photographs(train), y_train, self._photographs(test), y_test

    def _photographs(self, rows: list[dict[str, str]]) -> ImageFiles:
        names = [row["image_id"] for row in rows]
        nested = [Path(*name[:3], f"{name}.jpg") for name in names]
        layout = nested if (self.images / nested[0]).is_file() else [Path(f"{name}.jpg") for name in names]
        paths = [self.images / name for name in layout]
        if missing := [path for path in paths if not path.is_file()]:
            raise UserError(
                f"data.images = '{self.images}': {len(missing)} of {len(paths)} photographs are missing, such as "
                f"'{missing[0].relative_to(self.images)}'; expected there <image_id>.jpg or a/b/c/<image_id>.jpg, from "
                f"{PHOTOS}"
            )
        return ImageFiles([str(path) for path in paths], self.image_size, "data.images")


def _rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    def valid(row: dict[str, str]) -> bool:
        return all(row.get(name) for name in columns) and row["class"].isdecimal()

    return read_rows(path, csv.DictReader, valid, ", ".join(columns), HOME)
