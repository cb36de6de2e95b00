"""A training step of the unsplit model on one process, which the costs are measured on."""

from dataclasses import replace

import torch

from vigpipe.job.batch import ReplicaBatch
from vigpipe.parallel.layout import Layout
from vigpipe.run.batches import batches
from vigpipe.run.facts import Run
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.timing.clock import make_clock
from vigpipe.timing.recorder import Recorder

NUM_WARMUP = 2  # steps that are not timed
MAX_STEPS = 30  # timed steps of one micro-batch size
_MAX_MICROBATCHES = 2  # of a step that is timed

Trial = tuple[RankState, ReplicaBatch]


def make_trial(run: Run, microbatch_size: int, device: torch.device) -> Trial:
    """Build the unsplit model with a recorder, and read the batch of one step.

    Args:
        run: says which model, data and options; its layout is not used.
        microbatch_size: samples in each micro-batch of the step.
        device: device of this rank.

    Returns:
        The rank's state, and a batch of at most two micro-batches of that size.
    """
    config, num_microbatches = run.job.for_trial(microbatch_size, _MAX_MICROBATCHES)
    layout = Layout(num_microbatches=num_microbatches)
    unsplit = replace(run.unsplit(), config=config, layout=layout)
    recorder = Recorder(make_clock(device), 0, 0, num_warmup=NUM_WARMUP, num_steps=MAX_STEPS)
    rank_state = make_rank_state(unsplit, 0, device, recorder)
    batch = next(batches(rank_state))
    rank_state.feed.close()
    return rank_state, batch
