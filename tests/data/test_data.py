import ast
import shutil
import struct
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import fl_lightning.data
import fl_lightning.nets
from fl_lightning.core.errors import UserError
from fl_lightning.core.rng import generator, numpy_generator
from fl_lightning.data import (
    IID,
    Arrays,
    Augment,
    Digits,
    Dirichlet,
    FederatedDataModule,
    Given,
    ImageFolder,
    TorchvisionData,
)
from fl_lightning.data.validation import inputs
from fl_lightning.nets import DigitsMLP

RNG = numpy_generator(0, "test data")
X = RNG.integers(0, 256, (60, 6, 5, 3), dtype=np.uint8)  # NHWC
Y = RNG.permutation(np.repeat(np.arange(3), 20))
XF = RNG.normal(size=(60, 4))  # float64


class Toy(FederatedDataModule):
    """Sixty images, of which the first twelve are the test set too."""

    arrays = (X, Y, X[:12], Y[:12])

    def load(self):
        return self.arrays


def toy(arrays=None, **kwargs):
    """Sets up images whose test set is part of the training set, so it warns."""
    data = Toy(**{"num_clients": 4, "batch_size": 4, **kwargs})
    data.arrays = arrays or Toy.arrays
    data.setup()
    return data


def features(**kwargs):
    return toy((XF, Y, XF[:12], Y[:12]), **kwargs)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


# Augmentation


def images(dtype=torch.uint8):
    return torch.from_numpy(X).movedim(-1, 1).contiguous().to(dtype)


def augmented(augment, x, draws):
    return augment(x, augment.draw([len(x)], draws))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize(("crop", "flip"), [(2, True), (0, True), (3, False), (0, False)])
def test_augment_equals_a_loop_over_samples(dtype, crop, flip):
    x = images(dtype)
    augment = Augment(crop, flip)
    actual = augment(x, augment.draw([60], rng()))
    draws = rng()
    offsets = torch.randint(2 * crop + 1, (2, 60), generator=draws).T.tolist() if crop else [(0, 0)] * 60
    mirrored = (torch.rand(60, generator=draws) < 0.5).tolist() if flip else [False] * 60
    for image, (dy, dx), mirror, result in zip(x, offsets, mirrored, actual, strict=True):
        want = F.pad(image, [crop] * 4)[:, dy : dy + 6, dx : dx + 5]
        assert torch.equal(result, want.flip(-1) if mirror else want)
    assert actual.dtype == dtype
    assert torch.equal(x, images(dtype))  # the data stay as they are


def test_augmentation_differs_per_sample():
    copies = images()[:1].expand(60, -1, -1, -1)
    flips = augmented(Augment(crop=0), copies, rng())
    assert len(flips.flatten(1).unique(dim=0)) == 2
    assert 15 < (flips == copies).flatten(1).all(1).sum() < 45
    assert len(augmented(Augment(crop=2, flip=False), copies, rng()).flatten(1).unique(dim=0)) > 10


def test_augmentation_per_batch_is_one_draw():
    x = torch.arange(5 * 64, dtype=torch.float32).reshape(5, 1, 8, 8) + 1
    per_batch = augmented(Augment(crop=2, granularity="batch"), x, torch.Generator().manual_seed(3))
    assert len({tuple((image == 0).flatten().tolist()) for image in per_batch}) == 1
    per_sample = augmented(Augment(crop=2), x, torch.Generator().manual_seed(3))
    assert len({tuple((image == 0).flatten().tolist()) for image in per_sample}) > 1


def test_padding_is_black_before_normalisation():
    data = toy(augment=Augment(crop=4, flip=False), mean=[0.5], std=[0.25], batch_size=None, num_clients=1)
    x, _ = next(iter(data.client_batches(0, 1, None, rng(), torch.float64)))
    assert x.min() == -2.0  # (0 - 0.5) / 0.25: zeros came before normalisation
    torch.testing.assert_close(x, augmented(Augment(4, False), images()[data.clients[0]], rng()).double() / 255 * 4 - 2)


# Batches


