"""Which sub-graphs a training item takes, and how many nodes these have.

An item is determined by its number: with D replicas, item k is what replica k % D takes in step
k // D. A step takes the next D * M sub-graphs of its epoch; the last step of an epoch may find
fewer, and leaves micro-batches empty.
"""

from collections.abc import Iterator

from vigpipe.graphs.samplers.sampler import Sampler
from vigpipe.job.rows import Fill
from vigpipe.parallel.layout import Layout


def steps_per_epoch(sampler: Sampler, layout: Layout) -> int:
    """Return the number of steps that take every sub-graph of an epoch once."""
    return -(-max(sampler.num_sub_graphs) // per_step(sampler, layout))


def per_step(sampler: Sampler, layout: Layout) -> int:
    """Return how many sub-graphs of a group a step takes; see `Sampler.num_sub_graphs`."""
    return _replicas_per_group(sampler, layout) * layout.num_microbatches


def _replicas_per_group(sampler: Sampler, layout: Layout) -> int:
    """Return how many replicas take from one group; the unsplit model takes from the first."""
    return max(1, layout.num_replicas // len(sampler.num_sub_graphs))


def sub_graphs(
    step: int, replica: int, sampler: Sampler, layout: Layout
) -> tuple[int, list[int | None]]:
    """Return a step's epoch, from 1, and a replica's sub-graphs, None if its group has no more."""
    epoch, step_of_epoch = divmod(step, steps_per_epoch(sampler, layout))
    group, member = divmod(replica, _replicas_per_group(sampler, layout))
    before, num_microbatches = sum(sampler.num_sub_graphs[:group]), layout.num_microbatches
    first = step_of_epoch * per_step(sampler, layout) + member * num_microbatches
    numbers = range(first, first + num_microbatches)
    end = sampler.num_sub_graphs[group]
    return epoch + 1, [before + n if n < end else None for n in numbers]


def fill(item: int, sampler: Sampler, layout: Layout) -> Fill:
    """Return how many sub-graphs an item's team takes in a step, and how many in a full one."""
    samples = sum(1 for _ in _of_team(item, sampler, layout))
    return Fill(samples, layout.team_size * layout.num_microbatches)


def num_nodes(item: int, sampler: Sampler, layout: Layout) -> int:
    """Return about how many nodes the team of an item takes in the step of that item."""
    return sum(sampler.about_nodes(*numbers) for numbers in _of_team(item, sampler, layout))


def num_training_nodes(item: int, sampler: Sampler, layout: Layout) -> int:
    """Return how many of these nodes are trained on."""
    return sum(sampler.num_training_nodes(*numbers) for numbers in _of_team(item, sampler, layout))


def _of_team(item: int, sampler: Sampler, layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield epoch and number of each sub-graph that a team takes in the step of an item."""
    step, replica = divmod(item, layout.num_replicas)
    first = replica - layout.team_of(replica)[1]
    for member in range(first, first + layout.team_size):
        epoch, numbers = sub_graphs(step, member, sampler, layout)
        yield from ((epoch, number) for number in numbers if number is not None)
