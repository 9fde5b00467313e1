"""The processor: what rounds sums, and runs compiled code."""

import platform
import re
from functools import cache
from pathlib import Path

import torch


@cache
def processor() -> str:
    """Returns the processor's name, generation and instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    generation = re.findall(r"^(?:cpu family|model)\s*:\s*(\d+)$", text, re.MULTILINE)[:2]
    name = named[1] if named else platform.processor() or platform.machine()
    return f"{name} ({'.'.join([*generation, torch.backends.cpu.get_cpu_capability()])})"
