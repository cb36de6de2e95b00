"""Scores of nodes and their loss, against scikit-learn and torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score

from vigpipe.graphs.graph import TEST, TRAIN, VALIDATION
from vigpipe.graphs.loss import NodeLoss
from vigpipe.graphs.sbm import draw
from vigpipe.graphs.score import NodeScore, NodeTally
from vigpipe.job.batch import NO_LABEL, ReplicaBatch
from vigpipe.job.score import SHARES

CPU = torch.device("cpu")
SPLITS = {"validation": VALIDATION, "test": TEST}


def scored(graph, logits) -> dict[str, NodeScore]:
    tally = NodeTally(graph, tuple(SPLITS), CPU)
    labels = torch.from_numpy(graph.labels)
    empty = torch.empty(0)
    tally.add(ReplicaBatch(0, 1, (graph.num_nodes,), empty, None, labels), logits)
    tally.add(ReplicaBatch(0, 1, (graph.num_nodes,), empty, None, None), logits)  # counts nothing
    return dict(tally.scores(tally.sums.tolist()))


def test_of_single_classes():
    graph = draw("sbm:400,6,4,4", seed=0)
    logits = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    logits[:, 5] = -50.0  # a class that no node is said to have
    for split, score in scored(graph, logits).items():
        nodes = graph.nodes_of(SPLITS[split])
        labels, said = graph.labels[nodes], logits[nodes].argmax(1).numpy()
        assert score.num_samples == len(nodes)
        assert score.accuracy == pytest.approx(accuracy_score(labels, said))
        assert score.micro_f1 == pytest.approx(score.accuracy)
        assert score.macro_f1 == pytest.approx(f1_score(labels, said, average="macro"))
        loss = F.cross_entropy(logits[nodes].double(), torch.from_numpy(labels))
        assert score.loss == pytest.approx(loss.item())


def test_a_class_that_does_not_occur_does_not_count():
    graph = draw("sbm:100,3,4,4", seed=0)
    graph = replace(graph, labels=np.minimum(graph.labels, 1))
    logits = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    logits[:, 2] = -50.0
    nodes = graph.nodes_of(TEST)
    expected = f1_score(graph.labels[nodes], logits[nodes].argmax(1).numpy(), average="macro")
    assert scored(graph, logits)["test"].macro_f1 == pytest.approx(expected)


def test_of_several_classes():
    generator = torch.Generator().manual_seed(0)
    graph = draw("sbm:300,5,4,4", seed=0)
    graph = replace(graph, labels=(torch.rand(300, 5, generator=generator) < 0.3).numpy())
    logits = torch.randn(300, 5, generator=generator)
    for split, score in scored(graph, logits).items():
        nodes = graph.nodes_of(SPLITS[split])
        labels, said = graph.labels[nodes], (logits[nodes] > 0).numpy()
        assert score.accuracy == pytest.approx((labels == said).mean())
        assert score.micro_f1 == pytest.approx(f1_score(labels, said, average="micro"))
        assert score.macro_f1 == pytest.approx(f1_score(labels, said, average="macro"))
        truth = torch.from_numpy(labels).double()
        loss = F.binary_cross_entropy_with_logits(logits[nodes].double(), truth)
        assert score.loss == pytest.approx(loss.item())


def test_the_loss_is_the_mean_over_training_nodes_however_they_are_cut():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    split = np.array([TRAIN, TEST, TRAIN, VALIDATION] * 3)
    is_train = torch.from_numpy(split == TRAIN)
    classes = torch.arange(12) % 3
    several = torch.rand(12, 3, generator=generator, dtype=torch.float64).round()
    hard = classes.where(is_train, NO_LABEL)
    soft = several.where(is_train[:, None], NO_LABEL)
    for labels, whole in (
        (hard, F.cross_entropy(logits[is_train], classes[is_train])),
        (soft, F.binary_cross_entropy_with_logits(logits[is_train], several[is_train])),
    ):
        loss = NodeLoss()
        loss.begin(6)
        parts = zip(logits.split(5), labels.split(5), strict=True)
        total = sum(loss(*part) for part in parts)
        torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)


def test_weighted_losses_are_summed_in_the_order_of_the_micro_batches():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    counts, classes = torch.arange(12) % 5 != 1, torch.arange(12) % 3
    several = torch.rand(12, 3, generator=generator, dtype=torch.float64).round()
    weights = torch.rand(12, generator=generator, dtype=torch.float64)
    of_nodes = F.binary_cross_entropy_with_logits(logits, several, reduction="none").mean(1)
    for labels, losses in (
        (classes.where(counts, NO_LABEL), F.cross_entropy(logits, classes, reduction="none")),
        (several.where(counts[:, None], NO_LABEL), of_nodes),
    ):
        loss = NodeLoss()
        loss.begin(8, weights.split(5))
        total = sum(loss(*part) for part in zip(logits.split(5), labels.split(5), strict=True))
        expected = (losses * weights)[counts].sum() / 8
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)


def test_a_sub_graph_without_training_nodes_has_no_loss_and_no_gradient():
    logits = torch.randn(4, 3, requires_grad=True)
    loss = NodeLoss()
    loss.begin(0)
    for labels in (torch.full((4,), NO_LABEL), torch.full((4, 3), float(NO_LABEL))):
        value = loss(logits, labels)
        (gradient,) = torch.autograd.grad(value, logits)
        assert value.item() == 0
        assert not gradient.any()


def test_readers_of_metrics_know_the_names_of_the_numbers():
    score = NodeScore(0.5, 0.25, 0.25, 0.125, 8)
    assert tuple(score.numbers()) == ("loss", *SHARES[score.unit])
    assert SHARES[score.unit][0] == score.main_name
