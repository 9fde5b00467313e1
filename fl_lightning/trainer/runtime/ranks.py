"""Ranks of processes that are not connected."""

import os


def reports() -> tuple[int, bool]:
    """Returns this process's rank, and whether it is the first one of its node, which reports an error."""
    known = [os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ]
    local = [os.environ[name] for name in ("LOCAL_RANK", "SLURM_LOCALID") if name in os.environ]
    return int((known or ["0"])[0]), (local or known or ["0"])[0] == "0"
