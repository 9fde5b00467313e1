"""Communication between processes. With one process nothing is copied."""

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torchmetrics.utilities.distributed import gather_all_tensors

from fl_lightning.core import Uploads, UserError, grouped
from fl_lightning.trainer.runtime.signals import rank_and_first

V = TypeVar("V")
_store: TCPStore | None = None
_place = 0, 1  # this process's rank, and the number of processes


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
    global _store, _place
    if fabric.world_size == 1:
        return
    _place = fabric.global_rank, fabric.world_size
    host, limit = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=30)
    if fabric.is_global_zero:
        _store = TCPStore(host, 0, is_master=True, timeout=limit, wait_for_workers=False)
    port = fabric.broadcast(_store.port if _store is not None else 0)
    if not fabric.is_global_zero:
        with suppress(RuntimeError):  # no way through between the nodes: the first process of each reports
            _store = TCPStore(host, port, is_master=False, timeout=limit)


def shutdown() -> None:
    """Leaves the group of processes, if there is one; otherwise gloo aborts at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def regroup(fabric: Fabric, rounds: int, seconds: float = 10.0) -> bool:
    """Joins the processes of a run that breaks off once more, whatever each of them has been waiting for.

    Args:
        fabric: The processes; every one that is left calls.
        rounds: Rounds that this process has done.
        seconds: How long to wait for the others.

    Returns:
        Whether all are there, and have done the same rounds.
    """
    if _store is None:
        return False
    rank, size, store = fabric.global_rank, fabric.world_size, _store
    shutdown()  # ends what the others wait for
    with suppress(OSError, RuntimeError):  # the process that held the store is gone, or another one does not come
        _alive(store)
        store.set(f"left {rank}", str(rounds))
        names = [f"left {peer}" for peer in range(size)]
        if _soon(lambda: bool(store.check(names)), seconds) and {int(store.get(name)) for name in names} == {rounds}:
            dist.init_process_group("gloo", store=PrefixStore("left", store), rank=rank, world_size=size)
            return True
    return False


def reports(seconds: float = 10.0) -> tuple[int, bool]:
    """Returns this process's rank, and whether this process is to report an error.

    Most errors occur on all processes, and the first process reports them. If the first process has not met the error
    after some seconds, the others report it. Before the processes are connected, the first one of each node reports.

    Args:
        seconds: How long to wait for the first process.
    """
    if _store is None:
        return rank_and_first()
    (rank, size), store = _place, _store
    try:
        if rank == 0:
            store.set("error", "met")
            # the others ask while the store exists, which this process holds
            _soon(lambda: store.add("error seen", 0) == size - 1, seconds / 5)
            return rank, True
        time.sleep(0.2)  # the first process may be about to end
        met = _soon(lambda: _alive(store) and bool(store.check(["error"])), seconds)
        store.add("error seen", 1)
    except (OSError, RuntimeError):  # the process that held the store is gone
        return rank, True
    return rank, not met


def _alive(store: TCPStore) -> bool:
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
        if fabric.world_size == 1 or not lost:
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
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def assign(steps: Sequence[int], processes: int, clients: Sequence[int] = ()) -> list[list[int]]:
    """Divides a cohort among the processes: the longest client first, each to the process with the least work.

    With ``clients``, each goes to its `owner`, as long as no process then has more work than the longest one has
    without this wish. If that cannot be, or the first process were left without a client, there is no wish.

    Args:
        steps: Local steps of each client of the cohort.
        processes: Number of processes.
        clients: Ids of the clients, if their rows should not travel.

    Returns:
        For each process the positions in the cohort that it trains, ascending; the first process always has some.
    """

    def divided(most: int) -> tuple[int, list[list[int]]]:
        load, shares = [0] * processes, [list[int]() for _ in range(processes)]
        for position in sorted(range(len(steps)), key=lambda i: -steps[i]):
            rank = owner(clients[position], processes) if most else 0
            if load[rank] + steps[position] > most:
                rank = min(range(processes), key=load.__getitem__)
            load[rank] += steps[position]
            shares[rank].append(position)
        return max(load), [sorted(positions) for positions in shares]

    if processes == 1:
        return [[*range(len(steps))]]
    longest, shares = divided(0)
    wished, wished_shares = divided(longest) if clients else (longest, shares)
    return wished_shares if wished <= longest and wished_shares[0] else shares


def owner(client: int, processes: int) -> int:
    """Returns the process that keeps a client's row between rounds."""
    return client % processes


