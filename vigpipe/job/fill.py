"""How full the batch of a step is: the last one of an epoch may be a partial one."""

from typing import NamedTuple


class Fill(NamedTuple):
    """How much of a full batch a step takes, over all replicas that take it together."""

    samples: int  # images, or sub-graphs of one large graph
    full_batch: int

    @property
    def is_full(self) -> bool:
        return self.samples >= self.full_batch


def members(unit: str) -> str:
    """Return what batches are made of in a job that counts images or nodes."""
    return "sub-graphs" if unit == "nodes" else "samples"
