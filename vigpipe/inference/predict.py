"""Predict the most likely classes of image files, with the same pipeline as evaluation."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vigpipe.config.options import TrainConfig
from vigpipe.config.verbs import PredictConfig
from vigpipe.data import Source
from vigpipe.data.formats.folders import images_below
from vigpipe.data.job import ImageJob
from vigpipe.errors import InputError
from vigpipe.inference.description import matching_weights, read_description
from vigpipe.inference.prepack import can_prepack, prepack
from vigpipe.launch.device import weight_dtype
from vigpipe.messages import one_line
from vigpipe.run.facts import Run, prepare
from vigpipe.run.rank import RankState

NUM_SHOWN = 5  # classes per image


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one image, most likely first.

    Attributes:
        image: path of the image file.
        labels: labels of the classes, at most NUM_SHOWN.
        names: name of the class of each label.
        probabilities: probability of each label.
    """

    image: Path
    labels: tuple[int, ...]
    names: tuple[str, ...]
    probabilities: tuple[float, ...]

    def as_text(self) -> str:
        """Format as text: one line for the file, one for every class, and an empty one."""
        return as_lines(str(self.image), self.names, self.probabilities)

    def as_json(self) -> str:
        """Format as one line of JSON."""
        likely = top(self.names, self.labels, self.probabilities)
        return json.dumps({"image": str(self.image), "top": likely})


def as_lines(title: str, names: Sequence[str], probabilities: Sequence[float]) -> str:
    """Format the most likely classes of something as text, with a line for each."""
    pairs = zip(probabilities, names, strict=True)
    lines = [f"{probability:8.2%}  {one_line(name)}" for probability, name in pairs]
    return "\n".join([one_line(title), *lines, ""])


def top(
    names: Sequence[str], labels: Sequence[int], probabilities: Sequence[float]
) -> list[dict[str, str | int | float]]:
    """Return the most likely classes of something, for JSON."""
    rows = zip(names, labels, probabilities, strict=True)
    return [{"class": name, "label": i, "probability": p} for name, i, p in rows]


def options_of_ranks(config: PredictConfig) -> dict[str, Any]:
    """Return the options of `vigpipe train` that say how the ranks of a prediction compute."""
    names = ("stages", "microbatches", "dp", "schedule", "virtual_stages")
    names += ("device", "dtype", "threads", "timeout")
    return {name: getattr(config, name) for name in names}


def prepare_prediction(config: PredictConfig, paths: Sequence[Path]) -> Run:
    """Prepare a run whose test images are the given image files."""
    if not paths:
        raise InputError("predict: none of the images can be read; name others")
    description = read_description(config.weights, config.model, config.image_size)
    split, names = description.split(paths), description.names()
    source = Source(
        "image files", names, description.in_chans, description.image_size, split, split
    )
    options = TrainConfig(
        model=description.model,  # pyrefly: ignore[bad-argument-type]
        **description.options,
        data="fake",  # a placeholder, because the checks of the options need images
        image_size=f"{description.image_size[0]}x{description.image_size[1]}",
        batch_size=config.batch_size,
        sync="drain",  # the smallest buffers; there are no gradients
        **options_of_ranks(config),
    )
    run = prepare(options, weight_dtype(config.dtype))
    matching_weights(config.weights, description.build)
    options = replace(run.config, weights=config.weights)
    notes = tuple(note for note in run.notes if note not in run.job.notes)  # not of the placeholder
    return replace(run, job=ImageJob(options, source), config=options, notes=notes)


def predict(rank_state: RankState, paths: Sequence[Path]) -> Iterator[Prediction]:
    """Predict the image files of `prepare_prediction` in order, on ranks of the last stage.

    Every rank must exhaust the iterator. On a CPU the models are prepacked, so that nothing else
    can be done with them afterwards. Logits that are not finite are an error on all these ranks.
    """
    run, pipeline = rank_state.run, rank_state.pipeline
    job, dtype = run.job, run.autocast_dtype or run.dtype
    assert isinstance(job, ImageJob)
    for model in rank_state.trained.models:
        if can_prepack(model, dtype):
            prepack(model, dtype)
    names = job.source.class_names
    num_done = 0
    scorers = rank_state.scorers
    for batch in rank_state.feed.test_batches(("test",), scorers.size, scorers.rank):
        logits = pipeline.logits(batch)
        if logits is None:
            continue
        probabilities, labels = most_likely(logits)  # (M * microbatch_size, 5)
        flat = torch.stack((probabilities, labels.double())).flatten()
        by_replica = rank_state.reducer.gather(flat).unflatten(1, (2, *labels.shape)).cpu()
        for replica_index, (likely, label) in enumerate(by_replica):
            real = job.share(run.layout, replica_index).positions(batch.num_samples) >= 0
            for p, i in zip(likely[real].tolist(), label[real].int().tolist(), strict=True):
                yield make_prediction(paths[num_done], names, i, p)
                num_done += 1


def make_prediction(
    path: Path, names: Sequence[str], labels: Sequence[int], probabilities: Sequence[float]
) -> Prediction:
    """Make the prediction of an image from a row of `most_likely`; `names` are by label."""
    check_finite(str(path), probabilities)
    return Prediction(path, tuple(labels), tuple(names[i] for i in labels), tuple(probabilities))


def check_finite(what: str, probabilities: Sequence[float]) -> None:
    """Raise FloatingPointError if the logits of something were NaN or infinite."""
    if not all(map(math.isfinite, probabilities)):
        raise FloatingPointError(
            f"{what}: the model's logits are NaN or infinite; check the weights, or choose a wider "
            "--dtype"
        )


def most_likely(logits: Tensor, *, several: bool = False) -> tuple[Tensor, Tensor]:
    """Return probabilities, (b, 5) float64, and labels of the likeliest classes; ties by label.

    With fewer than 5 classes there are as many columns. Rows with NaN or infinite logits are NaN.
    Where each may have `several` classes or none, their probabilities do not depend on one another.
    """
    logits = logits.double()
    logits = logits.masked_fill(~logits.isfinite().all(1, keepdim=True), torch.nan)
    probabilities = logits.sigmoid() if several else logits.softmax(1)
    values, labels = probabilities.sort(dim=1, descending=True, stable=True)
    return values[:, :NUM_SHOWN], labels[:, :NUM_SHOWN]


def list_files(given: Sequence[Path]) -> list[Path]:
    """List the given files, with folders replaced by the images in and below them."""
    if not given:
        raise InputError("predict: name image files or folders of them, such as photos/cat.png")
    paths: list[Path] = []
    for path in given:
        if os.path.isdir(path):  # Path.is_dir raises an error for a name of 300 letters
            images = images_below(path)
            if not images:
                raise InputError(f"{path}: holds no images; name image files or a folder of them")
            paths += images
        elif os.path.lexists(path):
            paths.append(path)
        else:
            raise InputError(f"{path}: no such file or folder; name images to predict")
    return paths
