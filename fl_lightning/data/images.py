"""Image data sets: torchvision's, folders of image files, and Landmarks-User-160k."""

import csv
import inspect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import PositiveInt, Size, UserError, ensure, folded, similar
from fl_lightning.data.files import corrupt_file, find_files, hidden, read_image, read_rows, visible
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.partition import Natural, Partition
from fl_lightning.data.streaming import IndexedSamples, Published

NORMALISATION = {
    "CIFAR10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2434, 0.2616]),
    "CIFAR100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    "CINIC10": ([0.47889522, 0.47227842, 0.43047404], [0.24205776, 0.23828046, 0.25874835]),
}
"""Mean and standard deviation of each channel, as in the fedgloss and FL-SAM repositories (CINIC-10: FL-SAM only)."""

CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"
LAYOUT = {"CIFAR10": f"cifar-10-batches-py, from {CIFAR}", "CIFAR100": f"cifar-100-python, from {CIFAR}"}
"""Expected content of ``data_dir``, and its home page."""

PUBLISHED = {
    "CIFAR10": Published(50_000, 10_000, (32, 32, 3), classes=10),
    "CIFAR100": Published(50_000, 10_000, (32, 32, 3), classes=100),
    "FashionMNIST": Published(60_000, 10_000, (28, 28), classes=10),
    "MNIST": Published(60_000, 10_000, (28, 28), classes=10),
}

LANDMARKS = "https://github.com/google-research/google-research/tree/master/federated_vision_datasets"
PHOTOS = "https://github.com/cvdfoundation/google-landmark"


class TorchvisionData(FederatedDataModule):
    """Any classification data set of torchvision with a training and a test part.

    Args:
        name: Its name, such as CIFAR10, CIFAR100, MNIST, FashionMNIST, SVHN, EMNIST.
        data_dir: Folder of the data.
        download: Whether to download missing files.
        dataset_kwargs: Other arguments of the torchvision class, such as ``{split: balanced}`` for EMNIST.
        **kwargs: As for FederatedDataModule; mean and std default to the published ones for CIFAR-10 and CIFAR-100
            (``mean: [0], std: [1]`` disables them).

    Raises:
        UserError: If the name is unknown, or files are missing (on loading).
    """

    def __init__(
        self,
        name: str,
        data_dir: str = "data",
        download: bool = False,
        dataset_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        changes = {"transform", "target_transform", "transforms"} & (dataset_kwargs or {}).keys()
        remedy = "images are read as they are stored; see data.augment, mean and std, or FromDataset from Python"
        ensure(not changes, f"data.dataset_kwargs: {', '.join(sorted(changes))} has no effect, since {remedy}")
        super().__init__(**kwargs)
        self.dataset = name  # `name` is an attribute of Lightning's
        self.data_dir, self.download = data_dir, download
        self.dataset_kwargs, self.published = dataset_kwargs or {}, PUBLISHED.get(name)
        _normalise(self, name)

    def prepare_data(self) -> None:
        """Downloads missing files, if ``download`` is set."""
        if self.download:
            self._dataset(train=True, download=True)
            self._dataset(train=False, download=True)

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        return *_arrays(self._dataset(train=True)), *_arrays(self._dataset(train=False))

    def _dataset(self, train: bool, download: bool = False) -> Any:
        from torchvision import datasets

        makers = {n: inspect.signature(getattr(datasets, n)).parameters for n in datasets.__all__}
        known = [n for n, parameters in makers.items() if "train" in parameters or "split" in parameters]
        if self.dataset not in known:
            close = similar(self.dataset, known, cutoff=0.4) or ["CIFAR10", "MNIST"]
            raise UserError(
                f"data.name = '{self.dataset}' is not a torchvision data set with a training part; "
                f"did you mean {' or '.join(close)}?"
            )
        make = getattr(datasets, self.dataset)
        # EMNIST has both `train` and `split`; SVHN's `split` means train or test
        by_flag = "train" in makers[self.dataset] or "split" in self.dataset_kwargs
        part = {"train": train} if by_flag else {"split": "train" if train else "test"}
        try:
            return make(self.data_dir, **part, **({"download": True} if download else {}), **self.dataset_kwargs)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"data.dataset_kwargs = {self.dataset_kwargs}: {self.dataset} refuses them ({error}); correct them"
            ) from None
        except (RuntimeError, OSError, EOFError, AssertionError) as error:
            raise UserError(
                f"data.data_dir = {self.data_dir}: {self.dataset} cannot be read from there "
                f"({folded(error)}); put there {LAYOUT.get(self.dataset, 'its files')}, or set "
                "download: true"
            ) from None


