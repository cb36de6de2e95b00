"""A rank's batches, by number: complete, disjoint, and nothing read but what is asked for."""

import gc
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vigpipe.data import Source, open_source
from vigpipe.data.augment import Augmentation
from vigpipe.data.batches import Share, epoch_order, num_steps, repeated
from vigpipe.data.feed import ImageFeed
from vigpipe.data.loss import NO_LABEL
from vigpipe.data.mix import Mix
from vigpipe.data.pixels import Pixels
from vigpipe.model.keyed_dropout import PADDING, sample_keys

many = settings(deadline=None, max_examples=15)
CPU = torch.device("cpu")


class PlainPixels(NamedTuple):
    """What makes of pixels a tensor of their values."""

    dtype: torch.dtype

    def __call__(self, parts, num_images, shape):
        images = torch.cat([torch.empty(0, *shape), *(part.images for part in parts)])
        assert len(images) == num_images
        return images.to(self.dtype)


class RecordingSplit:
    """Image i is a pixel of value i, plus 100 for each copy; notes which ones were read."""

    def __init__(self, num_samples):
        self.labels = np.arange(num_samples)
        self.reads = []

    def __len__(self):
        return len(self.labels)

    def decode(self, indices, epoch=0, copies=None, out=None):
        self.reads.append((list(indices), epoch))
        pixels = torch.tensor(indices) + 100 * torch.tensor(copies or [0] * len(indices))
        return Pixels(pixels.to(torch.uint8).view(-1, 1, 1, 1))

    def normaliser(self, dtype=torch.float32, device=None, send=None) -> Any:
        return PlainPixels(dtype)


def feed_of(split: Any, share, **options: Any) -> Any:
    source = Source("x", tuple(map(str, range(60))), 1, (1, 1), split, split)
    options = {"with_images": True, "with_labels": True, **options}
    return ImageFeed(source, share, CPU, **options)


def epoch_of(feed, num_samples, share, first=0) -> list[Any]:
    steps = num_steps(num_samples, share.batch_size)
    items = range(first * share.num_replicas + share.replica_index, 10**6, share.num_replicas)
    return [feed.batch(item) for item in items[:steps]]


@st.composite
def cuts(draw):
    """(samples, B, M, D)."""
    degrees = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    return draw(st.integers(1, 40)), draw(st.integers(1, 60)), *degrees


def test_images_labels_and_keys_of_a_row_belong_together():
    for r in range(2):
        split, share = RecordingSplit(23), Share(10, 2, 2, r)
        feed = feed_of(split, share, seed=7)
        order = epoch_order(7, 2, 23)
        for step, batch in enumerate(epoch_of(feed, 23, share, first=3)):
            positions = share.positions(batch.num_samples)
            assert batch.sizes == share.sizes(batch.num_samples)
            assert torch.equal(batch.keys, sample_keys(7, 3 + step, positions))
            rows = zip(positions.tolist(), batch.inputs.flatten(), batch.labels, strict=True)
            for position, image, label in rows:
                if position == PADDING:
                    assert (image, label) == (0, NO_LABEL)
                else:
                    assert image == label == order[10 * step + position]


def test_any_batch_is_there_at_once_whatever_was_read_before():
    """Also where only the item after it is known."""
    in_order = feed_of(RecordingSplit(23), Share(5, 2))
    expected = [in_order.batch(step, range(step + 1, 15)) for step in range(15)]
    split = RecordingSplit(23)
    feed, items = feed_of(split, Share(5, 2)), (7, 8, 2, 14, 14, 0)
    for step, coming in zip(items, (*items[1:], None), strict=True):
        for ahead in (range(step + 1, step + 3), [] if coming is None else [coming]):
            split.reads.clear()
            batch = feed.batch(step, ahead)
            assert torch.equal(batch.inputs, expected[step].inputs)
            assert torch.equal(batch.labels, expected[step].labels)
            assert torch.equal(batch.keys, expected[step].keys)
            assert len(split.reads) == 1  # nothing but what was asked for


def test_a_closed_job_is_freed_at_once_with_the_files_it_has_open():
    feed = feed_of(RecordingSplit(23), Share(5, 2))
    feed.batch(0, range(1, 5))
    feed.close()
    of = weakref.ref(feed)
    gc.disable()
    try:
        del feed
        assert of() is None
    finally:
        gc.enable()


