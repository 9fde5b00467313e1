"""Many processes: who trains whom, and what goes between them. With one process nothing is copied."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from fl_lightning.core.state import Uploads

K = TypeVar("K")
V = TypeVar("V")


def shutdown() -> None:
    """End this process's part in the group of processes, if there is one: without, gloo aborts at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def tells(seconds: float = 10.0) -> tuple[int, bool]:
    """This process's rank, and whether it is the one to tell a mistake of the user's that it has met.

    Most mistakes are met by all processes: the first one tells them. Another one tells what the first has not met, too,
    after some seconds. Before they know of each other, the first process of each node tells.

    Args:
        seconds: How long to wait for the first process.
    """
    if not dist.is_initialized():
        known = [os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ]
        local = [os.environ[name] for name in ("LOCAL_RANK", "SLURM_LOCALID") if name in os.environ]
        return int((known or ["0"])[0]), (local or known or ["0"])[0] == "0"
    rank, store = dist.get_rank(), _get_default_store()
    try:
        if rank == 0:
            store.set("mistake", "met")
            others = dist.get_world_size() - 1  # they ask while the store is here, which this process may keep
            _soon(lambda: store.add("mistake heard", 0) == others, seconds / 5)
            return rank, True
        met = _soon(lambda: bool(store.check(["mistake"])), seconds)
        store.add("mistake heard", 1)
    except RuntimeError:  # whoever kept the store is gone
        return rank, True
    return rank, not met


def _soon(true: Callable[[], bool], seconds: float) -> bool:
    """Whether something becomes true in that time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def assign(steps: Sequence[int], processes: int) -> list[list[int]]:
    """Positions of the cohort that each process trains: the longest first, each to whom has least to do.

    Args:
        steps: Local steps of each client of the cohort.
        processes: Number of processes.

    Returns:
        For each process positions in ascending order; the first process always has some.
    """
    load = [(0, rank) for rank in range(processes)]
    mine: list[list[int]] = [[] for _ in range(processes)]
    for position in sorted(range(len(steps)), key=lambda i: -steps[i]):
        busy, rank = heapq.heappop(load)
        mine[rank].append(position)
        heapq.heappush(load, (busy + steps[position], rank))
    return [sorted(positions) for positions in mine]


def scatter(fabric: Fabric, rows: Tensor | None, parts: list[list[int]], shape: Sequence[int], like: Tensor) -> Tensor:
    """Rows of a cohort from rank 0 to whom trains the client.

    Args:
        fabric: The processes.
        rows: On rank 0 one row for each position of the cohort, ``(cohort, *shape)``.
        parts: Positions by rank.
        shape: Shape of a row.
        like: A tensor of the dtype, on this process's device.

    Returns:
        This process's rows, ``(its positions, *shape)``.
    """
    if fabric.world_size == 1:
        assert rows is not None
        return rows
    most, sent = max(map(len, parts)), None
    if rows is not None:
        sent = [torch.cat([rows[part], rows.new_zeros(most - len(part), *shape)]) for part in parts]
    mine = like.new_empty(most, *shape)
    dist.scatter(mine, sent, src=0)
    return mine[: len(parts[fabric.global_rank])]


def gather(
    fabric: Fabric, rows: Sequence[Tensor], parts: list[list[int]], shape: Sequence[int], like: Tensor
) -> list[Tensor]:
    """The inverse of `scatter`: rows of every process on rank 0, in cohort order; elsewhere nothing."""
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


def all_gather_dict(fabric: Fabric, mine: Mapping[K, V]) -> dict[K, V]:
    """What the processes know of different clients, together, on each of them; pickled on the way."""
    everyone: list[Mapping[K, V]] = [mine] * fabric.world_size
    if fabric.world_size > 1:
        dist.all_gather_object(everyone, mine)
    return {key: value for part in everyone for key, value in part.items()}


def all_reduce_sum(fabric: Fabric, mine: Tensor) -> Tensor:
    """Sum of a tensor over all processes, on each of them; the tensor is changed in place."""
    if fabric.world_size > 1:
        dist.all_reduce(mine)
    return mine


def reduce(
    fabric: Fabric, uploads: Uploads, shapes: Mapping[str, Sequence[int]], like: Tensor, deterministic: bool
) -> None:
    """Make the sums of this process's clients those of all.

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