def test_scaling():
    data = toy(mean=[0.1, 0.2, 0.3], std=[0.5, 0.25, 2.0])
    x = torch.cat([x for x, _ in data.eval_batches("test", torch.float64)])
    want = (images()[:12].double() / 255 - torch.tensor([0.1, 0.2, 0.3]).double()[:, None, None]) / torch.tensor(
        [0.5, 0.25, 2.0]
    )[:, None, None].double()
    torch.testing.assert_close(x, want, rtol=0, atol=1e-7)
    assert next(data.eval_batches("test"))[0].dtype == torch.float32


@pytest.mark.parametrize("augment", [None, Augment(crop=1)])
def test_epochs_are_shuffled_and_complete(augment):
    data = toy(batch_size=4, augment=augment)
    assert data.batches_per_client(1, 3, None) == 12
    batches = list(data.client_batches(1, 3, None, rng(), torch.float64))
    assert [len(y) for _, y in batches] == [4, 4, 4, 3] * 3
    again = list(data.client_batches(1, 3, None, rng(), torch.float64))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(batches, again, strict=True))
    reseeded = list(data.client_batches(1, 3, None, rng(1), torch.float64))
    assert not torch.equal(batches[0][0], reseeded[0][0])


def test_each_epoch_has_every_sample_once_in_a_new_order():
    data = features(batch_size=4)
    batches = list(data.client_batches(2, 2, None, rng(), torch.float64))
    first, second = (torch.cat([x for x, _ in part]) for part in (batches[:4], batches[4:]))
    samples = torch.from_numpy(XF)[data.clients[2]]
    for epoch in (first, second):
        assert torch.equal(epoch.sort(0).values, samples.sort(0).values)  # exactly: float64 is kept
    assert not torch.equal(first, second)
    for x, y in batches:
        rows = (torch.from_numpy(XF)[None] == x[:, None]).all(-1).nonzero()[:, 1]
        assert torch.equal(torch.from_numpy(Y)[rows], y)


def test_short_minibatches_are_left_out():
    data = features(batch_size=4, drop_last=True)
    batches = list(data.client_batches(2, 2, None, rng(), torch.float64))
    assert data.batches_per_client(2, 2, None) == 6 and [len(y) for _, y in batches] == [4] * 6
    kept = [set(map(tuple, torch.cat([x for x, _ in part]).tolist())) for part in (batches[:3], batches[3:])]
    assert [len(rows) for rows in kept] == [12, 12] and kept[0] != kept[1]  # of 15 others in each epoch
    assert len(data.train_dataloader()) == 15
    (only,) = features(batch_size=16, drop_last=True).client_batches(2, 1, None, rng(), torch.float64)
    assert len(only[1]) == 15


def test_steps_go_on_through_epochs():
    data = features(batch_size=4)
    assert data.batches_per_client(2, 99, 6) == 6
    by_steps = list(data.client_batches(2, 99, 6, rng(), torch.float64))
    by_epochs = list(data.client_batches(2, 2, None, rng(), torch.float64))
    assert len(by_steps) == 6
    assert all(torch.equal(a[0], b[0]) for a, b in zip(by_steps, by_epochs, strict=False))


def test_full_batch_is_stored_order():
    data = features(batch_size=None)
    samples = torch.from_numpy(XF)[data.clients[1]]
    for count, batches in (
        (2, data.client_batches(1, 2, None, rng(), torch.float64)),
        (5, data.client_batches(1, 2, 5, rng(), torch.float64)),
    ):
        actual = list(batches)
        assert len(actual) == count
        assert all(torch.equal(x, samples) for x, _ in actual)
    assert data.batches_per_client(1, 2, None) == 2


def test_normalising_floats_leaves_the_store_alone():
    data = features(mean=[1.0], std=[2.0])
    for batches in (data.client_batches(0, 1, None, rng(), torch.float64), data.eval_batches("test", torch.float64)):
        list(batches)
    assert torch.equal(data.x_train, torch.from_numpy(XF))
    assert torch.equal(next(data.eval_batches([3], torch.float64))[0], (torch.from_numpy(XF)[[3]] - 1) / 2)


def test_tokens_pass_as_they_are():
    tokens = RNG.integers(0, 1000, (60, 7), dtype=np.int32)
    data = toy((tokens, Y, tokens, Y))
    x, _ = next(data.eval_batches("test"))
    assert x.dtype == torch.int64
    assert torch.equal(x, torch.from_numpy(tokens).long())


