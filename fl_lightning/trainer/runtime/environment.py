"""What a run sets in its process and restores, and what the process prints."""

import ctypes
import fcntl
import logging
import os
import socket
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from typing import Any

import lightning as L
import torch

from fl_lightning.core import UserError, ensure
from fl_lightning.results.terminal import wrapped

M_MXFAST, M_TRIM_THRESHOLD, M_MMAP_MAX = 1, -1, -4
"""Parameters of glibc's mallopt(3)."""
KEPT = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_MXFAST: 0}
"""Values during a run: nothing gets a mapping of its own, which would go back to the system when it is freed."""
DEFAULT = {M_MMAP_MAX: 2**16, M_TRIM_THRESHOLD: 128 * 2**10, M_MXFAST: 16 * ctypes.sizeof(ctypes.c_size_t)}
"""glibc's own values."""
_depth = 0


@contextmanager
def keep_freed_memory(device: torch.device) -> Iterator[None]:
    """Keeps freed memory for the next tensor, instead of returning it to the system, which would clear it page by page.

    Training on a CPU frees and allocates the same megabytes in every step. Without M_MXFAST, small free blocks next to
    a large one keep it from being reused. Only glibc has these parameters; elsewhere this does nothing.

    Args:
        device: Where the run trains; only the CPU needs it.
    """
    global _depth
    linux = device.type == "cpu" and sys.platform.startswith("linux")
    mallopt = getattr(ctypes.CDLL(None) if linux else None, "mallopt", lambda *_: None)
    _depth += linux
    for parameter, value in KEPT.items():
        mallopt(parameter, value)
    try:
        yield
    finally:
        _depth -= linux
        if not _depth:
            for parameter, value in DEFAULT.items():
                mallopt(parameter, value)


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Sets whether TF32 may be used in products and convolutions, and restores what was set before.

    torch has two interfaces, and reading the older one is an error if a program has used the newer one, the attributes
    ``fp32_precision``.

    Args:
        tf32: Whether the factors may be rounded to 10 bits of mantissa.
    """
    backends: Any = torch.backends
    owners = (backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    with ExitStack() as restored:
        for owner in owners:  # the last to be restored: the older interface sets these, too
            restored.callback(setattr, owner, "fp32_precision", owner.fp32_precision)
        with suppress(RuntimeError):
            restored.callback(setattr, backends.cudnn, "allow_tf32", backends.cudnn.allow_tf32)
        with suppress(RuntimeError):
            restored.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        backends.cudnn.allow_tf32 = tf32
        for owner in owners[2:]:
            owner.fp32_precision = "tf32" if tf32 else "ieee"
        yield


@contextmanager
def repeatable_convolutions(wanted: bool) -> Iterator[None]:
    """Sets whether cuDNN may only use kernels that give the same bits again, and restores what was set before."""
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, wanted
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Sets torch's number of threads; None leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables by which gloo and NCCL take an interface."""
SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface, netdevice(7)."""


def choose_interface(main_address: str) -> None:
    """Sets `INTERFACES`, unless they are set, to the interface by which this machine reaches the first process.

    gloo would take that of the machine's own name, which is the loopback interface on many systems, and NCCL the first.

    Args:
        main_address: Name or address of the machine of the first process.

    Raises:
        UserError: If the name is not known, or it leaves several interfaces.
    """
    if not sys.platform.startswith("linux") or all(name in os.environ for name in INTERFACES):
        return
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:  # connect sends nothing
            route.connect((main_address, 9))
            own_address = route.getsockname()[0]
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR = {main_address}: not reached from this machine ({error.strerror}); give the address of the "
            "first machine, which every machine reaches"
        ) from None
    addresses = {name: address for _, name in socket.if_nameindex() if (address := _address(name)) is not None}
    interfaces = [name for name, address in addresses.items() if address == own_address]
    if own_address.startswith("127."):
        if main_address in ("localhost", own_address):
            return  # all processes are on this machine
        interfaces = [name for name, address in addresses.items() if not address.startswith("127.")]
        ensure(
            len(interfaces) < 2,
            f"MASTER_ADDR = {main_address}: a loopback address on this machine, whose interfaces are "
            f"{', '.join(interfaces)}; give the machine's address, or {' and '.join(INTERFACES)}",
        )
    for variable in INTERFACES if interfaces else ():
        os.environ.setdefault(variable, interfaces[0])


def _address(name: str) -> str | None:
    """Returns the IPv4 address of an interface, or None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


class Fabric(L.Fabric):
    """Lightning's Fabric; it prints once in a run, and not once on each node; a terminal breaks no word."""

    def __init__(self, **settings: Any) -> None:
        with quiet():  # on a cluster's login node Lightning advises to use srun
            super().__init__(**settings)

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_global_zero:
            print(*map(wrapped, map(str, args)), **kwargs)


LOGGERS = ("lightning.pytorch", "lightning.fabric")


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Hides Lightning's warnings, and messages below ERROR; this package handles what they are about.

    Args:
        *names: Names of the loggers whose messages are hidden; by default those of Lightning.
    """
    with warnings.catch_warnings(), ExitStack() as restored:
        warnings.filterwarnings("ignore", module=r"lightning\.")
        for logger in map(logging.getLogger, names or LOGGERS):
            restored.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


class _Unbroken:
    """A stream that drops everything once it cannot be written."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes text, if that still can be done."""
        self._call(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream, if that still can be done."""
        self._call(self._stream.flush)

    def _call(self, method: Callable[..., object], *args: str) -> None:
        """Calls a method of the stream; if it fails, sends what is buffered, and all that follows, nowhere.

        At its end Python flushes the stream, too.
        """
        try:
            method(*args)
        except OSError:
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
                self._stream.flush()


@contextmanager
def unbroken_output() -> Iterator[None]:
    """Within it, a closed pipe, a closed terminal or a full disk behind stdout ends the output, and nothing else."""
    if sys.stdout is None or isinstance(sys.stdout, _Unbroken):
        yield
        return
    stream: Any = _Unbroken(sys.stdout)
    with redirect_stdout(stream):
        try:
            yield
        finally:
            stream.flush()
