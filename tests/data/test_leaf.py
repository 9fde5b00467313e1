"""LEAF's data sets, read from small files in its format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import FEMNIST, IID, FedAvg, FederatedTrainer, Shakespeare, UserError
from fl_lightning.core.rng import numpy_generator
from fl_lightning.nets import LEAFCNN, LEAFLSTM
from tests.generated import leaf


@pytest.mark.parametrize("kind", [FEMNIST, Shakespeare])
def test_users_are_clients_with_their_own_test_samples(kind: Any, tmp_path: Path) -> None:
    train, test = leaf(tmp_path, kind.__name__)
    data = kind(str(tmp_path))
    data.setup()
    assert data.num_clients == 3 and data.client_sizes.tolist() == [4, 3, 5]
    assert data.num_classes == {"FEMNIST": 62, "Shakespeare": 80}[kind.__name__]
    for client, user in enumerate(train):
        rows = data.client_test_indices(client)
        assert rows is not None and len(rows) == len(test[user]["y"])
        for x, y, part in (
            (data.x_train[data.clients[client]], data.y_train[data.clients[client]], train[user]),
            (data.x_test[rows], data.y_test[rows], test[user]),
        ):
            if kind is FEMNIST:
                np.testing.assert_array_equal(x.flatten(1), np.array(part["x"], np.float32))
                assert x.shape[1:] == (1, 28, 28) and y.tolist() == part["y"]
            else:  # as LEAF's word_to_indices
                table = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
                assert x.tolist() == [[table.find(c) for c in text] for text in part["x"]]
                assert y.tolist() == [table.find(c) for c in part["y"]]


def test_other_partitions_and_other_test_users(tmp_path: Path) -> None:
    leaf(tmp_path, "FEMNIST")
    mixed = FEMNIST(str(tmp_path), partition=IID(), num_clients=4)
    mixed.setup()
    assert mixed.client_sizes.tolist() == [3] * 4 and mixed.client_test_indices(0) is None
    file = next((tmp_path / "test").glob("*.json"))
    file.write_text(file.read_text().replace("u2", "stranger"))
    data = FEMNIST(str(tmp_path))
    data.setup()
    assert [len(data.client_test_indices(k)) for k in range(3)] == [2, 1, 0]  # type: ignore[arg-type]


def edited(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edit(file: Path) -> None:
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return edit


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (FEMNIST, lambda file: file.write_text("{"), "Expecting property name"),
        (FEMNIST, lambda file: file.write_text("[]"), "list indices must be integers"),
        (FEMNIST, lambda file: file.unlink(), "no JSON file with samples"),
        (FEMNIST, edited(lambda c: c.pop("users")), "has no 'users'"),
        (FEMNIST, edited(lambda c: c["user_data"].pop("u1")), "has no 'u1'"),
        (FEMNIST, edited(lambda c: c["user_data"]["u1"]["y"].pop()), "user u1 has 3 samples and 2 labels"),
        (FEMNIST, edited(lambda c: c["user_data"]["u1"]["x"][0].pop()), "inhomogeneous shape"),
        (FEMNIST, edited(lambda c: c["user_data"]["u1"].update(x=[[0.0]] * 3)), "a sample is not 784 numbers, but of"),
        (FEMNIST, edited(lambda c: c["user_data"]["u1"].update(y=[0, 62, 1])), "a label is not one of 0 to 61"),
        (FEMNIST, edited(lambda c: c["user_data"]["u1"].update(y=[[0], [6], [1]])), "a label is not one of 0 to 61"),
        (Shakespeare, edited(lambda c: c["user_data"]["u1"].update(y=["a", "b", "cd"])), "a label is not one"),
        (Shakespeare, edited(lambda c: c["user_data"]["u1"].update(x=["a"] * 3)), "a sample has 1 characters, not 80"),
        (Shakespeare, edited(lambda c: c["user_data"]["u1"].update(y=["a", "é", "b"])), "character 'é' is not in LEAF"),
        (Shakespeare, edited(lambda c: c["user_data"]["u1"].update(y=["a", "…", "b"])), "character '…' is not in LEAF"),
    ],
)  # fmt: skip
def test_broken_files(kind: Any, change: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    leaf(tmp_path, kind.__name__)
    change(next((tmp_path / "train").glob("*.json")))
    with pytest.raises(UserError, match=rf"^data.data_dir = '[^\n]*': [^\n]*{message}[^\n]*; get it again from http"):
        kind(str(tmp_path)).setup()


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data.data_dir = '[^\n]*': 'train' is missing; expected there train, test"):
        Shakespeare(str(tmp_path)).setup()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_shakespeare_trains_alike_on_both_engines(tmp_path: Path) -> None:
    leaf(tmp_path, "Shakespeare")
    models = []
    for engine in ("sequential", "batched"):
        torch.manual_seed(0)
        net = LEAFLSTM(hidden=4, dim=2)
        trainer = FederatedTrainer(
            max_rounds=1, clients_per_round=3, engine=engine, accelerator="cpu", callbacks=[], loggers=[],
            precision="64-true", default_root_dir=str(tmp_path / "runs"), enable_progress_bar=False,
        )  # fmt: skip
        models.append(trainer.fit(FedAvg(net=net), Shakespeare(str(tmp_path), batch_size=2)).global_model)
    torch.testing.assert_close(*models, rtol=0, atol=1e-12)


def test_nets_take_the_data() -> None:
    x = numpy_generator(0, "test LEAF").random((2, 1, 28, 28), np.float32)
    assert LEAFCNN()(torch.from_numpy(x)).shape == (2, 62)
    assert LEAFLSTM()(torch.zeros(2, 80, dtype=torch.int64)).shape == (2, 80)
    counts = {net: sum(p.numel() for p in net().parameters()) for net in (LEAFCNN, LEAFLSTM)}
    assert counts == {LEAFCNN: 6_603_710, LEAFLSTM: 819_920}
