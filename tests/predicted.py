"""The predictions of samples, as a list."""

from vigpipe.inference.samples import Samples
from vigpipe.run.rank import RankState


def predicted(samples: Samples, rank_state: RankState) -> list:
    """What the command prints of these samples, on a rank of the last stage."""
    found = []
    for output in samples.outputs(rank_state, has_features=False):
        found += samples.predictions(len(found), output.logits)
    return found
