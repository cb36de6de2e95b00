"""Scores of nodes and their loss, against scikit-learn and torch."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, f1_score

from vigpipe.graphs.graph import TEST, UNKNOWN, VALIDATION
from vigpipe.graphs.loss import NodeLoss
from vigpipe.graphs.sbm import draw
from vigpipe.graphs.score import NodeScore, NodeTally
from vigpipe.parallel.batch import NO_LABEL, ReplicaBatch

CPU = torch.device("cpu")
SPLITS = {"validation": VALIDATION, "test": TEST}


def scored(graph, logits) -> dict[str, NodeScore]:
    tally = NodeTally(graph, tuple(SPLITS), CPU)
    labels = torch.from_numpy(graph.labels)
    empty = torch.empty(0)
    tally.add(ReplicaBatch(0, 1, (graph.num_nodes,), empty, None, labels), logits)
    tally.add(ReplicaBatch(0, 1, (graph.num_nodes,), empty, None, None), logits)  # counts nothing
    return dict(tally.scores(tally.sums.tolist()))


def check_scores(graph, logits, said, accuracy, micro_f1, loss_of):
    """Compare the scores of both parts with scikit-learn's and torch's."""
    for split, score in scored(graph, logits).items():
        nodes = graph.nodes_of(SPLITS[split])
        labels, of_nodes = graph.labels[nodes], said[nodes].numpy()
        assert score.num_samples == len(nodes)
        assert score.accuracy == pytest.approx(accuracy(labels, of_nodes))
        assert score.micro_f1 == pytest.approx(micro_f1(labels, of_nodes))
        assert score.macro_f1 == pytest.approx(f1_score(labels, of_nodes, average="macro"))
        loss = loss_of(logits[nodes].double(), torch.from_numpy(labels))
        assert score.loss == pytest.approx(loss.item())


def test_of_single_classes():
    graph, generator = draw("sbm:400,6,4,4", seed=0), torch.Generator().manual_seed(0)
    for most in (5, 4):  # then one class does not occur, and no node is said to have it
        graph = replace(graph, labels=np.minimum(graph.labels, most))
        logits = torch.randn(400, 6, generator=generator)
        logits[:, 5] = -50.0
        ways = accuracy_score, accuracy_score, F.cross_entropy
        check_scores(graph, logits, logits.argmax(1), *ways)


def test_of_several_classes():
    generator = torch.Generator().manual_seed(0)
    graph = draw("sbm:300,5,4,4", seed=0)
    graph = replace(graph, labels=(torch.rand(300, 5, generator=generator) < 0.3).numpy())
    logits = torch.randn(300, 5, generator=generator)

    def share(labels, said):
        return (labels == said).mean()

    def loss(logits, labels):
        return F.binary_cross_entropy_with_logits(logits, labels.double())

    check_scores(graph, logits, logits > 0, share, partial(f1_score, average="micro"), loss)


def test_what_is_not_known_of_several_classes_is_left_out():
    generator = torch.Generator().manual_seed(0)
    graph, logits = draw("sbm:300,5,4,4", seed=0), torch.randn(300, 5, generator=generator)
    has = (torch.rand(300, 5, generator=generator) < 0.3).numpy()
    is_known = (torch.rand(300, 5, generator=generator) < 0.7).numpy()
    labels = np.where(is_known, has, UNKNOWN).astype(np.int8)
    for split, score in scored(replace(graph, labels=labels), logits).items():
        nodes = graph.nodes_of(SPLITS[split])
        of, known, said = has[nodes], is_known[nodes], (logits[nodes] > 0).numpy()
        losses = F.binary_cross_entropy_with_logits(
            logits[nodes].double(), torch.from_numpy(of).double(), reduction="none"
        )
        assert score.num_samples == len(nodes)
        assert score.loss == pytest.approx(losses.numpy()[known].sum() / (5 * len(nodes)))
        assert score.accuracy == pytest.approx(accuracy_score(of[known], said[known]))
        assert score.micro_f1 == pytest.approx(f1_score(of[known], said[known]))
        by_class = [f1_score(of[known[:, i], i], said[known[:, i], i]) for i in range(5)]
        assert score.macro_f1 == pytest.approx(np.mean(by_class))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_losses_of_training_nodes_are_summed_however_they_are_cut(is_weighted):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    counts, classes = torch.arange(12) % 5 != 1, torch.arange(12) % 3
    several = torch.rand(12, 3, generator=generator, dtype=torch.float64).round()
    is_known = torch.rand(12, 3, generator=generator) < 0.7
    weights = torch.ones(12, dtype=torch.float64)
    if is_weighted:
        weights = torch.rand(12, generator=generator, dtype=torch.float64)
    of_classes = F.binary_cross_entropy_with_logits(logits, several, reduction="none")
    for labels, losses in (
        (classes.where(counts, NO_LABEL), F.cross_entropy(logits, classes, reduction="none")),
        (several.where(counts[:, None], NO_LABEL), of_classes.mean(1)),
        (
            several.where(counts[:, None] & is_known, NO_LABEL),
            of_classes.where(is_known, 0).mean(1),
        ),
    ):
        loss = NodeLoss()
        loss.begin(8, *([weights.split(5)] if is_weighted else []))
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
