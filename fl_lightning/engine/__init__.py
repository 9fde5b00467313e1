"""Local training of a cohort: the only place where gradients are made, and one client is told from many."""

from fl_lightning.engine.base import Autocast, Engine, Job, LocalResult
from fl_lightning.engine.batched import BatchedEngine, GraphedEngine
from fl_lightning.engine.choose import check, choose, make
from fl_lightning.engine.sequential import DebugEngine, SequentialEngine

__all__ = [
    "Autocast",
    "BatchedEngine",
    "DebugEngine",
    "Engine",
    "GraphedEngine",
    "Job",
    "LocalResult",
    "SequentialEngine",
    "check",
    "choose",
    "make",
]
