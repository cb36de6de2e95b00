"""Read the same images with vigpipe and with timm's loader, each with workers of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from vigpipe.data import Augmentation, Source, open_source
from vigpipe.data.augment import keep_one_bit
from vigpipe.data.batches import Share, TrainingOrder
from vigpipe.data.feed import ImageFeed
from vigpipe.errors import InputError

# Published for ImageNet: Han et al. 2022 (arXiv:2206.00272), table 3. With RandAugment, timm
# leaves colour jitter out.
TRAINING = Augmentation("box", "rand-m9-mstd0.5-inc1", 0.0, 0.25)
CROP_PCT = 0.9  # of evaluation
SIDE = 224  # pixels
MEAN = STD = 0.5


@dataclass(frozen=True)
class Reading:
    """Which images are read, and how."""

    folder: Path  # the data set, whose training images are read
    is_training: bool  # whether they are augmented; otherwise they are prepared as test images are
    batch_size: int  # images of a batch
    num_workers: int  # processes that read ahead
    device: torch.device  # where batches arrive

    def open(self) -> Source:
        """Open the images for vigpipe.

        Raises:
            InputError: the folder holds no data set.
        """
        return open_source(
            str(self.folder),
            image_size=SIDE,
            mean=MEAN,
            std=STD,
            crop_pct=CROP_PCT,
            augment=TRAINING if self.is_training else False,
        )

    def order(self, num_images: int) -> TrainingOrder:
        """Return the order in which both sides visit the images of a folder."""
        return TrainingOrder(num_images, self.batch_size, seed=0)


class Loader(Protocol):
    """One side of the comparison."""

    def read(self, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images, (B, 3, SIDE, SIDE) float32 on the device, and labels, (B,), of each step.

        When it ends, the workers have nothing left to do.
        """
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class VigpipeLoader:
    """Reads as a run of vigpipe does."""

    def __init__(self, reading: Reading) -> None:
        self._feed = ImageFeed(
            reading.open(),
            Share(reading.batch_size, num_microbatches=1),
            reading.device,
            with_images=True,
            with_labels=True,
            num_workers=reading.num_workers,
        )

    def read(self, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
        for step in steps:
            batch = self._feed.batch(step, range(step + 1, steps.stop))
            assert batch.inputs is not None
            assert batch.labels is not None
            yield batch.inputs, batch.labels

    def close(self) -> None:
        self._feed.close()


class TimmLoader:
    """Reads as timm's train.py does, only in vigpipe's order.

    Args:
        reading: what to read.
        prefetcher: whether images are normalised and erased on the device, timm's default, or else
            by the workers.

    Raises:
        InputError: timm does not find an image of the folder.
    """

    def __init__(self, reading: Reading, *, prefetcher: bool) -> None:
        from timm.data.dataset_factory import create_dataset
        from timm.data.loader import create_loader

        dataset: Any = create_dataset("", root=str(reading.folder), split="train")
        augment: dict[str, Any] = {
            "auto_augment": TRAINING.auto_augment,
            "interpolation": "random",
            "re_prob": TRAINING.erasing,
            "re_mode": "pixel",
        }
        make: Any = create_loader
        self._batches: Any = make(
            dataset,
            input_size=(3, SIDE, SIDE),
            batch_size=reading.batch_size,
            is_training=reading.is_training,
            mean=(MEAN,) * 3,
            std=(STD,) * 3,
            num_workers=reading.num_workers,
            device=reading.device,
            use_prefetcher=prefetcher,
            **(augment if reading.is_training else {"interpolation": "bicubic"}),
            crop_pct=CROP_PCT,
        )
        for step in dataset.transform.transforms:
            keep_one_bit(step)  # or Pillow 13 ends the run now and then
        self._device = reading.device
        self._loader = self._batches.loader if prefetcher else self._batches
        self._loader.batch_sampler.sampler = self._indices = []  # of the steps to read next
        self._places = _places(reading, dataset)
        self._order = reading.order(len(self._places))

    def read(self, steps: range) -> Iterator[tuple[Tensor, Tensor]]:
        visits = np.concatenate([self._order(step).indices for step in steps])
        self._indices[:] = self._places[visits].tolist()
        for images, labels in self._batches:
            yield images.to(self._device), labels

    def close(self) -> None:
        self._loader._iterator = None


def _places(reading: Reading, dataset: Any) -> np.ndarray:
    """Find the images of vigpipe's data set in timm's: (n,) int64."""
    source = reading.open()
    assert source.stored is not None
    images = source.stored.train
    place_of = {Path(name): i for i, name in enumerate(dataset.filenames(absolute=True))}
    paths = [Path(images.load.name_of(i)) for i in range(len(images))]
    missing = [path for path in paths if path not in place_of]
    if missing:
        raise InputError(
            f"--pictures {reading.folder}: timm's loader does not read {missing[0]} "
            f"({len(missing)} of {len(paths)} images); name a folder of JPEG files, "
            "train/<class>/<image>"
        )
    return np.asarray([place_of[path] for path in paths])
