"""Score the model on the test and the validation samples; every sample counts exactly once."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from vigpipe.job.score import Score, Scores
from vigpipe.launch.device import ToHost
from vigpipe.parallel.agreement import NOTHING_WANTED, agree, run_with_heartbeats
from vigpipe.parallel.counterparts import Counterparts
from vigpipe.run.anomaly import advise
from vigpipe.run.rank import RankState

MOST_AHEAD = 2  # batches that are handed to a GPU ahead of what it does; they take pinned memory


Tell = Callable[[int], None]  # is called with the number of each batch, counted from 1


def evaluate_all(rank_state: RankState, tell: Tell | None = None) -> Scores:
    """Score the weights, and their moving average if there is one; all ranks call this together."""
    scores = evaluate_passes(rank_state, tell=tell)
    averages: dict[str, Score] = {}
    if rank_state.trained.ema is not None:
        with rank_state.trained.averaged():
            averages = evaluate_passes(rank_state, tell=tell)
    return Scores(
        test=scores.get("test"),
        average=averages.get("test"),
        validation=scores.get("validation"),
        validation_average=averages.get("validation"),
    )


def evaluate_passes(
    rank_state: RankState, *, own: bool = False, tell: Tell | None = None
) -> dict[str, Score]:
    """Score all splits of the data, those together that the job scores so; see `evaluate`."""
    scores: dict[str, Score] = {}
    for splits in rank_state.run.job.passes:
        scores |= evaluate(rank_state, splits, own=own, tell=tell) or {}
    return scores


def evaluate(
    rank_state: RankState,
    splits: Sequence[str],
    most: int | None = None,
    *,
    own: bool = False,
    tell: Tell | None = None,
) -> Mapping[str, Score] | None:
    """Score splits of the data together; None on ranks without the last stage; all ranks call this.

    At most the first `most` samples are scored; with `own`, by the model that this rank trains,
    although it is a part of a wider one. Raise FloatingPointError if a logit is not finite.
    """
    run, pipeline, merged = rank_state.run, rank_state.pipeline, rank_state.merged
    logits_of = pipeline.logits if merged is None or own else merged.logits
    tally = run.job.tally(splits, rank_state.device)
    scorers = Counterparts(None) if own else rank_state.scorers
    batches = rank_state.feed.test_batches(splits, scorers.size, scorers.rank, most)
    done: deque[ToHost] = deque()  # batches that the device may still be busy with
    for number, batch in enumerate(batches, 1):
        done.append(ToHost(tally.sums[:1]))
        if len(done) > MOST_AHEAD:
            done.popleft().read()
        # What --timing reports of test batches is of test samples only.
        fill = run.job.fill_of_test(run.batch_layout, scorers.size, batch.num_samples)
        with rank_state.timed("test", number, fill) if "test" in splits else nullcontext():
            if batch.by_layer:  # a stage may take longer than its peers would wait
                work = partial(logits_of, batch)
                logits = run_with_heartbeats(work, *rank_state.strategy.peers)
            else:
                logits = logits_of(batch)
        if logits is not None:
            tally.add(batch, logits)
        if tell is not None:
            tell(number)
    sums = tally.sums
    with scorers.at_once():
        if pipeline.has_last:
            sums = scorers.gather(sums).sum(0)
    sums = rank_state.mesh.shards.total(sums, "scores")
    outcome = ToHost(sums)
    if rank_state.runs_ahead:  # a lost peer is noticed while this rank waits for its GPU
        agree(NOTHING_WANTED, rank_state.strategy.peers, outcome.has_come, run.config.timeout)
    if not pipeline.has_last:
        return None
    numbers = outcome.read()
    if not all(map(math.isfinite, numbers)):
        raise FloatingPointError(
            f"evaluation after step {rank_state.step}: logits are NaN or infinite; "
            f"{advise(run, have_moved=rank_state.step > rank_state.num_not_finite)}"
        )
    return tally.scores(numbers)
