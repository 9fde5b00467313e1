"""Data sets of Hugging Face's ``datasets``, made here and written to small files."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import IID, Arrays, FedAvg, FederatedTrainer, FromDataset, HuggingFace, Natural, UserError
from fl_lightning.core.rng import numpy_generator
from tests.runs import cli, newest

datasets = pytest.importorskip("datasets")
RNG = numpy_generator(0, "test Hugging Face")
USERS = ["9", "10", "9", "7", "10", "9", "7", "9", "10", "7", "7", "9"]
TEST_USERS = ["10", "8", "9", "9"]
PIXELS = RNG.integers(0, 256, (16, 6, 6, 3), dtype=np.uint8)
NUMBERS = RNG.normal(size=(16, 5))
LABELS = np.arange(16) % 3


def part(rows: slice, users: list[str]) -> Any:
    value, listed = datasets.Value, datasets.List
    types = {
        "image": datasets.Image(), "vector": listed(value("float64")), "grid": datasets.Array2D((5, 1), "float64"),
        "a": value("float64"), "n": value("int32"), "text": value("string"), "who": value("string"),
        "label": datasets.ClassLabel(names=["x", "y", "z", "w"]), "name": value("string"),
        "tags": listed(datasets.ClassLabel(names=["p", "q", "r"])), "ragged": listed(value("int64")),
    }  # fmt: skip
    k = LABELS[rows]
    columns = {
        "image": [Image.fromarray(x) for x in PIXELS[rows]], "vector": NUMBERS[rows].tolist(),
        "grid": NUMBERS[rows][:, :, None].tolist(), "a": NUMBERS[rows, 0].tolist(), "n": (2 * k).tolist(),
        "text": [("Oil, up", "oil", "day")[i] for i in k], "who": users, "label": k.tolist(),
        "name": [("rain", "snow", "hail")[i] for i in k], "tags": [([0], [2, 1], [])[i] for i in k],
        "ragged": [[1] * i for i in k],
    }  # fmt: skip
    return datasets.Dataset.from_dict(columns, features=datasets.Features(types))


def splits() -> Any:
    return datasets.DatasetDict(train=part(slice(12), USERS), test=part(slice(12, 16), TEST_USERS))


def written(form: str, folder: Path) -> Any:
    """Returns the same data set: as an object, by ``save_to_disk``, or as a file for each split."""
    data = splits()
    if form == "object":
        return data
    path = folder / "data"
    if form == "disk":
        data.save_to_disk(str(path))
        return str(path)
    path.mkdir()
    for name, split in data.items():
        getattr(split.select_columns(["a", "n", "label", "who"]), f"to_{form}")(str(path / f"{name}.{form}"))
    return str(path)


def weights(data: Any, net: nn.Module, folder: Path) -> torch.Tensor:
    """Returns the weights after three rounds of all clients."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    trainer = FederatedTrainer(
        max_rounds=3, clients_per_round=2, engine="sequential", accelerator="cpu", callbacks=[], loggers=[],
        default_root_dir=str(folder / "runs"), enable_progress_bar=False,
    )  # fmt: skip
    return trainer.fit(FedAvg(net=net), data).global_model


def by_user(x: Any, y: Any) -> Arrays:
    """Returns arrays of the users in the order of their numbers."""
    users = np.array(USERS)
    parts = [(x[:12][users == user], y[:12][users == user]) for user in ("7", "9", "10")]
    return Arrays(client_arrays=parts, test=(x[12:], y[12:]), batch_size=2)


@pytest.mark.parametrize(
    ("form", "inputs"),
    [("object", "vector"), ("object", "image"), ("disk", "image"), ("parquet", "an"), ("csv", "an"), ("json", "an")],
)
def test_equals_the_same_arrays(form: str, inputs: str, tmp_path: Path) -> None:
    """It does to the bit, after three rounds over clients by a column."""
    x = {"vector": NUMBERS, "image": PIXELS, "an": np.stack([NUMBERS[:, 0], 2.0 * LABELS], 1)}[inputs]
    columns: Any = ["a", "n"] if inputs == "an" else inputs
    net = nn.Sequential(nn.Flatten(), nn.Linear(x[0].size, 4))
    data = HuggingFace(written(form, tmp_path), columns, client="who", batch_size=2, stream=inputs == "image")
    assert torch.equal(weights(data, net, tmp_path), weights(by_user(x, LABELS), net, tmp_path))
    assert data.client_sizes.tolist() == [4, 5, 3]
    shares = [data.client_test_indices(client) for client in range(3)]
    assert [share.tolist() for share in shares if share is not None] == [[], [2, 3], [0]]


HOT = np.array([[1, 0, 0], [0, 1, 1], [0, 0, 0]], np.float32)[LABELS]


