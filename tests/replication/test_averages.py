"""Averages of weights that travel compressed."""

import torch

from tests.replication.together import SHAPES, flat, run_together, tensors_of
from vigpipe.replication.averages import Differences, RoundedWeights
from vigpipe.replication.compression import TopK
from vigpipe.replication.feedback import Compressor


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


def test_differences_give_the_mean_of_the_weights():
    def work(exchange, replica):
        old, new = tensors_of(7), tensors_of(replica, 1)
        parameters = dict(zip(SHAPES, old[:4], strict=False))
        compressor = Compressor(TopK(1), exchange, parameters, 3)
        averages = Differences(compressor, exchange, old[:4])
        weight = torch.tensor([1.0, 3.0][replica], dtype=torch.float64)
        return flat(averages.mean(new, weight)[0])

    expected = (flat(tensors_of(0, 1)) + 3 * flat(tensors_of(1, 1))) / 4
    for means in run_together(2, work):
        torch.testing.assert_close(means, expected, rtol=0, atol=1e-10)
