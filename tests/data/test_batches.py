"""Which samples a step visits and who has which of them: complete, disjoint, in order."""

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


# ---- repeated augmentation ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "times", "visits", "copies"),
    [
        (10, 2, [0, 11, 22, 0, 11, 22, 33, 44, 33, 44], [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]),
        (5, 2, [0, 11, 22, 0, 11], [0, 0, 0, 1, 1]),
        (4, 3, [0, 11, 0, 11], [0, 0, 1, 1]),
        (3, 1, [0, 11, 22], [0, 0, 0]),
    ],
)
def test_images_are_visited_several_times_in_batches_of_six(num_samples, times, visits, copies):
    found = repeated(np.arange(num_samples) * 11, 6, times)
    assert [part.tolist() for part in found] == [visits, copies]


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
