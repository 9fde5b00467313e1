"""Augmentation of many samples at once."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.core import require


class Augment:
    """Random crop from a zero-padded image and random horizontal flip; optionally a window, Cutout and Mixup.

    Crop, window and flip work on raw values, so the padding is black before normalisation, as in the fedsam repository;
    Cutout and Mixup follow after normalisation. Drawing (`draw`) and applying (`__call__`, `finish`) are separate: the
    draws of many minibatches can be applied at once, and both passes of a SAM step see the same samples.

    Args:
        crop: Zero pixels added on every side before cropping back to the image's size; 0 for no crop.
        flip: Whether half of the images are mirrored left to right.
        granularity: One draw for every sample, or one for the whole batch (as in FL-SAM and the fedgloss repository).
        window: Height and width of the part of an image that is used, a random one in training, the central one in
            evaluation (Reddi et al. 2021: 24 of CIFAR-100's 32); null for the whole image.
        cutout: Height and width of a hole of zeros at a random centre, clipped at the edges (DeVries and Taylor 2017;
            16 in the fedsam repository); 0 for none.
        mixup: alpha of Mixup (Zhang et al. 2018; 1.0 in the fedsam repository): one lambda ~ Beta(alpha, alpha) and one
            permutation per minibatch. Labels become probabilities, with which cross-entropy is
            ``lambda CE(y_a) + (1 - lambda) CE(y_b)``. 0 for none.

    Raises:
        UserError: If a number is out of range.
    """

    def __init__(
        self,
        crop: int = 4,
        flip: bool = True,
        granularity: Literal["sample", "batch"] = "sample",
        window: int | None = None,
        cutout: int = 0,
        mixup: float = 0.0,
    ) -> None:
        require(crop >= 0, "data.augment.crop", crop, "use 0 (no crop) or a number of pixels")
        require(window is None or window > 0, "data.augment.window", window, "use null (none) or a number of pixels")
        require(cutout >= 0, "data.augment.cutout", cutout, "use 0 (none) or a number of pixels")
        require(0 <= mixup < float("inf"), "data.augment.mixup", mixup, "use 0 (none) or a positive number")
        self.crop, self.flip, self.granularity = crop, flip, granularity
        self.window, self.cutout, self.mixup = window, cutout, mixup

    def draw(self, sizes: list[int], generator: torch.Generator) -> dict[str, Tensor]:
        """Draws for minibatches of these sizes: tensors ``(sum of sizes, ...)`` by name, on the CPU."""
        n, repeats = sum(sizes) if self.granularity == "sample" else len(sizes), torch.tensor(sizes)
        drawn = {}
        if self.crop:
            drawn["crop"] = torch.randint(2 * self.crop + 1, (2, n), generator=generator).T
        if self.flip:
            drawn["flip"] = torch.rand(n, generator=generator) < 0.5
        if self.window:
            drawn["window"] = torch.rand(n, 2, generator=generator)  # positions in [0, 1), for images of any size
        if self.cutout:
            drawn["cutout"] = torch.rand(n, 2, generator=generator)
        if self.granularity == "batch":
            drawn = {name: v.repeat_interleave(repeats, dim=0) for name, v in drawn.items()}
        if self.mixup:
            seed = int(torch.randint(2**62, (), generator=generator))  # torch cannot draw Beta from a generator
            shares = np.random.default_rng(seed).beta(self.mixup, self.mixup, len(sizes))
            drawn["share"] = torch.from_numpy(shares).repeat_interleave(repeats)
            # offset of the partner, so that a minibatch can stand anywhere among others
            steps = [torch.randperm(size, generator=generator) - torch.arange(size) for size in sizes]
            drawn["partner"] = torch.cat(steps)
        return drawn

    def __call__(self, x: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Augments raw images ``(N, C, H, W)`` of any dtype and device by their `draw`; keeps channels_last."""
        height, width = x.shape[-2:]
        if self.crop:
            dy, dx = draws["crop"].to(x.device).unbind(1)
            x = _cut(F.pad(x.permute(0, 2, 3, 1), [0, 0, *[self.crop] * 4]), dy, dx, height, width)
        if self.window:
            spare = torch.tensor([height, width]) - self.window + 1
            dy, dx = (draws["window"] * spare).long().to(x.device).unbind(1)
            x = _cut(x.permute(0, 2, 3, 1), dy, dx, self.window, self.window)
        if self.flip:
            x = torch.where(draws["flip"].to(x.device)[:, None, None, None], x.flip(-1), x)
        return x

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of an augmented image, given that of a stored one, ``(C, H, W)``.

        Raises:
            UserError: If the images are smaller than the window.
        """
        if not self.window:
            return shape
        fits = self.window <= min(shape[1:])
        require(fits, "data.augment.window", self.window, f"larger than the images, {shape}; use a smaller one")
        return shape[0], self.window, self.window

    def central(self, x: Tensor) -> Tensor:
        """Returns the part of raw images ``(N, C, H, W)`` that evaluation uses."""
        if not self.window:
            return x
        top, left = ((size - self.window) // 2 for size in x.shape[-2:])
        return x[..., top : top + self.window, left : left + self.window]

    def finish(self, x: Tensor, y: Tensor, draws: dict[str, Tensor], num_classes: int) -> tuple[Tensor, Tensor]:
        """Applies the steps after normalisation.

        Args:
            x: Images ``(N, C, H, W)``; they may be changed in place.
            y: Labels ``(N,)``.
            draws: Their `draw`. With Mixup the samples of a minibatch must be consecutive, as they were drawn.
            num_classes: Number of classes.

        Returns:
            Images, and labels: with Mixup, probabilities ``(N, num_classes)``.
        """
        if self.cutout:
            hidden = []
            for axis, size in enumerate(x.shape[-2:]):
                start = (draws["cutout"][:, axis] * size).long() - self.cutout // 2
                pixel = torch.arange(size)
                hidden.append((pixel >= start[:, None]) & (pixel < start[:, None] + self.cutout))
            x.masked_fill_((hidden[0][:, None, :, None] & hidden[1][:, None, None, :]).to(x.device), 0)
        if self.mixup:
            n = len(x)
            # padding of a block has no weight, so its partner can be any sample
            partner = (torch.arange(n) + draws["partner"]).clamp(max=n - 1).to(x.device)
            share = draws["share"].to(x.device, x.dtype)
            labels = F.one_hot(y, num_classes).to(x.dtype)
            y = share[:, None] * labels + (1 - share[:, None]) * labels[partner]
            x = share[:, None, None, None] * x + (1 - share[:, None, None, None]) * x[partner]
        return x, y


def _cut(x: Tensor, dy: Tensor, dx: Tensor, height: int, width: int) -> Tensor:
    """Crops images ``(N, H, W, C)`` at ``dy, dx``; returns ``(N, C, height, width)``, channels_last."""
    parts = x.unfold(1, height, 1).unfold(2, width, 1).permute(0, 1, 2, 4, 5, 3)  # a view: (N, dy, dx, h, w, C)
    return parts[torch.arange(len(x), device=x.device), dy, dx].permute(0, 3, 1, 2)
