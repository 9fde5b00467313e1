import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.data import IID, Dirichlet, FromFile, Given
from fl_lightning.errors import UserError
from fl_lightning.rng import generator, numpy_generator


def labels_of(counts):
    return numpy_generator(0, "test labels").permutation(np.repeat(np.arange(len(counts)), counts))


counts = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(lambda c: sum(c) > 0)


@settings(max_examples=60, deadline=None)
@given(counts, st.integers(1, 30), st.sampled_from([None, 1e-9, 0.05, 1.0, 30.0, 1e9]), st.integers(0, 2**40))
def test_every_sample_once_in_equal_parts(counts, num_clients, alpha, seed):
    y = labels_of(counts)
    num_clients = min(num_clients, len(y))
    partition = IID() if alpha is None else Dirichlet(alpha)
    parts = partition(y, num_clients, len(counts), seed)
    assert len(parts) == num_clients
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    again = partition(y, num_clients, len(counts), seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(5, 40), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 99))
def test_alpha_zero_gives_one_class_each(counts, per_class, seed):
    y = labels_of(counts)
    num_clients = per_class * len(counts) + len(counts) // 2
    parts = Dirichlet(0)(y, num_clients, len(counts), seed)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(y)))
    assert all(len(np.unique(y[part])) == 1 for part in parts)
    by_class = [[len(part) for part in parts if y[part[0]] == c] for c in range(len(counts))]
    assert {len(sizes) for sizes in by_class} <= {per_class, per_class + 1}
    assert all(max(sizes) - min(sizes) <= 1 for sizes in by_class)


