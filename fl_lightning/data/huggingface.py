"""Data sets of Hugging Face's ``datasets``."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.core import Fraction, Size, UserError, ensure, folded, imported, numpy_generator, require
from fl_lightning.data.module import CLIENTS, FederatedDataModule
from fl_lightning.data.partition import Natural, stratified
from fl_lightning.data.published import basic_english, numbered, vocabulary
from fl_lightning.data.streaming import IndexedSamples

KINDS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
"""Files of one split, and the name of their format in ``datasets``."""


class HuggingFace(FederatedDataModule):
    """A data set of Hugging Face's ``datasets``: images, numbers or text, if known with the client of each sample.

    Images are read once, or with ``stream`` whenever they are needed. Text is tokenized as in AG News, with the
    vocabulary of the training texts; 0 is both padding and unknown tokens. Columns of single numbers become floats;
    a column of lists keeps its dtype, so integers are tokens and uint8 are pixels. Nothing is downloaded.

    Args:
        dataset: From Python a ``Dataset``, or splits by name such as a ``DatasetDict``. Or a path: a folder that
            ``save_to_disk`` wrote; a folder of Parquet, CSV or JSON files, with ``train`` and ``test`` in their names;
            one such file.
        inputs: Column of the inputs; or several of numbers, which become one vector, or of text, which is joined.
        target: Column of the targets, or several of numbers. Text stands for classes, in alphabetical order; with
            ``task: multilabel`` a list of class labels stands for the labels of the sample.
        client: Column with the client of each sample, which sets the partition and the number of clients; in the
            test split it names the client of each test sample. Null: samples are divided by ``partition``.
        train: Name of the training split.
        test: Name of the test split.
        test_fraction: Share of the training split that is the test set (of each client, if these are known), in place
            of a test split.
        max_length: Tokens of a text; longer ones are cut.
        **kwargs: As for FederatedDataModule.

    Attributes:
        vocabulary: Number of each token, if the inputs are text (after loading).

    Raises:
        UserError: If (on loading) the package, the data, a split or a column is missing, or a column holds none of the
            above.
    """

    vocabulary: dict[str, int]

    def __init__(
        self,
        dataset: Any,
        inputs: list[str] | str,
        target: list[str] | str = "label",
        client: str | None = None,
        train: str = "train",
        test: str = "test",
        test_fraction: Fraction = 0.0,
        max_length: Size = 200,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.dataset, self.client = dataset, client
        self.inputs = [inputs] if isinstance(inputs, str) else inputs
        self.targets = [target] if isinstance(target, str) else target
        for key, names in (("inputs", self.inputs), ("target", self.targets)):
            require(len(names) > 0, f"data.{key}", names, "name a column")
        self.train, self.test, self.test_fraction, self.max_length = train, test, test_fraction, max_length

    def load(self) -> tuple[Any, Any, Any, Any]:
        """See :class:`FederatedDataModule`."""
        train, test = self._parts(_splits(self.dataset))
        columns = [("inputs", name) for name in self.inputs] + [("target", name) for name in self.targets]
        parts = {"train": train, "test": test}
        for part in parts.values():
            for key, name in columns:
                _check_column(part, name, key)
        for name in self.targets:
            features = (part.features[name] for part in (train, test))
            known, other = (
                getattr(getattr(feature, "feature", None) or feature, "names", None) for feature in features
            )
            require(known == other, "data.target", name, f"the test data have other classes, {other}, not {known}")
        kinds = [(f"{name} of {split}", _kind(part, name)) for split, part in parts.items() for name in self.inputs]
        odd = next((f"{column} {kind}" for column, kind in kinds if kind != kinds[0][1]), None)
        remedy = f"{kinds[0][0]} holds {kinds[0][1]}, {odd}; choose columns of one kind"
        require(odd is None, "data.inputs", ", ".join(self.inputs), remedy)
        if self.client is not None:
            users = test[self.client] if self.client in test.column_names else None
            self.set_clients(train[self.client], users, None if self.num_clients == CLIENTS else self.num_clients)
        inputs, targets = self._input_reader(train), self._target_reader(train)
        return inputs(train), targets(train), inputs(test), targets(test)

    def _parts(self, splits: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns training and test data."""
        wanted = {"train": self.train} if self.test_fraction else {"train": self.train, "test": self.test}
        for key, name in wanted.items():
            remedy = "; or set data.test_fraction" if key == "test" else ""
            require(name in splits, f"data.{key}", name, f"no such split; there are {', '.join(splits)}{remedy}")
            ensure(len(splits[name]) != 0, f"{key}: no samples; the {key} data must not be empty")
        train = splits[self.train]
        if self.client is not None:
            _check_column(train, self.client, "client")
        if not self.test_fraction:
            return train, splits[self.test]
        n = len(train)
        users = [""] * n if self.client is None else [*map(str, train[self.client])]
        rng = numpy_generator(0, "Hugging Face test set")  # independent of data.seed
        rows = stratified(Natural(users).clients(users), round(self.test_fraction * n), rng)
        problem = f"holds out {len(rows)} of {n} samples; leave some for both parts"
        require(0 < len(rows) < n, "data.test_fraction", self.test_fraction, problem)
        return train.select(np.setdiff1d(np.arange(n), rows)), train.select(rows)

    def _input_reader(self, train: Any) -> Callable[[Any], Any]:
        """Returns a function that reads the inputs of a part, chosen by the columns of the training data."""
        name, *others = self.inputs
        kind = _kind(train, name)
        if kind == "images":
            require(
                not others, "data.inputs", ", ".join(self.inputs), "images do not join with other columns; give one"
            )
            return lambda part: _images("train" if part is train else "test", part, name)
        if kind != "text":
            return lambda part: _numbers(part, self.inputs, "inputs")
        known = self.vocabulary = vocabulary(_texts(train, self.inputs))
        return lambda part: numbered(_texts(part, self.inputs), known, self.max_length)

    def _target_reader(self, train: Any) -> Callable[[Any], NDArray[Any]]:
        """Returns a function that reads the targets of a part."""
        import datasets

        if len(self.targets) > 1:
            return lambda part: np.stack([_array(part, name, "target") for name in self.targets], 1)
        name = self.targets[0]
        kind = train.features[name]
        inner = getattr(kind, "feature", None)
        if isinstance(inner, datasets.ClassLabel):
            return lambda part: _hot(name, part[name], inner.num_classes)
        if _is_text(kind) and self.task.by_class:
            classes = sorted({*map(str, train[name])})
            return lambda part: _places(name, part[name], classes)
        self.classes = self.classes or getattr(kind, "num_classes", None)
        return lambda part: _array(part, name, "target")


