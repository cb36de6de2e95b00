"""Score the model on the test and the validation images; every image counts exactly once."""

import math
from collections import deque
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from vigpipe.data.split import Split
from vigpipe.launch.device import ToHost, send
from vigpipe.parallel.agreement import NOTHING_WANTED, agree
from vigpipe.run.rank import RankState

MOST_AHEAD = 2  # batches that are handed to a GPU ahead of what it does; they take pinned memory


@dataclass(frozen=True)
class Score:
    """The score of a model on the images of a split; every image counts exactly once.

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
    """Scores of the weights and of their moving average; all None on ranks without the last stage.

    Attributes:
        test: score of the weights on the test images.
        average: score of the moving average on the test images; None without one.
        validation: score of the weights on the validation images; None without such images.
        validation_average: score of the moving average on them; None without one of the two.
    """

    test: Score | None
    average: Score | None
    validation: Score | None = None
    validation_average: Score | None = None

    def as_row(self) -> dict[str, Any]:
        """Return the numbers of a row of metrics.jsonl; only on ranks of the last stage."""
        assert self.test is not None
        return {**asdict(self.test), **_ema(self.average), **self._validation()}

    def as_summary(self) -> dict[str, Any]:
        """Return the numbers for summary.json; only on ranks of the last stage."""
        assert self.test is not None
        return {"test": asdict(self.test), **_ema(self.average), **self._validation()}

    def _validation(self) -> dict[str, Any]:
        if self.validation is None:
            return {}
        return {"validation": {**asdict(self.validation), **_ema(self.validation_average)}}

    def __str__(self) -> str:
        assert self.test is not None
        test, validation = self.test, self.validation
        parts: list[str] = []
        if validation is not None:
            parts.append(
                f"validation loss {validation.loss:.4f}, top-1 {validation.top1:.2%} of "
                f"{validation.images} images"
            )
        parts.append(
            f"test loss {test.loss:.4f}, top-1 {test.top1:.2%}, top-5 {test.top5:.2%} of "
            f"{test.images} images"
        )
        if self.average is not None:
            average = f"top-1 {self.average.top1:.2%}"
            if self.validation_average is not None:
                average = f"validation top-1 {self.validation_average.top1:.2%}, test {average}"
            parts.append(f"moving average: {average}")
        return "; ".join(parts)


def _ema(average: Score | None) -> dict[str, Any]:
    if average is None:
        return {}
    return {"ema": {"loss": average.loss, "top1": average.top1, "top5": average.top5}}


def evaluate_all(rank_state: RankState) -> Scores:
    """Score the weights, and their moving average if there is one; all ranks call this together.

    Args:
        rank_state: this rank's state; it is unchanged afterwards.
    """
    test, validation = _evaluate_splits(rank_state)
    average = validation_average = None
    if rank_state.ema is not None:
        with rank_state.averaged():
            average, validation_average = _evaluate_splits(rank_state)
    return Scores(test, average, validation, validation_average)


def _evaluate_splits(rank_state: RankState) -> tuple[Score | None, Score | None]:
    """Score the test images, and the validation images if there are any."""
    source = rank_state.run.source
    test = evaluate(rank_state, source.test)
    return test, None if source.validation is None else evaluate(rank_state, source.validation)


def evaluate(rank_state: RankState, split: Split, most_images: int | None = None) -> Score | None:
    """Run images through the pipeline in evaluation mode.

    Args:
        rank_state: this rank's state; all ranks call this together.
        split: the test or the validation images of the run's source.
        most_images: number of images to score, from the first; None for all.

    Returns:
        The score on ranks of the last stage; else None.

    Raises:
        FloatingPointError: a logit is NaN or infinite; raised on every rank of the last stage.
    """
    run, pipeline = rank_state.run, rank_state.pipeline
    sums = torch.zeros(4, dtype=torch.float64, device=rank_state.device)  # loss, top1, top5, images
    share, counterparts = rank_state.scorers
    batches = rank_state.job.test_batches(split, most_images, share)
    done: deque[ToHost] = deque()  # batches that the device may still be busy with
    for number, batch in enumerate(batches, 1):
        done.append(ToHost(sums[3:]))
        if len(done) > MOST_AHEAD:
            done.popleft().read()
        # What --timing reports of test batches is of test images only.
        is_test = split is run.source.test
        with rank_state.timed("test", number) if is_test else nullcontext():
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
    with counterparts.at_once():
        if pipeline.has_last:
            sums = counterparts.gather(sums).sum(0)
    outcome = ToHost(sums)
    if rank_state.runs_ahead:  # a lost peer is noticed while this rank waits for its GPU
        config = run.config
        agree(NOTHING_WANTED, rank_state.strategy.peers, outcome.has_come, config.timeout)
    if not pipeline.has_last:
        return None
    loss, top1, top5, images = outcome.read()
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"evaluation after step {rank_state.step}: logits are NaN or infinite; lower --lr, or "
            "bound the gradient with --clip 1"
        )
    return Score(loss / images, top1 / images, top5 / images, int(images))
