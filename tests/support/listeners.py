"""Find out from Linux on which addresses a process and its children listen."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

from .processes import children

_LISTEN = "0A"


def beyond_loopback(pid: int) -> list[str]:
    """Return the addresses, such as ``0.0.0.0:8883``, where other machines can reach a process."""
    return [f"{address}:{port}" for address, port in listening_on(pid) if not address.is_loopback]


def listening_on(
    pid: int,
) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Return address and port of each TCP socket on which a process or its children listen.

    Without ``/proc`` the list is empty.
    """
    inodes = {inode for each in (pid, *children(pid)) for inode in _sockets(each)}
    found = [*_listeners("tcp"), *_listeners("tcp6")]
    return [(address, port) for inode, address, port in found if inode in inodes]


def _sockets(pid: int) -> Iterator[str]:
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # the process has ended, or there is no /proc
        return
    for descriptor in descriptors:
        try:
            target = os.readlink(descriptor)
        except OSError:  # the process has just closed it
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _listeners(
    family: str,
) -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    table = Path("/proc/net", family)
    for line in table.read_text().splitlines()[1:] if table.exists() else ():
        _, local, _, state, *rest = line.split()
        if state == _LISTEN:
            raw, _, port = local.partition(":")
            yield rest[5], _address(raw), int(port, 16)


def _address(raw: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address that Linux writes as words of 32 bits in little-endian byte order."""
    words = [bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address
