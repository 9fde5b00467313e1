"""A device without hardware: every tensor lies on the host, and some of them count as lying on the device.

Inside `Device` tensors say where they count as lying, as on a GPU, and operations keep to its rules: tensors of both
places in one operation are refused, except for a number of the host in a pointwise operation of two; indices are
copied, as is such a number in `where`. What makes the host wait for the device, and what is copied between them, is
counted with the line of the package where it happens; a capture refuses both. A CUDA graph is the list of operations
captured, repeated in the same memory with the host's numbers of then. All numbers are those of the CPU.

What no simulation shows: speed, rounding of other kernels, streams, and an operation that a device lacks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

import fl_lightning
from fl_lightning import FederatedTrainer
from fl_lightning.engine.record import Recording
from tests.device_modes import MARK, Functions, Operations, plain, storage_key

ROOT = Path(fl_lightning.__file__).parent
HELPERS = ("to_device", "wait_for", "__torch_dispatch__")
"""Functions of the package in whose place their callers count."""
PAGEABLE = 64 * 1024
"""Most bytes that CUDA takes along with a copy from memory that is not pinned."""


class Event(NamedTuple):
    """What happened between host and device.

    Attributes:
        kind: "mixture", "wait" (the host waits for the device) or "copy" (from the host, which does not wait).
        what: The operation.
        where: File and line of the package, or "".
        function: The function there.
    """

    kind: str
    what: str
    where: str
    function: str


class Device:
    """A context in which ``device`` is simulated.

    Args:
        kind: Its type: "cuda", or "mps", which refuses float64.

    Attributes:
        device: The device.
        events: How often what happened.
        launches: How often which operation was launched: one of torch, a whole CUDA graph, or a capture.
    """

    def __init__(self, kind: str = "cuda") -> None:
        self.device = torch.device(kind, 0)
        self.events: Counter[Event] = Counter()
        self.launches: Counter[str] = Counter()
        self.replaying = False
        self.captured: list[tuple[Any, ...]] | None = None
        self.calls: list[Any] = []
        self._storages, self._pinned = Storages(), Storages()
        self._stack = ExitStack()

    def __enter__(self) -> Device:
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        old: Any = torch._C.TensorBase.device
        patch.setattr(Tensor, "device", property(lambda x: self.device if x in self else old.__get__(x)), raising=False)
        patch.setattr(Tensor, "is_cuda", property(lambda x: x.device.type == "cuda"), raising=False)
        if self.device.type == "cuda":
            for name, value in self._runtime().items():
                patch.setattr(torch.cuda, name, value)
            empty = torch.empty  # in a thread that reads, where no mode is active

            def pinned(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
                x = empty(*size, **options)
                return self.pin(x) if pin_memory else x

            patch.setattr(torch, "empty", pinned)
        else:
            for name, of_host in (("get_rng_state", "get_state"), ("set_rng_state", "set_state"), ("manual_seed",) * 2):
                patch.setattr(torch.mps, name, getattr(torch.default_generator, of_host))
        dispatched = Recording.__torch_dispatch__

        def recorded(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self.makes(func, args, kwargs):  # so that a record has it
                kwargs = {**kwargs, "device": MARK}
            return dispatched(mode, func, types, args, kwargs)

        patch.setattr(Recording, "__torch_dispatch__", recorded)
        self._stack.enter_context(Operations(self))
        self._stack.enter_context(Functions(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, x: Tensor) -> bool:
        """Whether a tensor counts as lying on the device."""
        return x in self._storages

    def trainer(self, **settings: Any) -> FederatedTrainer:
        """Returns a trainer that trains here."""
        trainer = FederatedTrainer(accelerator="cpu", threads=1, enable_progress_bar=False, **settings)
        trainer.launch()
        trainer.fabric.strategy._root_device = self.device  # type: ignore[attr-defined]
        return trainer

    def count(self, *kinds: str) -> int:
        """Returns the number of events of these kinds."""
        return sum(n for event, n in self.events.items() if event.kind in kinds)

    # for the modes

    @property
    def refuses_float64(self) -> bool:
        """Whether tensors of the device cannot be float64; a quantile's own scalar lies nowhere."""
        return self.device.type == "mps" and Tensor.quantile not in self.calls

    def put(self, x: Tensor) -> Tensor:
        """Counts a tensor as lying on the device."""
        self._storages.add(x)
        return x

    def take(self, x: Tensor) -> Tensor:
        """Counts a tensor, which shares no memory with others, as lying on the host."""
        self._storages.drop(x)
        return x

    def pin(self, x: Tensor) -> Tensor:
        """Counts a tensor of the host as pinned."""
        self._pinned.add(x)
        return x

    def kind_of_copy(self, x: Tensor, non_blocking: bool) -> str:
        """Returns the kind of a copy of a host's tensor: the host waits for all but pinned and small ones."""
        return "copy" if non_blocking and (x.nbytes <= PAGEABLE or x in self._pinned) else "wait"

    def makes(self, operation: Any, *arguments: Any) -> bool:
        """Whether an operation makes what a function that was called needs on the device."""
        free = any(x.name == "device" for x in operation._schema.arguments)
        return free and any(self.calls) and not any(isinstance(x, Tensor) for x in tree_leaves(arguments))

    def is_named(self, device: Any) -> bool:
        """Whether an argument names the device."""
        if device is None or isinstance(device, int):
            return False
        return torch.device(device).type == self.device.type

    def launch(self, operation: object) -> None:
        """Counts a launch; within a graph, captured or repeated, there is none."""
        if self.captured is None and not self.replaying:
            self.launches[str(operation)] += 1

    def note(self, kind: str, operation: object) -> None:
        """Counts an event.

        Raises:
            RuntimeError: If it is a mixture, or a wait in a capture.
        """
        frame = sys._getframe(1)
        while frame is not None and not (
            frame.f_code.co_filename.startswith(str(ROOT)) and frame.f_code.co_name not in HELPERS
        ):
            frame = frame.f_back  # type: ignore[assignment]
        where = function = ""
        if frame is not None:
            path = Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()
            where, function = f"{path}:{frame.f_lineno}", frame.f_code.co_name
        self.events[Event(kind, str(operation), where, function)] += 1
        if kind == "mixture":
            raise RuntimeError(f"Expected all tensors to be on the same device: {operation} at {where}")
        if self.captured is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {operation} at {where}")

    def _runtime(self) -> dict[str, Any]:
        """Returns what the package calls of ``torch.cuda``."""

        @contextmanager
        def graph(recorded: Graph, pool: object = None, capture_error_mode: str = "global") -> Iterator[None]:
            assert capture_error_mode == "thread_local", "other threads may pin memory meanwhile"
            self.captured = []
            try:
                yield
                recorded.take(self.captured)
            finally:
                launched, self.captured = bool(self.captured), None
            if launched:  # the pool's own graph is empty
                self.launch("capture")

        return {
            "synchronize": lambda: self.note("wait", "torch.cuda.synchronize"),
            "default_generators": (torch.default_generator,),
            "get_device_name": lambda device: "simulated",
            "Stream": Stream,
            "current_stream": Stream,
            "stream": lambda stream: nullcontext(),
            "CUDAGraph": type("CUDAGraph", (Graph,), {"device": self}),
            "graph": graph,
            "graph_pool_handle": object,
        }


