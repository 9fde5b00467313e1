"""Cutout, Mixup, windows and standardisation: against loops over samples, and alike on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning import SAM, SGD, Augment, FedAvg, FederatedTrainer, FedGMT, FedNTD, LocalObjective, UserError
from fl_lightning.core.rng import generator, numpy_generator
from fl_lightning.data.minibatches import blocks
from fl_lightning.trainer.run import Run
from tests.data.test_data import toy
from tests.engine.test_engines import assert_close, data

X = torch.from_numpy(numpy_generator(0, "test augment").normal(size=(40, 3, 12, 10)))


def draws(augment: Augment, sizes: list[int], seed: int = 0) -> dict[str, Tensor]:
    return augment.draw(sizes, torch.Generator().manual_seed(seed))


def test_draws_of_another_number_of_rows_are_refused() -> None:
    class Few(Augment):
        def draw(self, sizes: list[int], generator: torch.Generator) -> dict[str, Tensor]:
            return {"few": torch.rand(3, generator=generator)}

    module = data()
    module.augment = Few()
    module.setup()
    with pytest.raises(UserError, match=r"data\.augment: draw gives {'few': 3} rows for 4 samples; give one for each"):
        module.client_batches(0, 1, 1, generator(0, "check"), torch.float32)


@pytest.mark.parametrize("size", [4, 5, 30])
def test_cutout_is_one_clipped_hole(size: int) -> None:
    """As in DeVries and Taylor's code it starts at ``centre - size // 2``, is ``size`` wide, cut off at the edges."""
    augment = Augment(0, False, cutout=size)
    drawn = draws(augment, [40])
    x, _ = augment.finalize(X.clone(), torch.zeros(40), drawn, 2)
    centres = set()
    for image, result, place in zip(X, x, drawn["cutout"], strict=True):
        cy, cx = int(place[0] * 12), int(place[1] * 10)
        want = image.clone()
        want[
            :, max(cy - size // 2, 0) : max(cy - size // 2 + size, 0), max(cx - size // 2, 0) : cx - size // 2 + size
        ] = 0
        assert torch.equal(result, want)
        centres.add((cy, cx))
    assert len(centres) > 20 and {y for y, _ in centres} <= set(range(12)) and {x for _, x in centres} <= set(range(10))


def test_cutout_comes_after_normalisation() -> None:
    module = toy(augment=Augment(0, False, cutout=3), mean=[0.5], std=[0.1], batch_size=None, num_clients=1)
    x, _ = next(iter(module.client_batches(0, 1, None, generator(0, "cutout"), torch.float64)))
    assert ((x == 0).all(1).sum((1, 2)) >= 4).all()  # at least a corner of the hole: 0 is grey, not black


def test_mixup_is_a_convex_combination_within_the_minibatch() -> None:
    sizes, augment = [5, 1, 7, 27], Augment(0, False, mixup=1.0)
    drawn = draws(augment, sizes)
    y = torch.from_numpy(numpy_generator(1, "labels").integers(0, 3, 40))
    x, soft = augment.finalize(X.clone(), y, drawn, 3)
    logits, start, shares = X[:, 0, 0, :3], 0, []
    losses = F.cross_entropy(logits, soft, reduction="none")
    for size in sizes:
        part = slice(start, start + size)
        partner = torch.arange(size) + drawn["partner"][part]
        assert torch.equal(partner.sort().values, torch.arange(size))  # a permutation
        share = drawn["share"][part][0]
        assert (drawn["share"][part] == share).all()
        torch.testing.assert_close(x[part], share * X[part] + (1 - share) * X[part][partner], rtol=0, atol=0)
        terms = [F.cross_entropy(logits[part], labels, reduction="none") for labels in (y[part], y[part][partner])]
        torch.testing.assert_close(losses[part], share * terms[0] + (1 - share) * terms[1], rtol=1e-14, atol=1e-14)
        shares.append(float(share))
        start += size
    assert len(set(shares)) == 4 and all(0 < share < 1 for share in shares)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_mixup_draws_a_beta(alpha: float) -> None:
    share = draws(Augment(0, False, mixup=alpha), [1] * 20_000)["share"]
    assert share.mean() == pytest.approx(0.5, abs=0.01)
    assert share.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


def test_old_draws_stay_as_they_are() -> None:
    """What was drawn before Cutout and Mixup came is still drawn first."""
    plain, full = draws(Augment(), [3, 4]), draws(Augment(cutout=4, mixup=1.0, window=8), [3, 4])
    assert all(torch.equal(plain[name], full[name]) for name in ("crop", "flip"))


def test_granularity_batch_is_one_hole_and_one_window() -> None:
    drawn = draws(Augment(0, True, "batch", window=8, cutout=4), [3, 2])
    assert drawn.keys() == {"flip", "window", "cutout"}
    for v in drawn.values():
        assert (v[:3] == v[0]).all() and (v[3:] == v[3]).all()
    assert not torch.equal(drawn["cutout"][0], drawn["cutout"][3])


def test_window_is_random_in_training_and_central_in_evaluation() -> None:
    module = toy(augment=Augment(0, False, window=4), batch_size=None, num_clients=1)
    assert module.input_shape == (3, 4, 4)
    raw = module.x_train[module.clients[0]]
    x, _ = next(iter(module.client_batches(0, 1, None, generator(0, "window"), torch.float64)))
    places = set()
    for image, result in zip(raw, x, strict=True):
        image = image.double() / 255
        fits = [(i, j) for i in range(3) for j in range(2) if torch.equal(image[:, i : i + 4, j : j + 4], result)]
        assert len(fits) == 1
        places |= set(fits)
    assert len(places) == 6  # every place occurs: images are 6 x 5
    x, _ = next(module.eval_batches("test", torch.float64))
    torch.testing.assert_close(x, module.x_test[..., 1:5, 0:4].double() / 255, rtol=0, atol=0)
    with pytest.raises(UserError, match=r"^data.augment.window = 6: larger than the images, \(3, 6, 5\)"):
        toy(augment=Augment(window=6))


def test_standardise_is_that_of_tensorflow() -> None:
    flat = np.full((1, 6, 5, 3), 7, np.uint8)
    images = np.concatenate([numpy_generator(0, "std").integers(0, 256, (59, 6, 5, 3), dtype=np.uint8), flat])
    y = np.arange(60) % 3
    module = toy((images, y, images, y), standardise=True)
    x, _ = next(module.eval_batches("test", torch.float64))
    want = images.astype(np.float64)
    n = want[0].size
    for image, result in zip(want, x.movedim(1, -1).numpy(), strict=True):
        adjusted = max(image.std(), 1 / np.sqrt(n))
        np.testing.assert_allclose(result, (image - image.mean()) / adjusted, rtol=0, atol=1e-12)
    assert (x[-1] == 0).all()
    with pytest.raises(UserError, match="standardise = true: replaces mean and std"):
        toy(standardise=True, mean=[0.5])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixup": -1.0}, "data.augment.mixup = -1.0: give a"),
        ({"mixup": float("inf")}, "data.augment.mixup = inf: give a"),
        ({"cutout": -1}, "data.augment.cutout = -1: give a"),
        ({"window": 0}, "data.augment.window = 0: give a"),
    ],
)
def test_mistakes(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Augment(**settings)


# Engines

FULL = {"crop": 1, "cutout": 2, "mixup": 0.7}


def train(folder: Path, objective: LocalObjective, engine: str, **options: Any) -> Run:
    module = data()
    module.augment = Augment(**{**FULL, **options})
    trainer = FederatedTrainer(
        max_rounds=2, clients_per_round=4, precision="64-true", engine=engine, accelerator="cpu", threads=1,  # type: ignore[arg-type]
        default_root_dir=str(folder), enable_progress_bar=False, callbacks=[],
    )  # fmt: skip
    return trainer.fit(objective, module)


def net(side: int = 6) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * side * side, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"granularity": "batch", "window": 4}], ids=["samples", "batches, window"])
def test_engines_agree(options: dict[str, Any], tmp_path: Path) -> None:
    """Clients take one to five steps, the last minibatch is short; SAM's passes and the teacher see one batch."""

    def objective() -> LocalObjective:
        return FedGMT(net=net(options.get("window", 6)), ascent=SAM(0.1), optimizer=SGD(0.1, momentum=0.9))

    sequential = train(tmp_path, objective(), "sequential", **options)
    for engine in ("batched", "graphed"):
        assert_close(train(tmp_path, objective(), engine, **options), sequential)


