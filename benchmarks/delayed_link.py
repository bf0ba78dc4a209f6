"""A link between two network namespaces on which every packet takes a while: ``delayed_link.py SPACE SPACE SECONDS``.

For kernels without netem. Each namespace gets a device ``veth0`` and ``veth1`` whose packets this process carries to
the other one, so many seconds after it has got them; it says ``ready`` when they are there (root needed). Packets are
as large as they may be, so that a gigabit is two thousand of them in a second.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, TUN, NO_HEADER = 0x400454CA, 0x0001, 0x1000
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
LARGEST = 65535
"""Bytes of a packet."""

FIRST = -10
"""Priority of this process: a packet whose time has come does not wait for computation."""


def main() -> None:
    """Carry packets until the process is ended."""
    *spaces, seconds = sys.argv[1:]
    os.setpriority(os.PRIO_PROCESS, 0, FIRST)
    ends = [device_in(space, f"veth{i}") for i, space in enumerate(spaces)]
    print("ready", flush=True)
    carry(ends, float(seconds))


def device_in(space: str, name: str) -> int:
    """A file whose reads and writes are the packets of a new device of a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}", "rb") as file:
        if libc.setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"no way into namespace {space}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN | NO_HEADER))
    return device


def carry(ends: list[int], seconds: float) -> None:
    """What is read at one end is written to the other, so much later."""
    others = dict(zip(ends, reversed(ends), strict=True))
    waiting: deque[tuple[float, int, bytes]] = deque()  # in the order of their time, which is the same for all
    while True:
        left = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        ready, _, _ = select.select(ends, [], [], left)
        for end in ready:
            try:
                waiting.append((time.monotonic() + seconds, others[end], os.read(end, LARGEST)))
            except BlockingIOError:
                continue
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, packet = waiting.popleft()
            try:
                os.write(end, packet)
            except OSError:
                continue  # the other end is full or not up yet: a packet is lost, as on any link


if __name__ == "__main__":
    main()
