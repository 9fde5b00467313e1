"""The papers' data sets, read from small files that were written in their own formats."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from torchvision import datasets

import fl_lightning
from fl_lightning import (
    CIFAR10,
    CIFAR100,
    CINIC10,
    AGNews,
    Arrays,
    Dirichlet,
    FedAvg,
    FederatedTrainer,
    FromDataset,
    Landmarks,
    TorchvisionData,
)
from fl_lightning.core.errors import UserError
from fl_lightning.core.rng import numpy_generator
from fl_lightning.data.published import basic_english, vocabulary
from fl_lightning.trainer.run import Run
from tests import generated
from tests.generated import news, pictures

RNG = numpy_generator(0, "test data sets")
IMAGES = RNG.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8)
FINE = RNG.permutation(np.repeat(np.arange(100), 2))


def cifar10(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    y = (FINE % 10).tolist()
    generated.cifar10(folder, monkeypatch, (IMAGES[:100], y[:100]), (IMAGES[100:], y[100:]))


def cifar100(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    y = FINE.tolist()
    return generated.cifar100(folder, monkeypatch, (IMAGES[:150], y[:150]), (IMAGES[150:], y[150:]))


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar10(tmp_path, monkeypatch)
    data = CIFAR10(str(tmp_path), num_clients=5)
    data.setup()
    assert torch.equal(torch.as_tensor(data.x_train).movedim(1, -1), torch.from_numpy(IMAGES[:100]))
    np.testing.assert_array_equal(data.y_test, FINE[100:] % 10)
    assert data.std == [0.2470, 0.2434, 0.2616]


def test_cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar100(tmp_path, monkeypatch)
    data = CIFAR100(str(tmp_path), num_clients=5)
    data.setup()
    np.testing.assert_array_equal(data.y_train, FINE[:150])
    assert data.mean == [0.5071, 0.4865, 0.4409]
    (tmp_path / "cifar-100-python" / "train").write_bytes(b"cut")
    hint = "put there cifar-100-python, from https://www.cs.toronto.edu/~kriz/cifar.html, or set download: true"
    with pytest.raises(UserError, match=rf"^data.data_dir = [^\n]*CIFAR100 cannot be read [^\n]*corrupted.*; {hint}$"):
        CIFAR100(str(tmp_path)).setup()


def run(data: Any, net: nn.Module, folder: Path) -> Run:
    """Trains a round of every client."""
    trainer = FederatedTrainer(
        max_rounds=1, clients_per_round=data.num_clients, engine="sequential", accelerator="cpu", callbacks=[],
        default_root_dir=str(folder / "runs"), enable_progress_bar=False,
    )  # fmt: skip
    return trainer.fit(FedAvg(net=net), data)


# CINIC-10


@pytest.mark.parametrize("valid", [False, True])
def test_cinic10(valid: bool, tmp_path: Path) -> None:
    for part, start in (("train", 0), ("valid", 40), ("test", 80)):
        for label, name in enumerate(("airplane", "automobile")):
            pictures(tmp_path / part / name, IMAGES[start + 4 * label :][:4])
    data = CINIC10(str(tmp_path), valid, num_clients=2)
    with pytest.warns(UserWarning, match=r"CINIC10: \d+ training and 8 test samples, not the \d+0000 and 90000 of the"):
        data.setup()
    x = torch.as_tensor(data.x_train).movedim(1, -1)
    assert torch.equal(x[:8], torch.from_numpy(IMAGES[:8]))
    assert len(x) == (16 if valid else 8)
    assert data.y_train.tolist() == [0] * 4 + [1] * 4 + ([0] * 4 + [1] * 4 if valid else [])
    if valid:
        assert torch.equal(x[8:], torch.from_numpy(IMAGES[40:48]))
    assert data.std == [0.24205776, 0.23828046, 0.25874835]
    if valid:
        (tmp_path / "valid" / "airplane").rename(tmp_path / "lost")
        with pytest.raises(UserError, match=r"data.root: class 'airplane' is not in both valid and test"):
            CINIC10(str(tmp_path), valid).setup()
    (tmp_path / "test").rename(tmp_path / "other")
    message = (
        r"^data.root = '[^\n]*': 'test' is missing; expected there train, [^\n]*from https://github.com/BayesWatch"
    )
    with pytest.raises(UserError, match=message):
        CINIC10(str(tmp_path), valid).setup()


# AG News


def test_basic_english() -> None:
    """It follows the rules of torchtext's tokenizer."""
    text = 'It\'s "Wall St." (Reuters): up,down; 3.5<br />why?!  end'
    want = "it ' s wall st . ( reuters ) up , down 3 . 5 why ? ! end"
    assert basic_english(text) == want.split()


