"""A training step of the unsplit model on one process, which the costs are measured on."""

from dataclasses import replace

import torch

from vigpipe.job.job import TrialStep
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.parallel.layout import Layout
from vigpipe.run.facts import Run
from vigpipe.run.rank import RankState, make_rank_state
from vigpipe.timing.clock import make_clock
from vigpipe.timing.recorder import Recorder

NUM_WARMUP = 2  # steps that are not timed
MAX_STEPS = 30  # timed steps of one micro-batch size

Trial = tuple[RankState, ReplicaBatch]


def make_trial(run: Run, step: TrialStep, device: torch.device) -> Trial:
    """Build the unsplit model with a recorder, and read the batch of one step."""
    layout = Layout(num_microbatches=step.num_microbatches)
    unsplit = replace(run.unsplit(), config=step.config, layout=layout)
    recorder = Recorder(make_clock(device), 0, 0, num_warmup=NUM_WARMUP, num_steps=MAX_STEPS)
    rank_state = make_rank_state(unsplit, 0, device, recorder)
    batch = rank_state.feed.batch(step.item)
    rank_state.feed.close()
    return rank_state, batch
