"""The batches of one rank: any item of the training, which is one replica's share of a step."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, tee
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vigpipe.data.batches import Share, TrainingOrder, Visits, plain_order
from vigpipe.data.mix import Mix, Mixture
from vigpipe.data.pixels import Pixels
from vigpipe.data.reader import Reader, Request
from vigpipe.data.sources import Source
from vigpipe.data.split import Split
from vigpipe.launch.device import SideStream, sender
from vigpipe.model.keyed_dropout import sample_keys
from vigpipe.parallel.batch import NO_LABEL, ReplicaBatch


class _Plan(NamedTuple):
    """What is read for one share of a step; `num_samples` are those of the whole step."""

    step: int
    share: Share
    num_samples: int
    visits: Visits

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.share.sizes(self.num_samples)


class _PlanQueue:
    """Plans of coming items, made when they are first asked for; items may be added at any time.

    Every plan is taken twice: by whoever makes the batch, and, if `are_read`, perhaps long before
    by whoever reads its images.
    """

    def __init__(self, plan: Callable[[int], _Plan], *, are_read: bool) -> None:
        self.items: deque[int] = deque()  # those whose batches have not been made
        self._unplanned: deque[int] = deque()
        self._num_unread = 0
        # A method's generator would refer to this queue, which then would not be freed at once.
        self._to_use: Iterator[_Plan] = (plan(item) for item in _until_empty(self._unplanned))
        self._to_read: Iterator[_Plan] = iter(())
        if are_read:
            self._to_use, self._to_read = tee(self._to_use)

    def add(self, items: Sequence[int]) -> None:
        self.items.extend(items)
        self._unplanned.extend(items)
        self._num_unread += len(items)

    def to_use(self) -> Iterator[_Plan]:
        """Yield the plans of all items in turn; there must be one when it is asked for."""
        for plan in self._to_use:
            self.items.popleft()
            yield plan

    def to_read(self) -> Iterator[_Plan | None]:
        """Yield the same plans, and None while there are no more."""
        while True:
            plan = None
            if self._num_unread:
                self._num_unread -= 1
                plan = next(self._to_read)
            yield plan


def _until_empty(items: deque[int]) -> Iterator[int]:
    """Yield items as they are taken out; more may be added meanwhile."""
    while items:
        yield items.popleft()


class ImageFeed:
    """The batches of one rank, which reads only what it needs.

    The replicas of a team, by default all, take each step together. A step visits an image `times`
    times (`data.batches.repeated`). `counts` says whether the rank's logits count: of ranks that
    share images, the first one's do.
    """

    def __init__(
        self,
        source: Source,
        share: Share,
        device: torch.device,
        *,
        with_images: bool,
        with_labels: bool,
        team_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        times: int = 1,
        mix: Mix | None = None,
        num_workers: int = 0,
        hang_seconds: float | None = None,
        counts: bool = True,
    ) -> None:
        self._share, self._dtype, self._seed = share, dtype, seed
        self._team_size = team_size or share.num_replicas
        self._with_images, self._with_labels, self._mix = with_images, with_labels, mix
        self._counts = counts
        self._source = source
        self._shape = (source.channels, *source.image_size)
        self._order = TrainingOrder(len(source.train), share.batch_size, seed, times)
        # All splits are normalised alike.
        self._normalise = source.train.normaliser(dtype, device, sender(device))
        self._beside = SideStream(device)
        most_images = share.num_microbatches * share.microbatch_size
        self._reader = Reader(source.splits, num_workers, self._shape, most_images, hang_seconds)
        self._queue: _PlanQueue | None = None
        self._batches: Iterator[ReplicaBatch] = iter(())

    def batch(self, item: int, ahead: Sequence[int] = ()) -> ReplicaBatch:
        queue = self._queue
        if queue is None or not queue.items or queue.items[0] != item:
            self._queue = queue = _PlanQueue(self._plan_item, are_read=self._with_images)
            queue.add([item])
            train = self._source.train
            self._batches = self._read(train, queue.to_use(), queue.to_read(), self._mix)
        queue.add(ahead[len(queue.items) - 1 :])
        batch = next(self._batches)
        share = replace(self._share, replica_index=item % self._share.num_replicas)
        return replace(batch, num_samples=share.of_team(batch.num_samples, self._team_size))

    def test_batches(
        self,
        splits: Sequence[str],
        num_pipelines: int,
        pipeline_index: int,
        most: int | None = None,
    ) -> Iterator[ReplicaBatch]:
        """Yield a pipeline's share of the images of one split, which are visited once, in order."""
        (name,) = splits
        split = self._source.split(name)
        share = self._share.among(num_pipelines, pipeline_index)
        num_images = len(split) if most is None else min(len(split), most)
        self._queue = None  # This replaces what the reader reads ahead for the training.
        order = enumerate(plain_order(num_images, share.batch_size))
        plans, plans_to_read = tee(_plan(share, number, visits) for number, visits in order)
        return self._read(split, plans, plans_to_read, None)

    def hear(self, step: int, measured: int, busy_seconds: Sequence[float]) -> None:
        """Do nothing: the images of a step do not depend on what others took."""

    def progress(self) -> dict[str, object]:
        return {}

    def restore(self, progress: Mapping[str, object]) -> None:
        """Do nothing: the number of an item says all."""

    def close(self) -> None:
        self._queue, self._batches = None, iter(())
        self._reader.close()

    def _read(
        self,
        split: Split,
        plans: Iterable[_Plan],
        plans_to_read: Iterable[_Plan | None],
        mix: Mix | None,
    ) -> Iterator[ReplicaBatch]:
        """Yield a batch for each plan; those to read may be taken early, None for none just now."""
        index = self._source.splits.index(split)
        requests = (request for plan in plans_to_read for request in self._requests(index, plan))
        parts = self._reader.read(requests) if self._with_images else None
        for plan in plans:
            images = labels = None
            if parts is not None:
                num_parts = len(self._reader.cut(len(plan.visits.indices)))
                of_step = islice(parts, num_parts)
                images = self._beside.run(partial(self._images, plan, of_step, mix))
            if self._with_labels:
                labels = self._labels(plan, split.labels, mix)
            positions = plan.share.positions(plan.num_samples)
            keys = sample_keys(self._seed, plan.step, positions)
            yield ReplicaBatch(plan.step, plan.num_samples, plan.sizes, keys, images, labels)

    def _plan_item(self, item: int) -> _Plan:
        step, index = divmod(item, self._share.num_replicas)
        return _plan(replace(self._share, replica_index=index), step, self._order(step))

    def _requests(self, split: int, plan: _Plan | None) -> Iterator[Request | None]:
        if plan is None:
            yield None
            return
        indices, epoch, copies = plan.visits
        for part in self._reader.cut(len(indices)):
            of_part = None if copies is None else copies[part].tolist()
            yield Request(split, indices[part].tolist(), epoch, of_part)

    def _images(self, plan: _Plan, parts: Iterable[Pixels], mix: Mix | None) -> Tensor:
        """Normalise, erase, pad and mix the images of a share, on the device."""
        images = self._normalise(parts, len(plan.visits.indices), self._shape)
        images = _padded(images, plan.sizes, plan.share.microbatch_size, 0)
        if mix is not None:
            for i, samples in enumerate(_microbatches(images, plan.sizes)):
                mix.images(samples, _mixture(mix, plan, i))
        return images

    def _labels(self, plan: _Plan, labels: np.ndarray, mix: Mix | None) -> Tensor:
        """Pad the labels of a share, or make probabilities of them."""
        hard = torch.from_numpy(labels[plan.visits.indices])
        hard = _padded(hard, plan.sizes, plan.share.microbatch_size, NO_LABEL)
        if not self._counts:
            hard.fill_(NO_LABEL)
        if mix is None:
            return hard
        soft = torch.zeros(len(hard), mix.num_classes, dtype=self._dtype)
        if not self._counts:
            return soft
        pairs = zip(_microbatches(hard, plan.sizes), _microbatches(soft, plan.sizes), strict=True)
        for i, (labels_of_one, probabilities) in enumerate(pairs):
            probabilities[:] = mix.labels(labels_of_one, _mixture(mix, plan, i), self._dtype)
        return soft


def _plan(share: Share, step: int, visits: Visits) -> _Plan:
    num_samples = len(visits.indices)
    positions = share.positions(num_samples)
    return _Plan(step, share, num_samples, visits.at(positions[positions >= 0].numpy()))


def _mixture(mix: Mix, plan: _Plan, microbatch: int) -> Mixture:
    first = plan.share.replica_index * plan.share.num_microbatches
    return mix.draw(plan.step, first + microbatch)


def _microbatches(rows: Tensor, sizes: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield the samples of each micro-batch, without padding."""
    for microbatch, size in zip(rows.split(len(rows) // len(sizes)), sizes, strict=True):
        yield microbatch[:size]


def _padded(samples: Tensor, sizes: tuple[int, ...], microbatch_size: int, fill: int) -> Tensor:
    """Pad every micro-batch to the same size: (b, ...) -> (M * microbatch_size, ...)."""
    if min(sizes) == microbatch_size:
        return samples
    shape = (len(sizes), microbatch_size, *samples.shape[1:])
    padded = torch.full(shape, fill, dtype=samples.dtype, device=samples.device)
    for microbatch, real in zip(padded, samples.split(sizes), strict=True):
        microbatch[: len(real)] = real
    return padded.flatten(0, 1)
