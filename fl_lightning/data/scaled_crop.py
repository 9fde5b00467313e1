"""FedDrive's augmentation of images with label maps."""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.core import require
from fl_lightning.data.augment import Augment
from fl_lightning.data.miou import IGNORED


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
        granularity: As for Augment.

    Raises:
        UserError: If a number is out of range.
    """

    ASPECT = (3 / 4, 4 / 3)
    DRAWS = 10
    GREY = 74
    """Value that contrast does not change."""

    def __init__(
        self,
        size: tuple[int, int] = (512, 1024),
        scale: tuple[float, float] = (0.5, 1.5),
        kind: Literal["rescaled", "area"] = "rescaled",
        flip: bool = True,
        jitter: float = 0.0,
        granularity: Literal["sample", "batch"] = "sample",
    ) -> None:
        super().__init__(crop=0, flip=flip, granularity=granularity)
        require(min(size) > 0, "data.augment.size", size, "use height and width in pixels")
        require(0 < scale[0] <= scale[1], "data.augment.scale", scale, "use the minimum and the maximum, above 0")
        require(0 <= jitter <= 1, "data.augment.jitter", jitter, "use 0 (none) to 1")
        self.size, self.scale, self.kind, self.jitter = tuple(size), tuple(scale), kind, jitter

    def draw(self, sizes: list[int], generator: torch.Generator) -> dict[str, Tensor]:
        """See :class:`Augment`; positions and sizes are drawn in [0, 1), for images of any size."""
        n = sum(sizes) if self.granularity == "sample" else len(sizes)
        tries = self.DRAWS if self.kind == "area" else 1
        drawn = {
            "scale": torch.rand(n, tries, 2, generator=generator),
            "place": torch.rand(n, 2, generator=generator),
            "colour": torch.rand(n, 3, generator=generator),
        }
        if self.granularity == "batch":
            drawn = {name: v.repeat_interleave(torch.tensor(sizes), dim=0) for name, v in drawn.items()}
        return {**super().draw(sizes, generator), **drawn}

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See :class:`Augment`."""
        return shape[0], *self.size

    def __call__(self, x: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Augments ``(N, 4, H, W)`` uint8, whose last channel is the class."""
        top, left, height, width = self._parts(x.shape[-2], x.shape[-1], draws)
        x = _resampled(x, top.to(x.device), left.to(x.device), height.to(x.device), width.to(x.device), self.size)
        if self.flip:
            x = torch.where(draws["flip"].to(x.device)[:, None, None, None], x.flip(-1), x)
        if self.jitter:
            rates = 1 + self.jitter * (2 * draws["colour"].to(x.device) - 1)
            x = torch.cat([self._jittered(x[:, :3].float(), rates), x[:, 3:]], 1)
        return x.contiguous(memory_format=torch.channels_last)

    def _parts(self, height: int, width: int, draws: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Top, left, height and width of the crop of each image, in its pixels, ``(n,)`` each."""
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
            first = fits.double().argmax(1)
            extent = tried[torch.arange(len(u)), first]
            narrow = torch.tensor(
                [min(height, round(width / self.ASPECT[0])), min(width, round(height * self.ASPECT[1]))]
            ).double()
            found = fits.any(1, keepdim=True)
            extent = torch.where(found, extent, narrow)
            place = (draws["place"] * (full - extent + 1)).floor()
            corner = torch.where(found, place, (full - extent).div(2, rounding_mode="floor"))
        return corner[:, 0], corner[:, 1], extent[:, 0], extent[:, 1]

    def _jittered(self, x: Tensor, rates: Tensor) -> Tensor:
        """Jitters colours ``(n, 3, H, W)`` from 0 to 255, rounded down after each of the three steps."""
        brightness, contrast, saturation = rates[:, :, None, None, None].unbind(1)
        x = (x * brightness).clamp(0, 255).floor()
        x = (self.GREY + (x - self.GREY) * contrast).clamp(0, 255).floor()
        mean = x.mean(1, keepdim=True)
        return (mean + (x - mean) * saturation).clamp(0, 255).to(torch.uint8)


def _resampled(x: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, size: tuple[int, ...]) -> Tensor:
    """Crops ``(n, 4, H, W)`` resized to one size; pixels outside are black and do not count."""
    grids, nearest, inside = [], [], []
    for start, extent, out, full in zip((top, left), (height, width), size, x.shape[-2:], strict=True):
        at = (
            start[:, None] + (torch.arange(out, device=x.device) + 0.5) * (extent / out)[:, None]
        )  # (n, out), in pixels
        grids.append((2 * at / full - 1).float())
        nearest.append(at.floor().long().clamp(0, full - 1))
        inside.append((at >= 0) & (at < full))
    n, (rows, columns) = len(x), size
    grid = torch.stack(
        [grids[1][:, None, :].expand(n, rows, columns), grids[0][:, :, None].expand(n, rows, columns)], -1
    )
    rgb = F.grid_sample(x[:, :3].float(), grid, "bilinear", padding_mode="border", align_corners=False).round()
    image = torch.arange(n, device=x.device)[:, None, None]
    label = x[image, 3, nearest[0][:, :, None], nearest[1][:, None, :]][:, None]
    seen = (inside[0][:, :, None] & inside[1][:, None, :])[:, None]
    return torch.cat([(rgb * seen).to(torch.uint8), torch.where(seen, label, IGNORED)], 1)