@pytest.mark.parametrize(
    ("options", "x", "y", "classes"),
    [
        ({"inputs": "grid"}, NUMBERS[:, :, None], LABELS, 4),
        ({"inputs": "n", "target": "n"}, 2.0 * LABELS[:, None], 2 * LABELS, 5),
        ({"inputs": "a", "target": "name"}, NUMBERS[:, :1], np.array([1, 2, 0])[LABELS], 3),  # hail, rain, snow
        ({"inputs": "a", "target": "a", "task": "regression"}, NUMBERS[:, :1], NUMBERS[:, :1], 1),
        ({"inputs": "a", "target": ["a", "n"], "task": "regression"}, NUMBERS[:, :1],
         np.stack([NUMBERS[:, 0], 2.0 * LABELS], 1), 2),
        ({"inputs": "a", "target": "tags", "task": "multilabel"}, NUMBERS[:, :1], HOT, 3),
        # in the training texts "oil" is most frequent, then "," "day" "up" by the alphabet
        ({"inputs": "text", "max_length": 2}, np.array([[1, 2], [1, 0], [3, 0]])[LABELS], LABELS, 4),
        ({"inputs": ["text", "name"], "max_length": 9}, None, LABELS, 4),
    ],
)  # fmt: skip
def test_columns(options: Any, x: Any, y: Any, classes: int) -> None:
    data = HuggingFace(splits(), num_clients=3, **options)
    data.setup()
    assert data.num_classes == classes and data.client_test_indices(0) is None
    np.testing.assert_array_equal(torch.cat([data.y_train, data.y_test]), y)
    if x is not None:
        np.testing.assert_array_equal(torch.cat([torch.as_tensor(data.x_train), torch.as_tensor(data.x_test)]), x)
    else:
        assert {"oil", "snow"} < data.vocabulary.keys()


def test_a_share_of_each_client_is_the_test_set() -> None:
    data = HuggingFace(splits()["train"], "a", client="who", test_fraction=0.5)
    data.setup()
    tested = torch.tensor([len(data.client_test_indices(client)) for client in range(3)])  # type: ignore[arg-type]
    assert (data.client_sizes + tested).tolist() == [4, 5, 3] and tested.sum() == 6
    assert ((data.client_sizes - tested).abs() <= 1).all()
    values = torch.cat([torch.as_tensor(data.x_train), torch.as_tensor(data.x_test)]).flatten()
    np.testing.assert_array_equal(values.sort().values, np.sort(NUMBERS[:12, 0]))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nowhere", {"inputs": "a"}, "data.dataset = 'nowhere': no such folder or file; give what save_to_disk wrote"),
        ("odd.txt", {"inputs": "a"}, "data.dataset = 'odd.txt': unknown format; give what"),
        ("broken.json", {"inputs": "a"}, "data.dataset = 'broken.json': cannot be read "),
        (3, {"inputs": "a"}, "data.dataset = a int: give a path, a Dataset, or"),
        (None, {"inputs": "pixels"}, "data.inputs = pixels: no such column; there are image, vector"),
        (None, {"inputs": "a", "target": "y"}, "data.target = y: no such column; there are image"),
        (None, {"inputs": "a", "client": "user"}, "data.client = user: no such column; there are image"),
        (None, {"inputs": "a", "test": "dev"}, "data.test = dev: no such split; there are train, test; or set data.te"),
        (None, {"inputs": "ragged"}, "data.inputs = ragged: List.* or its rows differ in length; choose another"),
        (None, {"inputs": ["a", "vector"]}, "data.inputs = vector: holds lists, which do not join with other columns"),
        (None, {"inputs": "a", "target": "image"}, "data.target = image: Image.* holds no numbers, class labels or"),
        (None, {"inputs": "a", "target": "a"}, "y_train: labels are torch.float64; convert them to integers 0, 1"),
        (None, {"inputs": "a", "target": "who"}, "data.target = who: '8' occurs in the test data only; leave it out"),
    ],
)
def test_errors(source: Any, options: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.txt").touch()
    Path("broken.json").write_text("{")
    with pytest.raises(UserError, match=rf"^{message}[^\n]*$"):
        HuggingFace(splits() if source is None else source, num_clients=2, **options).setup()


FEW = {"a": [0.5, 1.5, 2.5], "n": [1, None, 3], "label": [0, 1, 0], "name": ["x", None, "y"]}
TAGGED = {"a": [0.5, 1.5, 2.5], "tags": [[0], [1], [1, 0]]}


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (FEW, {"inputs": "n"}, "data.inputs = n: 1 value is missing; leave out their rows by filter"),
        (FEW, {"inputs": "a", "target": "name"}, "data.target = name: 1 value is missing"),
        (FEW, {"inputs": "a", "client": "name"}, "data.client = name: 1 value is missing"),
        ({**FEW, "n": [[1, 2], [3, None], [5, 6]]}, {"inputs": "n"}, "data.inputs = n: 1 value is missing"),
        (TAGGED | {"tags": [[0], None, [1]]}, {"inputs": "a", "target": "tags"}, "data.target = tags: 1 value"),
        (TAGGED | {"tags": [[0], [-1], [1]]}, {"inputs": "a", "target": "tags"}, "data.target = tags: a label is"),
        ({**FEW, "name": ["x", "z", "y"]}, {"inputs": "a", "target": "name", "task": "regression"},
         "data.target = name: Value.* holds no numbers"),
        (FEW, {"inputs": []}, r"data.inputs = \[\]: name a column"),
        (FEW, {"inputs": "name"}, "data.inputs = name: 1 value is missing; leave"),
        (FEW, {"inputs": "a", "client": "name", "test_fraction": 0.4}, "data.client = name: 1 value is missing"),
        (FEW | {"n": [1.0, float("nan"), 2.0]}, {"inputs": "a", "client": "n"}, "data.client = n: 1 value is missing"),
        (FEW | {"name": ["x", "z", "y"]}, {"inputs": ["a", "name"]},
         "data.inputs = a, name: a of train holds numbers, name of train text; choose columns of one kind"),
    ],
)  # fmt: skip
def test_missing_and_odd_values_are_refused(columns: Any, options: Any, message: str) -> None:
    """A missing number would become a number, a missing name the name None, and label -1 the last one."""
    data = datasets.Dataset.from_dict(columns)
    if "tags" in columns:
        options = {"task": "multilabel", **options}
        data = data.cast_column("tags", datasets.List(datasets.ClassLabel(names=["p", "q"])))
    with pytest.raises(UserError, match=rf"^{message}[^\n]*$"):
        HuggingFace({"train": data, "test": data}, num_clients=2, **options).setup()