def test_scoring_visits_each_image_once_and_training_goes_on_where_it_was():
    """What is scored is not mixed either."""
    split, mix = RecordingSplit(23), Mix(0.8, 1.0, 0.1, 60, (1, 1), seed=4)
    feed, expected = (feed_of(split, Share(5, 2), mix=mix) for _ in range(2))
    for step in range(4):
        ahead = range(step + 1, 9)
        assert torch.equal(feed.batch(step, ahead).inputs, expected.batch(step, ahead).inputs)
        scored = list(feed.test_batches(("test",), 1, 0, 8))
        labels, images = (
            torch.cat([getattr(b, part).flatten() for b in scored]) for part in ("labels", "inputs")
        )
        assert labels[labels >= 0].tolist() == images[labels >= 0].tolist() == list(range(8))


def test_a_replica_without_samples_has_rows_of_padding_alone():
    share = Share(4, 2, 2, 1)
    *_, last = epoch_of(feed_of(RecordingSplit(5), share), 5, share)
    assert last.num_samples == 1
    assert last.keys.tolist() == [PADDING, PADDING]
    assert last.labels.tolist() == [NO_LABEL, NO_LABEL]
    assert not last.inputs.any()
    assert last.inputs.dtype == torch.float32


def test_copies_go_with_their_images():
    order = epoch_order(0, 1, 10)
    visits, copies = repeated(order, 6, 2)
    for r in range(2):
        share, seen = Share(6, 1, 2, r), []
        for batch in epoch_of(feed_of(RecordingSplit(10), share, times=2), 10, share):
            real = batch.keys >= 0
            seen += batch.inputs[real].flatten().tolist()
            assert batch.labels[real].tolist() == [x % 100 for x in batch.inputs[real].flatten()]
        mine = [0, 1, 2, 6, 7] if r == 0 else [3, 4, 5, 8, 9]
        assert seen == (visits + 100 * copies)[mine].tolist()


@many
@given(cuts(), st.integers(0, 5))
def test_first_and_last_stages_mix_the_same_way_on_their_own(case, step):
    num_samples, batch_size, num_microbatches, num_replicas = case
    mix = Mix(0.8, 0.0, 0.1, 60, (1, 1), seed=4)
    for r in range(num_replicas):
        share = Share(batch_size, num_microbatches, num_replicas, r)

        def batch(images, labels, share=share):
            options: dict[str, Any] = {"mix": mix, "dtype": torch.float64}
            split = RecordingSplit(num_samples)
            feed = feed_of(split, share, with_images=images, with_labels=labels, **options)
            return feed.batch(step * num_replicas + share.replica_index)

        both, first, last = batch(True, True), batch(True, False), batch(False, True)
        assert torch.equal(both.inputs, first.inputs)
        assert torch.equal(both.labels, last.labels)
        padding = both.keys < 0
        assert not both.inputs[padding].any()
        assert not both.labels[padding].any()
        # Pixels are the numbers of the images and labels too, so the mean of a row's labels is
        # its pixel, but for the smoothing.
        values = torch.arange(60, dtype=torch.float64)
        expected = 0.9 * both.inputs.flatten() + 0.1 * 29.5
        torch.testing.assert_close((both.labels @ values)[~padding], expected[~padding])


def test_every_micro_batch_has_a_mixture_of_its_own():
    mix = Mix(0.8, 0.0, 0.0, 60, (1, 1), seed=4)
    shares = set()
    for r in range(2):
        share = Share(12, 3, 2, r)
        for batch in epoch_of(feed_of(RecordingSplit(24), share, mix=mix), 24, share):
            shares |= {
                round(rows.max(1).values[0].item(), 9) for rows in batch.labels.view(3, 2, -1)
            }
    assert len(shares) == 12


def test_a_batch_is_what_the_split_reads():
    """The whole way, timm's erasing included, against the images one by one."""
    augment = Augmentation("box", "rand-m9-mstd0.5-inc1", 0.0, 0.9)
    source = open_source("fake", image_size=32, augment=augment, mean=0.4, std=0.3, seed=3)
    share = Share(20, 3)
    feed = ImageFeed(source, share, CPU, with_images=True, with_labels=False, seed=3)
    for step in (70, 3):  # an epoch has 64
        batch = feed.batch(step)
        assert batch.inputs is not None
        order = epoch_order(3, step // 64 + 1, 1280)[step % 64 * 20 :][:20]
        expected = torch.cat([source.train.read([i], step // 64 + 1) for i in order])
        assert torch.equal(batch.without_padding(batch.inputs), expected)
