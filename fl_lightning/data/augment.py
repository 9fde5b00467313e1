"""Augmentation of many samples at once."""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.core import (
    Checked,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Size,
    UnitInterval,
    accumulator_dtype,
    ensure,
    require,
    to_device,
)

IGNORED = 255
"""Class of pixels that do not count."""


class Augment(Checked, key="data.augment"):
    """Random crop from a zero-padded image and random horizontal flip; optionally a window, Cutout and Mixup.

    Crop, window and flip work on raw values, so the padding is black before normalisation, as in the fedsam repository;
    Cutout and Mixup follow after normalisation. Drawing (`draw`) and applying (`__call__`, `finalize`) are separate:
    the draws of many minibatches can be applied at once, and both passes of a SAM step see the same samples.

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
        crop: NonNegativeInt = 4,
        flip: bool = True,
        granularity: Literal["sample", "batch"] = "sample",
        window: PositiveInt | None = None,
        cutout: NonNegativeInt = 0,
        mixup: NonNegative = 0.0,
    ) -> None:
        self.crop, self.flip, self.granularity = crop, flip, granularity
        self.window, self.cutout, self.mixup = window, cutout, mixup

    def draw(self, sizes: list[int], generator: torch.Generator) -> dict[str, Tensor]:
        """Draws random numbers for minibatches of these sizes: tensors ``(sum of sizes, ...)`` by name, on the CPU."""
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
            drawn["partner"] = torch.cat([torch.randperm(n, generator=generator) - torch.arange(n) for n in sizes])
        return drawn

    def to_device(self, draws: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Moves draws to the device where `__call__` and `finalize` use them, at once for many minibatches."""
        wide = {torch.float64: accumulator_dtype(device)}
        return {name: to_device(v, device, wide.get(v.dtype)) for name, v in draws.items()}

    def __call__(self, x: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Augments raw images ``(N, C, H, W)`` of any dtype and device by their `draw`; keeps channels_last."""
        height, width = x.shape[-2:]
        if self.crop:
            dy, dx = to_device(draws["crop"], x.device).unbind(1)
            x = _cut(F.pad(x.permute(0, 2, 3, 1), [0, 0, *[self.crop] * 4]), dy, dx, height, width)
        if self.window:
            places = zip(to_device(draws["window"], x.device).unbind(1), (height, width), strict=True)
            dy, dx = ((place * (size - self.window + 1)).long() for place, size in places)
            x = _cut(x.permute(0, 2, 3, 1), dy, dx, self.window, self.window)
        if self.flip:
            x = torch.where(to_device(draws["flip"], x.device)[:, None, None, None], x.flip(-1), x)
        return x

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of an augmented image, given that of a stored one, ``(C, H, W)``.

        Raises:
            UserError: If the images are smaller than crop, cutout or window.
        """
        for key, pixels in (("crop", self.crop), ("cutout", self.cutout), ("window", self.window or 0)):
            fits = pixels <= min(shape[1:])
            require(fits, f"data.augment.{key}", pixels, f"larger than the images, {shape}; use a smaller one")
        return (shape[0], self.window, self.window) if self.window else shape

    def center_crop(self, x: Tensor) -> Tensor:
        """Returns the part of raw images ``(N, C, H, W)`` that evaluation uses."""
        if not self.window:
            return x
        top, left = ((size - self.window) // 2 for size in x.shape[-2:])
        return x[..., top : top + self.window, left : left + self.window]

    def finalize(self, x: Tensor, y: Tensor, draws: dict[str, Tensor], num_classes: int) -> tuple[Tensor, Tensor]:
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
            for place, size in zip(to_device(draws["cutout"], x.device).unbind(1), x.shape[-2:], strict=True):
                start = (place * size).long() - self.cutout // 2
                pixel = torch.arange(size, device=x.device)
                hidden.append((pixel >= start[:, None]) & (pixel < start[:, None] + self.cutout))
            x.masked_fill_(hidden[0][:, None, :, None] & hidden[1][:, None, None, :], 0)
        if self.mixup:
            n = len(x)
            # padding of a block has no weight, so its partner can be any sample
            partner = (torch.arange(n, device=x.device) + to_device(draws["partner"], x.device)).clamp(max=n - 1)
            share = to_device(draws["share"], x.device, x.dtype)
            labels = F.one_hot(y, num_classes).to(x.dtype)
            y = share[:, None] * labels + (1 - share[:, None]) * labels[partner]
            x = share[:, None, None, None] * x + (1 - share[:, None, None, None]) * x[partner]
        return x, y


def _cut(x: Tensor, dy: Tensor, dx: Tensor, height: int, width: int) -> Tensor:
    """Crops images ``(N, H, W, C)`` at ``dy, dx``; returns ``(N, C, height, width)``, channels_last."""
    parts = x.unfold(1, height, 1).unfold(2, width, 1).permute(0, 1, 2, 4, 5, 3)  # a view: (N, dy, dx, h, w, C)
    return parts[torch.arange(len(x), device=x.device), dy, dx].permute(0, 3, 1, 2)


class ScaledCrop(Augment):
    """FedDrive's augmentation of images with label maps: random scale, crop and flip, optionally colour jitter.

    Pixels outside the image are black and do not count. Images are interpolated bilinearly, without smoothing before
    they are made smaller; label maps take the nearest pixel.

    Args:
        size: Height and width of the result.
        scale: Minimum and maximum scale: the factor by which the image is enlarged before it is cropped (kind
            "rescaled", as on Cityscapes), or the share of its area that is cropped and resized (kind "area", as on
            IDDA; the central part if none of 10 draws fits).
        kind: Meaning of the scale.
        flip: Whether half of the images are mirrored left to right.
        jitter: Maximum deviation of brightness, contrast and saturation from 1, in this order; FedDrive: 0.4 on
            Cityscapes.

    Raises:
        UserError: If a number is out of range.
    """

    ASPECT = (3 / 4, 4 / 3)
    DRAWS = 10
    GREY = 74
    """Value that contrast does not change."""

    def __init__(
        self,
        size: tuple[Size, Size] = (512, 1024),
        scale: tuple[Positive, Positive] = (0.5, 1.5),
        kind: Literal["rescaled", "area"] = "rescaled",
        flip: bool = True,
        jitter: UnitInterval = 0.0,
    ) -> None:
        super().__init__(crop=0, flip=flip)
        require(scale[0] <= scale[1], "data.augment.scale", scale, "give the minimum first")
        self.size, self.scale, self.kind, self.jitter = tuple(size), tuple(scale), kind, jitter

    def draw(self, sizes: list[int], generator: torch.Generator) -> dict[str, Tensor]:
        """See :class:`Augment`; draws positions and sizes in [0, 1), for images of any size."""
        n, tries = sum(sizes), self.DRAWS if self.kind == "area" else 1
        return {
            "scale": torch.rand(n, tries, 2, generator=generator),
            "place": torch.rand(n, 2, generator=generator),
            "colour": torch.rand(n, 3, generator=generator),
            **super().draw(sizes, generator),
        }

    def to_device(self, draws: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Returns the draws unchanged: positions are computed on the host, in float64, which not all devices have."""
        return draws

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See :class:`Augment`."""
        return shape[0], *self.size

    def __call__(self, x: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Augments ``(N, 4, H, W)`` uint8, whose last channel is the class."""
        ensure(x.shape[1] == 4, "data.augment = ScaledCrop: these images have no label maps; use Augment or null")
        corner, extent = (to_device(v, x.device) for v in self._parts(x.shape[-2], x.shape[-1], draws))
        x = super().__call__(_resampled(x, corner, extent, self.size), draws)
        if self.jitter:
            rates = 1 + self.jitter * (2 * to_device(draws["colour"], x.device) - 1)
            x = torch.cat([self._jittered(x[:, :3].float(), rates), x[:, 3:]], 1)
        return x.contiguous(memory_format=torch.channels_last)

    def _parts(self, height: int, width: int, draws: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the upper left corner and the size of each image's crop, in its pixels, ``(n, 2)`` each."""
        low, high = self.scale
        full, out = torch.tensor([height, width]).double(), torch.tensor(self.size).double()
        u = draws["scale"].double()
        if self.kind == "rescaled":
            scaled = torch.ceil(full * (low + (high - low) * u[:, 0, :1]))
            pad = torch.where(scaled < out, (out - scaled).div(2, rounding_mode="floor") + 1, 0)
            start = (draws["place"] * (scaled + 2 * pad - out)).floor() - pad
            pixel = full / scaled
            corner, extent = start * pixel, out * pixel
        else:
            area = height * width * (low + (high - low) * u[..., 0])
            aspect = torch.exp(math.log(self.ASPECT[0]) + math.log(self.ASPECT[1] / self.ASPECT[0]) * u[..., 1])
            tried = torch.stack([(area / aspect).sqrt().round(), (area * aspect).sqrt().round()], -1)
            fits = (tried <= full).all(-1)
            extent = tried[torch.arange(len(u)), fits.double().argmax(1)]
            narrow = torch.tensor(
                [min(height, round(width / self.ASPECT[0])), min(width, round(height * self.ASPECT[1]))]
            ).double()
            any_fits = fits.any(1, keepdim=True)
            extent = torch.where(any_fits, extent, narrow)
            place = (draws["place"] * (full - extent + 1)).floor()
            corner = torch.where(any_fits, place, (full - extent).div(2, rounding_mode="floor"))
        return corner, extent

    def _jittered(self, x: Tensor, rates: Tensor) -> Tensor:
        """Jitters colours ``(n, 3, H, W)`` from 0 to 255, rounded down after each of the three steps."""
        brightness, contrast, saturation = rates[:, :, None, None, None].unbind(1)
        x = (x * brightness).clamp(0, 255).floor()
        x = (self.GREY + (x - self.GREY) * contrast).clamp(0, 255).floor()
        mean = x.mean(1, keepdim=True)
        return (mean + (x - mean) * saturation).clamp(0, 255).to(torch.uint8)


def _resampled(x: Tensor, corner: Tensor, extent: Tensor, size: tuple[int, ...]) -> Tensor:
    """Crops ``(n, 4, H, W)`` resized to one size; pixels outside are black and do not count."""
    (rows, row, in_height), (columns, column, in_width) = map(_places, corner.T, extent.T, size, x.shape[-2:])
    shape = len(x), *size
    grid = torch.stack([columns[:, None, :].expand(shape), rows[:, :, None].expand(shape)], -1)
    rgb = F.grid_sample(x[:, :3].float(), grid, "bilinear", padding_mode="border", align_corners=False).round()
    label = x[torch.arange(len(x), device=x.device)[:, None, None], 3, row[:, :, None], column[:, None, :]][:, None]
    seen = (in_height[:, :, None] & in_width[:, None, :])[:, None]
    return torch.cat([(rgb * seen).to(torch.uint8), torch.where(seen, label, IGNORED)], 1)


def _places(start: Tensor, length: Tensor, out: int, full: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the places of a crop's pixels along one axis of the image, ``(n, out)`` each.

    Args:
        start: First pixel of each crop, ``(n,)``.
        length: Its length in pixels, ``(n,)``.
        out: Number of pixels after resizing.
        full: Number of pixels of the image.

    Returns:
        Their coordinates from -1 to 1, for ``grid_sample``; the nearest pixels; and whether they are in the image.
    """
    pixel = start[:, None] + (torch.arange(out, device=start.device) + 0.5) * (length / out)[:, None]  # in pixels
    return (2 * pixel / full - 1).float(), pixel.floor().long().clamp(0, full - 1), (pixel >= 0) & (pixel < full)