def test_text_beside_numbers_of_the_test_data_is_refused() -> None:
    train, test = (datasets.Dataset.from_dict({"t": t, "label": [0, 1]}) for t in (["a b", "c"], [1, 2]))
    for pair, kinds in (((train, test), "text, t of test numbers"), ((test, train), "numbers, t of test text")):
        with pytest.raises(
            UserError, match=rf"^data\.inputs = t: t of train holds {kinds}; choose columns of one kind$"
        ):
            HuggingFace(dict(zip(("train", "test"), pair, strict=True)), "t", num_clients=2).setup()


def test_images_go_alone() -> None:
    with pytest.raises(
        UserError, match=r"^data\.inputs = image, image: images do not join with other columns; give one$"
    ):
        HuggingFace(splits(), ["image", "image"], num_clients=2).setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clients": 5}, r"data\.num_clients = 5: the data name 3 clients; leave it out"),
        ({"partition": IID(power=1.0)}, r"data\.partition = IID: the data say whose each sample is; leave it out"),
        ({"partition": Natural([0, 1])}, r"data\.partition = Natural: the data say whose each sample is; leave it out"),
    ],
)
def test_what_the_client_column_says_is_not_said_otherwise(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}$"):
        HuggingFace(splits(), "a", client="who", **options).setup()


def test_splits_with_other_classes_are_refused() -> None:
    data = splits()
    features = data["test"].features.copy()
    features["label"] = datasets.ClassLabel(names=["y", "x", "z", "w"])
    data["test"] = data["test"].cast(features)
    with pytest.raises(UserError, match=r"^data.target = label: the test data have other classes, \['y', 'x'"):
        HuggingFace(data, "a", num_clients=2).setup()


def test_lists_of_labels_with_other_classes_are_refused() -> None:
    def part(names: list[str]) -> Any:
        tags = datasets.Features(
            {"a": datasets.Value("float32"), "tags": datasets.List(datasets.ClassLabel(names=names))}
        )
        return datasets.Dataset.from_dict({"a": [0.0, 1.0], "tags": [[0], [1]]}, features=tags)

    data = {"train": part(["cat", "dog"]), "test": part(["dog", "cat"])}
    with pytest.raises(UserError, match=r"^data.target = tags: the test data have other classes, \['dog', 'cat'\]"):
        HuggingFace(data, "a", "tags", task="multilabel", num_clients=2).setup()


def test_a_share_of_no_sample_is_refused() -> None:
    with pytest.raises(UserError, match=r"^data.test_fraction = 0.01: holds out 0 of \d+ samples; leave some for both"):
        HuggingFace(splits(), "a", test_fraction=0.01, num_clients=2).setup()