def test_vocabulary_is_in_order_of_frequency_then_alphabet() -> None:
    tokens = vocabulary([["b", "a", "c"], ["c", "b", "<unk>"], ["c"]])
    assert tokens == {"<unk>": 0, "c": 1, "b": 2, "a": 3}


def test_texts_of_a_spreadsheet(tmp_path: Path) -> None:
    """It puts the mark of UTF-8 before the first class."""
    news(tmp_path, [(k, "Oil", "up") for k in (1, 2)], [(2, "Oil", "down")])
    for path in tmp_path.glob("*.csv"):
        path.write_text(f"\ufeff{path.read_text('utf-8')}", "utf-8")
    data = AGNews(str(tmp_path), num_clients=2)
    data.setup()
    assert data.y_train.tolist() == [0, 1] and data.y_test.tolist() == [1]


def test_ag_news(tmp_path: Path) -> None:
    train = [(k, "Oil up, again", "Prices rise; oil, oil.") for k in (1, 2, 3, 4)] + [(3, "Quiet", "day")]
    home = news(tmp_path, train, [(4, "Robots", 'say ""hi""'), (1, "Oil", "down")])
    data = AGNews(home, max_length=6, num_clients=5)
    with pytest.warns(UserWarning, match="AGNews: 5 training and 2 test samples, not the 120000 and 7600"):
        data.setup()
    tokens = data.vocabulary
    assert list(tokens)[:3] == ["<unk>", "oil", ","] and {"down", "hi"} < set(tokens)  # of the test texts, too
    assert data.y_train.tolist() == [0, 1, 2, 3, 2] and data.y_test.tolist() == [3, 0]
    x = torch.as_tensor(data.x_train)
    assert x.dtype == torch.int64 and x.shape == (5, 6)
    assert x[0].tolist() == [tokens[t] for t in ("oil", "up", ",", "again", "prices", "rise")]
    assert x[4].tolist() == [tokens["quiet"], tokens["day"], 0, 0, 0, 0]

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.fc = nn.Embedding(len(tokens), 4, padding_idx=0), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.embedding(x).mean(1))  # type: ignore[no-any-return]

    assert "server/test/acc" in run(data, Bag(), tmp_path).metrics


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("5", "a", "b"), r"train.csv': line 2 is not class \(1 to 4\), title, description; get it again from http"),
        (("1",), r"train.csv': line 2 is not class"),
    ],
)
def test_broken_news(row: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        AGNews(news(tmp_path, [(1, "a", "b"), row], [(1, "a", "b")])).setup()
    (tmp_path / "train.csv").unlink()
    with pytest.raises(UserError, match=r"'train.csv' is missing; expected there train.csv, test.csv, from http"):
        AGNews(str(tmp_path)).setup()
    with pytest.raises(UserError, match="max_length = 0: give a whole number"):
        AGNews(max_length=0)


# Landmarks


def landmarks(folder: Path, nested: bool) -> list[str]:
    """Writes five photographs of three users, of two sizes; two to test."""
    names = [f"{i}a{i:014x}" for i in range(7)]
    photographs = {name: np.full((20 + i, 30, 3), 30 * i, np.uint8) for i, name in enumerate(names)}
    users = ["10", "2", "10", "7", "2"]
    rows = [(user, name, i % 3) for i, (user, name) in enumerate(zip(users, names, strict=False))]
    generated.landmarks(folder, photographs, rows, [(names[5], 2), (names[6], 0)], nested)
    return names


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.filterwarnings("ignore:Landmarks")
def test_landmarks(nested: bool, tmp_path: Path) -> None:
    names = landmarks(tmp_path, nested)
    data = Landmarks(str(tmp_path), image_size=8, num_clients=3, batch_size=2)
    data.setup()
    assert [part.tolist() for part in data.clients] == [[1, 4], [3], [0, 2]]  # users 2, 7, 10
    assert data.y_train.tolist() == [0, 1, 2, 0, 1] and data.y_test.tolist() == [2, 0]
    x, _ = next(data.eval_batches("test"))
    grey = (x.mean((1, 2, 3)) * 255).round().tolist()
    assert grey == [150, 180] and x.shape == (2, 3, 8, 8)  # a flat JPEG is exact
    run(data, nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), tmp_path)
    with pytest.raises(UserError, match=r"data.num_clients = 4, but Natural has 3 clients; set it to 3"):
        Landmarks(str(tmp_path), image_size=8, num_clients=4).setup()
    photograph = next((tmp_path / "images").rglob(f"{names[6]}.jpg"))
    photograph.write_bytes(b"rubbish")
    with pytest.raises(UserError, match=rf"^data.images = '{photograph}' is not a readable image"):
        list(data.eval_batches("test"))
    photograph.unlink()
    message = rf"images': 1 of 2 photographs are missing, such as '[^\n]*{names[6]}.jpg'; expected there <image_id>.jpg"
    with pytest.raises(UserError, match=message):
        Landmarks(str(tmp_path), num_clients=3).setup()
    (tmp_path / "test.csv").write_text("image_id,class\nabc,x\n")
    with pytest.raises(UserError, match=r"test.csv': line 2 is not image_id, class; get it again from https://github"):
        Landmarks(str(tmp_path), num_clients=3).setup()
    (tmp_path / "test.csv").unlink()
    with pytest.raises(UserError, match=r"'test.csv' is missing; expected there federated_train.csv, test.csv, from"):
        Landmarks(str(tmp_path)).setup()


