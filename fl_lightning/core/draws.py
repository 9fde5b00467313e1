"""Random numbers for the hooks of an algorithm."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fl_lightning.core.errors import UserError
from fl_lightning.core.rng import generator


class Draws:
    """Random numbers of one client's hooks, or of several clients' at once.

    Each client has a stream of its own for each moment of its local training: before the first step, in each step, and
    after the last. So what a hook draws does not depend on the engine, the number of processes or an interruption.

    Args:
        keys: Seed, round, phase and id of each client.
        device: Device of the numbers; they are drawn on the CPU.
        together: Whether a draw returns a row for each client, ``(clients, k)``; otherwise ``(k,)``.
        refused: Why nothing can be drawn now, as an error message.
    """

    START, END, STEPS = 0, 1, 2

    def __init__(
        self, keys: Sequence[tuple[int, ...]], device: torch.device, together: bool, refused: str = ""
    ) -> None:
        self.keys, self.device, self.together, self.refused = keys, device, together, refused
        self._moment, self._generators = self.START, list[torch.Generator]()

    def move_to(self, moment: int) -> None:
        """Goes to a moment: START, END, or STEPS plus the number of the step, from 0."""
        self._moment, self._generators = moment, []

    def next_step(self) -> None:
        """Goes to the next step; from START to the first."""
        self.move_to(max(self._moment + 1, self.STEPS))

    def __call__(self, function: Callable[[torch.Generator], Tensor]) -> Tensor:
        """Returns what a function draws from the stream of each client; see `ClientContext.draw`."""
        if self.refused:
            raise UserError(self.refused)
        if not self._generators:
            self._generators = [generator(seed, "hooks", *key, self._moment) for seed, *key in self.keys]
        drawn = [function(each) for each in self._generators]
        return (torch.stack(drawn) if self.together else drawn[0]).to(self.device)
