"""What frozen parameters save: bits, state, checkpoints, memory and seconds of a transformer of 96 million weights.

``python benchmarks/bench_adapters.py`` prints a line for full training, LoRA and a trained head, each in a process of
its own; arguments choose among ``all``, ``lora`` and ``head``, ``--algorithm``, ``--devices`` and ``--engine``.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from fl_lightning import SGD, Arrays, FederatedTrainer, Frozen, LoRA, TextTransformer, algorithms

VOCABULARY, LENGTH = 70_000, 32
NETS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "all": lambda net: net,
    "lora": lambda net: LoRA(net, targets=["q", "v"], rank=8, trained=["head"]),
    "head": lambda net: Frozen(net, ["head"]),
}


def measure(trained: str, algorithm: str, devices: int, engine: str) -> None:
    """Makes a run of 2 rounds of 4 out of 8 clients and prints what it took."""
    rng = np.random.default_rng(0)
    clients = [(rng.integers(0, VOCABULARY, (4, LENGTH)), np.arange(4)) for _ in range(8)]
    data = Arrays(client_arrays=clients, test=(rng.integers(0, VOCABULARY, (8, LENGTH)), np.arange(8) % 4))
    torch.manual_seed(0)
    net = TextTransformer(VOCABULARY, LENGTH, dim=768, blocks=12, heads=12)
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            max_rounds=2,
            clients_per_round=4,
            local_steps=1,
            accelerator="cpu",
            threads=1,
            engine=engine,  # type: ignore[arg-type]
            devices=devices,
            strategy="ddp" if devices > 1 else "auto",
            enable_progress_bar=False,
            default_root_dir=folder,
        )
        run = trainer.fit(getattr(algorithms, algorithm)(net=NETS[trained](net), optimizer=SGD(0.01)), data)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if run.fabric.is_global_zero:
            rows = sum(v.numel() * v.element_size() for row in run.clients.rows().values() for v in row.values())
            files = ", ".join(
                f"{file.name} {file.stat().st_size / 1e6:,.1f} MB" for file in run.folder.checkpoints.iterdir()
            )
            print(
                f"{trained}: d {run.objective.flat.d:,}, sent {run.metrics['comm/total_bits'] / 8e6:,.1f} MB, "
                f"its clients' state {rows / 1e6:,.1f} MB, {files}, a round {run.metrics['time/round_s']:.1f} s"
            )
        print(f"peak memory of process {run.fabric.global_rank}: {peak:.2f} GiB")


def main() -> None:
    """Parses the arguments; several nets are measured one after another, each in a new process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trained", nargs="*", choices=[*NETS, []], default=[*NETS])
    parser.add_argument("--algorithm", default="FedDyn")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--engine", default="sequential")
    given = parser.parse_args()
    if len(given.trained) == 1:
        return measure(given.trained[0], given.algorithm, given.devices, given.engine)
    for trained in given.trained:
        options = [f"--algorithm={given.algorithm}", f"--devices={given.devices}", f"--engine={given.engine}"]
        subprocess.run([sys.executable, __file__, trained, *options], check=True)


if __name__ == "__main__":
    main()