class Storages:
    """A set of the memory of tensors that are alive."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def __contains__(self, x: Tensor) -> bool:
        return storage_key(x) in self._known

    def add(self, x: Tensor) -> None:
        """Adds the memory of a tensor."""
        if len(self._known) % 4096 == 4095:
            self._known = {key: ref for key, ref in self._known.items() if not ref.expired()}
        storage = plain(x).untyped_storage()
        self._known[storage._cdata] = StorageWeakRef(storage)  # which keeps the address from being used again

    def drop(self, x: Tensor) -> None:
        """Removes the memory of a tensor."""
        self._known.pop(storage_key(x), None)


class Stream:
    """A stream; the simulation has but one."""

    def wait_stream(self, other: Stream) -> None:
        """Does nothing."""


class Graph:
    """Operations repeated in the same memory, with their results in the same memory.

    As on a GPU, the graph keeps what was allocated in its capture, and the numbers of the host that it was given: it
    knows but the address of what it reads and writes besides.
    """

    device: Device

    def __init__(self) -> None:
        self._operations: list[tuple[Any, ...]] = []

    def take(self, operations: list[tuple[Any, ...]]) -> None:
        """Takes the operations of a capture."""
        fresh_keys = {storage_key(x) for *_, fresh in operations for x in fresh if x is not None}
        weak = partial(
            tree_map_only, Tensor, lambda x: Address(x) if x in self.device and storage_key(x) not in fresh_keys else x
        )
        self._operations = [(function, weak(args), weak(kwargs), fresh) for function, args, kwargs, fresh in operations]

    def replay(self) -> None:
        """Repeats the operations.

        Raises:
            RuntimeError: If something else may lie by now in memory that the capture has used.
        """
        self.device.launch("graph")
        self.device.replaying = True
        alive = partial(tree_map_only, Address, Address.tensor)
        with torch.no_grad():
            for function, args, kwargs, fresh in self._operations:
                for old, new in zip(fresh, tree_leaves(function(*alive(args), **alive(kwargs))), strict=True):
                    if old is not None:
                        old.copy_(new)
        self.device.replaying = False


class Address:
    """Where a tensor lies, which does not keep it."""

    def __init__(self, x: Tensor) -> None:
        self.storage = StorageWeakRef(x.untyped_storage())
        self.dtype, self.layout = x.dtype, (x.storage_offset(), x.size(), x.stride())

    def tensor(self) -> Tensor:
        """Returns the tensor there."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise RuntimeError("a CUDA graph reads or writes memory that was freed after its capture")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.layout)
