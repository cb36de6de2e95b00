"""The batches of a sub-network, which takes all the data in an order of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from vigpipe.job.feed import Feed
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.run.facts import Run


class OwnOrder:
    """A feed that is asked for items of a run of sub-networks (`Run.in_batches`); see `Feed`.

    It takes its batches from the feed of a run on a single replica.
    """

    def __init__(self, feed: Feed, run: Run) -> None:
        self._feed, self._run = feed, run

    def batch(self, item: int, ahead: Sequence[int] = ()) -> ReplicaBatch:
        """Return the batch of an item, as a batch of the sub-network's own step."""
        number, *coming = (self._run.in_batches(i)[1] for i in (item, *ahead))
        batch = self._feed.batch(number, coming)
        return replace(batch, step=item // self._run.num_subnetworks)

    def test_batches(
        self,
        splits: Sequence[str],
        num_pipelines: int,
        pipeline_index: int,
        most: int | None = None,
    ) -> Iterator[ReplicaBatch]:
        """Yield a pipeline's share of the samples of some splits."""
        return self._feed.test_batches(splits, num_pipelines, pipeline_index, most)

    def hear(self, step: int, measured: int, busy_seconds: Sequence[float]) -> str | None:
        """Be told how long the ranks have worked."""
        return self._feed.hear(step, measured, busy_seconds)

    def progress(self) -> dict[str, object]:
        """Return what a later run needs to read the same data."""
        return self._feed.progress()

    def restore(self, progress: Mapping[str, object]) -> None:
        """Read the same data as an earlier run."""
        self._feed.restore(progress)

    def close(self) -> None:
        """End what reads ahead."""
        self._feed.close()
