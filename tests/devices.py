"""A device without hardware: every tensor lies on the host, and some of them count as lying on the device.

Inside `Device` tensors say where they count as lying, as on a GPU, and operations keep to its rules: tensors of both
places in one operation are refused, except for scalars of the host in pointwise operations; indices are copied. What
makes the host wait for the device, and what is copied between them, is counted with the line of the package where it
happens. A CUDA graph is the list of operations captured, repeated in the same memory. All numbers are those of the CPU.

What no simulation shows: speed, rounding of other kernels, streams, and an operation that a device lacks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._C import _functorch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fl_lightning
from fl_lightning import FederatedTrainer

ROOT = Path(fl_lightning.__file__).parent
MARK = torch.device("cpu", 0)
"""What an operation is called with in place of the device; unlike a mode, it becomes part of a record."""
aten: Any = torch.ops.aten
WAITS = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive,
    aten.unique_dim, aten.bincount, aten.equal, aten._linalg_check_errors, aten._linalg_eigh, aten._linalg_svd,
}  # fmt: skip
"""Operations whose result, or its shape, the host waits for."""
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
MADE_OF_VALUES = {torch.tensor, torch.as_tensor, Tensor.new_tensor}
"""Functions that copy values of the host to the device."""


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
    """

    def __init__(self, kind: str = "cuda") -> None:
        self.device = torch.device(kind, 0)
        self.events: Counter[Event] = Counter()
        self.captured: list[tuple[Any, ...]] | None = None
        self.calls: list[Any] = []
        self._storages: dict[int, StorageWeakRef] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Device:
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        own: Any = torch._C.TensorBase.device
        patch.setattr(Tensor, "device", property(lambda x: self.device if x in self else own.__get__(x)), raising=False)
        patch.setattr(Tensor, "is_cuda", property(lambda x: x.device.type == "cuda"), raising=False)
        if self.device.type == "cuda":
            for name, value in self._runtime().items():
                patch.setattr(torch.cuda, name, value)
            empty = torch.empty  # in a thread that reads, where no mode is active
            patch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
        self._stack.enter_context(_Operations(self))
        self._stack.enter_context(_Functions(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, x: Tensor) -> bool:
        """Whether a tensor counts as lying on the device."""
        return _key(x) in self._storages

    def trainer(self, **settings: Any) -> FederatedTrainer:
        """A trainer that trains here."""
        trainer = FederatedTrainer(accelerator="cpu", threads=1, enable_progress_bar=False, **settings)
        trainer.launch()
        trainer.fabric.strategy._root_device = self.device  # type: ignore[attr-defined]
        return trainer

    def count(self, *kinds: str) -> int:
        """Number of events of these kinds."""
        return sum(n for event, n in self.events.items() if event.kind in kinds)

    # for the modes

    @property
    def refuses_float64(self) -> bool:
        """Whether tensors of the device cannot be float64; a quantile's own scalar lies nowhere."""
        return self.device.type == "mps" and Tensor.quantile not in self.calls

    def put(self, x: Tensor) -> Tensor:
        """Counts a tensor as lying on the device."""
        if len(self._storages) % 4096 == 4095:
            self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
        storage = _plain(x).untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage)  # which keeps the address from being used again
        return x

    def take(self, x: Tensor) -> Tensor:
        """Counts a tensor, which shares no memory with others, as lying on the host."""
        self._storages.pop(_key(x), None)
        return x

    def is_named(self, device: Any) -> bool:
        """Whether an argument names the device."""
        if device is None or isinstance(device, int):
            return False
        return torch.device(device).type == self.device.type

    def note(self, kind: str, what: object) -> None:
        """Counts an event.

        Raises:
            RuntimeError: If it is a mixture, or a wait in a capture.
        """
        frame = sys._getframe(1)
        while frame is not None and not (
            frame.f_code.co_filename.startswith(str(ROOT)) and frame.f_code.co_name != "to_device"
        ):
            frame = frame.f_back  # type: ignore[assignment]
        where = function = ""
        if frame is not None:
            path = Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()
            where, function = f"{path}:{frame.f_lineno}", frame.f_code.co_name
        self.events[Event(kind, str(what), where, function)] += 1
        if kind == "mixture":
            raise RuntimeError(f"Expected all tensors to be on the same device: {what} at {where}")
        if self.captured is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what} at {where}")

    def _runtime(self) -> dict[str, Any]:
        """What the package calls of ``torch.cuda``."""
        stream = SimpleNamespace(wait_stream=lambda other: None)

        @contextmanager
        def graph(recorded: _Graph) -> Iterator[None]:
            self.captured = recorded.operations
            try:
                yield
            finally:
                self.captured = None

        return {
            "synchronize": lambda: self.note("wait", "torch.cuda.synchronize"),
            "default_generators": (torch.default_generator,),
            "get_device_name": lambda device: "simulated",
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "stream": lambda stream: nullcontext(),
            "CUDAGraph": _Graph,
            "graph": graph,
        }


