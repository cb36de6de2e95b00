"""Give up collectives on GPUs that can no longer end, because a peer is gone."""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

ABORT_SECONDS = 10.0  # torch's own limit for this is 2 minutes more than the kernels need


def abort_collectives(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Abort NCCL's collectives in these groups, so that the GPU goes on with what comes after them.

    A collective whose peer has died spins on the GPU for ever, and all later work of the GPU, such
    as a copy of the weights to the host, waits behind it. What an aborted collective leaves in its
    tensors means nothing. Gloo's collectives fail by themselves and are left alone.

    Args:
        groups: process groups of this rank; the group of all ranks is always aborted too.
    """
    everybody = dist.group.WORLD
    abort_all([*_nccl_backends([*groups, everybody])], ABORT_SECONDS)


def abort_all(backends: Sequence[Any], seconds: float) -> None:
    """Abort backends in a thread, and go on after some seconds even if that hangs."""

    def abort() -> None:
        # Within one NCCL group, or the communicators' aborts could wait for one another
        # (pytorch/pytorch#119797).
        backends[0]._group_start()
        for backend in backends:
            backend.abort()
        backends[0]._group_end()

    if backends:
        thread = threading.Thread(target=abort, daemon=True)
        thread.start()
        thread.join(seconds)


def _nccl_backends(groups: Iterable[dist.ProcessGroup | None]) -> list[Any]:
    if not dist.is_nccl_available():
        return []
    backends: list[Any] = []
    for group in groups:
        backend = None if group is None else _backend_of(group)
        if isinstance(backend, dist.ProcessGroupNCCL) and backend not in backends:  # pyright: ignore[reportPrivateImportUsage]
            backends.append(backend)
    return backends


def _backend_of(group: dist.ProcessGroup) -> Any:  # noqa: ANN401
    try:
        return group._get_backend(torch.device("cuda"))
    except RuntimeError:  # this group has no backend for GPUs
        return None
