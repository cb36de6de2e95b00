"""Labelled images for a model of a weights file: its classes by name, its channels, its sizes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vigpipe.config.verbs import EvaluateConfig
from vigpipe.data import formats
from vigpipe.data.left_out import counted
from vigpipe.data.picture import Picture, to_pil
from vigpipe.data.sources import find_images, with_test_images
from vigpipe.data.stored import Load, Look, StoredImages, Wrapped
from vigpipe.errors import InputError
from vigpipe.inference.classes import Matched, match_classes
from vigpipe.inference.description import NUM_IMAGENET_CLASSES, ModelDescription
from vigpipe.messages import plural


class Labelled(NamedTuple):
    """Images whose classes are known."""

    name: str  # what the data are called
    images: StoredImages  # with the model's labels
    look: Look
    notes: tuple[str, ...]  # sentences that the user should read
    candidates: StoredImages  # those that were chosen from, unreadable ones too
    class_names: tuple[str, ...]  # by the model's label


def labelled_images(
    config: EvaluateConfig, description: ModelDescription, bad: Collection[int] = ()
) -> Labelled:
    """Find the images of --data and --split, with the labels that the model gives their classes.

    Those of the `candidates` that are `bad` are left out, before --test draws.

    Raises:
        InputError: the data cannot be read, or have classes or channels that the model has not.
    """
    if config.data == "fake":
        raise InputError("--data fake: is noise without classes of its own; name labelled images")
    name, stored = find_images(config.data, config.data_dir, formats.read, download=config.download)
    notes = [*stored.notes]
    if description.exif:
        stored = stored.upright()
    candidates = stored.splits.get(config.split)
    if config.split == "test" and not len(stored.test):
        candidates = stored.train
    if candidates is None or not len(candidates):
        raise InputError(
            f"--split {config.split}: {name} has no such images; choose one of "
            f"{', '.join(split for split, of in stored.splits.items() if len(of))}"
        )
    images = candidates.take(np.setdiff1d(np.arange(len(candidates)), [*bad]))
    if config.test:
        train = images if candidates is stored.train else stored.train
        divided = with_test_images(replace(stored, train=train), config.test, config.seed, name)
        images = divided.splits[config.split]
    elif candidates is stored.train and config.split == "test":
        notes.append(
            f"{name} has no test images: all are scored; --test and --seed of a run score those "
            "that it held out"
        )
    labels, names, of_classes = _labels_of(stored.class_names, description, config)
    load = _of_channels(images.load, stored.look, description, config)
    images = StoredImages(labels[images.labels], load)
    notes += of_classes
    absent = np.setdiff1d(np.arange(len(names)), images.labels)
    if len(absent):
        notes.append(f"without images: {counted([names[i] for i in absent], 'class', 'classes')}")
    look = replace(stored.look, channels=description.in_chans)
    return Labelled(name, images, look, tuple(notes), candidates, names)


def _labels_of(
    ours: Sequence[str], description: ModelDescription, config: EvaluateConfig
) -> Matched:
    """Match the classes, also of folders that are called as those of ImageNet."""
    theirs, num_classes = description.class_names, description.num_classes
    is_imagenet = not theirs and num_classes == NUM_IMAGENET_CLASSES
    if is_imagenet:
        from timm.data.imagenet_info import ImageNetInfo

        theirs = tuple(ImageNetInfo().label_names())  # n01440764 and so on, as its folders
    matched = match_classes(ours, theirs, num_classes, f"--data {config.data}", str(config.weights))
    return matched._replace(names=description.names()) if is_imagenet else matched


def _of_channels(
    load: Load, look: Look, description: ModelDescription, config: EvaluateConfig
) -> Load:
    if look.channels == description.in_chans and not look.is_encoded:
        return load
    if not look.is_encoded:
        raise InputError(
            f"--data {config.data}: its images have {plural(look.channels, 'channel')}, and those "
            f"of the model in {config.weights} {description.in_chans}; give images like those"
        )
    return _InChannels(load, "L" if description.in_chans == 1 else "RGB")


@dataclass(frozen=True)
class _InChannels(Wrapped):
    """Turns image files grey for a model of one channel, and grey ones to RGB for others."""

    mode: str

    def __call__(self, index: int) -> Picture:
        picture = to_pil(self.load(index))
        return picture if picture.mode == self.mode else picture.convert(self.mode)
