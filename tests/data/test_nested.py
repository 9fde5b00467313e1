"""Samples of several inputs: dicts of arrays, from all sources, on all engines, in memory and streamed."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from fl_lightning import Arrays, Augment, FedAvg, FederatedTrainer, FedSAM, FedSMOO, FlatnessMonitor, FromDataset
from fl_lightning.core.errors import UserError
from fl_lightning.core.nested import map_tensors, named_tensors, nested
from fl_lightning.core.rng import generator, numpy_generator
from fl_lightning.data import FederatedDataModule, Samples
from fl_lightning.data.minibatches import blocks
from fl_lightning.flatness import hessian, lambda_max
from fl_lightning.nets import TextTransformer
from fl_lightning.trainer.run import Run

RNG = numpy_generator(0, "test nested samples")
N, ENGINES = 44, ("sequential", "batched", "graphed")
IMAGES = RNG.integers(0, 256, (N, 6, 5, 3), dtype=np.uint8)
TABLE = RNG.normal(size=(N, 4))
WORDS = RNG.integers(0, 9, (N, 3))
Y = RNG.permutation(np.repeat(np.arange(3), 15))[:N]
X = {"image": IMAGES, "more": {"table": TABLE, "words": WORDS}}


class Two(nn.Module):
    """Images, numbers and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.words, self.fc = nn.Conv2d(3, 2, 3), nn.Embedding(9, 2), nn.Linear(8, 3)

    def forward(self, x: dict[str, Any]) -> Tensor:
        image = self.conv(x["image"]).tanh().mean((2, 3))
        logits: Tensor = self.fc(torch.cat([image, x["more"]["table"], self.words(x["more"]["words"]).mean(1)], 1))
        return logits


