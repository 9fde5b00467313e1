"""Communication between processes. With one process nothing is copied."""

import heapq
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed import TCPStore as Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torchmetrics.utilities.distributed import gather_all_tensors

from fl_lightning.core import Uploads, UserError
from fl_lightning.trainer.runtime import ranks

V = TypeVar("V")
_store: Store | None = None


def join_again(fabric: Fabric) -> None:
    """Joins the group of processes if torchrun has started them again; otherwise Fabric does.

    torchrun's store still has the addresses of the processes before, which torch would take for those of the new ones.
    """
    restarts, processes = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), fabric.world_size
    if restarts == "0" or processes == 1:
        return
    store, rank, _ = next(rendezvous("env://", fabric.global_rank, processes))
    backend = "nccl" if fabric.device.type == "cuda" else "gloo"
    fresh = PrefixStore(f"restart {restarts} of {processes}", store)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=processes)


def connect(fabric: Fabric) -> None:
    """Opens the store by which processes agree on who reports an error, after they have been launched."""
    global _store
    if fabric.world_size == 1:
        return
    host, limit = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=30)
    if fabric.is_global_zero:
        _store = Store(host, 0, is_master=True, timeout=limit, wait_for_workers=False)
    port = fabric.broadcast(_store.port if _store is not None else 0)
    if not fabric.is_global_zero:
        with suppress(RuntimeError):  # no way through between the nodes: the first process of each reports
            _store = Store(host, port, is_master=False, timeout=limit)


def shutdown() -> None:
    """Leaves the group of processes, if there is one; otherwise gloo aborts at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def reports(seconds: float = 10.0) -> tuple[int, bool]:
    """Returns this process's rank, and whether this process is to report an error.

    Most errors occur on all processes, and the first process reports them. If the first process has not met the error
    after some seconds, the others report it. Before the processes are connected, the first one of each node reports.

    Args:
        seconds: How long to wait for the first process.
    """
    if _store is None:
        return ranks.reports()
    rank, store = dist.get_rank() if dist.is_initialized() else 0, _store
    try:
        if rank == 0:
            store.set("error", "met")
            others = dist.get_world_size() - 1  # they ask while the store exists, which this process holds
            _soon(lambda: store.add("error seen", 0) == others, seconds / 5)
            return rank, True
        time.sleep(0.2)  # the first process may be about to end
        met = _soon(lambda: _alive(store) and bool(store.check(["error"])), seconds)
        store.add("error seen", 1)
    except (OSError, RuntimeError):  # the process that held the store is gone
        return rank, True
    return rank, not met


def _alive(store: Store) -> bool:
    """Returns True if a store answers. A question to a store that is gone would make torch print a long log.

    Raises:
        OSError: If it does not answer.
    """
    socket.create_connection((store.host, store.port), 5).close()
    return True


@contextmanager
def lost_process(
    fabric: Fabric,
    what: str = "has lost another one, which has failed or was killed; see its own message, and continue from the last "
    "checkpoint by --ckpt_path last",
) -> Iterator[None]:
    """Turns the communication error of a process whose peer has gone into one line.

    Args:
        fabric: The processes.
        what: What the line says of this process.

    Raises:
        UserError: If another process has ended.
    """
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "Connection" in str(error)
        if fabric.world_size == 1 or isinstance(error, UserError) or not lost:
            raise
        raise UserError(f"process {fabric.global_rank} {what}") from error


def on_rank_zero(fabric: Fabric, function: Callable[[], V]) -> V:
    """Calls a function on rank 0, and gives every process its result; pickled on the way.

    Raises:
        UserError: On every process, if the function raises it. If it raises another error, that on rank 0, and on the
            others a `UserError` that names it.
    """
    result: V | None = None
    failed: BaseException | None = None
    if fabric.is_global_zero:
        try:
            result = function()
        except BaseException as error:  # the others wait, whatever it is
            failed = error
    if fabric.world_size > 1:
        sent = failed if failed is None or isinstance(failed, UserError) else UserError(f"process 0: {failed!r}")
        result, received = fabric.broadcast((result, sent))
        failed = failed or received
    if failed is not None:
        raise failed
    return cast(V, result)


def _soon(condition: Callable[[], bool], seconds: float) -> bool:
    """Returns whether a condition becomes true within that time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def assign(steps: Sequence[int], processes: int) -> list[list[int]]:
    """Divides a cohort among the processes: the longest client first, each to the process with the least work.

    Args:
        steps: Local steps of each client of the cohort.
        processes: Number of processes.

    Returns:
        For each process the positions in the cohort that it trains, ascending; the first process always has some.
    """
    load = [(0, rank) for rank in range(processes)]
    mine: list[list[int]] = [[] for _ in range(processes)]
    for position in sorted(range(len(steps)), key=lambda i: -steps[i]):
        busy, rank = heapq.heappop(load)
        mine[rank].append(position)
        heapq.heappush(load, (busy + steps[position], rank))
    return [sorted(positions) for positions in mine]


