"""Neighbours reduced on a sparse graph: values, gradients, empty rows, and no bit by chance."""

from contextlib import contextmanager

import pytest
import torch
from torch.autograd import gradcheck

from tests.model.gnn.graphs import from_dense, random_adjacency, to_dense
from vigpipe.ops import sparse

GRAPHS = {
    "random": random_adjacency(30, 0.2),
    "nothing": from_dense(torch.zeros(0, 0, dtype=torch.bool)),
    "one node": from_dense(torch.zeros(1, 1, dtype=torch.bool)),
    "one loop": from_dense(torch.ones(1, 1, dtype=torch.bool)),
    "no edges": from_dense(torch.zeros(5, 5, dtype=torch.bool)),
    "rows": random_adjacency(30, 0.2).rows(2, 9),
}
every = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())


def features(graph, *channels, seed=0, of="sources"):
    num = {"sources": graph.num_sources, "targets": graph.num_targets, "edges": graph.num_edges}
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num[of], *channels, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def outcome(function, graph, *inputs):
    """The result, and the gradients of its product with fixed numbers."""
    y = function(graph, *inputs)
    grad = torch.linspace(-1, 1, y.numel()).to(y.dtype).view(y.shape)
    return y.detach(), *torch.autograd.grad(y, inputs, grad)


def max_by_loops(graph, x):
    rows = [x[graph.indices[graph.targets == v]] for v in range(graph.num_targets)]
    return torch.stack([row.max(0).values if len(row) else 0 * x.sum(0) for row in rows])


def softmax_by_loops(graph, scores):
    parts = [scores[graph.targets == v].softmax(0) for v in range(graph.num_targets)]
    return torch.cat([scores[:0], *parts])


def attention_by_edges(graph, weights, x):
    brought = weights[:, :, None] * x[graph.indices]
    return x.new_zeros(graph.num_targets, *x.shape[1:]).index_add(0, graph.targets, brought)


CASES = {
    "sum": (sparse.weighted_sum, lambda g, x: to_dense(g).double() @ x, [("sources", 3)]),
    "weighted": (
        lambda g, x, w: sparse.weighted_sum(g, x, w),
        lambda g, x, w: attention_by_edges(g, w[:, None], x[:, None])[:, 0],
        [("sources", 3), ("edges",)],
    ),
    "mean": (
        sparse.mean,
        lambda g, x: to_dense(g) / g.in_degrees[:, None].clamp(min=1).double() @ x,
        [("sources", 3)],
    ),
    "gcn": (
        lambda g, x: sparse.constant_sum(g, x, "gcn"),
        lambda g, x: torch.zeros(g.num_targets, 3, dtype=torch.float64).index_add(
            0, g.targets, g.weights("gcn", torch.float64)[:, None] * x[g.indices]
        ),
        [("sources", 3)],
    ),
    "maximum": (sparse.maximum, max_by_loops, [("sources", 3)]),
    "softmax": (sparse.edge_softmax, softmax_by_loops, [("edges", 2)]),
    "attention": (sparse.attention_sum, attention_by_edges, [("edges", 2), ("sources", 2, 3)]),
    "sources": (sparse.from_sources, lambda g, x: x[g.indices], [("sources", 3)]),
    "targets": (sparse.from_targets, lambda g, x: x[g.targets], [("targets", 3)]),
}


def case(name, graph):
    function, slow, kinds = CASES[name]
    inputs = [features(graph, *size, seed=i, of=of) for i, (of, *size) in enumerate(kinds)]
    return function, slow, inputs


@every
@pytest.mark.parametrize("name", CASES)
def test_equal_to_loops_and_dense_matrices(name, graph):
    if not graph.num_targets and name == "maximum":
        assert sparse.maximum(graph, torch.zeros(0, 3)).shape == (0, 3)
        return
    function, slow, inputs = case(name, graph)
    ours, theirs = outcome(function, graph, *inputs), outcome(slow, graph, *inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_finite_differences(name):
    graph = random_adjacency(9, 0.3)
    function, _, inputs = case(name, graph)
    assert gradcheck(lambda *inputs: function(graph, *inputs), inputs)


@contextmanager
def threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_threads(name, dtype):
    """Thousands of edges, as torch gives few numbers to one thread; some end in one node."""
    graph = random_adjacency(900, 0.02)
    function, _, kinds = CASES[name]
    inputs = [
        features(graph, *(16 * c for c in size), seed=i, of=of).detach().to(dtype).requires_grad_()
        for i, (of, *size) in enumerate(kinds)
    ]
    results = []
    for number in (1, 2, 3):
        with threads(number):
            results.append(outcome(function, graph, *inputs))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_gradient_of_a_maximum_goes_to_the_first_that_attains_it():
    graph = from_dense(torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 0]]).bool())
    x = torch.tensor([[1.0, 2.0], [3.0, 2.0], [3.0, 2.0]], requires_grad=True)
    y = sparse.maximum(graph, x)
    assert y.tolist() == [[3, 2], [3, 2], [0, 0]]
    (grad,) = torch.autograd.grad(y, x, torch.tensor([[1.0, 10.0], [100.0, 1000.0], [5.0, 5.0]]))
    assert grad.tolist() == [[0, 10], [101, 1000], [0, 0]]


def test_a_maximum_of_negative_numbers_and_of_nan():
    graph = from_dense(torch.tensor([[1, 1], [0, 1]]).bool())
    x = torch.tensor([[-2.0, -1.0], [-3.0, torch.nan]])
    y = sparse.maximum(graph, x)
    assert y[:, 0].tolist() == [-2, -3]
    assert y[:, 1].isnan().all()


@every
def test_a_maximum_without_a_gradient_is_the_same(graph):
    x = features(graph, 3)
    assert torch.equal(sparse.maximum(graph, x.detach()), sparse.maximum(graph, x))


@pytest.mark.parametrize("seed", range(5))
def test_maxima_by_copies_for_the_edges_are_the_same(seed):
    """What GPUs use, where torch has no product that takes maxima."""
    graph = random_adjacency(30, 0.2, seed)
    x = torch.randint(4, (30, 5), generator=torch.Generator().manual_seed(seed)).float()
    some = graph.in_degrees > 0
    for ours, theirs in zip(
        sparse._max_by_edges(graph, x), sparse._max_by_rows(graph, x), strict=True
    ):
        assert torch.equal(ours[some], theirs[some])


@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_summed_in_float32(name):
    graph = random_adjacency(60, 0.5)
    function, _, kinds = CASES[name]
    inputs = [
        features(graph, *size, seed=i, of=of).detach().bfloat16().requires_grad_()
        for i, (of, *size) in enumerate(kinds)
    ]
    half = outcome(function, graph, *inputs)
    wide = outcome(function, graph, *(x.detach().float().requires_grad_() for x in inputs))
    for narrow, exact in zip(half, wide, strict=True):
        assert narrow.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.float(), exact, rtol=2**-6, atol=2**-6)


def test_large_scores_do_not_overflow():
    graph = from_dense(torch.ones(1, 2, dtype=torch.bool))
    assert sparse.edge_softmax(graph, torch.tensor([[1e4], [-1e4]])).tolist() == [[1], [0]]
