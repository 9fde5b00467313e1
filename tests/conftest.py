"""Which tests run, and when; torch is not loaded by the process that only starts the others."""

from __future__ import annotations

import gc
from collections import Counter

import pytest

LONG = ("test_docs.py", "test_experiments.py", "test_gpu.py", "test_readme.py")
"""Files whose tests take minutes; they begin first, so that no process waits for one at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Gives the processes that run tests the fixtures of ``tests.problem``."""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.problem")


def _rates(quick: int = 1, slow: int = 1, start: int = 0) -> tuple[int, int, int]:
    return quick, slow, start


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is long as slow as well, as notebooks are, so that ``not slow`` is what is quick."""
    cases: Counter[str] = Counter()
    for item in items:
        if sampled := item.get_closest_marker("sampled"):
            case = cases[test := item.nodeid.partition("[")[0]]
            cases[test] += 1
            quick, slow, start = _rates(*sampled.args, **sampled.kwargs)
            if item.get_closest_marker("slow") or case % quick:
                item.add_marker("slow")
                if (case - start) % slow:
                    item.add_marker("long")
        elif item.get_closest_marker("long") or item.path.suffix == ".ipynb":
            item.add_marker("slow")
    items.sort(key=lambda item: item.path.suffix != ".ipynb" and item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """Keeps what was imported from being searched for garbage again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Lets Python's exit free what extensions count."""
    gc.unfreeze()
