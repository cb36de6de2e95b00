"""How full the batches of a run are is known from the numbers of their items alone."""

from typing import Any

import pytest
import torch

from tests.oracle import images_of, shortened, with_images
from vigpipe.config.options import TrainConfig
from vigpipe.job.feed import Needs
from vigpipe.job.rows import Fill, partial_batch
from vigpipe.run.facts import Run, prepare

CPU = torch.device("cpu")
NODES: dict[str, Any] = {
    **{"model": "gcn", "data": "sbm:200,4", "sampler": "parts", "partition": "random"},
    **{"parts": 10, "epochs": 2, "threads": 1},
}


def of_images(num_train: int = 28, **options: Any) -> Run:
    options = {"data": "fake", "image_size": 8, "batch_size": 10, "steps": 6, **options}
    run = prepare(TrainConfig(**options), torch.float32)
    return with_images(run, shortened(images_of(run), num_train, 24))


def fills(run: Run, num: int) -> list[Fill]:
    """Compared with plain tuples below."""
    return [run.fill(item) for item in range(num)]


def test_the_last_batch_of_an_epoch_has_what_is_left():
    assert fills(of_images(), 6) == 2 * [(10, 10), (10, 10), (8, 10)]
    assert fills(of_images(20), 3) == 3 * [(10, 10)]
    assert fills(of_images(7), 2) == 2 * [(7, 10)]


def test_replicas_that_take_steps_together_share_a_batch_and_others_have_items():
    together = {"dp": 3, "microbatches": 1}
    assert fills(of_images(**together), 9) == 6 * [(10, 10)] + 3 * [(8, 10)]
    own = of_images(**together, strategy="gossip")
    # Ten images are 4, 3 and 3; an item of 3 is a full one.
    assert fills(own, 9) == 2 * [(4, 4), (3, 3), (3, 3)] + [(3, 4), (3, 3), (2, 3)]


def test_sub_networks_take_whole_batches():
    run = of_images(strategy="subnetworks", dp=2)
    assert fills(run, 6) == 4 * [(10, 10)] + 2 * [(8, 10)]


@pytest.mark.parametrize(
    "options", [{}, {"dp": 2, "microbatches": 3}, {"dp": 3, "strategy": "periodic"}]
)
def test_fills_are_what_the_feed_reads(options):
    run = of_images(**options)
    for replica in range(run.layout.num_replicas):
        needs = Needs(run.batch_layout, replica, CPU, torch.float32, has_first=True, has_last=True)
        feed = run.job.feed(needs)
        for item in range(replica, 6 * run.layout.num_replicas, run.layout.num_replicas):
            fill = run.fill(item)
            assert fill.samples == feed.batch(item).num_samples
            row = run.job.rates(*run.in_batches(item), fill.samples, 0.5)
            assert row == {"images_per_second": 2 * fill.samples, **partial_batch(fill)}
        for number in (1, 2, 3):
            *full, last = feed.test_batches(("test",), number, min(replica, number - 1))
            found = [
                run.job.fill_of_test(run.batch_layout, number, batch.num_samples)
                for batch in (*full, last)
            ]
            assert all(fill.is_full for fill in found[:-1])
            assert sum(fill.samples for fill in found) == 24
            assert len({fill.full_batch for fill in found}) == 1
        feed.close()


def test_sub_graphs_are_counted_and_not_their_nodes():
    run = prepare(TrainConfig(**NODES, microbatches=4), torch.float32)
    assert fills(run, 6) == 2 * [(4, 4), (4, 4), (2, 4)]
    nodes = [run.job.num_rows(run.layout, item, 0) for item in range(2)]
    assert nodes[0] != nodes[1]  # and both are full
    assert "partial_batch" not in run.job.rates(run.layout, 1, 60, 0.5)
    row = run.job.rates(run.layout, 2, 60, 0.5)
    assert (row["partial_batch"], row["full_batch"]) == (2, 4)
    assert run.job.fill_of_test(run.layout, 1, 200).is_full


def test_replicas_share_the_sub_graphs_of_a_step():
    run = prepare(TrainConfig(**NODES, microbatches=2, dp=2), torch.float32)
    assert fills(run, 6) == 4 * [(4, 4)] + 2 * [(2, 4)]
    run = prepare(TrainConfig(**NODES, microbatches=2, dp=2, strategy="gossip"), torch.float32)
    assert fills(run, 6) == 5 * [(2, 2)] + [(0, 2)]


def test_the_whole_graph_is_a_full_batch():
    of_parts = ("sampler", "partition", "parts")
    nodes = {name: value for name, value in NODES.items() if name not in of_parts}
    run = prepare(TrainConfig(**nodes, sampler="full"), torch.float32)
    assert fills(run, 3) == 3 * [(1, 1)]
