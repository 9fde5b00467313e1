"""The network interface by which the processes of several machines reach each other."""

import os
import socket
import struct
import sys

from fl_lightning.core import UserError, ensure

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables by which gloo and NCCL take an interface."""
SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface, netdevice(7)."""


def choose(main_address: str) -> None:
    """Sets `VARIABLES`, unless they are set, to the interface by which this machine reaches the first process.

    gloo would take that of the machine's own name, which is the loopback interface on many systems, and NCCL the first.

    Args:
        main_address: Name or address of the machine of the first process.

    Raises:
        UserError: If the name is not known, or it leaves several interfaces.
    """
    if not sys.platform.startswith("linux") or all(name in os.environ for name in VARIABLES):
        return
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:  # connect sends nothing
            route.connect((main_address, 9))
            mine = route.getsockname()[0]
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR = {main_address}: not reached from this machine ({error.strerror}); give the address of the "
            "first machine, which every machine reaches"
        ) from None
    known = {name: address for _, name in socket.if_nameindex() if (address := _address(name)) is not None}
    found = [name for name, address in known.items() if address == mine]
    if mine.startswith("127."):
        if main_address in ("localhost", mine):
            return  # all processes are on this machine
        found = [name for name, address in known.items() if not address.startswith("127.")]
        ensure(
            len(found) < 2,
            f"MASTER_ADDR = {main_address}: a loopback address on this machine, whose interfaces are "
            f"{', '.join(found)}; give the machine's address, or {' and '.join(VARIABLES)}",
        )
    for variable in VARIABLES if found else ():
        os.environ.setdefault(variable, found[0])


def _address(name: str) -> str | None:
    """Returns the IPv4 address of an interface, or None if it has none."""
    import fcntl  # which Windows lacks

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
