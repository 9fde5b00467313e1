"""Local training of a cohort: the only subpackage that computes training gradients, or tells one client from many."""

from fl_lightning.engine.agreement import check, check_repeatable
from fl_lightning.engine.base import Engine, Job, LocalResult
from fl_lightning.engine.batched import BatchedEngine
from fl_lightning.engine.choice import ENGINES, Choice, EngineName, choose, engine_class, is_name, name_of, seconds
from fl_lightning.engine.contract import Exchange, contract_of, dry_step
from fl_lightning.engine.graphed import GraphedEngine
from fl_lightning.engine.sequential import DebugEngine, SequentialEngine

__all__ = [
    "ENGINES",
    "BatchedEngine",
    "Choice",
    "DebugEngine",
    "Engine",
    "EngineName",
    "Exchange",
    "GraphedEngine",
    "Job",
    "LocalResult",
    "SequentialEngine",
    "check",
    "check_repeatable",
    "choose",
    "contract_of",
    "dry_step",
    "engine_class",
    "is_name",
    "name_of",
    "seconds",
]
