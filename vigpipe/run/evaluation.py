"""Score the model on the test images; every image counts exactly once."""

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from vigpipe.launch.device import ToHost, send
from vigpipe.parallel.agreement import NOTHING_WANTED, agree
from vigpipe.run.rank import RankState

MOST_AHEAD = 2  # batches that are handed to a GPU ahead of what it does; they take pinned memory


@dataclass(frozen=True)
class Score:
    """The score of a model on the test images; every image counts exactly once.

    Attributes:
        loss: mean cross-entropy.
        top1: fraction of images whose most likely class is right.
        top5: fraction of images whose class is among the five most likely.
        images: number of images.
    """

    loss: float
    top1: float
    top5: float
    images: int


class Scores(NamedTuple):
    """Scores of the weights and of their moving average.

    Attributes:
        test: score of the weights; None on ranks without the last stage.
        average: score of the moving average; None without one, and on ranks without the last stage.
    """

    test: Score | None
    average: Score | None

    def as_row(self) -> dict[str, Any]:
        """Return the numbers of a row of metrics.jsonl; only on ranks of the last stage."""
        assert self.test is not None
        return {**asdict(self.test), **self._average()}

    def as_summary(self) -> dict[str, Any]:
        """Return the numbers for summary.json; only on ranks of the last stage."""
        assert self.test is not None
        return {"test": asdict(self.test), **self._average()}

    def _average(self) -> dict[str, Any]:
        if self.average is None:
            return {}
        average = self.average
        return {"ema": {"loss": average.loss, "top1": average.top1, "top5": average.top5}}

    def __str__(self) -> str:
        assert self.test is not None
        test, average = self.test, self.average
        return (
            f"test loss {test.loss:.4f}, top-1 {test.top1:.2%}, top-5 {test.top5:.2%} of "
            f"{test.images} images"
            + (f"; moving average: top-1 {average.top1:.2%}" if average else "")
        )


def evaluate_all(rank_state: RankState) -> Scores:
    """Score the weights, and their moving average if there is one; all ranks call this together.

    Args:
        rank_state: this rank's state; it is unchanged afterwards.
    """
    test, average = evaluate(rank_state), None
    if rank_state.ema is not None:
        with rank_state.averaged():
            average = evaluate(rank_state)
    return Scores(test, average)


def evaluate(rank_state: RankState, most_images: int | None = None) -> Score | None:
    """Run the test images through the pipeline in evaluation mode.

    Args:
        rank_state: this rank's state; all ranks call this together.
        most_images: number of test images to score, from the first; None for all.

    Returns:
        The score on ranks of the last stage; else None.

    Raises:
        FloatingPointError: a logit is NaN or infinite; raised on every rank of the last stage.
    """
    run, pipeline = rank_state.run, rank_state.pipeline
    sums = torch.zeros(4, dtype=torch.float64, device=rank_state.device)  # loss, top1, top5, images
    batches = rank_state.job.test_batches(run.source.test, most_images)
    done: deque[ToHost] = deque()  # batches that the device may still be busy with
    for number, batch in enumerate(batches, 1):
        done.append(ToHost(sums[3:]))
        if len(done) > MOST_AHEAD:
            done.popleft().read()
        with rank_state.timed("test", number):
            logits = pipeline.logits(batch)
        if logits is None:
            continue
        assert batch.labels is not None
        logits = batch.without_padding(logits)
        labels = send(batch.without_padding(batch.labels), rank_state.device)
        sums[0] += F.cross_entropy(logits.double(), labels, reduction="sum")
        is_right = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]  # (b, 5)
        sums[1] += is_right[:, 0].sum()
        sums[2] += is_right.any(1).sum()
        sums[3] += len(labels)
    if pipeline.has_last:
        sums = rank_state.replicas.gather(sums).sum(0)
    outcome = ToHost(sums)
    if rank_state.runs_ahead:  # a lost peer is noticed while this rank waits for its GPU
        config = run.config
        agree(NOTHING_WANTED, run.layout.world_size, outcome.has_come, config.timeout)
    if not pipeline.has_last:
        return None
    loss, top1, top5, images = outcome.read()
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"evaluation after step {rank_state.step}: logits are NaN or infinite; lower --lr, or "
            "bound the gradient with --clip 1"
        )
    return Score(loss / images, top1 / images, top5 / images, int(images))