class Graph(nn.Module):
    """Graphs of up to five nodes: two steps of message passing, and the mean over the nodes that exist."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, graph: dict[str, Tensor]) -> Tensor:
        h = (graph["adjacency"] @ self.first(graph["x"])).tanh()
        h = (graph["adjacency"] @ self.second(h)).tanh()
        mask = graph["mask"][..., None].to(h.dtype)
        logits: Tensor = self.fc((h * mask).sum(-2) / mask.sum(-2))
        return logits


def graphs() -> dict[str, Any]:
    mask = np.arange(5) < RNG.integers(2, 6, (N, 1))
    edges = RNG.integers(0, 2, (N, 5, 5)) * mask[:, None] * mask[:, :, None]
    return {"x": RNG.normal(size=(N, 5, 2)), "adjacency": (edges + edges.transpose(0, 2, 1)) / 2.0, "mask": mask}


GRAPHS = graphs()


def cut(x: Any, rows: slice) -> Any:
    return map_tensors(lambda v: v[rows], x)


def arrays(x: Any, **kwargs: Any) -> Arrays:
    """Divides samples among four clients of different sizes."""
    bounds = [0, 5, 14, 20, 32]
    parts = [(cut(x, slice(a, b)), Y[a:b]) for a, b in pairwise(bounds)]
    return Arrays(client_arrays=parts, test=(cut(x, slice(32, None)), Y[32:]), batch_size=4, **kwargs)


def fit(data: Any, net: type[nn.Module], algorithm: Any, engine: str, folder: Path, **kwargs: Any) -> Run:
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        max_rounds=2, clients_per_round=3, local_epochs=2, engine=engine, accelerator="cpu", precision="64-true",
        enable_progress_bar=False, default_root_dir=str(folder), **{"callbacks": [], "loggers": [], **kwargs},
    )  # fmt: skip
    return trainer.fit(algorithm(net=net()), data)


@pytest.mark.sampled(quick=6, slow=6)
@pytest.mark.parametrize("algorithm", [FedAvg, FedSAM, FedSMOO])
@pytest.mark.parametrize(("x", "net"), [(X, Two), (GRAPHS, Graph)], ids=["two inputs", "graphs"])
def test_engines_agree(x: Any, net: type[nn.Module], algorithm: Any, tmp_path: Path) -> None:
    runs = [fit(arrays(x), net, algorithm, engine, tmp_path) for engine in ENGINES]
    torch.manual_seed(0)
    start = nn.utils.parameters_to_vector(net().double().parameters())
    assert float((runs[0].global_model - start).detach().norm()) > 1e-3
    for run in runs[1:]:
        torch.testing.assert_close(run.global_model, runs[0].global_model, rtol=0, atol=1e-12)
        assert run.metrics["server/test/loss"] == pytest.approx(runs[0].metrics["server/test/loss"], abs=1e-12)


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(90, 5), nn.Tanh(), nn.Linear(5, 3))


class Only(Plain):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        logits: Tensor = super().forward(x["only"])
        return logits


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_dict_of_one_array_is_that_array_to_the_bit(engine: str, stream: bool, tmp_path: Path) -> None:
    monitors = [FlatnessMonitor() if engine == "sequential" else None for _ in range(2)]
    runs = [
        fit(arrays(x, stream=stream), net, FedSAM, engine, tmp_path, callbacks=[monitor] if monitor else [])
        for x, net, monitor in zip((IMAGES, {"only": IMAGES}), (Plain, Only), monitors, strict=True)
    ]
    assert torch.equal(runs[0].global_model, runs[1].global_model)
    names = [name for name in runs[0].metrics if "time/" not in name]
    assert {name: runs[0].metrics[name] for name in names} == {name: runs[1].metrics[name] for name in names}
    assert engine != "sequential" or "flatness/lambda_max" in names


def test_lambda_max_is_that_of_the_dense_hessian() -> None:
    torch.manual_seed(0)
    net, x = Graph().double(), map_tensors(lambda v: torch.from_numpy(v[:20]), GRAPHS)
    y, names = torch.from_numpy(Y[:20]), dict(net.named_parameters())
    shapes = [p.shape for p in names.values()]

    def loss(w: Tensor) -> Tensor:
        parts = torch.split(w, [shape.numel() for shape in shapes])
        tensors = {n: part.view(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}
        return F.cross_entropy(torch.func.functional_call(net, tensors, (x,)), y)

    dense = torch.func.hessian(loss)(nn.utils.parameters_to_vector(net.parameters()).detach())
    batches = [(cut(x, rows), y[rows]) for rows in (slice(7), slice(7, 14), slice(14, 20))]
    top = lambda_max(hessian(net, nn.CrossEntropyLoss(reduction="none"), batches), tol=1e-9)
    assert float(top.value) == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-5)


# Sources


class Pairs(Dataset[Any]):
    def __init__(self, rows: slice) -> None:
        self.x, self.y = cut(X, rows), Y[rows]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        image, table, words = (v[i] for v in named_tensors(self.x, "x").values())
        return {"image": image, "more": {"table": torch.from_numpy(table), "words": words}}, int(self.y[i])


class Both(Samples):
    """In a dict whose order is not that of the fields."""

    def __init__(self, rows: slice) -> None:
        self.pairs = Pairs(rows)
        more = [("table", "f8", 4), ("words", "i8", 3)]
        self.shape, self.dtype = (len(self.pairs),), np.dtype([("image", "u1", (6, 5, 3)), ("more", more)])

    def __getitem__(self, i: int) -> Any:
        image, more = self.pairs[i][0].values()
        return {"more": more, "image": image}


class Own(FederatedDataModule):
    def load(self) -> tuple[Any, Any, Any, Any]:
        train, test = slice(32), slice(32, None)
        return Both(train), Y[train], {"image": IMAGES[test], "more": {"table": Both(test).pairs.x["more"]["table"],
                                                                      "words": WORDS[test]}}, Y[test]  # fmt: skip


def source(kind: str, folder: Path, **kwargs: Any) -> FederatedDataModule:
    settings: Any = {"num_clients": 4, "batch_size": 4, "eval_batch_size": 5, **kwargs}
    if kind == "data set":
        return FromDataset(Pairs(slice(32)), Pairs(slice(32, None)), **settings)
    if kind == "own":
        return Own(**settings)
    train, test = (
        named_tensors(cut(X, rows), name) for name, rows in (("x_train", slice(32)), ("x_test", slice(32, N)))
    )
    arrays = {**train, **test, "y_train": Y[:32], "y_test": Y[32:]}
    if kind == "npz":
        np.savez(folder / "data.npz", **arrays)
        return Arrays(str(folder / "data.npz"), **settings)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return Arrays(str(folder), **settings)


@pytest.mark.parametrize("kind", ["data set", "own", "npz", "folder"])
def test_all_sources_give_the_same_batches_streamed_or_not(kind: str, tmp_path: Path) -> None:
    readings = []
    for options in ({"stream": False}, {"stream": True, "workers": 2}):
        data = source(kind, tmp_path, **options)
        data.setup()
        assert data.input_shape == {"image": (3, 6, 5), "more": {"table": (4,), "words": (3,)}}
        train = list(data.client_batches(1, 2, None, generator(0, "batches"), torch.float64))
        loaders = [*data.train_dataloader(), *data.test_dataloader()]
        readings.append(([*train, *data.eval_batches("test", torch.float64), *loaders], data.fingerprint()))
    assert readings[0][1] == readings[1][1]
    for (x, y), (want_x, want_y) in zip(readings[0][0], readings[1][0], strict=True):
        named, want = named_tensors(x, "x"), named_tensors(want_x, "x")
        assert named.keys() == want.keys() and torch.equal(y, want_y)
        assert all(torch.equal(v, want[name]) and v.stride() == want[name].stride() for name, v in named.items())
    data.setup()
    indices = data.clients[1]
    x, y = next(data.eval_batches(indices, torch.float64))
    np.testing.assert_allclose(x["image"].movedim(1, -1), IMAGES[indices[:5]] / 255, atol=1e-15)
    np.testing.assert_array_equal(x["more"]["table"], TABLE[indices[:5]])
    assert x["more"]["words"].tolist() == WORDS[indices[:5]].tolist() and y.tolist() == Y[indices[:5]].tolist()


def test_blocks_hold_each_clients_minibatches() -> None:
    data = arrays(X)
    data.setup()
    clients = [data.client_batches(k, 1, None, generator(0, "batches", k), torch.float64) for k in range(3)]
    (block,) = blocks(clients, 4, 4)
    assert {name: v.shape[:3] for name, v in block.tensors().items() if ".x." in name} == {
        f"block.x.{name}": (3, 4, 4) for name in ("image", "more.table", "more.words")
    }
    for step, (x, y, weight, active) in enumerate(block):
        for k, client in enumerate(clients):
            assert bool(active[k]) == (step < len(client))
            if active[k]:
                want_x, want_y = list(client)[step]
                n = len(want_y)
                assert torch.equal(y[k, :n], want_y) and weight[k].count_nonzero() == n
                for name, v in named_tensors(want_x, "x").items():
                    assert torch.equal(named_tensors(x, "x")[name][k, :n], v)


def test_names_lead_there_and_back() -> None:
    assert list(named_tensors(X, "x")) == ["x.image", "x.more.table", "x.more.words"]
    assert nested({"other": 0, **named_tensors(X, "x")}, "x") == X and nested({"x": 1}, "x") == 1


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (
            X,
            {"augment": Augment()},
            r"data.augment = Augment: samples of shape \{'image': \(3, 6, 5\), .* are not images",
        ),
        (X, {"mean": [0.5]}, r"data.mean = \[0.5\]: samples have shape \{'image'"),
        (X, {"standardise": True}, "data.standardise = true: samples are dicts; use false"),
        ({"a": TABLE, "b": TABLE[:9]}, {}, "client_arrays: client [0-9] has [0-9]+ samples and [0-9]+ labels"),
        ({"a.b": TABLE}, {}, r"x of test: keys \['a.b'\]; name one array or more, without dots"),
        ({}, {}, r"x of test: keys \[\]; name one array or more"),
        ({"a": np.where(TABLE > 2, np.nan, TABLE)}, {}, "x of (test|client .).a: row [0-9]+ holds NaN or infinity"),
    ],
)
def test_what_does_not_fit_is_one_line(x: Any, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"^{message}[^\n]*$"):
        arrays(x, **options).setup()


class Unlike(FederatedDataModule):
    test: Any

    def load(self) -> tuple[Any, Any, Any, Any]:
        return X, Y, self.test, Y


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ({"image": IMAGES}, "x_test: its arrays are not named as x_train's; name both alike"),
        (
            {**X, "image": IMAGES[:, :5]},
            r"x_test.image: shape \(3, 5, 5\) of a sample differs from x_train.image's \(3, 6",
        ),
        (
            {**X, "image": np.moveaxis(IMAGES, -1, 1) / 255},
            "x_test.image: dtype torch.float64 of a sample differs from x_train.image's",
        ),
        (TABLE, "x_test: its arrays are not named as x_train's"),
    ],
)
def test_training_and_test_samples_must_be_alike(test: Any, message: str) -> None:
    data = Unlike(num_clients=2)
    data.test = test
    with pytest.raises(UserError, match=rf"^{message}[^\n]*$"):
        data.setup()


def test_a_token_beyond_the_net_is_named_before_the_run(tmp_path: Path) -> None:
    """It is in the last sample of the last client, which neither the first test batch nor the first client has."""
    x = np.arange(60).reshape(12, 5) % 20
    x[-1, -1] = 40
    parts = [(x[i : i + 4], Y[i : i + 4]) for i in (0, 4, 8)]
    data = Arrays(client_arrays=parts, test=parts[0], batch_size=3)
    net: Any = partial(TextTransformer, 20, length=5, dim=8, blocks=1, heads=2, num_classes=3)
    message = r"^model.net = TextTransformer cannot take a batch of shape \(1, 5\) \(index out"
    with pytest.raises(UserError, match=message):
        fit(data, net, FedAvg, "sequential", tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_net_for_other_inputs_is_named_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model.net = Plain cannot take a batch of shape \{'image': \(12, 3, 6, 5\)"):
        fit(arrays(X), Plain, FedAvg, "sequential", tmp_path)
