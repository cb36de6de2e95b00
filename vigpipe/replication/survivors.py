"""A process group of the ranks of the replicas that are left."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vigpipe.errors import PeerLostError
from vigpipe.launch.failures import is_lost_peer
from vigpipe.parallel.agreement import Peers, Status, agree
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.proof import prove


class Survivors(Counterparts):
    """The ranks with the same stages of the replicas that are left.

    torch makes process groups only with all ranks of the run. This one is gloo's, made by its
    members alone, and tensors of a GPU are copied to the host. If a member is lost, all others get
    a RuntimeError as soon as one calls `give_up`, and the group cannot be used again.

    Each group needs a section of the store of its own.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout_seconds: float, peers: Peers
    ) -> None:
        self._peers = peers
        self.size, self.rank = size, rank
        self._gloo: Any = None
        if size > 1:
            # This rank gives up before its peers, which wait for it twice as long.
            timeout = timedelta(seconds=timeout_seconds / 2)
            self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
            prove(self.exchange, rank, range(size))

    def gather(self, values: Tensor) -> Tensor:
        if self._gloo is None or values.numel() == 0:
            return values.unsqueeze(0)
        own = values.cpu().contiguous()
        rows = [torch.empty_like(own) for _ in range(self.size)]
        self._gloo.allgather([rows], [own]).wait()
        return torch.stack(rows).to(values.device)

    def exchange(self, chunks: Tensor) -> Tensor:
        if self._gloo is None:
            return chunks
        own = chunks.cpu()
        received, sizes = torch.empty_like(own), [len(own) // self.size] * self.size
        self._gloo.alltoall_base(received, own, sizes, sizes).wait()
        return received.to(chunks.device)

    def copy_from(self, rank: int, tensor: Tensor) -> None:
        if self._gloo is None:
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = rank, 0
        on_host = tensor.detach().cpu().contiguous()
        self._gloo.broadcast([on_host], options).wait()
        tensor.copy_(on_host)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        error = None
        try:
            yield
        except RuntimeError as failure:
            if not is_lost_peer(failure):
                raise
            error = failure
            self.give_up()
        if not agree(Status(finite=error is None), self._peers).finite:
            raise PeerLostError("a replica was lost") from error

    def give_up(self) -> None:
        """Close the connections, so that nobody waits for this rank any longer."""
        self._gloo = None
