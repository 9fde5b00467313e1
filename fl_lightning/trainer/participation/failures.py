"""Failures of clients: how often each was refused, dropped or late, and the lines that say so."""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_lightning.core import write_atomically

Failures = Mapping[str, Mapping[int, int]]
"""How often each client failed, by kind (refused, dropped, late) and id."""
LINES = 10
"""Clients named on the console in a run, and in a line; all are in ``clients.csv``."""


def counted(before: Failures, failed: Mapping[str, Sequence[int]]) -> Failures:
    """Returns the counts after another round; those before stay as they are.

    Args:
        before: The counts.
        failed: Clients that failed in the round, by kind.
    """
    new = {kind: Counter(clients) for kind, clients in failed.items() if clients}  # in two phases, two failures
    return {**before, **{kind: dict(Counter(before.get(kind, {})) + counts) for kind, counts in new.items()}}


def new_lines(before: Failures, t: int, refused: Sequence[int]) -> list[str]:
    """Returns a line that names the clients that are refused for the first time, until `LINES` clients were named.

    Args:
        before: The counts before the round.
        t: The round, from 0.
        refused: Clients that are refused in it.
    """
    known = before.get("refused", {})
    new = sorted(set(refused) - known.keys())
    if not new or len(known) >= LINES:
        return []
    more = f" and {len(new) - LINES} more" if len(new) > LINES else ""
    named = f"client{'s' if len(new) > 1 else ''} {', '.join(map(str, new[:LINES]))}{more}"
    return [f"round {t + 1}: not finite and left out: {named} (each is named once; counts are in clients.csv)"]


def write(path: Path, failures: Failures) -> None:
    """Writes the table of all clients that failed, if there are any."""
    clients = sorted({client for counts in failures.values() for client in counts})
    if not clients:
        return
    kinds, text = ("dropped", "late", "refused"), io.StringIO()
    rows = ([k, *(failures.get(kind, {}).get(k, 0) for kind in kinds)] for k in clients)
    csv.writer(text).writerows([["client", *kinds], *rows])
    write_atomically(path, text.getvalue())