def test_class_labels_as_numbers_are_one_number() -> None:
    data = HuggingFace(splits(), "a", task="regression", num_clients=2)
    data.setup()
    assert data.num_classes == 1


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = splits()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        UserError, match=r"^data = HuggingFace: needs datasets; pip install 'fl-lightning\[huggingface\]'$"
    ):
        HuggingFace(rows, "a", num_clients=2).setup()


def test_rows_as_pairs_are_refused_by_name() -> None:
    rows = splits()
    with pytest.raises(UserError, match=r"^train: samples are dicts with keys image, [^\n]*; use HuggingFace, or wrap"):
        FromDataset(rows["train"], rows["test"], num_clients=2).setup()


def test_what_is_no_data_set_of_pairs_is_refused() -> None:
    x = torch.zeros(4, 2)
    for source in (DataLoader(TensorDataset(x, x)), TensorDataset(x), x.numpy()):
        with pytest.raises(
            UserError, match=r"^train: a \w+ has no pairs \(x, label\); give a map-style data set of pairs"
        ):
            FromDataset(source, source, num_clients=2).setup()


def test_from_the_command_line(tmp_path: Path) -> None:
    """The run has several input columns, and the client of each sample."""
    path = written("csv", tmp_path)
    cli(
        "fit", "--model=FedAvg", "--model.net=FullyConnected", "--model.net.in_features=2", "--model.net.hidden=[]",
        "--model.net.num_classes=3", "--data=HuggingFace", f"--data.dataset={path}", "--data.inputs=[a, n]",
        "--data.client=who", "--trainer.max_rounds=1", "--trainer.clients_per_round=3", "--trainer.accelerator=cpu",
        "--trainer.engine=sequential", "--trainer.enable_progress_bar=false", f"--trainer.default_root_dir={tmp_path}",
    )  # fmt: skip
    assert "server/test/acc" in (newest(tmp_path) / "metrics.csv").read_text()


@pytest.mark.parametrize("stored", ["in files", "in memory"])
def test_a_streamed_image_of_another_size_is_named_when_it_is_read(stored: str, tmp_path: Path) -> None:
    images = [Image.fromarray(np.full((6, 5 + (i == 8)), i, np.uint8)) for i in range(9)]
    if stored == "in files":
        for i, image in enumerate(images):
            image.save(tmp_path / f"{i}.png")
        images = [str(tmp_path / f"{i}.png") for i in range(9)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    dataset = datasets.Dataset.from_dict({"image": images, "label": [0, 1, 2] * 3}, features=features)
    data = HuggingFace(datasets.DatasetDict(train=dataset, test=dataset), "image", stream=True, num_clients=2)
    data.setup()
    assert len(next(iter(data.eval_batches([0, 1])))[1]) == 2
    file = rf" \({re.escape(str(tmp_path / '8.png'))}\)" if stored == "in files" else ""
    first = r"uint8 \(6, 6\), the first is uint8 \(6, 5\); make all alike"
    with pytest.raises(UserError, match=rf"^train: sample 8{file} is {first}"):
        list(data.eval_batches([7, 8]))


@pytest.mark.parametrize("way", ["by mode", "by orientation", "by a transform"])
def test_streamed_images_that_reading_makes_alike_are_taken(way: str, tmp_path: Path) -> None:
    """Their files differ in size or mode."""
    turned = Image.Exif()
    turned[0x112] = 6  # the tag of the orientation
    Image.new("RGB", (8, 4)).save(tmp_path / "0.png")
    match way:
        case "by mode":
            Image.new("L", (8, 4)).save(tmp_path / "1.png")
        case "by orientation":
            Image.new("RGB", (4, 8)).save(tmp_path / "1.png", exif=turned)
        case _:
            Image.new("RGB", (16, 8)).save(tmp_path / "1.png")
    features = datasets.Features(
        {"image": datasets.Image(mode="RGB" if way == "by mode" else None), "label": datasets.Value("int64")}
    )
    paths = [str(tmp_path / f"{i % 2}.png") for i in range(6)]
    dataset = datasets.Dataset.from_dict({"image": paths, "label": [0, 1, 2] * 2}, features=features)
    if way == "by a transform":
        dataset = dataset.with_transform(resized)
    data = HuggingFace(datasets.DatasetDict(train=dataset, test=dataset), "image", stream=True, num_clients=2)
    data.setup()
    assert data.stored_shape() == (3, 4, 8)
    assert {x.shape[1:] for x, _ in data.eval_batches("train")} == {(3, 4, 8)}


def resized(rows: dict[str, Any]) -> dict[str, Any]:
    images = [image.convert("RGB").resize((8, 4)) for image in rows["image"]] if "image" in rows else None
    return {**rows, "image": images} if images is not None else rows