def test_eval_batches_are_in_order():
    data = features(eval_batch_size=7, val_fraction=0.2)
    union = data.clients.indices.sort().values
    for batches, x, y in (
        (data.eval_batches("train", torch.float64), XF[union], Y[union]),
        (data.eval_batches("val", torch.float64), XF[data.val_indices], Y[data.val_indices]),
        (data.eval_batches("test", torch.float64), XF[:12], Y[:12]),
        (data.eval_batches([5, 1], torch.float64), XF[[5, 1]], Y[[5, 1]]),
        (data.eval_batches(data.clients[1], torch.float64), XF[data.clients[1]], Y[data.clients[1]]),
    ):
        actual = list(batches)
        assert all(len(labels) <= 7 for _, labels in actual)
        np.testing.assert_array_equal(torch.cat([a for a, _ in actual]), x)
        np.testing.assert_array_equal(torch.cat([b for _, b in actual]), y)


# Set-up


def test_validation_part_is_stratified_and_apart():
    data = toy(val_fraction=0.2, partition=Dirichlet(1.0))
    assert torch.equal(torch.bincount(data.y_train[data.val_indices]), torch.tensor([4, 4, 4]))
    everything = torch.cat([data.val_indices, data.clients.indices]).sort().values
    assert torch.equal(everything, torch.arange(60))
    assert data.client_sizes.tolist() == [12] * 4
    assert not torch.equal(data.val_indices, toy(val_fraction=0.2, seed=1).val_indices)


def test_validation_part_leaves_given_indices_right():
    parts = [list(range(a, a + 20)) for a in (0, 20, 40)]
    data = toy(num_clients=3, val_fraction=0.1, partition=Given(parts))
    for client, part in zip(data.clients, parts, strict=True):
        assert set(client.tolist()) == set(part) - set(data.val_indices.tolist())
    with pytest.raises(UserError, match=r"data.val_fraction = 0.9: takes all data of client \d+; use a smaller one"):
        toy(num_clients=3, val_fraction=0.9, partition=Given([[0], [1], [2]]))


def test_sample_is_fixed_and_stratified():
    data = toy(val_fraction=0.2)
    sample = data.sample_indices(12)
    assert torch.equal(sample, data.sample_indices(12))
    assert torch.equal(torch.bincount(data.y_train[sample]), torch.tensor([4, 4, 4]))
    assert not set(sample.tolist()) & set(data.val_indices.tolist())
    assert not torch.equal(sample, data.sample_indices(12, seed=5))
    assert torch.equal(data.sample_indices(None), data.clients.indices.sort().values)
    assert len(data.sample_indices(14)) == 14


def test_fingerprint_tells_data_apart():
    prints = {
        toy(seed=0).fingerprint(),
        toy(seed=1).fingerprint(),
        toy(num_clients=5).fingerprint(),
        toy((X, Y, X[:12], Y[12:24])).fingerprint(),
    }
    assert len(prints) == 4
    assert toy().fingerprint() in prints


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 3), ("num_clients", 3), ("partition", Dirichlet(1.0)), ("val_fraction", 0.2)]
)
def test_settings_that_are_set_anew_count(name, value):
    """A config shows them."""
    data, fresh = toy(), toy(**{name: value})
    before = data.fingerprint()
    setattr(data, name, value)
    data.setup()
    assert data.fingerprint() == fresh.fingerprint() != before


def test_settings_of_the_partition_that_are_set_anew_count():
    data = toy(partition=Dirichlet(1.0))
    data.partition.alpha = 0.1
    data.setup()
    assert data.fingerprint() == toy(partition=Dirichlet(0.1)).fingerprint()


def test_setup_and_moving_are_idempotent():
    data = toy()
    clients = data.clients
    data.setup("fit")
    assert data.clients is clients
    store = data.x_train
    assert data.to("cpu") is data
    assert data.x_train is store
    assert data.input_shape == (3, 6, 5)
    assert data.num_classes == 3
    data.to("meta")
    assert {t.device.type for t in (data.x_train, data.y_train, data.x_test, data.y_test)} == {"meta"}
    x, y = next(iter(data.client_batches(0, 1, None, rng(), torch.float32)))
    assert x.device.type == y.device.type == "meta"


def nan_at(row):
    x = XF.copy()
    x[row, 1] = np.nan
    return x


