"""Memory of a rank, added up by hand."""

import pytest

from tests.planning.profiles import make_piece, make_profile
from vigpipe.planning.memory import peak, rank_bytes
from vigpipe.schedules import orders


@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "in_flight"),
    [("gpipe", 6, [6, 6, 6]), ("1f1b", 6, [3, 2, 1]), ("1f1b", 3, [3, 2, 1])],
)
def test_micro_batches_in_flight(schedule, num_microbatches, in_flight):
    order = orders(schedule, 3, 1, num_microbatches)
    assert [peak(own, {rank: 1}) for rank, own in enumerate(order)] == in_flight


def test_several_stages_of_a_rank_keep_their_own():
    # Rank 0 goes forward with both micro-batches in stages 0 and 2 before it goes back.
    assert peak(orders("loopedbfs", 2, 2, 2)[0], {0: 5, 2: 7}) == 2 * 5 + 2 * 7
    # Interleaved, rank 1: F1.0 F1.1 F3.0 B3.0 F3.1 B3.1, so stage 3 keeps one.
    assert peak(orders("interleaved1f1b", 2, 2, 2)[1], {1: 5, 3: 7}) == 2 * 5 + 7


def test_bytes_of_a_rank():
    small = make_piece("block 0", weights=101, activation=10, boundary=3)
    large = make_piece("block 1", weights=50, activation=40, boundary=2)
    profile = make_profile([small, large], optimizer_bytes=2.5, base_bytes=10**6)
    weights = 354 + 175  # of 101 and 50 bytes, 3.5 times as many, and not half a byte too few
    kept = 4 * 2 * (10 + 40)  # micro-batches of two samples
    working = 2 * (40 + 2)  # of the larger block
    found = rank_bytes(profile, orders("gpipe", 2, 1, 4)[0], {0: [small, large]}, 2)
    assert found == weights + kept + working
