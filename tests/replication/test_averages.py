"""Averages of weights that travel compressed."""

import torch

from tests.replication.together import flat, run_together, tensors_of
from vigpipe.replication.averages import RoundedWeights


def test_rounded_weights_are_the_same_everywhere_and_stay_when_averaged_again():
    def work(exchange, replica):
        *weights, statistic = tensors_of(replica, dtype=torch.float32)
        averages = RoundedWeights(exchange, len(weights))
        weight = torch.tensor(float(replica), dtype=torch.float64)
        *means, _ = averages.mean([*weights, statistic], weight)[0]
        *again, same = averages.mean([*means, statistic], weight)[0]
        assert torch.equal(flat(again), flat(means))
        return flat(means), same

    (first, statistic), (second, _) = run_together(2, work)
    assert torch.equal(first, second)
    *weights, of_replica_1 = tensors_of(1, dtype=torch.float32)
    assert torch.equal(first, flat(weights).bfloat16().float())  # replica 0 has no samples
    assert torch.equal(statistic, of_replica_1)