def exchange(
    fabric: Fabric,
    moves: Mapping[int, tuple[int, int]],
    rows: Mapping[int, Mapping[str, Tensor]],
    shapes: Mapping[str, Sequence[int]],
    like: Tensor,
) -> dict[int, dict[str, Tensor]]:
    """Sends clients' rows from process to process, in one message from each to each that gets some; no other waits.

    Args:
        fabric: The processes.
        moves: For each row that travels, by client, from which process to which; the same on every process.
        rows: Those that this process sends, at least.
        shapes: Shapes of a row's values, by name.
        like: A tensor of the dtype, on this process's device.

    Returns:
        The rows that this process receives.
    """
    rank, ops, received = fabric.global_rank, list[dist.P2POp](), dict[int, Tensor]()
    numbers = [math.prod(shape) for shape in shapes.values()]
    if not numbers:
        return {k: {} for k, (_, target) in moves.items() if target == rank}
    for (source, target), clients in sorted(grouped((move, k) for k, move in moves.items()).items()):
        wire = torch.device("cpu") if dist.get_backend() == "gloo" else like.device
        if rank == source:
            sent = torch.cat([rows[k][name].reshape(-1) for k in clients for name in shapes]).to(wire, like.dtype)
            ops.append(dist.P2POp(dist.isend, sent, target))
        elif rank == target:
            packed = torch.empty(len(clients) * sum(numbers), dtype=like.dtype, device=wire)
            ops.append(dist.P2POp(dist.irecv, packed, source))
            received |= zip(clients, torch.split(packed, sum(numbers)), strict=True)
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    columns = {
        k: zip(shapes.items(), torch.split(row.to(like.device), numbers), strict=True) for k, row in received.items()
    }
    return {k: {name: v.view(torch.Size(shape)) for (name, shape), v in values} for k, values in columns.items()}


def all_gather_dict(fabric: Fabric, mine: Mapping[int, V]) -> dict[int, V]:
    """Merges what the processes know of different clients, sorted by client, on each process; pickled on the way."""
    everyone: list[Mapping[int, V]] = [mine] * fabric.world_size
    if fabric.world_size > 1:
        dist.all_gather_object(everyone, mine)
    return dict(sorted({client: value for part in everyone for client, value in part.items()}.items()))


def sum_of(fabric: Fabric, mine: Iterable[tuple[int, Tensor]], zero: Tensor) -> Tensor:
    """Returns a sum over clients in the order of their ids, the same on each process.

    Args:
        fabric: The processes; every one calls.
        mine: What each client adds of which this process has the row, by ascending id.
        zero: The sum over no client.
    """
    if fabric.world_size > 1:
        values = all_gather_dict(fabric, {client: value.cpu() for client, value in mine})
        mine = ((client, value.to(zero)) for client, value in values.items())
    return sum((value for _, value in mine), zero)


def gather_states(state: Tensor, group: Any = None) -> list[Tensor]:
    """Returns the state of a metric on each process.

    torchmetrics' own function does not take an empty state, which a process without samples has.
    """
    kinds: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(kinds, (state.shape, state.dtype), group)
    shape, dtype = max(kinds, key=lambda kind: len(kind[0]) and kind[0].numel())
    return gather_all_tensors(state if state.numel() else state.new_zeros((0, *shape[1:]), dtype=dtype), group)


def all_reduce_sum(fabric: Fabric, mine: Tensor) -> Tensor:
    """Sums a tensor over all processes, in place."""
    if fabric.world_size > 1:
        dist.all_reduce(mine)
    return mine


def total(fabric: Fabric, mine: int) -> int:
    """Returns the sum of a whole number over all processes."""
    alone = fabric.world_size == 1  # no wait for a GPU
    return mine if alone else int(all_reduce_sum(fabric, torch.tensor(mine, device=fabric.device)))


def reduce(
    fabric: Fabric, uploads: Uploads, shapes: Mapping[str, Sequence[int]], like: Tensor, deterministic: bool
) -> None:
    """Sums the uploads of all processes; each sum travels when the server's step first reads it, on every process.

    They travel in the order in which rank 0 reads them: that of a set is another one on each process.

    Args:
        fabric: The processes.
        uploads: The sums; they are changed in place.
        shapes: Shape of each uploaded name.
        like: A tensor of the dtype, on this process's device.
        deterministic: Rank 0 has already summed up all rows: only broadcast.
    """
    if fabric.world_size > 1:
        uploads.change(lambda name, sums: like.new_zeros(2, *shapes[name]) if sums is None else sums)
        places = [(name, kind) for name in uploads.names for kind in (0, 1)]

        def share(sums: Mapping[str, Tensor], *asked: Any) -> tuple[str, int]:
            place = torch.tensor(places.index(asked), device=like.device)
            dist.broadcast(place, src=0)
            name, kind = places[int(place)]
            if deterministic:
                dist.broadcast(sums[name][kind], src=0)
            else:
                dist.all_reduce(sums[name][kind])
            return name, kind

        uploads.share = share
