"""Gradients that are multiplied out once a step have the bits of those of each micro-batch."""

import copy

import pytest
import torch

from vigpipe import ops
from vigpipe.model.study import StudyGrapher
from vigpipe.ops import factored
from vigpipe.parallel.gradients import DoubleGradients

GRID = (6, 5)
OF_CONVOLUTIONS = ("graph_conv.lin_rel.weight", "graph_conv.lin_root.weight")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert ops.versions("cpu")["hidden"].startswith("C++")


@pytest.fixture
def num_terms(monkeypatch) -> list[int]:
    """How many terms each product that was added up had."""
    counts, add = [], factored.add_products

    def counted(total, terms, *, is_first):
        counts.append(len(terms))
        add(total, terms, is_first=is_first)

    monkeypatch.setattr(factored, "add_products", counted)
    return counts


def grapher(dtype=torch.float32) -> StudyGrapher:
    torch.manual_seed(0)
    return StudyGrapher(3, 32, "grid", GRID, "batch", 0.0, 0).to(dtype)


def take_step(model, gradients, inputs):
    gradients.clear()
    for x in inputs:
        model(x, None).square().sum().backward()
    gradients.reduce()


def drawn(num, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 30, 3, generator=generator).to(dtype) for _ in range(num)]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_sums_have_the_same_bits(num_terms, monkeypatch, threads):
    model = grapher()
    other = copy.deepcopy(model)
    ours = DoubleGradients(model.parameters(), None)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    monkeypatch.setattr("vigpipe.ops.call._GRAIN", 1)
    for num in (3, 1):  # the second step over the first
        take_step(model, ours, drawn(num))
    torch.set_num_threads(before)
    assert num_terms == [3, 3, 1, 1]
    monkeypatch.setattr(factored, "ask", lambda _: None)
    theirs = DoubleGradients(other.parameters(), None)
    for num in (3, 1):
        take_step(other, theirs, drawn(num))
        for name, one in other.named_parameters():
            assert one.grad is not None, name
    assert len(num_terms) == 4
    assert torch.equal(ours.high, theirs.high)
    assert torch.equal(ours.rounded, theirs.rounded)
    assert all(model.get_parameter(name).grad.abs().sum() > 0 for name in OF_CONVOLUTIONS)


def test_they_are_added_to_gradients_that_came_whole(num_terms):
    model = grapher()
    gradients = DoubleGradients(model.parameters(), None)
    take_step(model, gradients, drawn(2))
    expected = gradients.high.clone()
    gradients.clear()
    for parameter in model.parameters():  # as of a micro-batch without samples
        (0.0 * parameter.sum()).backward()
    for x in drawn(2):
        model(x, None).square().sum().backward()
    gradients.reduce()
    assert torch.equal(gradients.high, expected)
    assert num_terms == [2] * 4


def test_sums_in_pairs_take_none(num_terms):
    """Checks add up float64 gradients, whose last bits products of other orders would change."""
    model = grapher(torch.float64)
    take_step(model, DoubleGradients(model.parameters(), None), drawn(2, torch.float64))
    assert not num_terms
    assert all(p.grad is not None for p in model.parameters())


def test_who_does_not_ask_gets_whole_gradients(num_terms):
    model = grapher()
    gradients = DoubleGradients(copy.deepcopy(model).parameters(), None)
    take_step(model, gradients, drawn(1))  # of another model
    assert all(p.grad is not None for p in model.parameters())
    assert not num_terms


def test_after_a_step_nobody_asks():
    model = grapher()
    take_step(model, DoubleGradients(model.parameters(), None), drawn(1))
    assert all(factored.asked(p) is None for p in model.parameters())
    assert factored.take(model.graph_conv.lin_rel.weight) == []
