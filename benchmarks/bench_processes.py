"""What the processes of a run send each other in a round: calls and bytes, by a counter around torch.distributed.

The digits among 100 clients, 20 a round, one net of 33,610 weights, a checkpoint every ten rounds; gloo on one machine.
Prints a line for each algorithm and number of processes: calls of collectives on rank 0, messages from process to
process, MB through rank 0 and MB sent by all, a round each; and whether the trained state is that of one process.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import fl_lightning
from fl_lightning import Checkpoints, Digits, DigitsMLP, Dirichlet, FederatedTrainer
from fl_lightning.trainer.storage import checkpoint

ROUNDS, CLIENTS, COHORT = 20, 100, 20
COUNTS: Counter[str] = Counter()


def count(name: str, counted: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of torch.distributed that counts its calls, and the bytes that it sends and receives here."""

    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        n = tensor.nbytes if isinstance(tensor, torch.Tensor) else 0
        if n or "object" in name:
            sent, received = {
                "isend": (n, 0),
                "irecv": (0, n),
                "gather": (n, 0) if rank else (0, n * (size - 1)),
                "scatter": (0, n) if rank else (n * (size - 1), 0),
                "broadcast": (0, n) if rank else (n * (size - 1), 0),
                "all_reduce": (2 * n * (size - 1) // size,) * 2,
            }.get(name, (0, 0))
            COUNTS.update(
                {"sent": sent, "received": received, "messages" if name == "isend" else "calls": name != "irecv"}
            )
        return counted(tensor, *args, **kwargs)

    return call


def train(rank: int, size: int, port: int, algorithm: str, options: Mapping[str, Any], root: str) -> None:
    """One process of a run; writes its counts."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "bench"}
    if size > 1:
        os.environ.update({name: str(value) for name, value in environment.items()})
    for name in (
        "gather",
        "scatter",
        "broadcast",
        "all_reduce",
        "isend",
        "irecv",
        "broadcast_object_list",
        "all_gather_object",
    ):
        wrapped = count(name, getattr(dist, name))
        setattr(dist, name, wrapped)
        if name in ("isend", "irecv"):  # P2POp compares with these
            setattr(distributed_c10d, name, wrapped)
    torch.manual_seed(0)
    model = getattr(fl_lightning, algorithm)(DigitsMLP(hidden=448))
    data = Digits(num_clients=CLIENTS, partition=Dirichlet(alpha=1.0), batch_size=8)
    trainer = FederatedTrainer(
        max_rounds=ROUNDS, clients_per_round=COHORT, local_steps=2, eval_every=ROUNDS, accelerator="cpu", devices=size,
        strategy="ddp" if size > 1 else "auto", threads=1, engine="sequential", loggers=[],
        callbacks=[Checkpoints()], enable_progress_bar=False, default_root_dir=root, **options,
    )  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(model, data)
    Path(root, f"{rank}.json").write_text(json.dumps(COUNTS))


def measure(size: int, algorithm: str, options: Mapping[str, Any]) -> tuple[list[Counter[str]], str]:
    """Returns the counts of each process, and a hash of what the run has trained."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as root:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        fork = multiprocessing.get_context("fork")
        args = [(rank, size, port, algorithm, options, root) for rank in range(size)]
        children = [fork.Process(target=train, args=each) for each in args]
        for child in children:
            child.start()
        for child in children:
            child.join()
        (path,) = Path(root).glob("*/*/checkpoints/last.ckpt")
        found = checkpoint.load(path)
        values = {**found["server"], **found["clients"]["rows"]}
        bits = sha256(b"".join(values[name].numpy().tobytes() for name in sorted(values)))
        counts = [Counter(json.loads(Path(root, f"{rank}.json").read_text())) for rank in range(size)]
        return counts, bits.hexdigest()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", nargs="+", default=["FedAvg", "FedSMOO", "SCAFFOLD"])
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    given = parser.parse_args()
    print("| algorithm | processes | deterministic | calls | messages | MB, rank 0 | MB, all | same bits |")
    print("|---|---|---|---|---|---|---|---|")
    for algorithm in given.algorithms:
        for deterministic in (True, False):
            options = {"deterministic": deterministic}
            _, one = measure(1, algorithm, options)
            for size in given.processes:
                counts, many = measure(size, algorithm, options)
                messages = sum(each["messages"] for each in counts) / ROUNDS
                first = (counts[0]["sent"] + counts[0]["received"]) / 1e6 / ROUNDS
                everyone = sum(each["sent"] for each in counts) / 1e6 / ROUNDS
                row = (
                    algorithm,
                    size,
                    str(deterministic).lower(),
                    f"{counts[0]['calls'] / ROUNDS:.1f}",
                    f"{messages:.1f}",
                )
                print(
                    "|",
                    *" | ".join(
                        map(str, (*row, f"{first:.2f}", f"{everyone:.2f}", "yes" if many == one else "no"))
                    ).split("\n"),
                    "|",
                    flush=True,
                )


if __name__ == "__main__":
    main()
