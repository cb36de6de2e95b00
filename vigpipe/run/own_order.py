"""The batches of a sub-network, which takes all the data in an order of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from vigpipe.job.feed import Feed
from vigpipe.parallel.batch import ReplicaBatch
from vigpipe.run.facts import Run


class OwnOrder:
    """A sub-network's batches (`Run.in_batches`), from the feed of a run on a single replica."""

    def __init__(self, feed: Feed, run: Run) -> None:
        self._feed, self._run = feed, run

    def batch(self, item: int, ahead: Sequence[int] = ()) -> ReplicaBatch:
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
        return self._feed.test_batches(splits, num_pipelines, pipeline_index, most)

    def hear(self, step: int, measured: int, busy_seconds: Sequence[float]) -> str | None:
        return self._feed.hear(step, measured, busy_seconds)

    def progress(self) -> dict[str, object]:
        return self._feed.progress()

    def restore(self, progress: Mapping[str, object]) -> None:
        self._feed.restore(progress)

    def close(self) -> None:
        self._feed.close()