class CIFAR10(TorchvisionData):
    """CIFAR-10 (https://www.cs.toronto.edu/~kriz/cifar.html): 50,000 training and 10,000 test images of 10 classes.

    A sample's index is that of torchvision, as in the published splits.

    Args:
        data_dir: Folder that holds ``cifar-10-batches-py``.
        download: Whether to download it if it is missing.
        **kwargs: As for TorchvisionData.
    """

    def __init__(self, data_dir: str = "data", download: bool = False, **kwargs: Any) -> None:
        super().__init__("CIFAR10", data_dir, download, **kwargs)


class CIFAR100(TorchvisionData):
    """CIFAR-100 (https://www.cs.toronto.edu/~kriz/cifar.html): 50,000 training and 10,000 test images of 100 classes.

    Args:
        data_dir: Folder that holds ``cifar-100-python``.
        download: Whether to download it if it is missing.
        **kwargs: As for TorchvisionData.
    """

    def __init__(self, data_dir: str = "data", download: bool = False, **kwargs: Any) -> None:
        super().__init__("CIFAR100", data_dir, download, **kwargs)


def _normalise(data: FederatedDataModule, name: str) -> None:
    """Sets the published mean and standard deviation, if there are any and the user has set none."""
    if name in NORMALISATION and data.mean is None and data.std is None and not data.standardise:
        data.mean, data.std = NORMALISATION[name]


def _arrays(dataset: Any) -> tuple[Any, Any]:
    data, targets = getattr(dataset, "data", None), getattr(dataset, "targets", getattr(dataset, "labels", None))
    if data is not None and targets is not None:
        labels = np.asarray(targets)
        return data, labels[:, 0] if labels.ndim == 2 else labels  # of QMNIST's eight columns the first is the class
    pairs = [(np.asarray(image.convert("RGB")), label) for image, label in dataset]
    ensure(
        len({image.shape for image, _ in pairs}) == 1,
        f"data.name = {type(dataset).__name__} has images of several sizes; write it as files, use ImageFolder",
    )
    return np.stack([image for image, _ in pairs]), np.array([label for _, label in pairs])


def image_files(paths: Sequence[str | Path], size: int, key: str) -> IndexedSamples:
    """Returns image files as samples, read as RGB, ``(H, W, 3)``.

    Args:
        paths: The files.
        size: Height and width, in pixels, that every image is resized to (bilinear).
        key: Config key of their folder.

    Raises:
        UserError: If (on reading) a file is not an image.
    """
    like = np.empty((size, size, 3), np.uint8)
    return IndexedSamples(key, len(paths), lambda i: read_image(paths[i], key, (size, size)), like)


