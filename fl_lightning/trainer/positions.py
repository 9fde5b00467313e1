"""Positions of the clients' rows in a file, as an array by client."""

from collections.abc import Iterator, MutableMapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

NONE = -1


class Positions(MutableMapping[int, int]):
    """Positions by client: a million of them take 8 MB, and are copied at once.

    Args:
        clients: Ids, ``(n,)``, each once.
        positions: Their positions, ``(n,)``, from 0.
    """

    def __init__(self, clients: ArrayLike = (), positions: ArrayLike = ()) -> None:
        clients = np.asarray(clients, np.int64)
        self._of: NDArray[np.int64] = np.full(int(clients.max(initial=-1)) + 1, NONE)
        self._of[clients] = positions
        self._count = len(clients)

    @property
    def clients(self) -> NDArray[np.int64]:
        """Clients with a position, ``(n,)``, in ascending order."""
        return np.flatnonzero(self._of != NONE)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Their positions, ``(n,)``, in the same order."""
        return self._of[self.clients]

    def copy(self) -> "Positions":
        """Returns a copy."""
        clients = self.clients
        return Positions(clients, self._of[clients])

    def __getitem__(self, client: int) -> int:
        if client not in self:
            raise KeyError(client)
        return int(self._of[client])

    def __setitem__(self, client: int, position: int) -> None:
        if client >= len(self._of):
            more = np.full(max(client + 1 - len(self._of), len(self._of)), NONE)
            self._of = np.concatenate([self._of, more])
        new = self._of[client] == NONE
        self._of[client] = position
        self._count += new

    def __delitem__(self, client: int) -> None:
        if client not in self:
            raise KeyError(client)
        self._of[client] = NONE
        self._count -= 1

    def __contains__(self, client: object) -> bool:
        if not isinstance(client, int | np.integer):
            return False
        return bool(0 <= client < len(self._of) and self._of[int(client)] != NONE)

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients.tolist())

    def __len__(self) -> int:
        return self._count
