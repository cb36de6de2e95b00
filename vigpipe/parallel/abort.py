"""Give up collectives on GPUs that can no longer end, because a peer is gone."""

import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

ABORT_SECONDS = 10.0  # far more than the kernels need to see that they are given up


def abort_collectives(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Abort NCCL's collectives in these groups, so that the GPU goes on with what comes after them.

    A collective whose peer has died spins on the GPU for ever, and all later work of the GPU, such
    as a copy of the weights to the host, waits behind it. What an aborted collective leaves in its
    tensors means nothing. Gloo's collectives fail by themselves and are left alone. The group of
    all ranks is always aborted too.
    """
    abort_all(_nccl_backends([*groups, dist.group.WORLD]), ABORT_SECONDS)


def abort_all(backends: Iterable[Any], seconds: float) -> None:
    """Abort backends, each in a thread, and go on after some seconds even if one hangs.

    One after the other they could wait for one another (pytorch/pytorch#119797).
    """
    threads = [threading.Thread(target=backend.abort, daemon=True) for backend in backends]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _nccl_backends(groups: Iterable[dist.ProcessGroup | None]) -> list[Any]:
    of_nccl = (g for g in groups if g is not None and "nccl" in dist.get_backend_config(g))
    return list(dict.fromkeys(group._get_backend(torch.device("cuda")) for group in of_nccl))