@pytest.mark.parametrize(
    ("arrays", "kwargs", "message"),
    [
        ((nan_at(17), Y, XF, Y), {}, "x_train: row 17 holds NaN or infinity; clean or drop such rows"),
        ((XF, Y, nan_at(3), Y), {}, "x_test: row 3 holds NaN"),
        ((XF, Y[:9], XF, Y), {}, "x_train: 60 samples, but y_train has 9 labels"),
        ((XF, Y, XF[:0], Y[:0]), {}, "x_test: no samples"),
        ((XF, Y, XF[:, :2], Y), {}, r"x_test: shape \(2,\) of a sample differs from x_train's \(4,\)"),
        ((XF, Y, XF.astype("f4"), Y), {}, "x_test: dtype torch.float32 of a sample differs"),
        ((XF, Y - 1, XF, Y), {}, r"y_train: label -1 at row \d+ is negative; number the classes from 0"),
        ((XF, Y, XF, Y + 7), {}, r"y_test: label 9 at row \d+ exceeds y_train's largest, 2"),
        ((XF, Y.astype(float), XF, Y), {}, "y_train: labels are torch.float64; convert them to integers"),
        ((XF, Y[:, None], XF, Y), {}, r"y_train: shape \(60, 1\) is not \(N,\)"),
        ((XF.astype(complex), Y, XF, Y), {}, "x_train: dtype torch.complex128 is not supported"),
        ((np.array(["a"] * 60), Y, XF, Y), {}, "x_train: ndarray of <U1 is not a numeric array"),
        ((torch.from_numpy(XF).to_sparse(), Y, XF, Y), {}, "x_train: a tensor that is sparse, "),
        ((XF, torch.from_numpy(Y).to_sparse(), XF, Y), {}, "y_train: a tensor that is sparse, "),
        (
            (XF, Y, XF, Y),
            {"num_clients": 61},
            r"data.num_clients = 61 leaves client 60 without data \(60 samples, IID\); use fewer clients",
        ),
        (
            (XF, Y, XF, Y),
            {"augment": Augment()},
            r"data.augment = Augment: samples of shape \(4,\) are not images .* use null",
        ),
        (
            None,
            {"mean": [0.1, 0.2]},
            r"data.mean = \[0.1, 0.2\]: samples have shape \(3, 6, 5\); give one value, or one per channel",
        ),
        (None, {"std": [0.0]}, r"data.std = \[0.0\]: give a list, each a finite number"),
        (None, {"batch_size": 0}, "data.batch_size = 0: give a whole number of at least 1 or null"),
        (None, {"eval_batch_size": 0}, "data.eval_batch_size = 0: give a whole number of at least 1"),
        (None, {"num_clients": 0}, "data.num_clients = 0: give a whole number of at least 1"),
        (None, {"val_fraction": 1.0}, r"data.val_fraction = 1.0: give a finite number from 0 to below 1"),
    ],
)
def test_faulty_data_and_settings(arrays, kwargs, message):
    with pytest.raises(UserError, match="^" + message + "[^\n]*$"):
        toy(arrays, **kwargs)


def test_classes_that_only_the_test_set_has():
    with pytest.raises(UserError, match=r"number the classes of both alike, or set data\.num_classes = 10$"):
        toy((XF, Y, XF, Y + 7))
    assert toy((XF, Y, XF, Y + 7), num_classes=10).num_classes == 10
    pairs = [(XF[:30], Y[:30] % 2), (XF[30:], Y[30:] % 2)]
    data = Arrays(client_arrays=pairs, test=(XF, Y), num_classes=3)
    data.setup()
    assert data.num_classes == 3
    with pytest.raises(UserError, match=r"^data\.num_classes = 3: data\.task = regression has no classes; leave"):
        Toy(task="regression", num_classes=3)


def test_numbers_of_something_else_are_no_classes():
    message = r"^y_train: only 3 of the classes 0 to 2000000000 occur; number them 0, 1, \.\.\., or set data\.num_c"
    with pytest.raises(UserError, match=message):
        toy((XF, Y * 10**9, XF, Y), partition=Dirichlet(0.1))
    with pytest.warns(UserWarning, match=r"^y_train: only 3 of the classes 0 to 8 occur; number .* if all are meant$"):
        assert toy((XF, Y * 4, XF, Y)).num_classes == 9
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        toy((XF, Y * 4, XF, Y), num_classes=9)
    assert not any("occur;" in str(warning.message) for warning in seen)