def _splits(dataset: Any) -> Mapping[str, Any]:
    """Returns splits by name, from a data set, from splits, or from a path."""
    datasets = imported("datasets", "data = HuggingFace: needs datasets; pip install 'fl-lightning[huggingface]'")
    dataset = _from_path(Path(dataset)) if isinstance(dataset, str | os.PathLike) else dataset
    splits = {"train": dataset} if isinstance(dataset, datasets.Dataset) else dataset
    fits = isinstance(splits, Mapping) and all(isinstance(part, datasets.Dataset) for part in splits.values())
    require(fits, "data.dataset", f"a {type(dataset).__name__}", "give a path, a Dataset, or Datasets by name of split")
    return splits


def _from_path(path: Path) -> Any:
    import datasets

    forms = "give what save_to_disk wrote, or Parquet, CSV or JSON files"
    require(path.exists(), "data.dataset", f"'{path}'", f"no such folder or file; {forms}")
    require(path.is_dir() or path.suffix in KINDS, "data.dataset", f"'{path}'", f"unknown format; {forms}")
    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return datasets.load_from_disk(str(path))
        if path.is_dir():
            return datasets.load_dataset(str(path))
        return datasets.load_dataset(KINDS[path.suffix], data_files=str(path))
    except Exception as error:  # many packages raise their own
        raise UserError(
            f"data.dataset = '{path}': cannot be read ({folded(error.__cause__ or error):.120}); {forms}"
        ) from None


