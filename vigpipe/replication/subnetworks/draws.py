"""Draw which replica trains which channels in a round."""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Channels = Mapping[str, Tensor]  # one replica's channels of each named group, ascending


def draw_channels(
    sizes: Mapping[str, int], num_replicas: int, seed: int, round_index: int
) -> list[Channels]:
    """Divide the channels of each group among the replicas at random, the same number for each.

    The number of channels of each group must be a multiple of the number of replicas. A replica's
    channels are in order, so that the model of a single replica is the wide model itself.
    """
    by_replica: list[dict[str, Tensor]] = [{} for _ in range(num_replicas)]
    for name, size in sizes.items():
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        order = np.random.default_rng([seed, round_index, key]).permutation(size)
        drawn = np.sort(order.reshape(num_replicas, -1), axis=1)
        for channels, of_replica in zip(by_replica, drawn, strict=True):
            channels[name] = torch.from_numpy(of_replica)
    return [*by_replica]
