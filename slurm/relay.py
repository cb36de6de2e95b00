"""Be the switch between the hosts of slurm/hosts.sh, and delay what they send: without netem.

    relay.py MILLISECONDS PID ...

gives the network of each process an eth0, and lets every frame that one of them sends arrive at the
others so much later. It says "ready" once all are there, and needs only Python's own library.
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8  # linux/if_tun.h
_TAP, _NO_PI, _VNET_HDR = 0x0002, 0x1000, 0x4000
_OFFLOAD = 0x01 | 0x02 | 0x04  # checksums, and segments of TCP over IPv4 and IPv6: large frames
_HEADER = 10  # bytes of virtio_net_hdr in front of a frame
_MOST = (1 << 16) + 64
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def open_tap(pid: int) -> int:
    """Return the descriptor of a new eth0 in the network of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as network:
        if libc.setns(network.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP | _NO_PI | _VNET_HDR))
    fcntl.ioctl(tap, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _OFFLOAD)
    return tap


def relay(taps: list[int], delay: float) -> None:
    """Hand on what the taps get, for ever; `delay` is in seconds."""
    port_of: dict[bytes, int] = {}  # a host's tap, by its address
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for tap in select.select(taps, [], [], timeout)[0]:
            frame = os.read(tap, _MOST)
            port_of[frame[_HEADER + 6 : _HEADER + 12]] = tap
            waiting.append((time.monotonic() + delay, tap, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, source, frame = waiting.popleft()
            target = port_of.get(frame[_HEADER : _HEADER + 6])
            for tap in [target] if target is not None else taps:
                if tap != source:
                    with contextlib.suppress(OSError):  # its interface is down, or its queue full
                        os.write(tap, frame)


if __name__ == "__main__":
    all_taps = [open_tap(int(pid)) for pid in sys.argv[2:]]
    print("ready", flush=True)
    relay(all_taps, float(sys.argv[1]) / 1000)
