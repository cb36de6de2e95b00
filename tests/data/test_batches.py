"""Which samples a step visits and who has which of them: complete, disjoint, in order."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vigpipe.data.batches import (
    Share,
    TrainingOrder,
    epoch_order,
    num_steps,
    plain_order,
    repeated,
)
from vigpipe.model.keyed_dropout import PADDING

many = settings(deadline=None, max_examples=60)


@st.composite
def cuts(draw):
    """(samples of this step, B, M, D), the step being at most as large as a full one."""
    batch_size = draw(st.integers(1, 60))
    degrees = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    return draw(st.integers(1, batch_size)), batch_size, *degrees


def micro_batches(num_samples, batch_size, num_microbatches, num_replicas):
    """Every micro-batch's positions, padding included, over all replicas in order."""
    rows = []
    for r in range(num_replicas):
        share = Share(batch_size, num_microbatches, num_replicas, r)
        rows += share.positions(num_samples).view(num_microbatches, share.microbatch_size).tolist()
    return rows


# ---- the share ------------------------------------------------------------------------------


def test_ten_samples_on_two_replicas_of_two_micro_batches():
    x = PADDING
    assert micro_batches(10, 10, 2, 2) == [[0, 1, 2], [3, 4, 5], [6, 7, x], [8, 9, x]]


def test_three_samples_of_ten_leave_the_last_micro_batch_empty():
    x = PADDING
    assert micro_batches(3, 10, 2, 2) == [[0, x, x], [1, x, x], [2, x, x], [x, x, x]]


@many
@given(cuts())
def test_positions_come_once_in_order_in_even_micro_batches_with_padding_behind(case):
    num_samples, batch_size, num_microbatches, num_replicas = case
    rows = micro_batches(*case)
    real = [[p for p in row if p != PADDING] for row in rows]
    assert [p for samples in real for p in samples] == list(range(num_samples))
    sizes = [len(samples) for samples in real]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert [row[: len(samples)] for row, samples in zip(rows, real, strict=True)] == real
    assert len(rows) == num_microbatches * num_replicas
    full = micro_batches(batch_size, batch_size, num_microbatches, num_replicas)
    assert PADDING not in full[0]  # no row to spare


# ---- the order of an epoch ------------------------------------------------------------------


def test_an_epochs_order_is_a_permutation():
    for num_samples in (0, 1, 2, 7, 200):
        assert sorted(epoch_order(2**32, 1000, num_samples)) == list(range(num_samples))


def test_an_epochs_order_depends_on_seed_and_epoch_and_nothing_else():
    first = epoch_order(1, 2, 100).tolist()
    np.random.seed(5)
    torch.manual_seed(5)
    assert epoch_order(1, 2, 100).tolist() == first
    assert epoch_order(2, 2, 100).tolist() != first
    assert epoch_order(1, 3, 100).tolist() != first
    assert epoch_order(2, 1, 100).tolist() != first


@pytest.mark.parametrize(("samples", "batch", "steps"), [(1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_a_partial_step_counts(samples, batch, steps):
    assert num_steps(samples, batch) == steps


# ---- repeated augmentation ------------------------------------------------------------------


def test_ten_images_in_batches_of_six_visited_twice():
    visits, copies = repeated(np.arange(10) * 11, 6, 2)
    assert visits.tolist() == [0, 11, 22, 0, 11, 22, 33, 44, 33, 44]
    assert copies.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


@many
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5))
def test_an_epoch_keeps_its_length_and_no_visit_happens_twice(num_samples, batch_size, times):
    order = epoch_order(0, 1, num_samples)
    visits, copies = repeated(order, batch_size, times)
    assert len(visits) == len(copies) == num_samples
    for start in range(0, num_samples, batch_size):
        batch = visits[start : start + batch_size].tolist()
        pairs = set(zip(batch, copies[start : start + batch_size].tolist(), strict=True))
        assert len(pairs) == len(batch)
        assert len(set(batch)) == -(-len(batch) // times)
        # Two visits of an image are as far apart as there are different images.
        for image in set(batch):
            places = [i for i, other in enumerate(batch) if other == image]
            assert all(b - a == len(set(batch)) for a, b in pairwise(places))
    if times == 1:
        assert visits.tolist() == order.tolist()


# ---- what a step visits ---------------------------------------------------------------------


@many
@given(st.integers(1, 40), st.integers(1, 15), st.integers(1, 3), st.integers(0, 2**32))
def test_an_epoch_visits_every_image_once_in_the_order_of_the_seed(n, batch_size, times, seed):
    order = TrainingOrder(n, batch_size, seed, times)
    steps = num_steps(n, batch_size)
    for epoch in (1, 2):
        expected, copies = epoch_order(seed, epoch, n), None
        if times > 1:
            expected, copies = repeated(expected, batch_size, times)
        visits = [order(step) for step in range((epoch - 1) * steps, epoch * steps)]
        assert np.concatenate([v.indices for v in visits]).tolist() == expected.tolist()
        assert {v.epoch for v in visits} == {epoch}
        if copies is not None:
            found = [v.copies for v in visits if v.copies is not None]
            assert np.concatenate(found).tolist() == copies.tolist()
        assert all(len(v.indices) == batch_size for v in visits[:-1])


def test_images_that_are_scored_come_in_order():
    assert [v.indices.tolist() for v in plain_order(5, 2)] == [[0, 1], [2, 3], [4]]
    assert plain_order(0, 2) == []
