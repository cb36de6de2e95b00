"""Sums over replicas that send fewer bytes: threads of one process, without ranks."""

import torch

from tests.replication.together import SHAPES, run_together, tensors_of
from vigpipe.replication.compression import Bfloat16, TopK, bytes_of_sum, largest
from vigpipe.replication.decisions import ALL
from vigpipe.replication.powersgd import PowerSgd


def test_of_equal_numbers_the_first_are_the_largest():
    numbers = torch.tensor([1.0, torch.nan, 7, -torch.inf, torch.nan])
    assert largest(numbers, 2).tolist() == [1, 3]
    generator = torch.Generator().manual_seed(0)
    for k in range(1, 50):
        numbers = torch.randint(-5, 6, (50,), generator=generator).float()
        expected = numbers.abs().sort(descending=True, stable=True).indices[:k].sort().values
        assert torch.equal(largest(numbers, k), expected)


def test_a_share_of_each_tensor_is_sent_but_at_least_one_number():
    def work(exchange, replica):
        named = dict(zip(SHAPES, tensors_of(replica, dtype=torch.float32), strict=True))
        sent = TopK(0.1).add_up(named, {}, exchange, ALL).sent
        assert exchange.bytes_sent == TopK(0.1).bytes_sent(SHAPES, 4, 3, ALL)
        return [int(tensor.count_nonzero()) for tensor in sent.values()]

    assert run_together(3, work) == [[18, 2, 18, 3, 1]] * 3


def test_bytes_of_each_method():
    shapes = {"m": (100, 200), "v": (100,)}
    ring = bytes_of_sum(20_100, 4, 4)
    assert ring == 2 * 3 * 5025 * 4
    assert Bfloat16().bytes_sent(shapes, 4, 4, ALL) == ring // 2
    assert Bfloat16().bytes_sent(shapes, 4, 4, 1) == 2 * 20_100
    assert TopK(0.01).bytes_sent(shapes, 4, 4, ALL) == 8 * 201 * 3
    assert TopK(0.01).bytes_sent(shapes, 4, 4, 1) == 8 * 201
    # 4 columns of 100 and a vector of 100; 4 columns of 200.
    assert PowerSgd(4).bytes_sent(shapes, 4, 4, ALL) == 2 * 3 * (125 + 200) * 4
    assert PowerSgd(4).bytes_sent(shapes, 4, 4, 1) == (500 + 800) * 4