def test_seeds_differ():
    y = labels_of([50] * 4)
    for partition in (IID(), Dirichlet(0), Dirichlet(1)):
        first, second = (partition(y, 4, 4, seed) for seed in (0, 1))
        assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("classes", "alpha", "mean_classes", "largest_share"),
    [
        (10, 0.2, 2.04, 0.894),
        (10, 1, 4.88, 0.685),
        (10, 10, 9.47, 0.308),
        (100, 5, 22.75, 0.298),
        (100, 10, 34.65, 0.212),
    ],
)
def test_dirichlet_statistics(classes, alpha, mean_classes, largest_share):
    """The expected values come from an independent implementation of the rule (12 seeds, 100 clients)."""
    y = np.repeat(np.arange(classes), 50_000 // classes)
    seen = []
    for seed in range(3):
        table = np.stack([np.bincount(y[p], minlength=classes) for p in Dirichlet(alpha)(y, 100, classes, seed)])
        seen.append(((table > 0).sum(1).mean(), table.max(1).mean() / 500))
    got_classes, got_share = np.mean(seen, 0)
    assert got_classes == pytest.approx(mean_classes, abs=0.4 if classes == 10 else 1.0)
    assert got_share == pytest.approx(largest_share, abs=0.04)


@pytest.mark.parametrize("alpha", [-0.1, float("nan"), float("inf")])
def test_bad_alpha(alpha):
    with pytest.raises(UserError, match=rf"^data.*alpha = {alpha} is no concentration; use a finite number >= 0"):
        Dirichlet(alpha)


def test_impossible_splits():
    y = labels_of([4, 4, 4])
    with pytest.raises(
        UserError, match="3 classes need at least 3 clients, not num_clients = 2; use more clients or alpha"
    ):
        Dirichlet(0)(y, 2, 3, 0)
    for partition in (Dirichlet(1), IID(), Dirichlet(0)):
        with pytest.raises(UserError, match=r"num_clients = 20 leaves client \d+ without data.*use fewer clients"):
            partition(y, 20, 3, 0)


# Splits from files: six samples, three clients

Y = np.array([0, 1, 2, 0, 1, 2])
WANT = [[0, 3], [4, 1], [2, 5]]


def fedsam(key="user_data", labels=Y):
    # Clients out of order, as in the published files.
    users = [2, 0, 1]
    rows = {
        str(u): {"x": [f"img_{i}_label_{labels[i]}.png" for i in WANT[u]], "y": [int(labels[i]) for i in WANT[u]]}
        for u in users
    }
    return json.dumps({"users": users, "num_samples": [2, 2, 2], key: rows})


CSV = "user_id,image_id,class\n" + "".join(f"{u},{i},{Y[i]}\n" for u in (1, 0, 2) for i in WANT[u])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain.json", json.dumps({"2": WANT[2], "0": WANT[0], "1": WANT[1]})),
        ("list.json", json.dumps(WANT)),
        ("fedsam.json", fedsam()),
        ("fedgloss.json", fedsam("users_data")),
        ("google.csv", CSV),
    ],
)
def test_formats(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    parts = FromFile(str(path))(Y, 3, 3, 0)
    assert [part.tolist() for part in parts] == WANT
    with pytest.raises(UserError, match=r"num_clients = 5, but '.*' has 3 clients; set it to 3"):
        FromFile(str(path))(Y, 5, 3, 0)


def test_clients_are_ordered_as_numbers(tmp_path):
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"10": [3], "2": [1], "0": [0]}))
    assert [part.tolist() for part in FromFile(str(path))(Y, 3, 3, 0)] == [[0], [1], [3]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.json",
            fedsam(labels=np.array([0, 2, 2, 0, 1, 2])),
            "client 1 has sample 1 as class 2, but in the data it is class 1",
        ),
        ("b.csv", CSV.replace("1,4,1", "1,4,0"), "client 1 has sample 4 as class 0, but in the data it is class 1"),
        ("c.json", "[[0, 1], [2, 6], [3]]", "client 1 has index 6, but the training set has 6 samples"),
        ("d.json", "[[0, 1], [-1], [3]]", "client 1 has index -1"),
        ("e.json", "[[0, 1], [2, 1], [3]]", "index 1 occurs 2 times; give every sample to one client only"),
        ("f.json", "[[0, 1], [], [3]]", "leaves client 1 without data"),
        ("g.json", "{not json", "is no split in a known format"),
        ("h.json", "[[0.5], [1], [2]]", "index 0.5 is not an integer"),
        ("i.json", "7", "is no split in a known format"),
        ("j.csv", "a,b\n1,2\n", "is no split in a known format"),
        ("k.json", fedsam().replace("img_0_label_0", "img_0_label_1"), "is not img_<index>_label_0.png"),
    ],
)
def test_faulty_files(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match="^[^\n]*" + message.replace(".", r"\.") + "[^\n]*$"):
        FromFile(str(path))(Y, 3, 3, 0)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"none.json': cannot read it \(No such file.*; give an existing split file"):
        FromFile(str(tmp_path / "none.json"))(Y, 3, 3, 0)


def test_given_is_checked():
    assert [part.tolist() for part in Given(WANT)(Y, 3, 3, 0)] == WANT
    with pytest.raises(UserError, match="Given: index 0 occurs 2 times"):
        Given([[0], [0]])(Y, 2, 3, 0)


# Random streams


def test_generators_are_keyed():
    draws = {
        int(generator(*key).initial_seed())
        for key in [(0, "a"), (1, "a"), (0, "b"), (0, "a", 1), (0, "a", 1, 2), (0, "a", 2, 1), (0, "a", 2**40)]
    }
    assert len(draws) == 7
    assert generator(3, "a", 1).get_state().equal(generator(3, "a", 1).get_state())
    assert numpy_generator(3, "a", 1).integers(2**60) == numpy_generator(3, "a", 1).integers(2**60)
    assert numpy_generator(3, "a", 1).integers(2**60) != numpy_generator(3, "a", 2).integers(2**60)
    with pytest.raises(UserError, match="seed = -1 is negative; use 0 or a positive integer"):
        generator(-1, "a")
