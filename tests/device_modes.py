"""The modes of torch that make a `Device`: what calls ask for, and where the results of operations lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from tests.devices import Device

MARK = torch.device("cpu", 0)
"""What an operation is called with in place of the device; unlike a mode, it becomes part of a record."""
aten: Any = torch.ops.aten
WAITS = {aten._linalg_check_errors, aten._linalg_eigh, aten._linalg_svd, aten.multinomial}
"""Operations that the host waits for, beside those that ``DEPENDS`` tags."""
DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations whose result, or its shape, depends on values."""
FILLS = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor}
"""Operations that a kernel fills with a number, which the host reads first."""
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
MADE_OF_VALUES = {torch.tensor, torch.as_tensor, Tensor.new_tensor}
"""Functions that copy values of the host to the device."""


class Functions(TorchFunctionMode):
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
            return device.pin(args[0].clone())
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and args[0] in device:
            if func is not Tensor.tolist:
                raise TypeError(f"can't convert {device.device} device type tensor to numpy")
            device.note("wait", "tolist")
        kwargs.pop("pin_memory", None)
        on_device = device.is_named(kwargs.get("device"))
        if on_device:
            kwargs["device"] = MARK
            if kwargs.get("generator") is not None:
                device.note("mixture", f"{func.__name__} with a generator of the host")
        if func in MADE_OF_VALUES:
            return self._made(func, args, kwargs, on_device)
        # what a function makes for itself lies where its arguments do
        device.calls.append(func if any(x in device for x in tree_leaves((args, kwargs)) if has_values(x)) else None)
        try:
            return func(*args, **kwargs)
        finally:
            device.calls.pop()

    def _made(self, func: Any, args: Any, kwargs: Any, on_device: bool) -> Tensor:
        device, source = self.device, args[0] if args else None
        present = isinstance(source, Tensor) and source in device
        on_device = on_device or (present and "device" not in kwargs)
        if func is not Tensor.new_tensor and present and on_device:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        result: Tensor = func(*args, **kwargs)
        if on_device:
            device.note("wait", func.__name__)
            device.put(result.clone() if result is source else result)
        return result

    def _moved(self, x: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        device, like = self.device, args[0] if args else kwargs.pop("other", None)
        if isinstance(like, Tensor):
            kwargs = {"device": like.device, "dtype": like.dtype, **kwargs}
            args = args[1:]
        target, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        on_device = x in device
        to_device = on_device if target is None else device.is_named(target)
        options: Any = {"dtype": dtype or x.dtype}
        if layout is not None:
            options["memory_format"] = layout
        if on_device == to_device:
            return x.to(copy=copy, **options)
        if to_device:
            device.note(device.kind_of_copy(x, non_blocking), "to the device")
            return x.to(MARK, copy=True, **options)
        if target is None or target.type != "meta":  # where there are no values
            device.note("wait", "to the host")
        return device.take(x.to(copy=True, **options))


class Operations(TorchDispatchMode):
    """Results lie where their arguments do."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, device = kwargs or {}, self.device
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = [x in device for x in tensors]
        if any(on_device):
            self._check(func, args, kwargs, tensors, on_device)
            if not func.is_view:
                device.launch(func)
        result = func(*args, **kwargs)
        requested = any(on_device) or kwargs.get("device") == MARK
        placed = requested or device.makes(func, args, kwargs)
        known, results = {storage_key(x) for x in tensors}, tree_leaves(result)
        fresh = [x if isinstance(x, Tensor) and storage_key(x) not in known else None for x in results]
        for x in fresh if placed else ():
            if x is not None:
                device.put(x)
                if requested and x.dtype == torch.float64 and device.refuses_float64:
                    raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        if device.captured is not None and (any(on_device) or placed):  # of the host a graph knows the numbers of now
            args, kwargs = tree_map_only(Tensor, lambda x: x if x in device else x.clone(), (args, kwargs))
            device.captured.append((func, args, kwargs, fresh))
        return result

    def _check(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], on_device: list[bool]) -> None:
        device, packet = self.device, func.overloadpacket
        host = [x for x, lies_there in zip(tensors, on_device, strict=True) if not lies_there]
        scalars = torch.Tag.pointwise in func.tags and all(x.ndim == 0 for x in host)
        if packet in INDEXED:
            self._check_indices(func, args)
        elif func in FILLS:
            if not all(on_device[:-1]):
                device.note("mixture", func)
            if on_device[-1]:
                device.note("wait", f"{func}, whose number the host reads")
        elif packet is aten.copy_:
            if host:
                non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
                device.note("wait" if on_device[1] else device.kind_of_copy(args[1], non_blocking), func)
        elif packet is aten.where and scalars and host:
            device.note("wait", f"{func}, which copies a number of the host")
        elif host and (not scalars or len(tensors) > 2 or (func._schema.is_mutable and not on_device[0])):
            device.note("mixture", func)  # kernels of two tensors alone take a number of the host as an argument
        waits = packet in WAITS or (DEPENDS.intersection(func.tags) and packet not in INDEXED)
        known = kwargs.get("output_size") is not None or torch.nn.functional.one_hot in device.calls  # looks on a CPU
        if waits and not known:
            device.note("wait", func)

    def _check_indices(self, func: Any, args: Any) -> None:
        indices = [x for x in args[1] if x is not None]
        values = [x for x in args[2:3] if isinstance(x, Tensor)]
        if args[0] not in self.device or any(x not in self.device and x.ndim for x in values):
            self.device.note("mixture", func)
        if any(x not in self.device or x.dtype == torch.bool for x in indices):
            self.device.note("wait", f"{func} by indices of the host, or by a mask")


def has_values(x: Any) -> bool:
    """Whether a tensor has values: no Fake one of a compiler."""
    return isinstance(x, Tensor) and not x.is_meta


def plain(x: Tensor) -> Tensor:
    """Returns the tensor within those of vmap and grad."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def storage_key(x: Tensor) -> int:
    return plain(x).untyped_storage()._cdata