# Any torch data set


class Pairs(Dataset):  # type: ignore[type-arg]
    """Images with a label each, counted when they are read."""

    def __init__(self, images: Any, labels: Any) -> None:
        self.images, self.labels, self.reads = images, labels, 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        self.reads += 1
        return self.images[index], int(self.labels[index])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["array", "tensor", "PIL"])
def test_any_dataset_with_clients(kind: str, stream: bool, tmp_path: Path) -> None:
    as_kind = {"array": lambda x: x, "tensor": torch.from_numpy, "PIL": Image.fromarray}[kind]
    train = Pairs([as_kind(x) for x in IMAGES[:6]], [0, 1, 2, 0, 1, 2])
    test = Pairs([as_kind(x) for x in IMAGES[6:8]], [1, 0])
    data = FromDataset(train, test, ["ann", "bob", "ann", "bob", "ann", "cy"], stream=stream, batch_size=2)
    data.setup()
    assert [part.tolist() for part in data.clients] == [[0, 2, 4], [1, 3], [5]]
    x, y = next(data.eval_batches([4, 1]))
    np.testing.assert_allclose(x.movedim(1, -1).numpy(), IMAGES[[4, 1]] / 255, rtol=1e-6)
    assert y.tolist() == [1, 1]
    before = train.reads
    run(data, nn.Sequential(nn.Flatten(), nn.Linear(3072, 3)), tmp_path)
    assert (train.reads > before) is stream


@pytest.mark.parametrize("column", [list, np.array])
def test_a_client_has_its_own_part_of_the_test_set(column: Callable[[list[int]], Any]) -> None:
    train, test = Pairs(IMAGES[:6], [0, 1] * 3), Pairs(IMAGES[6:11], [0, 1, 1, 0, 0])
    # user 3 trains nowhere, 2 tests nothing
    data = FromDataset(train, test, column([10, 2, 2, 10, 7, 7]), column([10, 7, 3, 10, 7]))
    data.setup()
    assert [part.tolist() for part in data.clients] == [[1, 2], [4, 5], [0, 3]]
    indices = [data.client_test_indices(client) for client in range(3)]
    assert [None if part is None else part.tolist() for part in indices] == [[], [1, 4], [0, 3]]
    plain = FromDataset(train, test, num_clients=2)
    plain.setup()
    assert plain.client_test_indices(0) is None


