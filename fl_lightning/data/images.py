"""Image data sets: torchvision's, and folders of image files."""

import difflib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_lightning.core import Size, UserError, ensure
from fl_lightning.data.files import find_files, read_image
from fl_lightning.data.module import FederatedDataModule
from fl_lightning.data.streaming import Samples

NORMALISATION = {
    "CIFAR10": ([0.4914, 0.4822, 0.4465], [0.2470, 0.2434, 0.2616]),
    "CIFAR100": ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    "CINIC10": ([0.47889522, 0.47227842, 0.43047404], [0.24205776, 0.23828046, 0.25874835]),
}
"""Mean and standard deviation of each channel, as in the fedgloss and FL-SAM repositories (CINIC-10: FL-SAM only)."""


CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"
LAYOUT = {"CIFAR10": f"cifar-10-batches-py, from {CIFAR}", "CIFAR100": f"cifar-100-python, from {CIFAR}"}
"""Expected content of ``data_dir``, and its home page."""


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
        super().__init__(**kwargs)
        self.dataset = name  # `name` is an attribute of Lightning's
        self.data_dir, self.download = data_dir, download
        self.dataset_kwargs = dataset_kwargs or {}
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
            close = difflib.get_close_matches(self.dataset.upper(), known, cutoff=0.4) or ["CIFAR10", "MNIST"]
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
                f"({' '.join(str(error).split())}); put there {LAYOUT.get(self.dataset, 'its files')}, or set "
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
        return data, np.asarray(targets)
    pairs = [(np.asarray(image.convert("RGB")), label) for image, label in dataset]
    ensure(
        len({image.shape for image, _ in pairs}) == 1,
        f"data.name = {type(dataset).__name__} has images of several sizes; write it as files, use ImageFolder",
    )
    return np.stack([image for image, _ in pairs]), np.array([label for _, label in pairs])


class ImageFiles(Samples):
    """Image files, read as RGB.

    Args:
        paths: The files.
        size: Height and width, in pixels, that every image is resized to (bilinear).
        key: Config key of their folder.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, paths: list[str], size: int, key: str = "data.root") -> None:
        self.paths, self.size, self.key = paths, size, key
        self.shape = (len(paths), size, size, 3)

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        """Returns one image, ``(H, W, 3)``.

        Raises:
            UserError: If the file is not an image.
        """
        return read_image(self.paths[index], self.key, (self.size, self.size))


class ImageFolder(FederatedDataModule):
    """Image files in ``root/train/<class>/`` and ``root/test/<class>/``, as RGB.

    With ``stream``, a file is read, and so checked, only when it is needed.

    Args:
        root: Folder with ``train`` and ``test``.
        image_size: Height and width, in pixels, that every image is resized to (bilinear).
        **kwargs: As for FederatedDataModule.

    Raises:
        UserError: If a folder is missing or empty, a file is not an image, or classes differ (on loading or reading).
    """

    def __init__(self, root: str, image_size: Size, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root, self.image_size = root, image_size

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        x_train, y_train, classes = self._part("train")
        x_test, y_test, test_classes = self._part("test")
        odd = f"class '{min({*classes} ^ {*test_classes}, default='')}' is not in both train and test"
        ensure(classes == test_classes, f"root: {odd} of '{self.root}'; name classes alike")
        return x_train, y_train, x_test, y_test

    def _part(self, part: str) -> tuple[ImageFiles, torch.Tensor, list[str]]:
        from torchvision.datasets import ImageFolder as Files

        folder = Path(self.root, part)
        try:
            files = Files(str(folder))
        except FileNotFoundError:
            raise UserError(
                f"root: no images of each class under '{folder}'; expected {self.root}/train/<class>/*.png "
                f"and {self.root}/test/<class>/*.png"
            ) from None
        paths = [path for path, _ in files.samples]
        return ImageFiles(paths, self.image_size), torch.tensor(files.targets), files.classes


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
        self.valid = valid
        self.published = (180_000 if valid else 90_000, 90_000)
        _normalise(self, "CINIC10")

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        parts = ("train", "valid", "test") if self.valid else ("train", "test")
        find_files("data.root", self.root, parts, "https://github.com/BayesWatch/cinic-10")
        x, y, x_test, y_test = super().load()
        if self.valid:
            more, labels, _ = self._part("valid")
            x, y = ImageFiles(x.paths + more.paths, 32), torch.cat([y, labels])
        return x, y, x_test, y_test