class Known(Arrays):
    """Data that say how many classes there are, and whose the test samples are."""

    classes, test_clients = 3, None


def test_numbers_beyond_those_that_the_data_name(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=XF, y_train=Y, x_test=XF, y_test=Y)
    for name, value, line in (
        ("classes", 2, r"y_train: label 2 at row \d+ exceeds 1, the largest of classes; number"),
        ("test_clients", [0, 1, 3] * 20, "test_clients: 0 to 3; number the 3 clients from 0, -1 is none"),
    ):
        data = Known(str(tmp_path / "a.npz"), num_clients=3)
        setattr(data, name, value)
        with pytest.raises(UserError, match=f"^{line}"):
            data.setup()


def test_other_mistakes():
    with pytest.raises(
        UserError, match=r"data.val_fraction = 0.0 holds out nothing to validate on; use for example 0.1"
    ):
        toy().eval_batches("val")
    with pytest.raises(UserError, match="crop = -1: give a whole number"):
        Augment(crop=-1)


@pytest.mark.parametrize(("copied", "warns"), [(0, False), (1, False), (3, True)])
def test_leaks_are_counted_and_warned_of(copied, warns, recwarn):
    x = RNG.integers(0, 256, (400, 6, 5, 3), dtype=np.uint8)
    train, test = x[:200], x[200:].copy()
    test[:copied] = train[7]
    y = np.arange(200) % 3
    data = toy((train, y, test, y))
    assert data.leaked == copied
    texts = [str(w.message) for w in recwarn if "x_test" in str(w.message)]
    assert [s.startswith(f"x_test: {copied} of 200 samples occur in x_train as well") for s in texts] == [True] * warns


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NHW"])
def test_image_layouts(layout):
    array = {"NHWC": X, "NCHW": np.moveaxis(X, -1, 1), "NHW": X[..., 0]}[layout]
    data = toy((array, Y, array, Y))
    want = images()[:, :1] if layout == "NHW" else images()
    assert torch.equal(data.x_train, want)
    assert data.x_train.is_contiguous(memory_format=torch.channels_last)


# Data sets


def test_digits():
    data, skewed = Digits(seed=0), Digits(seed=1, partition=Dirichlet(0.0))
    data.setup()
    skewed.setup()
    assert (data.num_classes, data.input_shape) == (10, (1, 8, 8))
    assert (len(data.y_train), len(data.y_test), len(data.clients), data.batch_size) == (1437, 360, 50, 16)
    assert torch.equal(data.x_test, skewed.x_test)  # one test set whatever the seed
    assert torch.bincount(data.y_test).float().std() < 2
    x = torch.cat([x for x, _ in data.eval_batches("train")])
    assert (x.min(), x.max()) == (0, 1)
    assert all(len(skewed.y_train[c].unique()) == 1 for c in skewed.clients)


