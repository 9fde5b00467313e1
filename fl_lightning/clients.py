"""The clients' state between rounds: rows by client, made on first use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fl_lightning.state import Rule, Slots


class ClientStore:
    """Slots of every client seen so far; a client never seen costs nothing.

    Args:
        rules: First values of the slots, by name.
        w0: The initial model, ``(d,)``.
    """

    def __init__(self, rules: Mapping[str, Rule], w0: Tensor) -> None:
        self.rules, self.w0 = dict(rules), w0
        self._rows: dict[int, Slots] = {}

    def __len__(self) -> int:
        """Number of clients with a row."""
        return len(self._rows)

    def gather(self, client: int, w: Tensor, scratch: Mapping[str, Rule], row: Slots | None = None) -> Slots:
        """State of a client that has just received ``w``: its row, or first values if it was never seen.

        Args:
            client: Its id.
            w: What it received, ``(d,)``.
            scratch: Rules of further slots, which start afresh.
            row: Its state if it is newer than what is stored.
        """
        kept = row or self._rows.get(client) or Slots.first(self.rules, self.w0, w)
        return Slots({**kept, **Slots.first(scratch, self.w0, w)})

    def row(self, client: int) -> Slots | None:
        """What is kept of a client; None if it was never seen."""
        return self._rows.get(client)

    def scatter(self, rows: Mapping[int, Slots | None]) -> None:
        """Keep clients' states, None for a client to be as if it was never seen; names without a rule are dropped."""
        for client, slots in rows.items() if self.rules else ():
            if slots is None:
                self._rows.pop(client, None)
            else:
                self._rows[client] = slots.only(self.rules)

    def rows(self) -> dict[int, Slots]:
        """The slots of all clients seen, by id."""
        return dict(self._rows)

    def state_dict(self) -> dict[str, Any]:
        """Rows as tensors, by slot ``(clients seen, d)``, in the order of ``ids``; and the initial model."""
        ids = sorted(self._rows)
        rows = {name: torch.stack([self._rows[i][name].cpu() for i in ids]) for name in self.rules} if ids else {}
        return {"ids": ids, "rows": rows, "w0": self.w0.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the rows of `state_dict`."""
        self.w0 = state["w0"].to(self.w0)
        self._rows = {
            i: Slots({name: values[k].to(self.w0, copy=True) for name, values in state["rows"].items()})
            for k, i in enumerate(state["ids"])
        }