def test_targets_of_torchvision_spare_reading(tmp_path: Path) -> None:
    for k, image in enumerate(IMAGES[:20]):
        path = tmp_path / "ab"[k % 2] / f"{k}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path)
    reads: list[str] = []

    def loader(path: str) -> Any:
        reads.append(path)
        return Image.open(path)

    for options, labels in (({}, [0, 1]), ({"target_transform": lambda y: 1 - y}, [1, 0])):
        reads.clear()
        train = datasets.ImageFolder(str(tmp_path), loader=loader, **options)
        data = FromDataset(train, Pairs(IMAGES[6:8], [1, 0]), num_clients=2, stream=True)
        data.setup()
        assert data.y_train.tolist() == [y for y in labels for _ in range(10)]
        assert len(reads) == (3 if not options else 21) + 8


def test_labels_that_torchvision_keeps_otherwise() -> None:
    """MNIST has a tensor of them, QMNIST eight columns; a list of pairs has none."""
    for kind, targets in ((datasets.MNIST, torch.arange(20) % 3), (datasets.QMNIST, torch.arange(20)[:, None] % 3)):
        train = kind.__new__(kind)
        train.__dict__ |= {"data": torch.zeros(20, 28, 28, dtype=torch.uint8), "targets": targets, "compat": True}
        train.transform = train.target_transform = None
        data = FromDataset(train, [(Image.new("L", (28, 28)), 2)] * 4, num_clients=2)
        data.setup()
        assert data.y_train.tolist() == [k % 3 for k in range(20)] and data.y_test.tolist() == [2] * 4


def test_the_class_of_qmnist_is_the_first_of_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    def dataset(self: TorchvisionData, train: bool, download: bool = False) -> Any:
        qmnist = datasets.QMNIST.__new__(datasets.QMNIST)
        images = torch.randint(256, (20, 28, 28), dtype=torch.uint8)
        qmnist.__dict__ |= {"data": images, "targets": torch.arange(20)[:, None].repeat(1, 8) % 3, "compat": True}
        return qmnist

    monkeypatch.setattr(TorchvisionData, "_dataset", dataset)
    data = TorchvisionData("QMNIST", num_clients=2)
    data.setup()
    assert data.y_train.tolist() == [k % 3 for k in range(20)] and data.input_shape == (1, 28, 28)


def test_labels_are_those_of_the_samples() -> None:
    """A data set may change a few of those in its ``targets``."""
    train = Pairs([*IMAGES[:6]] * 10, [0, 1] * 30)
    train.targets = [1, *train.labels[1:]]  # type: ignore[attr-defined]
    data = FromDataset(train, Pairs(IMAGES[6:8], [1, 0]), num_clients=2, stream=True)
    data.setup()
    assert data.y_train.tolist() == [0, 1] * 30


def test_colours_of_a_palette_are_colours() -> None:
    images = [Image.fromarray(x) for x in IMAGES[:4]]
    quantized = [image.quantize(200) for image in images]
    data = FromDataset(Pairs(quantized, [0, 1] * 2), Pairs(images, [0, 1] * 2), num_clients=2)
    data.setup()
    for stored, image in zip(data.x_train.numpy(), quantized, strict=True):
        np.testing.assert_array_equal(stored, np.asarray(image.convert("RGB")).transpose(2, 0, 1))


def test_images_of_one_bit_are_black_and_white_and_deeper_ones_are_refused() -> None:
    grey = [Image.fromarray(x).convert("L") for x in IMAGES[:4]]
    data = FromDataset(*[Pairs([image.convert("1") for image in grey], [0, 1] * 2)] * 2, num_clients=2)
    data.setup()
    assert data.x_train.dtype == torch.uint8 and {0, 255} == {*data.x_train.unique().tolist()}
    for mode in ("I", "F", "I;16"):
        pairs = Pairs([image.convert("I").convert(mode) for image in grey], [0, 1] * 2)
        with pytest.raises(UserError, match=rf"^an image has more than 8 bits a channel \({mode}\); convert it"):
            FromDataset(pairs, pairs, num_clients=2).setup()