class ImageFolder(FederatedDataModule):
    """Image files in ``root/train/<class>/`` and ``root/test/<class>/``, as RGB; hidden files and folders are none.

    With ``stream``, a file is read, and so checked, only when it is needed.

    Args:
        root: Folder with ``train`` and ``test``.
        image_size: Height and width, in pixels, that every image is resized to (bilinear).
        **kwargs: As for FederatedDataModule.

    Raises:
        UserError: If a folder is missing or empty, a file is not an image, or classes differ (on loading or reading).
    """

    training: tuple[str, ...] = ("train",)
    """Folders of the training images."""

    def __init__(self, root: str, image_size: Size, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root, self.image_size = root, image_size

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        *train, test = [self._part(name) for name in (*self.training, "test")]
        for name, part in zip(self.training, train, strict=True):
            problem = f"class '{min({*part} ^ {*test}, default='')}' is not in both {name} and test"
            ensure([*part] == [*test], f"data.root: {problem} of '{self.root}'; name classes alike")
        return *self._samples(train), *self._samples([test])

    def _samples(self, parts: Sequence[dict[str, list[str]]]) -> tuple[IndexedSamples, list[int]]:
        labelled = [(path, c) for part in parts for c, paths in enumerate(part.values()) for path in paths]
        paths, labels = zip(*labelled, strict=True)
        return image_files(paths, self.image_size, "data.root"), [*labels]

    def _part(self, part: str) -> dict[str, list[str]]:
        """Returns the images of each class, in the order of names."""
        folder = Path(self.root, part)
        files = {path.name: _images_below(path) for path in visible(folder) if path.is_dir()}
        empty = next((f"class '{name}'" for name, paths in files.items() if not paths), None if files else "each class")
        ensure(
            empty is None,
            f"data.root = {self.root}: no images of {empty} under '{folder}'; expected {self.root}/train/<class>/*.png "
            f"and {self.root}/test/<class>/*.png",
        )
        return files


def _images_below(folder: Path) -> list[str]:
    """Returns the images of a folder and of those in it, in torchvision's order."""
    from torchvision.datasets.folder import is_image_file

    walk = sorted(os.walk(folder, followlinks=True))
    folders = [(root, names) for root, _, names in walk if not hidden(*Path(root).relative_to(folder).parts)]
    return [
        os.path.join(root, n) for root, names in folders for n in sorted(names) if is_image_file(n) and not hidden(n)
    ]


class CINIC10(ImageFolder):
    """CINIC-10 (https://github.com/BayesWatch/cinic-10): 90,000 images each for training, validation and test.

    PNG files of 32x32 pixels in ``root/<train, valid or test>/<class>/``, of CIFAR-10's ten classes.

    Args:
        root: Folder with ``train``, ``valid`` and ``test``.
        valid: Whether to train on the images of ``valid`` too; otherwise they are not used, as in FL-SAM.
        **kwargs: As for FederatedDataModule; mean and std default to the values of FL-SAM.

    Raises:
        UserError: In the same cases as ImageFolder.
    """

    def __init__(self, root: str = "data/cinic-10", valid: bool = False, **kwargs: Any) -> None:
        super().__init__(root, 32, **kwargs)
        self.training = ("train", "valid") if valid else ("train",)
        self.published = Published(180_000 if valid else 90_000, 90_000, (32, 32, 3), classes=10)
        _normalise(self, "CINIC10")

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        find_files("data.root", self.root, (*self.training, "test"), "https://github.com/BayesWatch/cinic-10")
        return super().load()


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
        self.published = Published(164_172, 19_526, (image_size, image_size, 3), classes=2028)
        self._by_user = partition is None

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        files = find_files("data.data_dir", self.data_dir, ("federated_train.csv", "test.csv"), LANDMARKS)
        train = _landmark_rows(files[0], ("user_id", "image_id", "class"))
        test = _landmark_rows(files[1], ("image_id", "class"))
        if self._by_user:
            self.partition = Natural([row["user_id"] for row in train])
        y_train, y_test = (np.array([int(row["class"]) for row in rows]) for rows in (train, test))
        return self._photographs(train), y_train, self._photographs(test), y_test

    def _photographs(self, rows: list[dict[str, str]]) -> IndexedSamples:
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
        return image_files(paths, self.image_size, "data.images")


def _landmark_rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    return read_rows(
        path,
        csv.DictReader,
        lambda row: all(row.get(name) for name in columns) and row["class"].isdecimal(),
        ", ".join(columns),
        LANDMARKS,
    )


HOME = "https://github.com/hendrycks/robustness"
CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
    "speckle_noise", "gaussian_blur", "spatter", "saturate",
)  # fmt: skip
"""The 15 corruptions of the benchmark and the 4 extra ones, by the names of their files."""
SEVERITIES = (1, 2, 3, 4, 5)


def corrupted_cifar(folder: str, y: NDArray[np.int64]) -> Iterator[tuple[str, int, NDArray[np.uint8]]]:
    """Returns corruption, severity and images ``(n, 32, 32, 3)`` of CIFAR-10-C or CIFAR-100-C, one after another.

    ``<corruption>.npy`` (Hendrycks and Dietterich, ICLR 2019) contains the test images five times,
    ``(5 n, 32, 32, 3)`` uint8, severity s in rows ``n (s - 1)`` to ``n s``; ``labels.npy`` their labels, ``(5 n,)``.

    Args:
        folder: Folder of the files.
        y: Labels of the test images, ``(n,)``.

    Raises:
        UserError: If a file is missing or corrupt, or the labels are not ``y``, five times.
    """
    *files, last = find_files("folder", folder, [f"{name}.npy" for name in (*CORRUPTIONS, "labels")], HOME)
    labels, n = _array(last), len(y)
    ensure(
        np.array_equal(labels, np.tile(y, len(SEVERITIES))),
        f"folder = '{folder}': its {len(labels)} labels are not the {n} of data's test set, five times; "
        "CIFAR-10-C goes with CIFAR10, CIFAR-100-C with CIFAR100",
    )
    images = {name: _array(path) for name, path in zip(CORRUPTIONS, files, strict=True)}
    for path, array in zip(files, images.values(), strict=True):
        problem = f"{array.dtype} {array.shape} instead of uint8 {(len(labels), 32, 32, 3)}"
        ensure(
            array.shape == (len(labels), 32, 32, 3) and array.dtype == np.uint8,
            corrupt_file("folder", path, problem, HOME),
        )
    return ((name, s, np.array(array[n * (s - 1) : n * s])) for name, array in images.items() for s in SEVERITIES)


def _array(path: Path) -> NDArray[np.uint8]:
    try:
        array: NDArray[np.uint8] = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(corrupt_file("folder", path, error, HOME)) from None
    return array
