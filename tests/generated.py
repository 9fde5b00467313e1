"""Small files in the formats of the papers' data sets, written by the tests."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from torchvision import datasets

from fl_lightning.core.rng import numpy_generator

Part = tuple[NDArray[np.uint8], Sequence[int]]
"""Images ``(n, H, W, 3)`` and their labels."""


class Python2(pickle._Pickler):  # type: ignore[name-defined,misc]
    """Writes bytes as the strings of Python 2, with which CIFAR's files were made."""

    dispatch = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_string(self, text: Any) -> None:
        self.write(b"T" + struct.pack("<i", len(text)) + text)
        self.memoize(text)

    dispatch[bytes] = save_string


def pickled(path: Path, **entries: object) -> list[str]:
    """Writes a file as CIFAR has it; returns its name and checksum, as torchvision compares them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = io.BytesIO()
    Python2(file, 2).dump({name.encode(): value for name, value in entries.items()})
    path.write_bytes(file.getvalue())
    return [path.name, hashlib.md5(file.getvalue()).hexdigest()]


def fashion_mnist(folder: Path, samples: int) -> None:
    """Writes random images to the IDX files that torchvision reads from ``folder``."""
    draw, raw = numpy_generator(0, "images"), folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        images = draw.integers(256, size=(samples, 28, 28), dtype=np.uint8).tobytes()
        labels = (np.arange(samples) % 10).astype(np.uint8).tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, samples, 28, 28) + images)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, samples) + labels)


def _rows(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def _torchvision_takes(
    monkeypatch: pytest.MonkeyPatch, name: str, train: list[list[str]], test: list[str], meta: list[str], key: str
) -> None:
    """Lets torchvision expect these checksums."""
    kind = getattr(datasets, name)
    monkeypatch.setattr(kind, "train_list", train)
    monkeypatch.setattr(kind, "test_list", [test])
    monkeypatch.setattr(kind, "meta", {"filename": meta[0], "key": key, "md5": meta[1]})


def cifar10(folder: Path, monkeypatch: pytest.MonkeyPatch, train: Part, test: Part) -> None:
    """Writes ``cifar-10-batches-py``, in five batches."""
    home = folder / "cifar-10-batches-py"
    parts = np.array_split(np.arange(len(train[0])), 5)
    y = np.array(train[1])
    batches = [
        pickled(home / f"data_batch_{i + 1}", data=_rows(train[0][part]), labels=y[part].tolist())
        for i, part in enumerate(parts)
    ]
    last = pickled(home / "test_batch", data=_rows(test[0]), labels=list(test[1]))
    meta = pickled(home / "batches.meta", label_names=[b"airplane"])
    _torchvision_takes(monkeypatch, "CIFAR10", batches, last, meta, "label_names")


def cifar100(folder: Path, monkeypatch: pytest.MonkeyPatch, train: Part, test: Part) -> list[str]:
    """Writes ``cifar-100-python``, a coarse label being a fifth of the fine one; returns the training images' names."""
    home = folder / "cifar-100-python"
    names = [f"cichlid_s_{i:06}.png".encode() for i in range(len(train[0]) + len(test[0]))]

    def part(name: str, x: NDArray[np.uint8], y: Sequence[int], names: list[bytes]) -> list[str]:
        fine = [int(label) for label in y]
        coarse = [label // 5 for label in fine]
        return pickled(home / name, data=_rows(x), fine_labels=fine, coarse_labels=coarse, filenames=names)

    first, last = part("train", *train, names[: len(train[0])]), part("test", *test, names[len(train[0]) :])
    meta = pickled(home / "meta", fine_label_names=[b"apple"])
    _torchvision_takes(monkeypatch, "CIFAR100", [first], last, meta, "fine_label_names")
    return [name.decode() for name in names[: len(train[0])]]


def pictures(folder: Path, images: NDArray[np.uint8]) -> None:
    """Writes PNG files, as in CINIC-10."""
    folder.mkdir(parents=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"cifar10-train-{i}.png")


def news(folder: Path, train: Iterable[tuple[Any, ...]], test: Iterable[tuple[Any, ...]]) -> str:
    """Writes AG News: rows of class (1 to 4), title, description."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train.csv", train), ("test.csv", test)):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    return str(folder)


def landmarks(
    folder: Path,
    photographs: Mapping[str, NDArray[np.uint8]],
    train: Iterable[tuple[str, str, int]],
    test: Iterable[tuple[str, int]],
    nested: bool,
) -> None:
    """Writes Landmarks-User-160k.

    Args:
        folder: Where.
        photographs: By image id.
        train: User, image id and class.
        test: Image id and class.
        nested: Whether the photographs lie in folders of their first three letters.
    """
    for name, image in photographs.items():
        path = folder / "images" / (f"{name[0]}/{name[1]}/{name[2]}" if nested else "") / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    for file, head, rows in (
        ("federated_train.csv", "user_id,image_id,class", list(train)),
        ("test.csv", "image_id,class", list(test)),
    ):
        lines = [head, *(",".join(map(str, row)) for row in rows)]
        (folder / file).write_text("\n".join(lines) + "\n")


def scene(root: Path, image: str, labels: str, arrays: tuple[NDArray[np.uint8], NDArray[np.uint8]]) -> None:
    """Writes an image and its label map."""
    for name, array in zip((image, labels), arrays, strict=True):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(root / name)


def lists(folder: Path, files: Mapping[str, Mapping[str, list[tuple[str, str]]]]) -> None:
    """Writes who has which scenes, as FedDrive does."""
    folder.mkdir(parents=True)
    for name, users in files.items():
        data = {user: {"x": [x for x, _ in pairs], "y": [y for _, y in pairs]} for user, pairs in users.items()}
        sizes = [len(pairs) for pairs in users.values()]
        (folder / name).write_text(json.dumps({"users": list(users), "num_samples": sizes, "user_data": data}))


def leaf(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Writes LEAF's files of three users, 4, 3, 5 samples to train on, 2, 1, 3 to test on; returns ``user_data``."""
    rng = numpy_generator(0, "LEAF files")
    letters = list("abc ,.;ABC'\n")

    def sample() -> tuple[Any, Any]:
        if kind == "FEMNIST":
            return rng.random(784, np.float32).tolist(), int(rng.integers(62))
        return "".join(rng.choice(letters, 80)), str(rng.choice(letters))

    parts = []
    for split, sizes in (("train", (4, 3, 5)), ("test", (2, 1, 3))):
        data = {}
        for k, n in enumerate(sizes):
            x, y = zip(*(sample() for _ in range(n)), strict=True)
            data[f"u{k}"] = {"x": list(x), "y": list(y)}
        content = {"users": list(data), "num_samples": list(sizes), "user_data": data}
        (folder / split).mkdir(parents=True)
        (folder / split / f"all_data_0_niid_0_keep_0_{split}_9.json").write_text(json.dumps(content))
        parts.append(data)
    return parts


def everything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes noise as all data sets of the papers, below ``folder`` where the classes expect them below ``data``.

    They have as many classes and as many clients as the papers', and samples for the partitions of these clients.
    """
    rng = numpy_generator(0, "generated data")
    noise = rng.integers(0, 256, (1020, 32, 32, 3), dtype=np.uint8)
    for write, classes in ((cifar10, 10), (cifar100, 100)):
        y = (np.arange(1020) % classes).tolist()
        write(folder, monkeypatch, (noise[:1000], y[:1000]), (noise[1000:], y[1000:]))
    for label in range(10):
        name = f"{label}class"
        pictures(folder / "cinic-10" / "train" / name, noise[label * 40 :][:40])
        pictures(folder / "cinic-10" / "test" / name, noise[400 + label * 2 :][:2])
    words = [f"word{i}" for i in range(50)]
    texts = [(1 + i % 4, "Title", " ".join(rng.choice(words, 12))) for i in range(420)]
    news(folder / "ag_news", texts[:400], texts[400:])
    photographs = {f"{i}a{i:014x}": noise[i] for i in range(8)}
    names = list(photographs)
    taken = [(str(user), names[user % 6], 2027 - user) for user in range(1262)]
    landmarks(folder / "landmarks", photographs, taken, [(names[6], 2027), (names[7], 0)], nested=True)
    _driving(folder, rng)
    for name in ("FEMNIST", "Shakespeare"):
        leaf(folder / name.lower(), name)


def _driving(folder: Path, rng: np.random.Generator) -> None:
    """Writes three clients of four scenes each, and two scenes to test."""
    images, maps = rng.integers(0, 256, (14, 16, 32, 3), np.uint8), rng.integers(0, 34, (14, 16, 32), np.uint8)
    home, pairs = folder / "cityscapes", []
    for i in range(14):
        city = "train/ulm/ulm" if i < 12 else "val/bonn/bonn"
        pair = (f"{city}_{i:06}_000019_leftImg8bit.png", f"{city}_{i:06}_000019_gtFine_labelIds.png")
        scene(home, f"leftImg8bit/{pair[0]}", f"gtFine/{pair[1]}", (images[i], maps[i]))
        pairs.append(pair)
    clients = {f"ulm{k}": pairs[4 * k :][:4] for k in range(3)}
    for kind in ("uniform", "heterogeneous"):
        lists(home / kind / "train", {"all_data_0.json": clients})
        lists(home / kind / "test", {"all_data_0.json": {"test_user": pairs[12:]}})
    home, pairs = folder / "idda", [(f"T{i:02}_CN_A/RGB/{i}.jpg", f"T{i:02}_CN_A/Semantic/{i}.png") for i in range(14)]
    for i, pair in enumerate(pairs):
        scene(home / "IDDAsmall", *pair, (images[i], maps[i] % 24))
    clients = {f"client{k}": pairs[4 * k :][:4] for k in range(3)}
    test = {"test_user_diff_domain": pairs[12:13], "test_user_same_domain": pairs[13:]}
    for kind in ("uniform", "heterogeneous"):
        for setting in ("country", "rainy"):
            lists(home / kind / setting / "train", {"train.json": clients})
            lists(home / kind / setting / "test", {"test.json": test})