def test_centralized_training_by_lightning():
    class Plain(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen = DigitsMLP(), []

        def training_step(self, batch, _):
            self.seen.append(batch[1])
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("val", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

        def test_step(self, batch, batch_idx):
            self.log("test", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.5)

    torch.manual_seed(0)
    data, model = Digits(val_fraction=0.1), Plain()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = L.Trainer(max_epochs=4, accelerator="cpu", **quiet)
    trainer.fit(model, datamodule=data)
    assert trainer.callback_metrics["val"] > 0.8
    trainer.test(model, datamodule=data, verbose=False)
    assert trainer.callback_metrics["test"] > 0.8
    n = len(data.train_dataloader())
    assert len(model.seen) == 4 * n
    epochs = [torch.cat(model.seen[i * n : (i + 1) * n]) for i in range(4)]
    assert all(len(epoch) == int(data.client_sizes.sum()) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])


def test_loader_repeats_from_the_start():
    data = toy(augment=Augment(1))
    loader = data.train_dataloader()
    first, second, again = (torch.cat([x for x, _ in batches]) for batches in (loader, loader, data.train_dataloader()))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    assert len(list(loader)) == len(loader) == 15
    assert len(list(data.test_dataloader())) == len(data.test_dataloader()) == 1
    assert data.val_dataloader() == []
    assert len(list(toy(val_fraction=0.5, eval_batch_size=7).val_dataloader())) == 5


def test_npz(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x_train=X, y_train=Y.astype(np.uint8), x_test=X[:12], y_test=Y[:12])
    data = Arrays(str(path), num_clients=4, partition=IID())
    data.setup()
    assert torch.equal(data.x_train, images())
    assert data.y_train.dtype == torch.int64

    big_endian = {"x_train": XF.astype(">f8"), "y_train": Y.astype(">i4"), "x_test": XF[:12], "y_test": Y[:12]}
    np.savez(path, **big_endian)
    data = Arrays(str(path), num_clients=4, partition=IID())
    data.setup()
    assert torch.equal(data.x_train.double(), torch.from_numpy(XF)) and data.y_train.tolist() == Y.tolist()
    np.savez(path, **{**big_endian, "x_test": XF[:0]})
    with pytest.raises(UserError, match=r"^x_test: 0 samples, but y_test has 12 labels; give one label per sample$"):
        Arrays(str(path)).setup()

    np.savez(path, x_train=X, y_train=Y)
    with pytest.raises(UserError, match=r"path = '.*data.npz' lacks x_test, y_test; it needs x_train"):
        Arrays(str(path)).setup()
    for bad in (b"", b"rubbish", path.read_bytes()[:200]):
        path.write_bytes(bad)
        with pytest.raises(
            UserError, match=r"path = '.*data.npz' is not a readable .npz file \([^\n]*\); write it again"
        ):
            Arrays(str(path)).setup()
    with pytest.raises(UserError, match=r"none.npz': no such file; give an .npz file with x_train"):
        Arrays(str(tmp_path / "none.npz")).setup()


@pytest.mark.parametrize("name", ["users", "client_ids", "partition", "mask_train"])
def test_arrays_beside_those_that_are_read(name, tmp_path):
    arrays = {"x_train": XF, "y_train": Y, "x_test": XF + 1, "y_test": Y, name: np.arange(3), "classes": np.arange(2)}
    np.savez(tmp_path / "data.npz", **arrays)
    for key, array in arrays.items():
        np.save(tmp_path / f"{key}.npy", array)
    for path in (tmp_path / "data.npz", tmp_path):
        with pytest.raises(UserError, match=rf"^data\.path = '{path}': {name} is not read; set data\.partition, "):
            Arrays(str(path), num_clients=3).setup()
        Arrays(str(path), num_clients=3, partition=IID()).setup()


def test_client_arrays():
    parts = [(XF[:10], Y[:10]), (torch.from_numpy(XF[10:15]), Y[10:15]), (XF[15:], torch.from_numpy(Y[15:]))]
    data = Arrays(client_arrays=parts, test=(XF[:5], Y[:5]), batch_size=None)
    data.setup()
    assert data.num_clients == 3
    assert data.client_sizes.tolist() == [10, 5, 45]
    for client, (x, y) in enumerate(parts):
        got_x, got_y = next(iter(data.client_batches(client, 1, None, rng(), torch.float64)))
        np.testing.assert_array_equal(got_x, x)
        np.testing.assert_array_equal(got_y, y)
    scaled = Arrays(client_arrays=[(X, Y)], test=(X, Y), scale=2.0)
    scaled.setup()
    torch.testing.assert_close(next(scaled.eval_batches("test"))[0], images().float() / 2)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "data.path: give either path .* or client_arrays"),
        ({"path": np.zeros(3)}, r"data.path = a ndarray: give an .npz file .*; arrays go by client_arrays=\[\(x, y\)"),
        ({"client_arrays": [(X, Y, Y)], "test": (X, Y)}, "client_arrays: give a list of pairs"),
        ({"client_arrays": [None], "test": (X, Y)}, "client_arrays: give a list of pairs"),
        ({"client_arrays": 3, "test": (X, Y)}, "client_arrays: give a list of pairs"),
        ({"path": "a.npz", "client_arrays": []}, "data.path: give either path .* or client_arrays"),
        ({"client_arrays": [(XF, Y)]}, "test: missing; client_arrays need the central test set"),
        (
            {"client_arrays": [(XF, Y), (XF, Y[:3])], "test": (XF, Y)},
            "client_arrays: client 1 has 60 samples and 3 labels",
        ),
        (
            {"client_arrays": [(XF[:, :2], Y)], "test": (XF, Y)},
            r"x of client 0: shape \(2,\) of a sample differs from x of test's \(4,\)",
        ),
        ({"client_arrays": [(XF, Y), (nan_at(7), Y)], "test": (XF, Y)}, "x of client 1: row 7 holds NaN"),
        (
            {"client_arrays": [(XF, Y), (XF[:0], Y[:0])], "test": (XF, Y)},
            "data.num_clients = 2 leaves client 1 without data",
        ),
    ],
)
def test_faulty_client_arrays(kwargs, message):
    with pytest.raises(UserError, match="^" + message):
        Arrays(**kwargs).setup()


