"""Who reads which sample: complete, disjoint, in order, and nothing but what is asked for."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vigpipe.data.batches import Share, epoch_order, num_steps, repeated, replica_batches
from vigpipe.data.loss import NO_LABEL
from vigpipe.data.mix import Mix
from vigpipe.model.keyed_dropout import PADDING, sample_keys

many = settings(deadline=None, max_examples=100)


class RecordingSplit:
    """Image i is a single pixel of value i with label 100 + i; notes which ones were read."""

    def __init__(self, num_samples):
        self.labels = np.arange(100, 100 + num_samples)
        self.reads = []

    def __len__(self):
        return len(self.labels)

    def read(self, indices, epoch=0, copies=None):
        self.reads.append((list(indices), epoch))
        return torch.tensor(indices, dtype=torch.float32).view(-1, 1, 1, 1)


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


def batches_of(split, share, order=None, **options):
    order = np.arange(len(split)) if order is None else order
    options = {"with_images": True, "with_labels": True, **options}
    batches: Iterator[Any] = replica_batches(split, order, share, **options)
    return list(batches)


# ---- the share ------------------------------------------------------------------------------


def test_ten_samples_on_two_replicas_of_two_micro_batches():
    x = PADDING
    assert micro_batches(10, 10, 2, 2) == [[0, 1, 2], [3, 4, 5], [6, 7, x], [8, 9, x]]


def test_three_samples_of_ten_leave_the_last_micro_batch_empty():
    x = PADDING
    assert micro_batches(3, 10, 2, 2) == [[0, x, x], [1, x, x], [2, x, x], [x, x, x]]


@many
@given(cuts())
def test_replicas_together_take_every_position_once_and_in_order(case):
    positions = [p for row in micro_batches(*case) for p in row if p != PADDING]
    assert positions == list(range(case[0]))


@many
@given(cuts())
def test_sizes_differ_by_at_most_one_and_fall(case):
    sizes = [sum(p != PADDING for p in row) for row in micro_batches(*case)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@many
@given(cuts())
def test_padding_stands_at_the_ends_of_micro_batches(case):
    for row in micro_batches(*case):
        padding = [p == PADDING for p in row]
        assert padding == sorted(padding)


@many
@given(cuts())
def test_a_full_step_has_no_row_to_spare(case):
    _, batch_size, num_microbatches, num_replicas = case
    rows = micro_batches(batch_size, batch_size, num_microbatches, num_replicas)
    assert len(rows) == num_microbatches * num_replicas
    assert PADDING not in rows[0]


# ---- reading --------------------------------------------------------------------------------


@many
@given(st.integers(1, 40), cuts())
def test_an_epoch_reads_every_image_once_and_in_order(num_samples, case):
    _, batch_size, num_microbatches, num_replicas = case
    order = epoch_order(0, 0, num_samples)
    steps = []
    for r in range(num_replicas):
        split = RecordingSplit(num_samples)
        share = Share(batch_size, num_microbatches, num_replicas, r)
        steps.append([batch.num_samples for batch in batches_of(split, share, order)])
        reads = [indices for indices, _ in split.reads]
        # What this replica's positions name, in each step.
        starts = range(0, num_samples, batch_size)
        for start, indices in zip(starts, reads, strict=True):
            here = order[start : start + batch_size]
            positions = share.positions(len(here))
            assert indices == here[positions[positions >= 0].numpy()].tolist()
    assert steps == [steps[0]] * num_replicas
    assert sum(steps[0]) == num_samples
    assert len(steps[0]) == num_steps(num_samples, batch_size)


def test_images_labels_and_keys_of_a_row_belong_together():
    order = epoch_order(3, 1, 23)
    for r in range(2):
        split, share = RecordingSplit(23), Share(10, 2, 2, r)
        batches = batches_of(split, share, order, seed=7, first_step=40)
        for step, batch in enumerate(batches):
            positions = share.positions(batch.num_samples)
            assert torch.equal(batch.keys, sample_keys(7, 40 + step, positions))
            rows = zip(positions.tolist(), batch.images.flatten(), batch.labels, strict=True)
            for position, image, label in rows:
                if position == PADDING:
                    assert (image, label) == (0, NO_LABEL)
                else:
                    assert image == order[10 * step + position]
                    assert label == 100 + image


def test_only_the_first_stage_reads_images():
    split = RecordingSplit(10)
    batches = batches_of(split, Share(4, 2), with_images=False)
    assert split.reads == []
    assert all(batch.images is None and batch.labels is not None for batch in batches)


def test_only_the_last_stage_takes_labels():
    split = RecordingSplit(10)
    batches = batches_of(split, Share(4, 2), with_labels=False)
    assert all(batch.labels is None and batch.images is not None for batch in batches)


def test_a_batch_is_read_when_it_is_asked_for():
    split = RecordingSplit(10)
    batches = replica_batches(
        split, np.arange(10), Share(4, 2), epoch=5, with_images=True, with_labels=True
    )
    assert split.reads == []
    next(batches)
    assert split.reads == [([0, 1, 2, 3], 5)]


def test_every_replica_has_the_rows_of_the_largest_micro_batch():
    for r in range(3):
        for batch in batches_of(RecordingSplit(8), Share(7, 2, 3, r)):
            assert batch.keys.shape == batch.labels.shape == (4,)
            assert batch.images.shape == (4, 1, 1, 1)


def test_a_replica_without_samples_has_rows_of_padding_alone():
    *_, last = batches_of(RecordingSplit(5), Share(4, 2, 2, 1))
    assert last.num_samples == 1
    assert last.keys.tolist() == [PADDING, PADDING]
    assert last.labels.tolist() == [NO_LABEL, NO_LABEL]
    assert not last.images.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_come_in_the_dtype_asked_for(dtype):
    for batch in batches_of(RecordingSplit(3), Share(2, 1), dtype=dtype):  # one step has padding
        assert batch.images.dtype == dtype
        assert batch.labels.dtype == torch.int64


# ---- the order of an epoch ------------------------------------------------------------------


@many
@given(st.integers(0, 2**32), st.integers(0, 1000), st.integers(0, 200))
def test_an_epochs_order_is_a_permutation(seed, epoch, num_samples):
    assert sorted(epoch_order(seed, epoch, num_samples)) == list(range(num_samples))


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


class NotingSplit(RecordingSplit):
    """Notes copies too."""

    def read(self, indices, epoch=0, copies=None):
        x = super().read(indices, epoch)
        return x + 1000 * torch.tensor(copies, dtype=torch.float32).view(-1, 1, 1, 1)


def test_copies_go_with_their_images():
    visits, copies = repeated(np.arange(10), 6, 2)
    seen = []
    for r in range(2):
        for batch in batches_of(NotingSplit(10), Share(6, 1, 2, r), visits, copies=copies):
            seen.append(batch.images[batch.keys >= 0].flatten().tolist())
            assert (batch.labels[batch.keys >= 0] - 100).tolist() == [x % 1000 for x in seen[-1]]
    assert seen == [[0, 1, 2], [3, 4], [1000, 1001, 1002], [1003, 1004]]


# ---- mixing ---------------------------------------------------------------------------------


@many
@given(cuts(), st.integers(0, 5))
def test_first_and_last_stages_mix_the_same_way_on_their_own(case, step):
    num_samples, batch_size, num_microbatches, num_replicas = case
    mix = Mix(0.8, 0.0, 0.1, 60, (1, 1), seed=4)
    for r in range(num_replicas):
        split = RecordingSplit(num_samples)
        share = Share(batch_size, num_microbatches, num_replicas, r)
        split.labels = np.arange(num_samples)
        options = {"mix": mix, "first_step": step, "dtype": torch.float64}
        ((both,), (first,), (last,)) = (
            batches_of(split, share, with_images=images, with_labels=labels, **options)
            for images, labels in ((True, True), (True, False), (False, True))
        )
        assert torch.equal(both.images, first.images)
        assert torch.equal(both.labels, last.labels)
        padding = both.keys < 0
        assert not both.images[padding].any()
        assert not both.labels[padding].any()
        # Pixels are the numbers of the images and labels too, so the mean of a row's labels is
        # its pixel, but for the smoothing.
        values = torch.arange(60, dtype=torch.float64)
        expected = 0.9 * both.images.flatten() + 0.1 * 29.5
        torch.testing.assert_close((both.labels @ values)[~padding], expected[~padding])


def test_every_micro_batch_has_a_mixture_of_its_own():
    mix = Mix(0.8, 0.0, 0.0, 200, (1, 1), seed=4)
    shares = set()
    for r in range(2):
        for batch in batches_of(RecordingSplit(24), Share(12, 3, 2, r), mix=mix):
            shares |= {
                round(rows.max(1).values[0].item(), 9) for rows in batch.labels.view(3, 2, -1)
            }
    assert len(shares) == 12
