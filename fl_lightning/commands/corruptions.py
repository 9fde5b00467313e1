"""Accuracy on CIFAR-10-C and CIFAR-100-C, by corruption and severity."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.core.errors import UserError, require
from fl_lightning.data.files import broken, located

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fl_lightning.algorithms.base import LocalObjective
    from fl_lightning.data import FederatedDataModule
    from fl_lightning.trainer.trainer import FederatedTrainer

HOME = "https://github.com/hendrycks/robustness"
CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
    "speckle_noise", "gaussian_blur", "spatter", "saturate",
)  # fmt: skip
"""The 15 corruptions of the benchmark and the 4 extra ones, named as their files."""
SEVERITIES = (1, 2, 3, 4, 5)
CLEAN = "clean"
COLUMNS = ("corruption", "severity", "acc")


class Accuracy(NamedTuple):
    """One row of the table.

    Attributes:
        corruption: Its name; "clean" for the test set itself.
        severity: 1 to 5; 0 for the test set itself.
        acc: Share of the test images that are classified rightly.
    """

    corruption: str
    severity: int
    acc: float


class CorruptedCIFAR:
    """The files of CIFAR-10-C or CIFAR-100-C (Hendrycks and Dietterich, ICLR 2019).

    ``<corruption>.npy`` holds the test images five times, ``(5 n, 32, 32, 3)`` uint8, severity s in rows ``n (s - 1)``
    to ``n s``; ``labels.npy`` their labels, ``(5 n,)``. Iterated, it gives corruption, severity, images and labels.

    Args:
        folder: Where the files lie.
        corruptions: Which of them.
        severities: Which of 1 to 5.

    Raises:
        UserError: If a name or severity is none, a file is missing or broken, or labels are not five times the same.
    """

    def __init__(
        self, folder: str, corruptions: Sequence[str] = CORRUPTIONS, severities: Sequence[int] = SEVERITIES
    ) -> None:
        for name in corruptions:
            require(name in CORRUPTIONS, "corruptions", name, f"choose from {', '.join(CORRUPTIONS)}")
        for severity in severities:
            require(severity in SEVERITIES, "severities", severity, "choose from 1, 2, 3, 4, 5")
        self.corruptions, self.severities = tuple(corruptions), tuple(severities)
        files = located("folder", folder, [f"{name}.npy" for name in (*self.corruptions, "labels")], HOME)
        self._files = dict(zip(self.corruptions, files, strict=False))
        labels = _array(files[-1])
        n, rest = divmod(len(labels), len(SEVERITIES))
        if labels.ndim != 1 or rest or n == 0 or not (labels.reshape(len(SEVERITIES), n) == labels[:n]).all():
            raise broken("folder", files[-1], f"labels {labels.shape} are not those of a test set five times", HOME)
        self.labels: NDArray[np.int64] = labels[:n].astype(np.int64)
        for path in files[:-1]:
            images = _array(path)
            if images.shape != (len(labels), 32, 32, 3) or images.dtype != np.uint8:
                told = f"{images.dtype} {images.shape} in place of uint8 {(len(labels), 32, 32, 3)}"
                raise broken("folder", path, told, HOME)

    def images(self, corruption: str, severity: int) -> NDArray[np.uint8]:
        """The test images so corrupted, ``(n, 32, 32, 3)``."""
        n = len(self.labels)
        return np.array(_array(self._files[corruption])[n * (severity - 1) : n * severity])

    def __iter__(self) -> Iterator[tuple[str, int, NDArray[np.uint8], NDArray[np.int64]]]:
        for corruption in self.corruptions:
            for severity in self.severities:
                yield corruption, severity, self.images(corruption, severity), self.labels


def _array(path: Path) -> NDArray[np.generic]:
    try:
        array: NDArray[np.generic] = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise broken("folder", path, error, HOME) from None
    return array


def evaluate_corruptions(
    predict: Callable[[Tensor], Tensor],
    data: FederatedDataModule,
    folder: str,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
) -> list[Accuracy]:
    """Accuracy under each corruption and severity, after that on the clean test set.

    Args:
        predict: From images as the net gets them, ``(B, C, H, W)`` float32, to logits ``(B, classes)``.
        data: CIFAR, set up: images are prepared as its test set, whose labels the files must have.
        folder: Where the files lie.
        corruptions: Which corruptions.
        severities: Which severities.

    Raises:
        UserError: As `CorruptedCIFAR`, or if the labels are not those of the test set.
    """
    files = CorruptedCIFAR(folder, corruptions, severities)
    y = data.y_test.cpu().numpy()
    if not np.array_equal(files.labels, y):
        raise UserError(
            f"folder = '{folder}': its {len(files.labels)} labels are not the {len(y)} of data's test set; "
            "CIFAR-10-C goes with CIFAR10, CIFAR-100-C with CIFAR100"
        )

    def accuracy(batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        right = n = 0
        for x, y in batches:
            right, n = right + int((predict(x)[:, : data.num_classes].argmax(1) == y).sum()), n + len(y)
        return right / n

    rows = [Accuracy(CLEAN, 0, accuracy(data.eval_batches("test")))]
    for corruption, severity, images, labels in files:
        rows.append(Accuracy(corruption, severity, accuracy(data.batches_of(corruption, images, labels))))
    return rows


def run(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    folder: str,
    ckpt_path: str | None = None,
    out: str | None = None,
) -> list[Accuracy]:
    """Evaluate a model or checkpoint, and write ``corruptions.csv``, ``.png`` and ``.pdf``.

    Args:
        trainer: A federated trainer, for device and precision.
        model: The local objective.
        data: CIFAR-10 or CIFAR-100.
        folder: Where the files of CIFAR-10-C or CIFAR-100-C lie.
        ckpt_path: The checkpoint, or "last"; by default the model's own weights.
        out: Folder of the results; by default that of the checkpoint's run, or the working folder.
    """
    path, _ = trainer.load(model, data, ckpt_path)
    rows = evaluate_corruptions(lambda x: trainer.logits(trainer.global_model, x.to(trainer.dtype)), data, folder)
    if trainer.fabric.is_global_zero:
        from fl_lightning.core.figures import save_figure

        home = Path(out) if out is not None else Path() if ckpt_path is None else path.parent.parent
        home.mkdir(parents=True, exist_ok=True)
        write(home / "corruptions.csv", rows)
        save_figure(plot_corruptions({home.resolve().parent.name: rows}), home / "corruptions")
        for name, value in means(rows).items():
            print(f"{name} {value:.4f}")
        print(f"results: {home / 'corruptions.csv'}")
    return rows


def means(rows: Sequence[Accuracy]) -> dict[str, float]:
    """Accuracy on the clean test set, mean over all corruptions by severity, and over everything."""
    corrupted = [row for row in rows if row.severity]
    found = {CLEAN: [row.acc for row in rows if not row.severity]}
    found |= {f"severity {s}": [row.acc for row in corrupted if row.severity == s] for s in SEVERITIES}
    found["all"] = [row.acc for row in corrupted]
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def write(path: Path, rows: Sequence[Accuracy]) -> None:
    """Write the table as CSV."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        table.writerows(rows)


