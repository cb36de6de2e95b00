"""Average weights that travel compressed (--compress); running statistics never do."""

from collections.abc import Sequence

from torch import Tensor

from vigpipe.replication.decisions import ALL
from vigpipe.replication.exchange import Exchange, Means
from vigpipe.replication.feedback import Compressor


class RoundedWeights:
    """Averages weights that are rounded to bfloat16, and rounds the means.

    The rounding errors are not kept: every replica counts with the rounded copy, for itself too, so
    all get the same. Means that are averaged again stay as they are. The first `num_parameters`
    tensors are weights, the others running statistics.
    """

    def __init__(self, exchange: Exchange, num_parameters: int) -> None:
        self._exchange, self._num_parameters = exchange, num_parameters

    def mean(self, tensors: Sequence[Tensor], weight: Tensor, partner: int = ALL) -> Means:
        weights, statistics = tensors[: self._num_parameters], tensors[self._num_parameters :]
        rounded = [tensor.bfloat16() for tensor in weights]
        means, total = self._exchange.mean(rounded, weight, partner)
        whole = _mean_of_statistics(self._exchange, statistics, weight, partner)
        return [*(m.to(w.dtype) for m, w in zip(means, weights, strict=True)), *whole], total


class Differences:
    """Averages weights by their compressed differences from `old`, the last averaged weights.

    Weights come first among the tensors, then running statistics.
    """

    def __init__(self, compressor: Compressor, exchange: Exchange, old: Sequence[Tensor]) -> None:
        self._compressor, self._exchange, self._old = compressor, exchange, old

    def mean(self, tensors: Sequence[Tensor], weight: Tensor, partner: int = ALL) -> Means:
        weights, statistics = tensors[: len(self._old)], tensors[len(self._old) :]
        differences = [old - new for old, new in zip(self._old, weights, strict=True)]
        means, total = self._compressor.mean(differences, weight, partner)
        whole = _mean_of_statistics(self._exchange, statistics, weight, partner)
        return [*(old - mean for old, mean in zip(self._old, means, strict=True)), *whole], total


def _mean_of_statistics(
    exchange: Exchange, statistics: Sequence[Tensor], weight: Tensor, partner: int
) -> list[Tensor]:
    return exchange.mean(statistics, weight, partner)[0] if statistics else []


Averages = Exchange | Compressor | RoundedWeights | Differences
