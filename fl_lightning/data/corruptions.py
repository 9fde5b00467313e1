"""The files of CIFAR-10-C and CIFAR-100-C."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import require
from fl_lightning.data.files import corrupt_file_error, find_files

HOME = "https://github.com/hendrycks/robustness"
CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
    "speckle_noise", "gaussian_blur", "spatter", "saturate",
)  # fmt: skip
"""The 15 corruptions of the benchmark and the 4 extra ones, by the names of their files."""
SEVERITIES = (1, 2, 3, 4, 5)


class CorruptedCIFAR:
    """The files of CIFAR-10-C or CIFAR-100-C (Hendrycks and Dietterich, ICLR 2019).

    ``<corruption>.npy`` contains the test images five times, ``(5 n, 32, 32, 3)`` uint8, severity s in rows
    ``n (s - 1)`` to ``n s``; ``labels.npy`` their labels, ``(5 n,)``. Iterating yields corruption, severity, images and
    labels.

    Args:
        folder: Folder of the files.
        corruptions: Names of the corruptions.
        severities: Severities from 1 to 5.

    Attributes:
        labels: Labels of the test images, ``(n,)``.

    Raises:
        UserError: If a name or severity is unknown, a file is missing or corrupt, or the labels are not the
            labels of a test set, five times.
    """

    def __init__(
        self, folder: str, corruptions: Sequence[str] = CORRUPTIONS, severities: Sequence[int] = SEVERITIES
    ) -> None:
        for name in corruptions:
            require(name in CORRUPTIONS, "corruptions", name, f"choose from {', '.join(CORRUPTIONS)}")
        for severity in severities:
            require(severity in SEVERITIES, "severities", severity, "choose from 1, 2, 3, 4, 5")
        self.severities = severities
        *files, last = find_files("folder", folder, [f"{name}.npy" for name in (*corruptions, "labels")], HOME)
        labels = _array(last)
        n, rest = divmod(len(labels), len(SEVERITIES))
        if labels.ndim != 1 or rest or n == 0 or not (labels.reshape(len(SEVERITIES), n) == labels[:n]).all():
            problem = f"labels {labels.shape} are not those of a test set five times"
            raise corrupt_file_error("folder", last, problem, HOME)
        self.labels: NDArray[np.int64] = labels[:n].astype(np.int64)
        self._images = {name: _array(path) for name, path in zip(corruptions, files, strict=True)}
        for path, images in zip(files, self._images.values(), strict=True):
            if images.shape != (len(labels), 32, 32, 3) or images.dtype != np.uint8:
                problem = f"{images.dtype} {images.shape} instead of uint8 {(len(labels), 32, 32, 3)}"
                raise corrupt_file_error("folder", path, problem, HOME)

    def __iter__(self) -> Iterator[tuple[str, int, NDArray[np.uint8], NDArray[np.int64]]]:
        n = len(self.labels)
        for corruption, images in self._images.items():
            for severity in self.severities:
                yield corruption, severity, np.array(images[n * (severity - 1) : n * severity]), self.labels


def _array(path: Path) -> NDArray[np.uint8]:
    try:
        array: NDArray[np.uint8] = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise corrupt_file_error("folder", path, error, HOME) from None
    return array
