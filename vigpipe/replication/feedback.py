"""Keep what a compressed sum leaves out, and add it to the next one (error feedback).

Stich et al. 2018 (arXiv:1809.07599), algorithm 1; Karimireddy et al. 2019 (arXiv:1901.09847). With
the numbers g of a replica, and its residual e, which it has left out before:

    a = g + e;  C(a) is sent;  e = a - C(a)

So all that was sent and all residuals together are the sum of all numbers.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vigpipe.config.compress import Compression, parse_compress
from vigpipe.config.options import TrainConfig
from vigpipe.replication.compression import Bfloat16, Method, Named, Shapes, TopK, bytes_of_sum
from vigpipe.replication.decisions import ALL
from vigpipe.replication.exchange import Exchange, Means
from vigpipe.replication.powersgd import PowerSgd

RESIDUAL, MEMORY = "residual", "powersgd_q"


class Compressor:
    """Adds up tensors over replicas with error feedback; the ranks concerned call it together.

    `parameters` have the names, shapes and dtype of the tensors that are added up. A partner is the
    other replica of a pair, or ALL.
    """

    def __init__(self, method: Method, exchange: Exchange, parameters: Named, seed: int) -> None:
        self._method, self._exchange = method, exchange
        self._names = list(parameters)
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._num_bytes = sum(parameter.nbytes for parameter in parameters.values())
        self._residual = {n: torch.zeros_like(parameters[n]) for n in method.lossy(shapes)}
        self._memory = method.first_memory(parameters, seed)
        self._next: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        self._num_sums = 0

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor], partner: int = ALL) -> list[Tensor]:
        """Add up tensors of all parameters, with the same bits everywhere; `commit` must follow."""
        named = dict(zip(self._names, tensors, strict=True))
        for name, residual in self._residual.items():
            named[name] = named[name] + residual
        totals, sent, memory = self._method.add_up(named, self._memory, self._exchange, partner)
        self._next = {n: named[n] - sent[n] for n in self._residual}, memory
        self._num_sums += 1
        return list(totals.values())

    @torch.no_grad()
    def commit(self, is_used: Tensor) -> None:
        """Keep what the last sum left out if `is_used`, a scalar on the device; else forget it."""
        for state, after in zip((self._residual, self._memory), self._next, strict=True):
            for name, new in after.items():
                state[name].copy_(torch.where(is_used, new, state[name]))
        self._next = {}, {}

    def mean(self, tensors: Sequence[Tensor], weight: Tensor, partner: int = ALL) -> Means:
        """Average tensors over replicas, each with its weight; see `Exchange.mean`.

        The residual has the unit of weight * tensor. If all weights are 0, the means are 0, and
        nothing is kept or forgotten.
        """
        total = self._exchange.gather(weight.reshape(1), partner).sum()
        sums = self.add_up([tensor * weight.to(tensor.dtype) for tensor in tensors], partner)
        self.commit(total > 0)
        factor = torch.where(total > 0, 1 / total, torch.zeros_like(total))
        return [(s.double() * factor).to(s.dtype) for s in sums], total

    def residuals(self) -> dict[str, Tensor]:
        """Return by name what this replica has left out; it differs from replica to replica."""
        return {f"{RESIDUAL}/{name}": tensor for name, tensor in self._residual.items()}

    def memory(self) -> dict[str, Tensor]:
        """Return what the next sum begins with; after sums over all replicas they have the same."""
        return {f"{MEMORY}/{name}": tensor for name, tensor in self._memory.items()}

    def account(self) -> dict[str, int]:
        """Return the number of sums, the bytes sent, and what a ring would have sent for them."""
        num_replicas = self._exchange.size
        of_ring = 2 * (num_replicas - 1) * self._num_bytes // num_replicas
        return {
            "sums": self._num_sums,
            "bytes_sent": self._exchange.bytes_sent,
            "bytes_of_ring": self._num_sums * of_ring,
        }


def make_method(compression: Compression) -> Method:
    """Return the method that --compress names, which is not "none"."""
    if compression.method == "bfloat16":
        return Bfloat16()
    if compression.method == "top-k":
        return TopK(compression.ratio)
    return PowerSgd(compression.rank)


def notes_on_compression(
    options: TrainConfig, shapes: Shapes, itemsize: int, num_teams: int
) -> list[str]:
    """Tell what the user should know about --compress, which is not "none", before the run.

    `shapes` are those of all parameters, and `itemsize` is the bytes of a number.
    """
    what = f"--compress {options.compress}"
    num_replicas = options.dp if options.strategy == "synchronous" else num_teams
    if num_replicas == 1:
        return [f"{what}: there is one replica, which sends nothing, so nothing is compressed"]
    if options.average == "weights":
        return []
    partner = 1 if options.strategy == "gossip" else ALL  # all partners send as much as 1
    num_numbers = sum(map(math.prod, shapes.values()))
    method = make_method(parse_compress(options.compress))
    num_bytes = method.bytes_sent(shapes, itemsize, num_replicas, partner)
    uncompressed = bytes_of_sum(num_numbers, itemsize, num_replicas, partner)
    if num_bytes < uncompressed:
        return []
    return [
        f"{what}: a replica sends {num_bytes / 1e6:.1f} MB for each sum over {num_replicas} "
        f"replicas, and without compression it would send {uncompressed / 1e6:.1f} MB: compression "
        "costs more than it saves"
    ]


def make_compressor(
    options: TrainConfig, exchange: Exchange, parameters: Named
) -> Compressor | None:
    """Make what compresses gradients or outer differences, if the options say so."""
    compression = parse_compress(options.compress)
    if compression.method == "none" or options.average == "weights" or exchange.size == 1:
        return None
    return Compressor(make_method(compression), exchange, parameters, options.seed)