def test_arrays_that_cannot_be_written():
    """Those of pandas are read without torch's warning."""
    x, y = XF.copy(), Y.copy()
    x.flags.writeable = y.flags.writeable = False
    data = Arrays(client_arrays=[(x, y)], test=(x + 1, y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.setup()
    np.testing.assert_array_equal(data.x_train, x)
    np.testing.assert_array_equal(data.y_train, y)


def write_idx(folder, train, x, y):
    """Writes MNIST's own file format."""
    prefix = "train" if train else "t10k"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, *x.shape) + x.tobytes())
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
        struct.pack(">2i", 0x801, len(y)) + y.astype(np.uint8).tobytes()
    )


def test_torchvision_with_train_flag(tmp_path):
    for train, n in ((True, 60), (False, 12)):
        write_idx(tmp_path / "FashionMNIST" / "raw", train, X[:n, ..., 0], Y[:n])
    data = TorchvisionData("FashionMNIST", data_dir=str(tmp_path), num_clients=4)
    data.prepare_data()
    data.setup()
    assert torch.equal(data.x_train, images()[:, :1])
    assert torch.equal(data.x_test, data.x_train[:12])
    np.testing.assert_array_equal(data.y_train, Y)


def test_torchvision_with_split(tmp_path):
    """RenderedSST2 has image files, and ``split`` for ``train``."""
    for split in ("train", "test"):
        for i, name in enumerate(("negative", "positive")):
            folder = tmp_path / "rendered-sst2" / split / name
            folder.mkdir(parents=True)
            Image.fromarray(X[i]).save(folder / "a.png")
    (tmp_path / "rendered-sst2" / "valid").mkdir()
    data = TorchvisionData("RenderedSST2", data_dir=str(tmp_path), num_clients=2)
    data.setup()
    assert torch.equal(data.x_train, images()[:2])
    assert data.y_train.tolist() == [0, 1]
    Image.fromarray(X[0][:4]).save(tmp_path / "rendered-sst2" / "train" / "negative" / "b.png")
    with pytest.raises(UserError, match=r"name = RenderedSST2 has images of several sizes.* use ImageFolder"):
        TorchvisionData("RenderedSST2", data_dir=str(tmp_path), num_clients=2).setup()


def test_torchvision_defaults_and_mistakes(tmp_path):
    assert TorchvisionData("CIFAR10").std == [0.2470, 0.2434, 0.2616]
    assert TorchvisionData("CIFAR100").mean == [0.5071, 0.4865, 0.4409]
    assert TorchvisionData("CIFAR10", mean=[0.0], std=[1.0]).std == [1.0]
    assert TorchvisionData("MNIST").mean is None
    with pytest.raises(
        UserError, match=r"^data.*name = 'cifar-10' is not a torchvision data set .* did you mean .*CIFAR10"
    ):
        TorchvisionData("cifar-10").setup()
    for name in ("CIFAR10", "MNIST", "SVHN", "STL10"):
        message = rf"^data.data_dir = {tmp_path}: {name} cannot be read from there[^\n]*download: true$"
        with pytest.raises(UserError, match=message):
            TorchvisionData(name, data_dir=str(tmp_path)).setup()
    with pytest.raises(UserError, match=r"dataset_kwargs = {}: EMNIST refuses them.*balanced"):
        TorchvisionData("EMNIST", data_dir=str(tmp_path)).setup()


