"""Augmentation of a whole batch at once."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.errors import UserError


class Augment:
    """Random crop from a zero-padded image, then a random horizontal flip.

    Works on raw values, so the padding is black before normalisation, as in the fedsam repository.

    Args:
        crop: Zero pixels added on every side before cropping back to the image's size; 0 for no crop.
        flip: Whether half of the images are mirrored left to right.
        granularity: Draws of its own for every sample, or one for the whole batch (as FL-SAM and the fedgloss
            repository have it).

    Raises:
        UserError: If crop is negative.
    """

    def __init__(self, crop: int = 4, flip: bool = True, granularity: Literal["sample", "batch"] = "sample") -> None:
        if crop < 0:
            raise UserError(f"data.augment.crop = {crop} is negative; use 0 (no crop) or a number of pixels")
        self.crop = crop
        self.flip = flip
        self.granularity = granularity

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Augment images of shape ``(N, C, H, W)``, any dtype and device; draws come from a CPU ``generator``."""
        n, _, height, width = x.shape
        draws = n if self.granularity == "sample" else 1
        if self.crop:
            windows = F.pad(x, [self.crop] * 4).unfold(2, height, 1).unfold(3, width, 1)  # a view: (N, C, dy, dx, H, W)
            dy, dx = torch.randint(2 * self.crop + 1, (2, draws), generator=generator).to(x.device).expand(2, n)
            x = windows[torch.arange(n, device=x.device), :, dy, dx]
        if self.flip:
            mirrored = (torch.rand(draws, generator=generator) < 0.5).to(x.device)
            x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
        return x
