"""The batches of a rank: features, labels and keys of a row are those of its node."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vigpipe.graphs.feed import GraphFeed
from vigpipe.graphs.graph import TRAIN
from vigpipe.graphs.items import num_training_nodes, steps_per_epoch
from vigpipe.graphs.partitions.generations import Generations
from vigpipe.graphs.partitions.make import make_partition
from vigpipe.graphs.samplers.counts import count
from vigpipe.graphs.samplers.layered import InLayers
from vigpipe.graphs.samplers.neighbour import Neighbours
from vigpipe.graphs.samplers.parts import Parts
from vigpipe.graphs.samplers.saint import Saint, by_walks
from vigpipe.graphs.samplers.whole import WholeGraph
from vigpipe.graphs.sbm import draw
from vigpipe.job.feed import Needs
from vigpipe.ops.adjacency import Adjacency
from vigpipe.parallel.batch import NO_LABEL
from vigpipe.parallel.layout import Layout

CPU = torch.device("cpu")
GRAPH = draw("sbm:200,4,3,6", seed=1)
# A node can be told by its only feature.
NUMBERED = replace(GRAPH, features=np.arange(200, dtype=np.float32)[:, None])
PARTITION = make_partition(NUMBERED, "random", 7, 1)
FIXED = Generations(NUMBERED, PARTITION, None, 3)
SAMPLER = Parts(NUMBERED, FIXED, 1, seed=3)
DRAW = by_walks(NUMBERED, 15, 2)
WALKS = Saint(NUMBERED, DRAW, 45, count(NUMBERED, DRAW, 5, seed=3), seed=3)
NEIGHBOURS = InLayers(NUMBERED, Neighbours(NUMBERED, (3, 2)), 25, 2, seed=3)


def feed_of(
    layout: Layout, graph=NUMBERED, sampler: Any = SAMPLER, has_first=True, has_last=True
) -> Any:
    needs = Needs(layout, 0, CPU, torch.float32, has_first, has_last)
    return GraphFeed(graph, sampler, 3, needs)


@pytest.mark.parametrize(("dp", "num_microbatches"), [(1, 1), (1, 3), (2, 2), (3, 1)])
def test_all_nodes_come_once_an_epoch_each_with_its_own_label(dp, num_microbatches):
    layout = Layout(num_microbatches=num_microbatches, num_replicas=dp)
    feed, steps = feed_of(layout), steps_per_epoch(SAMPLER, layout)
    assert steps == -(-7 // (dp * num_microbatches))
    seen, keys, num_train = [], set(), 0
    for item in range(steps * dp):
        batch = feed.batch(item)
        rows = batch.without_padding(batch.inputs)[:, 0].long()
        labels = batch.without_padding(batch.labels)
        seen += rows.tolist()
        expected = torch.from_numpy(np.where(GRAPH.split == TRAIN, GRAPH.labels, NO_LABEL))
        assert torch.equal(labels, expected[rows])
        own_keys = batch.without_padding(batch.keys).tolist()
        assert not keys & set(own_keys)
        keys |= set(own_keys)
        assert len(batch.keys) == num_microbatches * SAMPLER.most_nodes
        assert [s[0].num_targets if s else 0 for s in batch.structures] == list(batch.sizes)
        assert batch.num_samples == num_training_nodes(item, SAMPLER, layout)
        num_train += (labels != NO_LABEL).sum().item()
    assert sorted(seen) == list(range(200))
    assert num_train == (GRAPH.split == TRAIN).sum()


def test_padding_has_no_feature_no_label_and_no_key():
    batch = feed_of(Layout(num_microbatches=4)).batch(1)  # the epoch's last three of seven parts
    assert batch.sizes[-1] == 0
    assert batch.structures[-1] == ()
    is_padding = batch.keys < 0
    assert is_padding.sum() == len(batch.keys) - sum(batch.sizes)
    assert not batch.inputs[is_padding].any()
    assert (batch.labels[is_padding] == NO_LABEL).all()


def test_only_the_first_stage_has_features_and_only_the_last_one_labels():
    middle = feed_of(Layout(), has_first=False, has_last=False).batch(0)
    assert (middle.inputs, middle.labels) == (None, None)
    assert (
        middle.structures[0][0].num_edges == feed_of(Layout()).batch(0).structures[0][0].num_edges
    )


def test_where_nodes_have_several_classes_the_others_do_not_count():
    labels = np.zeros((200, 3), dtype=bool)
    labels[::2, 1] = True
    graph = replace(NUMBERED, labels=labels, class_names=("a", "b", "c"))
    batch = feed_of(Layout(), graph=graph).batch(0)
    rows = batch.without_padding(batch.inputs)[:, 0].long()
    found, is_train = batch.without_padding(batch.labels), GRAPH.split[rows.numpy()] == TRAIN
    assert (found[~is_train] == NO_LABEL).all()
    assert torch.equal(found[is_train], torch.from_numpy(labels[rows.numpy()[is_train]]).float())


def test_the_evaluation_has_the_whole_graph_and_one_pipeline_counts_it():
    feed = feed_of(Layout(num_microbatches=2), sampler=WholeGraph(NUMBERED))
    for place in (0, 1):
        (batch,) = feed.test_batches(("test",), 2, place)
        assert batch.by_layer
        assert batch.sizes == (200,)
        assert batch.inputs[:, 0].tolist() == list(range(200))
        assert (batch.labels is None) == (place == 1)


def test_drawn_sub_graphs_stand_for_all_training_nodes_by_their_weights():
    layout = Layout(num_microbatches=2, num_replicas=2)
    steps = steps_per_epoch(WALKS, layout)
    assert 4 * steps >= sum(WALKS.num_sub_graphs) > 4 * (steps - 1)
    batch = feed_of(layout, sampler=WALKS).batch(1)
    assert batch.num_samples == 4 * (GRAPH.split == TRAIN).sum()
    assert len(batch.weights) == 2 * WALKS.most_nodes
    rows = batch.without_padding(batch.inputs)[:, 0].long()
    drawn = [WALKS.draw(1, number) for number in (2, 3)]
    assert rows.tolist() == [node for sub_graph in drawn for node in sub_graph.nodes]
    weights = torch.cat([torch.tensor(sub_graph.weights) for sub_graph in drawn])
    assert torch.equal(batch.without_padding(batch.weights), weights.float())
    assert not batch.weights[batch.keys < 0].any()
    assert feed_of(layout, sampler=WALKS, has_last=False).batch(1).weights is None


def test_only_the_nodes_of_a_batch_have_labels_though_others_come_with_them():
    layout = Layout(num_microbatches=2)
    feed, found = feed_of(layout, sampler=NEIGHBOURS), []
    for item in range(steps_per_epoch(NEIGHBOURS, layout)):
        batch = feed.batch(item)
        assert batch.weights is None
        of_batches = zip(
            batch.inputs.split(NEIGHBOURS.most_nodes),
            batch.labels.split(NEIGHBOURS.most_targets),
            batch.structures,
            batch.sizes,
            strict=True,
        )
        for rows, labels, structure, size in of_batches:
            if not structure:
                continue
            (layers,) = structure
            nodes, num = rows[:size, 0].long().numpy(), layers.num_targets
            assert layers.num_sources == size > num
            assert labels[:num].tolist() == GRAPH.labels[nodes[:num]].tolist()
            assert (labels[num:] == NO_LABEL).all()
            found += nodes[:num].tolist()
        assert batch.num_samples == (batch.labels != NO_LABEL).sum()
    assert sorted(found) == np.flatnonzero(GRAPH.split == TRAIN).tolist()


@pytest.mark.parametrize("sampler", [SAMPLER, WALKS, NEIGHBOURS])
def test_what_is_drawn_ahead_is_what_would_be_drawn(sampler):
    layout = Layout(num_microbatches=2)
    ahead, alone = (feed_of(layout, sampler=sampler) for _ in range(2))
    for item in range(6):
        ours, theirs = ahead.batch(item, range(item + 1, 9)), alone.batch(item)
        for name in ("keys", "inputs", "labels"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert (ours.sizes, ours.num_samples) == (theirs.sizes, theirs.num_samples)
    ahead.close()


def test_the_whole_graph_is_sent_to_a_device_once(monkeypatch):
    """A step on a GPU would otherwise wait for its edges, and transpose them anew."""
    num_sent = 0

    def to(graph, device):
        nonlocal num_sent
        num_sent += 1
        return Adjacency(graph.indptr, graph.indices, graph.num_sources)

    monkeypatch.setattr(Adjacency, "to", to)
    feed = feed_of(Layout(1, 1, 1), sampler=WholeGraph(NUMBERED))
    (first,), (second,) = (feed.batch(item).structures for item in range(2))
    assert first[0] is second[0]
    assert num_sent == 1
