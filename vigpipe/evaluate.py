"""The forward-only pipeline over held-out images, each counted once."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from vigpipe.data.shards import replica_batches
from vigpipe.worker import Worker


@dataclass(frozen=True)
class Score:
    """Result over all test images.

    Attributes:
        loss: mean cross-entropy.
        top1: fraction whose most likely class is right.
        top5: fraction with the right class among the five most likely.
        images: images counted.
    """

    loss: float
    top1: float
    top5: float
    images: int


def evaluate(worker: Worker, most_images: int | None = None) -> Score | None:
    """Run the test images through the pipeline in evaluation mode.

    Args:
        worker: this rank's share.
        most_images: how many of them; None for all.

    Returns:
        The score on ranks of the last stage, else None.

    Raises:
        FloatingPointError: a logit is NaN or infinite; on every rank of a last stage.
    """
    job, pipeline = worker.job, worker.pipeline
    sums = torch.zeros(4, dtype=torch.float64, device=worker.device)  # loss, top1, top5, images
    batches = replica_batches(
        job.source.test,
        np.arange(len(job.source.test))[:most_images],
        job.cut(worker.replica_index),
        reader=worker.reader,
        with_images=pipeline.has_first,
        with_labels=pipeline.has_last,
        dtype=job.dtype,
    )
    for number, batch in enumerate(batches, 1):
        with worker.timed("test", number):
            logits = pipeline.logits(batch)
        if logits is None:
            continue
        assert batch.labels is not None
        real = (batch.keys >= 0).to(worker.device)
        logits, labels = logits[real], batch.labels.to(worker.device)[real]
        sums[0] += F.cross_entropy(logits.double(), labels, reduction="sum")
        likely = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]  # (b, 5)
        sums[1] += likely[:, 0].sum()
        sums[2] += likely.any(1).sum()
        sums[3] += len(labels)
    if not pipeline.has_last:
        return None
    loss, top1, top5, images = worker.replicas.gather(sums).sum(0).tolist()
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"evaluation after step {worker.step}: logits are NaN or infinite; lower --lr, or "
            "bound the gradient with --clip 1"
        )
    return Score(loss / images, top1 / images, top5 / images, int(images))
