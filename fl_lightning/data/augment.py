"""Augmentation of a whole batch at once, with its own draws for every sample."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.errors import UserError


class Augment:
    """Random crop from a zero-padded image, then a random horizontal flip; each sample has its own draws.

    Works on raw values, so the padding is black before normalisation, as in the fedsam repository.

    Args:
        crop: Zero pixels added on every side before cropping back to the image's size; 0 for no crop.
        flip: Whether half of the images are mirrored left to right.

    Raises:
        UserError: If crop is negative.
    """

    def __init__(self, crop: int = 4, flip: bool = True) -> None:
        if crop < 0:
            raise UserError(f"data.augment.crop = {crop} is negative; use 0 (no crop) or a number of pixels")
        self.crop = crop
        self.flip = flip

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Augment images of shape ``(N, C, H, W)``, any dtype and device; draws come from a CPU ``generator``."""
        n, _, height, width = x.shape
        if self.crop:
            windows = F.pad(x, [self.crop] * 4).unfold(2, height, 1).unfold(3, width, 1)  # a view: (N, C, dy, dx, H, W)
            dy, dx = torch.randint(2 * self.crop + 1, (2, n), generator=generator).to(x.device)
            x = windows[torch.arange(n, device=x.device), :, dy, dx]
        if self.flip:
            mirrored = (torch.rand(n, generator=generator) < 0.5).to(x.device)
            x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
        return x