def read(path: Path) -> list[Accuracy]:
    """Read a table that `write` wrote."""
    with path.open(newline="") as file:
        return [Accuracy(row["corruption"], int(row["severity"]), float(row["acc"])) for row in csv.DictReader(file)]


def plot_corruptions(runs: Mapping[str, Sequence[Accuracy] | Path]) -> Figure:
    """Accuracy by corruption of one or more runs: at the highest severity, and as the mean over all of them.

    A dotted line is the accuracy on the clean test set.

    Args:
        runs: Rows, or the file that they were written to, of each run by its label.
    """
    from matplotlib.figure import Figure

    tables = {label: read(rows) if isinstance(rows, Path) else rows for label, rows in runs.items()}
    found = {(row.corruption, row.severity) for rows in tables.values() for row in rows if row.severity}
    names = [name for name in CORRUPTIONS if any(name == corruption for corruption, _ in found)]
    highest = max(severity for _, severity in found)
    figure = Figure(figsize=(3 + 0.45 * len(names), 5.5), layout="constrained")
    width = 0.8 / len(tables)
    for place, (title, severities) in enumerate(
        ((f"severity {highest}", {highest}), ("mean over severities", {severity for _, severity in found}))
    ):
        axes = figure.add_subplot(2, 1, place + 1, title=title, ylabel="test accuracy")
        for i, (label, rows) in enumerate(tables.items()):
            shown = [row for row in rows if row.severity in severities]
            heights = [np.mean([r.acc for r in shown if r.corruption == name] or [np.nan]) for name in names]
            at = np.arange(len(names)) + (i - (len(tables) - 1) / 2) * width
            bars = axes.bar(at, heights, width, label=label)
            for row in rows:
                if row.corruption == CLEAN:
                    axes.axhline(row.acc, color=bars.patches[0].get_facecolor(), linestyle=":", linewidth=1)
        labels = [name.replace("_", " ") for name in names] if place else [""] * len(names)
        axes.set_xticks(range(len(names)), labels, rotation=40, ha="right", fontsize="small")
        axes.grid(axis="y", alpha=0.3)
        if not place and len(tables) > 1:
            figure.legend(loc="outside upper center", ncols=len(tables), fontsize="small")
    return figure
