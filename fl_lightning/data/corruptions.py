"""The files of CIFAR-10-C and CIFAR-100-C."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import UserError, ensure, require
from fl_lightning.data.files import corrupt_file, find_files

HOME = "https://github.com/hendrycks/robustness"
CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
    "speckle_noise", "gaussian_blur", "spatter", "saturate",
)  # fmt: skip
"""The 15 corruptions of the benchmark and the 4 extra ones, by the names of their files."""
SEVERITIES = (1, 2, 3, 4, 5)


def corrupted_cifar(
    folder: str,
    y: NDArray[np.int64],
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
) -> Iterator[tuple[str, int, NDArray[np.uint8]]]:
    """Returns corruption, severity and images ``(n, 32, 32, 3)`` of CIFAR-10-C or CIFAR-100-C, one after another.

    ``<corruption>.npy`` (Hendrycks and Dietterich, ICLR 2019) contains the test images five times,
    ``(5 n, 32, 32, 3)`` uint8, severity s in rows ``n (s - 1)`` to ``n s``; ``labels.npy`` their labels, ``(5 n,)``.

    Args:
        folder: Folder of the files.
        y: Labels of the test images, ``(n,)``.
        corruptions: Names of the corruptions.
        severities: Severities from 1 to 5.

    Raises:
        UserError: If a name or severity is unknown, a file is missing or corrupt, or the labels are not ``y``, five
            times.
    """
    for name in corruptions:
        require(name in CORRUPTIONS, "corruptions", name, f"choose from {', '.join(CORRUPTIONS)}")
    for severity in severities:
        require(severity in SEVERITIES, "severities", severity, "choose from 1, 2, 3, 4, 5")
    *files, last = find_files("folder", folder, [f"{name}.npy" for name in (*corruptions, "labels")], HOME)
    labels, n = _array(last), len(y)
    ensure(
        np.array_equal(labels, np.tile(y, len(SEVERITIES))),
        f"folder = '{folder}': its {len(labels)} labels are not the {n} of data's test set, five times; "
        "CIFAR-10-C goes with CIFAR10, CIFAR-100-C with CIFAR100",
    )
    images = {name: _array(path) for name, path in zip(corruptions, files, strict=True)}
    for path, array in zip(files, images.values(), strict=True):
        problem = f"{array.dtype} {array.shape} instead of uint8 {(len(labels), 32, 32, 3)}"
        fits = array.shape == (len(labels), 32, 32, 3) and array.dtype == np.uint8
        ensure(fits, corrupt_file("folder", path, problem, HOME))
    return ((name, s, np.array(array[n * (s - 1) : n * s])) for name, array in images.items() for s in severities)


def _array(path: Path) -> NDArray[np.uint8]:
    try:
        array: NDArray[np.uint8] = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(corrupt_file("folder", path, error, HOME)) from None
    return array
