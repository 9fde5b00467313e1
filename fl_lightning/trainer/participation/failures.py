"""Failures of clients: how often each was refused, dropped or late, and the lines that say so."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_lightning.results.metrics import write_table

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
    named = f"{listed('client', new)} (each is named once; counts are in clients.csv)"
    return [f"round {t + 1}: not finite and left out: {named}"]


def listed(what: str, ids: Sequence[int]) -> str:
    """Returns a text such as "clients 1, 2", which names at most `LINES` of them."""
    more = f" and {len(ids) - LINES} more" if len(ids) > LINES else ""
    return f"{what}{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids[:LINES]))}{more}"


def write(path: Path, failures: Failures) -> None:
    """Writes the table of all clients that failed, if there are any."""
    kinds = ("dropped", "late", "refused")
    if clients := sorted({client for counts in failures.values() for client in counts}):
        rows = ([k, *(failures.get(kind, {}).get(k, 0) for kind in kinds)] for k in clients)
        write_table(path, ["client", *kinds], rows)