def test_who_has_a_sample_is_said_once() -> None:
    train, test = Pairs(IMAGES[:6], [0, 1] * 3), Pairs(IMAGES[6:8], [1, 0])
    with pytest.raises(
        UserError, match=r"^data\.partition = Dirichlet: the data say whose each sample is; leave it out$"
    ):
        FromDataset(train, test, [0, 0, 1, 1, 2, 2], partition=Dirichlet(0.1))
    with pytest.raises(UserError, match=r"^data\.num_clients = 30: the data name 3 clients; leave it out$"):
        FromDataset(train, test, [0, 0, 1, 1, 2, 2], num_clients=30)
    pairs = [(IMAGES[:2], [0, 1])] * 2
    with pytest.raises(UserError, match=r"^num_clients = 3: client_arrays has 2; leave it out$"):
        Arrays(client_arrays=pairs, test=pairs[0], num_clients=3)
    with pytest.raises(UserError, match=r"^partition: client_arrays is one; leave it out$"):
        Arrays(client_arrays=pairs, test=pairs[0], num_clients=2, partition=Dirichlet(0.1))
    with pytest.raises(UserError, match=r"^data\.dataset_kwargs: target_transform has no effect"):
        TorchvisionData("MNIST", dataset_kwargs={"target_transform": int})


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        yield IMAGES[0], 0


def test_users_of_two_columns_with_other_forms_of_a_number() -> None:
    """A column of a table that once held a missing value is one of floats."""
    good = Pairs(IMAGES[:4], [0, 1, 0, 1])
    for users, test_users in (((3, 4, 3, 4), (4.0, 3.0, 5.0, 4.0)), ((3.0, 4.0, 3.0, 4.0), (4, 3, 5, 4))):
        data = FromDataset(good, good, np.array(users), np.array(test_users))
        data.setup()
        assert data.test_clients.tolist() == [1, 0, -1, 1]


class Shaken(Pairs):
    """Pairs behind a random transform."""

    def __getitem__(self, i: int) -> Any:
        image, label = super().__getitem__(i)
        return torch.as_tensor(np.asarray(image)).float() + torch.rand(()), label


@pytest.mark.parametrize("stream", [False, True])
def test_a_random_transform_is_a_warning(stream: bool) -> None:
    train, test = Shaken(IMAGES[:6], [0, 1] * 3), Pairs(IMAGES[6:8], [1, 0])
    with pytest.warns(UserWarning, match="^train: a sample differs when it is read again, as by a random transform;"):
        FromDataset(train, test, num_clients=2, stream=stream).load()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FromDataset(test, test, num_clients=2, stream=stream).load()


def test_faulty_datasets() -> None:
    good = Pairs(IMAGES[:4], [0, 1, 0, 1])
    with pytest.raises(UserError, match="clients: 3 for 4 samples; give one per sample"):
        FromDataset(good, good, [0, 1, 1])
    with pytest.raises(UserError, match="test_clients: 1 for 4 samples; give one per sample"):
        FromDataset(good, good, [0, 1, 1, 0], [0])
    with pytest.raises(UserError, match=r"^train: a Endless has no length; give a map-style data set of pairs$"):
        FromDataset(Endless(), good, num_clients=2)
    odd = Pairs([*IMAGES[:3], IMAGES[3, :5]], [0, 1, 0, 1])
    with pytest.raises(UserError, match=r"train: sample 3 is uint8 \(5, 32, 3\), the first is uint8 \(32, 32, 3\)"):
        FromDataset(odd, good, num_clients=2).setup()
    with pytest.raises(UserError, match="test: no samples"):
        FromDataset(good, Pairs([], []), num_clients=2).setup()


# Documentation


@pytest.mark.slow
def test_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    generated.leaf(tmp_path / "data" / "femnist", "FEMNIST")
    names: dict[str, Any] = {}
    summaries = []
    for block in blocks:
        exec(block, names)
        if "data = " in block:
            data = names["data"]
            data.setup()
            summaries.append((type(data).__name__, data.num_clients, data.client_sizes.tolist()))
            assert len(block.strip().splitlines()) < 15
    assert summaries[:2] == [("HuggingFace", 3, [24] * 3), ("FEMNIST", 3, [4, 3, 5])]
    assert summaries[2:] == [
        ("Arrays", 5, [10] * 5),
        ("FromDataset", 3, [20] * 3),
        ("Sensors", 2, [10, 20]),
        ("Arrays", 2, [20, 28]),
    ]


def test_yaml_of_the_page_is_a_config() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        config = yaml.safe_load(block)["data"]
        settings = config["init_args"].pop("augment", {"class_path": "Augment", "init_args": {}})
        augment = getattr(fl_lightning, settings["class_path"])(**settings["init_args"])
        assert getattr(fl_lightning, config["class_path"])(**config["init_args"], augment=augment).augment is augment