def test_image_folder(tmp_path):
    for part, n in (("train", 4), ("test", 2)):
        for i in range(n):
            folder = tmp_path / part / ("cat", "dog")[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(X[i, :5]).save(folder / f"{i}.png")
    data = ImageFolder(str(tmp_path), 5, num_clients=2, batch_size=1)
    data.setup()
    assert torch.equal(data.x_train, images()[[0, 2, 1, 3], :, :5])
    assert data.y_train.tolist() == [0, 0, 1, 1]
    assert data.y_test.tolist() == [0, 1]
    resized = ImageFolder(str(tmp_path), 16, num_clients=2)
    resized.setup()
    assert resized.input_shape == (3, 16, 16)

    for hidden in ("train/.cache/0.png", "train/__MACOSX/._0.png", "train/cat/._0.png", "train/cat/.copies/0.png"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        shutil.copy(tmp_path / "train" / "cat" / "0.png", tmp_path / hidden)
    again = ImageFolder(str(tmp_path), 5, num_clients=2, batch_size=1)
    again.setup()
    assert torch.equal(again.x_train, data.x_train)
    (tmp_path / "train" / "emu").mkdir()
    with pytest.raises(UserError, match=r"^data.root = .*: no images of class 'emu' under '.*train'; expected"):
        ImageFolder(str(tmp_path), 5).setup()
    (tmp_path / "train" / "emu").rmdir()

    (tmp_path / "test" / "dog").rename(tmp_path / "test" / "wolf")
    with pytest.raises(UserError, match=r"data.root: class 'dog' is not in both train and test"):
        ImageFolder(str(tmp_path), 5).setup()
    (tmp_path / "test" / "wolf").rename(tmp_path / "test" / "dog")
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"root = '.*0.png' is not a readable image [^\n]*; replace it"):
        ImageFolder(str(tmp_path), 5).setup()
    Image.fromarray(np.full((5, 5), 40_000, np.uint16)).save(tmp_path / "train" / "cat" / "0.png")
    with pytest.raises(UserError, match=r"0.png': has more than 8 bits a channel \(I;16\); convert it to 8 bits$"):
        ImageFolder(str(tmp_path), 5).setup()
    with pytest.raises(
        UserError, match=r"data.root = .*: no images of each class under '.*train'; expected .*/train/<class>/\*.png"
    ):
        ImageFolder(str(tmp_path / "none"), 5).setup()
    with pytest.raises(UserError, match="image_size = 0: give a whole number"):
        ImageFolder(str(tmp_path), 0)


def test_import_stays_light():
    heavy = {"sklearn", "torchvision", "PIL", "scipy"}
    files = [
        *Path(fl_lightning.data.__file__).parent.glob("*.py"),
        *Path(fl_lightning.nets.__file__).parent.glob("*.py"),
    ]
    assert len(files) > 6
    for file in files:
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not heavy & {name.split(".")[0] for name in names}, file


def test_keyed_batches_are_reproducible_across_rounds():
    data = toy(augment=Augment(1))
    draw = [
        next(iter(data.client_batches(0, 1, None, generator(0, "batches", t, 0), torch.float32)))[0] for t in (0, 1, 0)
    ]
    assert torch.equal(draw[0], draw[2])
    assert not torch.equal(draw[0], draw[1])


def test_an_unknown_split_is_one_line():
    message = r"^split = 'validation': choose from train, val, test, or give indices$"
    with pytest.raises(UserError, match=message):
        toy().eval_batches("validation")


@pytest.mark.parametrize(
    ("shape", "dtype", "turned"),
    [
        ((2, 6, 5, 3), "f4", True),
        ((2, 6, 5, 4), "f8", True),
        ((2, 6, 5, 4), "u1", True),
        ((2, 6, 6, 1), "f4", True),
        ((2, 9, 128, 1), "f4", False),  # sensors by time
        ((2, 64, 4, 4), "f4", False),  # maps of a net
        ((2, 3, 8, 8), "f4", False),
    ],
)
def test_images_of_which_channels_come_last(shape, dtype, turned):
    array = (numpy_generator(0, "channels").random(shape) * 255).astype(dtype)
    np.testing.assert_array_equal(inputs("x", array), array.transpose(0, 3, 1, 2) if turned else array)


@pytest.mark.parametrize("shape", [(2, 4, 5, 3), (2, 2, 9, 1), (2, 3, 9, 3), (2, 1, 8, 1)])
def test_narrow_channels_first_images_stay(shape):
    """No image has four rows, but many have up to four channels."""
    array = numpy_generator(0, "narrow").integers(0, 256, shape, dtype=np.uint8)
    np.testing.assert_array_equal(inputs("x", array), array)