def test_blocks_mix_within_a_minibatch() -> None:
    """Padded side by side, minibatches hold what they hold alone."""
    module = data()
    module.augment = Augment(**FULL)
    module.setup()
    alone = [module.client_batches(k, 2, None, generator(0, "batches", k), torch.float64) for k in range(5)]
    steps = [list(client) for client in alone]
    at = 0
    for block in blocks(alone, 6, 4):
        for x, y, weight in zip(block.x, block.y, block.weight, strict=True):
            for k in range(6):
                live = weight[k] > 0
                if k < 5 and at < len(steps[k]):
                    assert torch.equal(x[k][live], steps[k][at][0]) and torch.equal(y[k][live], steps[k][at][1])
                else:
                    assert not live.any()
            at += 1
    assert at == max(map(len, steps))


def test_mixup_by_hand(tmp_path: Path) -> None:
    """A run agrees with a plain loop with the two-term loss, at both points of SAM."""
    module = data()
    module.augment = Augment(0, False, mixup=1.0)
    objective = FedAvg(net=net(), ascent=SAM(0.1), optimizer=SGD(0.1))
    run = train(tmp_path, objective, "sequential", crop=0, flip=False, cutout=0, mixup=1.0)
    module.setup()
    model = net().double()
    w = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    for t in range(2):
        local, total = [], 0
        for k in run.settings.sampler(t, 5, 0):
            v, batches = w.clone(), module.client_batches(k, 1, None, generator(0, "batches", t, 0, k), torch.float64)
            start = 0
            for size in batches.sizes:
                index = batches.indices[start : start + size]
                x, y = module.x_train[index].double() / 255, module.y_train[index]
                partner = torch.arange(size) + batches.draws["partner"][start : start + size]
                share = batches.draws["share"][start]
                mixed = share * x + (1 - share) * x[partner]

                def gradient(
                    point: Tensor,
                    mixed: Tensor = mixed,
                    y: Tensor = y,
                    partner: Tensor = partner,
                    share: Tensor = share,
                ) -> Tensor:
                    torch.nn.utils.vector_to_parameters(point, model.parameters())
                    logits = model(mixed)
                    loss = share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[partner])
                    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

                g = gradient(v)
                v = v - 0.1 * gradient(v + 0.1 * g / g.norm())
                start += size
            local.append(v * len(module.clients[k]))
            total += len(module.clients[k])
        w = torch.stack(local).sum(0) / total
    torch.testing.assert_close(run.server.w, w, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (FedAvg(net=net(), loss=nn.MultiMarginLoss()), r"model.loss = MultiMarginLoss cannot take .* labels \(2, 3\)"),
        (FedNTD(net=net()), "data.augment.mixup = on: use 0, FedNTD needs one true class a sample"),
    ],
    ids=["loss", "FedNTD"],
)
def test_what_cannot_be_mixed(objective: LocalObjective, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        train(tmp_path, objective, "sequential")


def test_a_step_has_the_same_layout_in_a_block_of_any_length() -> None:
    """Compiled code is made for one."""
    module = data()
    module.setup()
    layouts = set()
    for epochs in (1, 2, 3):
        alone = [module.client_batches(k, epochs, None, generator(0, "batches", k), torch.float64) for k in range(5)]
        for block in blocks(alone, 5, 4):
            layouts.add(tuple(v[:1].stride() for v in (block.x, block.y, block.weight, block.active)))
    assert len(layouts) == 1
