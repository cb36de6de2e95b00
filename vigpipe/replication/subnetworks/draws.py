"""Which replica trains which channels in a round."""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Channels = Mapping[str, Tensor]  # of one replica, ascending, by the name of their group


def draw_channels(
    sizes: Mapping[str, int], num_replicas: int, seed: int, round_index: int
) -> list[Channels]:
    """Divide the channels of each group among the replicas at random, the same number for each.

    Args:
        sizes: number of channels of each group, multiples of the number of replicas.
        num_replicas: m.
        seed: of the run.
        round_index: number of the round, from 0.

    Returns:
        The channels of each replica. They are in order, so that the model of a single replica is
        the wide model itself.
    """
    by_replica: list[dict[str, Tensor]] = [{} for _ in range(num_replicas)]
    for name, size in sizes.items():
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        order = np.random.default_rng([seed, round_index, key]).permutation(size)
        parts = np.sort(order.reshape(num_replicas, -1), axis=1)
        for channels, part in zip(by_replica, parts, strict=True):
            channels[name] = torch.from_numpy(part)
    return [*by_replica]
