"""The most likely classes of image files, through the same forward-only pipeline as evaluation."""

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vigpipe.card import read_card
from vigpipe.config import TrainConfig
from vigpipe.data import Source
from vigpipe.data.images import find_bad_images, images_below
from vigpipe.data.shards import replica_batches
from vigpipe.device import backend, choose_device, weight_dtype
from vigpipe.errors import DONE, InputError
from vigpipe.job import Job, prepare
from vigpipe.model.weights import fit, read_weights, to_reference_names
from vigpipe.options import PredictConfig
from vigpipe.parallel.exchange import everyone, patiently
from vigpipe.parallel.failure import run_rank
from vigpipe.parallel.launch import Launch, from_environment, init_process_group, threads_per_rank
from vigpipe.parallel.local import preload, start_local
from vigpipe.start import claim_device
from vigpipe.worker import Worker, make_worker

NUM_SHOWN = 5


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of one image, most likely first.

    Attributes:
        image: its file.
        labels: at most NUM_SHOWN.
        probabilities: of the labels.
    """

    image: Path
    labels: tuple[int, ...]
    probabilities: tuple[float, ...]

    def as_text(self, names: Sequence[str]) -> str:
        """A line for the file and one for every class."""
        pairs = zip(self.probabilities, self.labels, strict=True)
        lines = [f"{probability:8.2%}  {names[label]}" for probability, label in pairs]
        file = str(self.image).encode("utf-8", "backslashreplace").decode()
        return "\n".join([file, *lines, ""])

    def as_json(self, names: Sequence[str]) -> str:
        """One line."""
        pairs = zip(self.probabilities, self.labels, strict=True)
        top = [{"class": names[i], "label": i, "probability": p} for p, i in pairs]
        return json.dumps({"image": str(self.image), "top": top})


def list_files(given: Sequence[Path]) -> list[Path]:
    """The files as given, folders replaced by the images in and below them.

    Raises:
        InputError: nothing is given, something is not there, or a folder holds no image.
    """
    if not given:
        raise InputError("predict: name image files or folders of them, such as photos/cat.png")
    paths: list[Path] = []
    for path in given:
        if os.path.isdir(path):  # Path's own raises for a name of 300 letters
            found = images_below(path)
            if not found:
                raise InputError(f"{path}: holds no images; name image files or a folder of them")
            paths += found
        elif os.path.lexists(path):
            paths.append(path)
        else:
            raise InputError(f"{path}: no such file or folder; name images to predict")
    return paths


def start(config: PredictConfig, given: Sequence[Path], arguments: Sequence[str]) -> int:
    """Predict on every rank of the layout, ranks started as for training.

    Args:
        config: the options.
        given: image files and folders.
        arguments: the command line, for ranks that are started here.

    Returns:
        The exit code.
    """
    launch = from_environment(os.environ)
    if launch.launcher == "alone" and (config.stages != 1 or config.dp > 1):
        preload("vigpipe.predict")
    return run_rank(lambda: _start(config, given, arguments, launch), launch)


def _start(
    config: PredictConfig, given: Sequence[Path], arguments: Sequence[str], launch: Launch
) -> int:
    from vigpipe.cli import main

    paths = list_files(given)
    job = prepare_prediction(config, paths)
    world_size = job.layout.world_size
    if launch.launcher == "alone" and world_size > 1:
        choose_device(config.device, 0, world_size)
        threads = threads_per_rank(config.threads, world_size, os.environ)
        return start_local(world_size, main, arguments, threads)
    device = claim_device(config, job, launch)
    if world_size > 1:
        init_process_group(launch, backend(device), config.timeout)
    if config.skip_bad_images:
        bad = _bad_images(paths, launch)
        paths = [path for path in paths if path not in bad]
        job = prepare_prediction(config, paths)
        if bad and launch.rank == 0:
            images = (
                "1 unreadable image is" if len(bad) == 1 else f"{len(bad)} unreadable images are"
            )
            print(f"{images} left out", file=sys.stderr)
    for note in job.notes if launch.rank == 0 else ():
        print(f"note: {note}", file=sys.stderr)
    worker = make_worker(job, launch.rank, device)
    names = job.source.class_names
    for each in predict(worker, paths):
        if worker.is_writer:
            print(each.as_json(names) if config.format == "json" else each.as_text(names))
    return DONE


def prepare_prediction(config: PredictConfig, paths: Sequence[Path]) -> Job:
    """Decide a run over these image files, which stand where evaluation has its test images.

    Raises:
        InputError: as `read_card` and `prepare`.
    """
    if not paths:
        raise InputError("predict: none of the images can be read; name others")
    card = read_card(config.weights, config.model, config.image_size)
    split, names = card.split(paths), card.names()
    source = Source("image files", names, card.in_chans, card.image_size, split, split)
    options = TrainConfig(
        model=card.model,  # pyright: ignore[reportArgumentType]
        **card.options,
        data="fake",  # for the checks of the options, which need some images
        image_size=f"{card.image_size[0]}x{card.image_size[1]}",
        batch_size=config.batch_size,
        stages=config.stages,
        microbatches=config.microbatches,
        dp=config.dp,
        schedule=config.schedule,
        virtual_stages=config.virtual_stages,
        sync="drain",  # the smallest buffers; there are no gradients
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        timeout=config.timeout,
    )
    job = prepare(options, weight_dtype(config.dtype))
    state = to_reference_names(read_weights(config.weights))
    with torch.device("meta"):
        model = card.build()
    fit(state, model, str(config.weights))
    return replace(job, source=source, config=replace(job.config, weights=config.weights))


def _bad_images(paths: Sequence[Path], launch: Launch) -> set[Path]:
    """Unreadable images; the ranks share the search."""
    mine = paths[launch.rank :: launch.world_size]
    found = patiently(lambda: list(find_bad_images(mine)), launch.world_size)
    return {path for each in everyone(found, launch.world_size) for path in each}


def predict(worker: Worker, paths: Sequence[Path]) -> Iterator[Prediction]:
    """Run image files through the pipeline; every rank goes through the whole iterator.

    Args:
        worker: of a job by `prepare_prediction`.
        paths: the files of that job.

    Yields:
        One prediction an image, in order, on ranks of the last stage; nothing on the others.

    Raises:
        FloatingPointError: an image's logits are NaN or infinite; on every rank of a last stage.
        InputError: an image cannot be read.
    """
    job, pipeline = worker.job, worker.pipeline
    batches = replica_batches(
        job.source.test,
        np.arange(len(paths)),
        job.cut(worker.replica_index),
        reader=worker.reader,
        with_images=pipeline.has_first,
        with_labels=pipeline.has_last,
        dtype=job.dtype,
    )
    done = 0
    for batch in batches:
        logits = pipeline.logits(batch)
        if logits is None:
            continue
        probabilities, labels = most_likely(logits)  # (M * rows, 5)
        own = torch.stack((probabilities, labels.double())).flatten()
        everyone = worker.replicas.gather(own).unflatten(1, (2, *labels.shape)).cpu()
        for replica_index, (likely, label) in enumerate(everyone):
            real = job.cut(replica_index).positions(batch.num_samples) >= 0
            for p, i in zip(likely[real].tolist(), label[real].int().tolist(), strict=True):
                if not math.isfinite(p[0]):
                    raise FloatingPointError(
                        f"{paths[done]}: the model's logits are NaN or infinite; check the "
                        f"weights, or choose a wider --dtype than {job.config.dtype}"
                    )
                yield Prediction(paths[done], tuple(i), tuple(p))
                done += 1


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and labels of the likeliest classes; of equal ones the lower label first.

    (b, classes) -> (b, 5) float64, NaN where a row has logits that are not finite; (b, 5) int64.
    """
    logits = logits.double()
    logits = logits.masked_fill(~logits.isfinite().all(1, keepdim=True), torch.nan)
    values, labels = logits.softmax(1).sort(dim=1, descending=True, stable=True)
    return values[:, :NUM_SHOWN], labels[:, :NUM_SHOWN]