class _Graph:
    """Operations repeated on the same tensors, with their results in the same memory."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, ...]] = []

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, fresh in self.operations:
                for old, new in zip(fresh, tree_leaves(function(*args, **kwargs)), strict=True):
                    if old is not None:
                        old.copy_(new)


class _Functions(TorchFunctionMode):
    """Calls with a device, and what leaves torch."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = dict(kwargs or {}), self.device
        if func is torch._C._nn._parse_to:
            return func(*args, **kwargs)
        if func is Tensor.to:
            return self._moved(*args, **kwargs)
        if func in (Tensor.cpu, Tensor.cuda):
            return self._moved(args[0], "cpu" if func is Tensor.cpu else device.device)
        if func is Tensor.pin_memory:
            return args[0]
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and args[0] in device:
            if func is not Tensor.tolist:
                raise TypeError(f"can't convert {device.device} device type tensor to numpy")
            device.note("wait", "tolist")
        kwargs.pop("pin_memory", None)
        here = device.is_named(kwargs.get("device"))
        if here:
            kwargs["device"] = MARK
            if kwargs.get("generator") is not None:
                device.note("mixture", f"{func.__name__} with a generator of the host")
        if func in MADE_OF_VALUES:
            return self._made(func, args, kwargs, here)
        # what a function makes for itself lies where its arguments do
        device.calls.append(func if any(x in device for x in tree_leaves((args, kwargs)) if _is_plain(x)) else None)
        try:
            return func(*args, **kwargs)
        finally:
            device.calls.pop()

    def _made(self, func: Any, args: Any, kwargs: Any, here: bool) -> Tensor:
        device, source = self.device, args[0] if args else None
        present = isinstance(source, Tensor) and source in device
        here = here or (present and "device" not in kwargs)
        if func is not Tensor.new_tensor and present and here:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        result: Tensor = func(*args, **kwargs)
        if here:
            device.note("wait", func.__name__)
            device.put(result.clone() if result is source else result)
        return result

    def _moved(self, x: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        device, like = self.device, args[0] if args else kwargs.pop("other", None)
        if isinstance(like, Tensor):
            kwargs = {"device": like.device, "dtype": like.dtype, **kwargs}
            args = args[1:]
        target, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        here = x in device
        there = here if target is None else device.is_named(target)
        options: Any = {"dtype": dtype or x.dtype}
        if layout is not None:
            options["memory_format"] = layout
        if here == there:
            return x.to(copy=copy, **options)
        if there:
            device.note("copy" if non_blocking else "wait", "to the device")
            return x.to(MARK, copy=True, **options)
        device.note("wait", "to the host")
        return device.take(x.to(copy=True, **options))


class _Operations(TorchDispatchMode):
    """Results lie where their arguments do."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self.device
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here = [x in device for x in tensors]
        if any(here):
            self._check(func, args, kwargs, tensors, here)
        result = func(*args, **kwargs)
        asked = any(here) or kwargs.get("device") == MARK
        there = asked or (not tensors and any(device.calls))
        known, results = {_key(x) for x in tensors}, tree_leaves(result)
        fresh = [x if isinstance(x, Tensor) and _key(x) not in known else None for x in results]
        for x in fresh if there else ():
            if x is not None:
                device.put(x)
                if asked and x.dtype == torch.float64 and device.refuses_float64:
                    raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        if device.captured is not None:
            device.captured.append((func, args, kwargs, fresh))
        return result

    def _check(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], here: list[bool]) -> None:
        device, packet = self.device, func.overloadpacket
        if packet in INDEXED:
            self._check_indices(func, args)
        elif packet is aten.copy_:
            if not all(here):
                waits = here[1] or not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
                device.note("wait" if waits else "copy", func)
        elif not all(here):
            host = [x for x, yes in zip(tensors, here, strict=True) if not yes]
            scalars = torch.Tag.pointwise in func.tags and all(x.ndim == 0 for x in host)
            written = func._schema.is_mutable and not here[0]
            if not scalars or written:
                device.note("mixture", func)
        if packet in WAITS and torch.nn.functional.one_hot not in device.calls:  # which looks at values on a CPU only
            device.note("wait", func)
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            device.note("wait", func)

    def _check_indices(self, func: Any, args: Any) -> None:
        indices = [x for x in args[1] if x is not None]
        values = [x for x in args[2:3] if isinstance(x, Tensor)]
        if args[0] not in self.device or any(x not in self.device and x.ndim for x in values):
            self.device.note("mixture", func)
        if any(x not in self.device or x.dtype == torch.bool for x in indices):
            self.device.note("wait", f"{func} by indices of the host, or by a mask")


def _is_plain(x: Any) -> bool:
    """Whether a tensor has values: no Fake one of a compiler."""
    return isinstance(x, Tensor) and not x.is_meta


def _plain(x: Tensor) -> Tensor:
    """The tensor within those of vmap and grad."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def _key(x: Tensor) -> int:
    return _plain(x).untyped_storage()._cdata
