"""Augmentation of many samples at once."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.errors import require


class Augment:
    """Random crop from a zero-padded image, then a random horizontal flip.

    Works on raw values, so the padding is black before normalisation, as in the fedsam repository. What is drawn for a
    sample (`draw`) and what is done with it (`__call__`) are apart: the draws of many minibatches can be applied at
    once.

    Args:
        crop: Zero pixels added on every side before cropping back to the image's size; 0 for no crop.
        flip: Whether half of the images are mirrored left to right.
        granularity: Draws of its own for every sample, or one for the whole batch (as FL-SAM and the fedgloss
            repository have it).

    Raises:
        UserError: If crop is negative.
    """

    def __init__(self, crop: int = 4, flip: bool = True, granularity: Literal["sample", "batch"] = "sample") -> None:
        require(crop >= 0, "data.augment.crop", crop, "use 0 (no crop) or a number of pixels")
        self.crop = crop
        self.flip = flip
        self.granularity = granularity

    def draw(self, sizes: list[int], generator: torch.Generator) -> dict[str, Tensor]:
        """What is drawn for minibatches of these sizes: tensors ``(sum of sizes, ...)`` by name, on the CPU."""
        n = sum(sizes) if self.granularity == "sample" else len(sizes)
        drawn = {}
        if self.crop:
            drawn["crop"] = torch.randint(2 * self.crop + 1, (2, n), generator=generator).T
        if self.flip:
            drawn["flip"] = torch.rand(n, generator=generator) < 0.5
        if self.granularity == "batch":
            drawn = {name: v.repeat_interleave(torch.tensor(sizes), dim=0) for name, v in drawn.items()}
        return drawn

    def __call__(self, x: Tensor, draws: dict[str, Tensor]) -> Tensor:
        """Augment images of shape ``(N, C, H, W)``, any dtype and device, by their `draw`; channels_last stays so."""
        n, _, height, width = x.shape
        if self.crop:
            padded = F.pad(x.permute(0, 2, 3, 1), [0, 0, *[self.crop] * 4])
            windows = padded.unfold(1, height, 1).unfold(2, width, 1)  # a view: (N, dy, dx, C, H, W)
            dy, dx = draws["crop"].to(x.device).unbind(1)
            x = windows.permute(0, 1, 2, 4, 5, 3)[torch.arange(n, device=x.device), dy, dx].permute(0, 3, 1, 2)
        if self.flip:
            x = torch.where(draws["flip"].to(x.device)[:, None, None, None], x.flip(-1), x)
        return x
