"""``fl-lightning corruptions``: accuracy on CIFAR-10-C and CIFAR-100-C, by corruption and severity."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from fl_lightning import FederatedTrainer, LocalObjective
from fl_lightning.commands.shared.landscapes import labels_of, number_of, save_figures
from fl_lightning.core import grouped, make_folder
from fl_lightning.data import Batch, FederatedDataModule, corrupted_cifar
from fl_lightning.results import CLEAN, Accuracy, average, plot_corruptions, say, write_table


def evaluate_corruptions(
    accuracy: Callable[[Iterable[Batch]], float],
    data: FederatedDataModule,
    folder: str,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Accuracy]:
    """Yields the accuracy on the clean test set, then under each corruption and severity.

    Args:
        accuracy: Accuracy on batches of images as the net gets them, ``(B, C, H, W)``, and labels.
        data: CIFAR, set up: images are prepared as its test set, whose labels the files must have.
        folder: Folder of the files.
        dtype: Floating dtype of the images.

    Raises:
        UserError: As `corrupted_cifar`.
    """
    y = data.y_test.cpu().numpy()
    files = corrupted_cifar(folder, y)
    yield Accuracy(CLEAN, 0, accuracy(data.eval_batches("test", dtype)))
    for corruption, severity, images in files:
        yield Accuracy(corruption, severity, accuracy(data.batches_of(corruption, images, y, dtype)))


def means(rows: Sequence[Accuracy]) -> dict[str, float]:
    """Returns the accuracy on the clean test set, and its mean over corruptions, by severity and over all."""
    ordered = sorted(rows, key=lambda row: row.severity)
    by_severity = grouped((f"severity {row.severity}" if row.severity else CLEAN, row.acc) for row in ordered)
    by_severity["all"] = [row.acc for row in rows if row.severity]
    return {name: average(values) for name, values in by_severity.items() if values}


def run(
    trainer: FederatedTrainer,
    model: LocalObjective,
    data: FederatedDataModule,
    folder: str,
    ckpt_path: str | None = None,
    out: str | None = None,
) -> list[Accuracy]:
    """Evaluates a model or checkpoint, and writes ``corruptions.csv``, ``.png`` and ``.pdf``.

    Nothing is overwritten: a second evaluation is ``corruptions_2``.

    Args:
        trainer: A federated trainer, for device and precision.
        model: The local objective.
        data: CIFAR-10 or CIFAR-100.
        folder: Folder of the files of CIFAR-10-C or CIFAR-100-C.
        ckpt_path: The checkpoint, or "last"; by default the model's own weights.
        out: Folder of the results; by default that of the checkpoint's run, or the working folder.
    """
    restored = trainer.load(model, data, ckpt_path)
    target = make_folder(out or ("." if restored.checkpoint is None else restored.checkpoint.parents[1]))
    rows = [
        *evaluate_corruptions(
            lambda batches: restored.evaluate_batches(batches)["acc"], data, folder, dtype=restored.dtype
        )
    ]
    if trainer.fabric.is_global_zero:
        number = number_of(target, "corruptions.csv")
        write_table(target / f"corruptions{number}.csv", Accuracy._fields, rows)
        label = restored.name if restored.checkpoint is None else labels_of([restored.checkpoint])[0]
        save_figures(restored, target, {"corruptions": lambda: plot_corruptions({label: rows})}, number, "")
        for name, value in means(rows).items():
            say(f"{name} {value:.4f}")
        say(f"results: {target / f'corruptions{number}.csv'}")
    return rows