def scatter(
    fabric: Fabric, rows: Sequence[Tensor], parts: list[list[int]], shape: Sequence[int], like: Tensor
) -> list[Tensor]:
    """Sends the rows of a cohort from rank 0 to the processes that train the clients.

    Args:
        fabric: The processes.
        rows: On rank 0 one row, ``shape``, for each position of the cohort.
        parts: Positions by rank.
        shape: Shape of a row.
        like: A tensor of the dtype, on this process's device.

    Returns:
        This process's rows, each of ``shape``.
    """
    if fabric.world_size == 1:
        return list(rows)
    most, sent = max(map(len, parts)), None
    if fabric.is_global_zero:
        filler = like.new_zeros(shape)
        sent = [torch.stack([*(rows[i] for i in part), *[filler] * (most - len(part))]) for part in parts]
    mine = like.new_empty(most, *shape)
    dist.scatter(mine, sent, src=0)
    return list(mine[: len(parts[fabric.global_rank])])


def gather(
    fabric: Fabric, rows: Sequence[Tensor], parts: list[list[int]], shape: Sequence[int], like: Tensor
) -> list[Tensor]:
    """Returns the rows of all processes in cohort order on rank 0, and nothing elsewhere: the inverse of `scatter`."""
    if fabric.world_size == 1:
        return list(rows)
    mine = like.new_zeros(max(map(len, parts)), *shape)
    for place, row in zip(mine, rows, strict=False):
        place.copy_(row)
    if fabric.global_rank:
        dist.gather(mine, dst=0)
        return []
    everyone = [torch.empty_like(mine) for _ in parts]
    dist.gather(mine, everyone, dst=0)
    cohort: list[Tensor] = [mine] * sum(map(len, parts))
    for part, theirs in zip(parts, everyone, strict=True):
        for position, row in zip(part, theirs, strict=False):
            cohort[position] = row
    return cohort


def all_gather_dict(fabric: Fabric, mine: Mapping[int, V]) -> dict[int, V]:
    """Merges what the processes know of different clients, sorted by client, on each process; pickled on the way."""
    everyone: list[Mapping[int, V]] = [mine] * fabric.world_size
    if fabric.world_size > 1:
        dist.all_gather_object(everyone, mine)
    merged = {client: value for part in everyone for client, value in part.items()}
    return dict(sorted(merged.items()))


def gather_states(state: Tensor, group: Any = None) -> list[Tensor]:
    """Returns the state of a metric on each process.

    torchmetrics' own function does not take an empty state, which a process without samples has.
    """
    kinds: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(kinds, (state.shape, state.dtype), group)
    shape, dtype = max(kinds, key=lambda kind: len(kind[0]) and kind[0].numel())
    if not state.numel():
        state = state.new_zeros((0, *shape[1:]), dtype=dtype)
    return gather_all_tensors(state, group)


def all_reduce_sum(fabric: Fabric, mine: Tensor) -> Tensor:
    """Sums a tensor over all processes, in place."""
    if fabric.world_size > 1:
        dist.all_reduce(mine)
    return mine


def total(fabric: Fabric, mine: int) -> int:
    """Returns the sum of a whole number over all processes."""
    if fabric.world_size == 1:
        return mine  # no wait for a GPU
    return int(all_reduce_sum(fabric, torch.tensor(mine, device=fabric.device)))


def reduce(
    fabric: Fabric, uploads: Uploads, shapes: Mapping[str, Sequence[int]], like: Tensor, deterministic: bool
) -> None:
    """Sums the uploads of all processes.

    Args:
        fabric: The processes.
        uploads: The sums; they are changed in place.
        shapes: Shape of each uploaded name.
        like: A tensor of the dtype, on this process's device.
        deterministic: Rank 0 has already summed up all rows: only broadcast.
    """
    if fabric.world_size == 1:
        return

    def shared(sums: Tensor) -> Tensor:
        if deterministic:
            dist.broadcast(sums, src=0)
        else:
            dist.all_reduce(sums)
        return sums

    uploads.change(lambda name, sums: shared(like.new_zeros(2, *shapes[name]) if sums is None else sums))