def _check_column(part: Any, column: str, key: str) -> None:
    """Refuses an unknown column, and missing values, which would become numbers or names; images are checked later."""
    import pyarrow.compute

    columns = part.column_names
    require(column in columns, f"data.{key}", column, f"no such column; there are {', '.join(columns)}")
    if key == "inputs" and _kind(part, column) == "images":
        return
    values = part.select_columns([column]).with_format("arrow")[:][column]
    nan = key == "client" and pyarrow.types.is_floating(values.type)
    missing = pyarrow.compute.sum(values.is_null(nan_is_null=nan)).as_py()
    while pyarrow.types.is_nested(values.type) and not pyarrow.types.is_struct(values.type):
        values = pyarrow.compute.list_flatten(values)
        missing += values.null_count
    lacking = "1 value is" if missing == 1 else f"{missing} values are"
    require(missing == 0, f"data.{key}", column, f"{lacking} missing; leave out their rows by filter")


def _kind(part: Any, column: str) -> str:
    """Returns what a column holds: images, text, or numbers."""
    import datasets

    feature = part.features[column]
    return "images" if isinstance(feature, datasets.Image) else "text" if _is_text(feature) else "numbers"


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _texts(part: Any, columns: Sequence[str]) -> list[list[str]]:
    rows = zip(*(part[name] for name in columns), strict=True)
    return [basic_english(" ".join(row)) for row in rows]


def _images(split: str, part: Any, column: str) -> IndexedSamples:
    images = part.select_columns([column])
    return IndexedSamples(split, len(images), lambda i: images[i][column], images[0][column])


def _numbers(part: Any, columns: Sequence[str], key: str) -> NDArray[Any]:
    """Returns a column of arrays unchanged, or columns of numbers as vectors of floats."""
    arrays = [_array(part, name, key) for name in columns]
    if len(arrays) == 1 and arrays[0].ndim > 1:
        return arrays[0]
    flat = next((name for name, array in zip(columns, arrays, strict=True) if array.ndim != 1), None)
    require(flat is None, f"data.{key}", flat, "holds lists, which do not join with other columns; give it alone")
    return np.stack(arrays, 1).astype(np.result_type(*arrays, np.float32))


def _array(part: Any, column: str, key: str) -> NDArray[Any]:
    """Returns a column of numbers, or of lists of numbers, as an array."""
    leaf = part.features[column]
    while (inner := getattr(leaf, "feature", None)) is not None:
        leaf = inner
    try:
        dtype = np.dtype(leaf.dtype)
        return np.asarray(part.with_format("numpy", columns=[column], dtype=dtype)[:][column], dtype)
    except (TypeError, ValueError, AttributeError):
        problem = "neither images nor text nor numbers" if key == "inputs" else "no numbers, class labels or text"
        raise UserError(
            f"data.{key} = {column}: {part.features[column]} holds {problem}, or its rows differ in length; choose "
            "another column, or prepare it with map"
        ) from None


def _places(column: str, labels: Iterable[Any], classes: Sequence[str]) -> NDArray[np.int64]:
    """Converts text to positions in a sorted list of classes, ``(N,)``."""
    texts = [str(label) for label in labels]
    unknown = min({*texts} - {*classes}, default=None)
    require(unknown is None, "data.target", column, f"'{unknown}' occurs in the test data only; leave it out there")
    return np.searchsorted(classes, texts)


def _hot(column: str, rows: Sequence[Sequence[int]], classes: int) -> NDArray[np.float32]:
    """Converts lists of labels to zeros and ones, ``(N, classes)``."""
    hot = np.zeros((len(rows), classes), np.float32)
    for row, labels in zip(hot, rows, strict=True):
        require(min(labels, default=0) >= 0, "data.target", column, "a label is negative; leave it out of its list")
        row[labels] = 1
    return hot
