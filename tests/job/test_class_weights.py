"""Weights of classes: their mean over the training samples is 1, and the divisor stays."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.refusals import check_refusals
from vigpipe.config.options import TrainConfig
from vigpipe.data.loss import Loss
from vigpipe.graphs.loss import NodeLoss
from vigpipe.job.class_weights import class_weights, positive_weights
from vigpipe.parallel.batch import NO_LABEL
from vigpipe.run.facts import prepare

NAMES, COUNTS = ("a", "b,c", "d"), np.array([6, 3, 0])


def test_their_mean_over_the_training_samples_is_1(tmp_path):
    balanced = class_weights("balanced", NAMES, COUNTS).numpy()
    assert balanced[0] * 2 == pytest.approx(balanced[1])
    path = tmp_path / "w.csv"
    path.write_text('class,weight\nd,5\n"b,c",0\na,2\n')
    given = class_weights(str(path), NAMES, COUNTS).numpy()
    assert given / given[0] == pytest.approx([1, 0, 2.5])
    for weights in (balanced, given):
        assert weights @ COUNTS == pytest.approx(COUNTS.sum())


def test_each_sample_counts_as_much_as_its_class_says_whatever_the_batch():
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 3, generator=draws, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0, 0, 1, 2, 2])
    weights = torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64)
    losses = F.cross_entropy(logits, labels, reduction="none")
    soft = F.one_hot(labels, 3).double() * 0.8 + 0.2 / 3
    expected = (losses * weights[labels]).sum() / 8
    for of_job in (Loss(None, weights), NodeLoss(None, weights)):
        of_job.begin(8)
        shares = [of_job(logits[i : i + 4], labels[i : i + 4]) for i in (0, 4)]
        torch.testing.assert_close(sum(shares), expected)
        of_job.begin(8, [torch.full((8,), 3.0)])
        if isinstance(of_job, NodeLoss):
            torch.testing.assert_close(of_job(logits, labels), 3 * expected)
    loss = Loss(None, weights)
    loss.begin(8)
    by_class = -(weights * soft * logits.log_softmax(1)).sum() / 8
    torch.testing.assert_close(loss(logits, soft), by_class)


def test_of_several_classes_those_that_have_one_weigh_as_much_as_those_that_lack_it(tmp_path):
    has = torch.tensor([[1, 0, 0], [1, 0, -1], [0, -1, 1], [1, 0, 1.0]], dtype=torch.float64)
    labels = has.masked_fill(has < 0, NO_LABEL)
    counts = ((has == value).sum(0).numpy() for value in (1, 0))
    weights = positive_weights("balanced", NAMES, *counts)
    assert weights.tolist() == [1 / 3, 1, 1 / 2]  # no node has the second class
    loss = NodeLoss(None, weights)
    logits = torch.zeros(4, 3, dtype=torch.float64)
    loss.begin(1)
    ln2, of_classes = float(np.log(2)), (1 + 1, 3, 1 + 1)
    assert loss(logits, labels).item() == pytest.approx(ln2 * sum(of_classes) / 3)
    path = tmp_path / "w.csv"
    path.write_text('d,5\n"b,c",0\na,2\n')
    assert positive_weights(str(path), NAMES, *has[:2].numpy()).tolist() == [2, 0, 5]


def test_what_they_are_is_part_of_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config: dict[str, Any] = {"data": "sbm:60,3", "model": "sage", "steps": 1}
    plain = prepare(TrainConfig(**config), torch.float32)
    weighted = prepare(TrainConfig(**config, class_weights="balanced"), torch.float32)
    digest = "SHA-256 of the class weights"
    assert digest not in plain.fingerprint
    assert weighted.differs_in_data({**weighted.fingerprint, digest: "other"}) == digest
    loss: Any = weighted.job.loss(None)
    assert loss.weights_for(torch.zeros(1, 3)).shape == (3,)


def test_a_file_of_them_is_refused_in_a_sentence(tmp_path):
    rows = [
        ("a,1", "has no weight of b,c, d; add a row for each"),
        ("a,1\nx,1", "'x' is no class of the data; the classes are a, b,c, d"),
        ("a,1\na,2", "'a' is there twice"),
        ("a", "has the row 'a', expected a class and a weight"),
        ("a,-1", "has the row 'a,-1'"),
        ("a,nan", "has the row 'a,nan'"),
        ('a,0\n"b,c",0\nd,1', "gives every class of the training 0"),
    ]

    def read(text):
        (tmp_path / "w.csv").write_text(text)
        class_weights(str(tmp_path / "w.csv"), NAMES, COUNTS)

    check_refusals(rows, read, where=tmp_path)
    check_refusals([("none.csv", "cannot be read")], lambda n: class_weights(n, NAMES, COUNTS))
