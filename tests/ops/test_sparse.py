"""Neighbours reduced on a sparse graph: values, gradients, empty rows, and no bit by chance."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.model.gnn.graphs import from_dense, random_adjacency, to_dense
from tests.ops.threads import assert_threads_change_nothing
from vigpipe.ops import sparse
from vigpipe.ops.adjacency import Adjacency

GRAPHS = {
    "random": random_adjacency(30, 0.2),
    "nothing": from_dense(torch.zeros(0, 0, dtype=torch.bool)),
    "one node": from_dense(torch.zeros(1, 1, dtype=torch.bool)),
    "one loop": from_dense(torch.ones(1, 1, dtype=torch.bool)),
    "no edges": from_dense(torch.zeros(5, 5, dtype=torch.bool)),
    "rows": random_adjacency(30, 0.2).rows(2, 9),
}
versions = pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
SLOPE = 0.2


def features(graph, *channels, seed=0, of="sources"):
    counts = {"sources": graph.num_sources, "targets": graph.num_targets, "edges": graph.num_edges}
    shape = (counts[of], *channels) if of in counts else channels
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


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


def pair_scores_by_edges(graph, left, right, weights):
    z = (left[graph.indices] + right[graph.targets]).view(graph.num_edges, *weights.shape)
    return (F.leaky_relu(z, SLOPE) * weights).sum(-1)


def pair_softmax_by_loops(graph, of_sources, of_targets):
    scores = F.leaky_relu(of_sources[graph.indices] + of_targets[graph.targets], SLOPE)
    return softmax_by_loops(graph, scores)


def attention_by_edges(graph, weights, x):
    brought = weights[:, :, None] * x[graph.indices]
    return x.new_zeros(graph.num_targets, *x.shape[1:]).index_add(0, graph.targets, brought)


def sum_by_edges(kind):
    def slow(graph, x, added=0.0):
        weights = graph.weights(kind, x.dtype)[:, None]
        zeros = x.new_zeros(graph.num_targets, x.shape[1])
        return zeros.index_add(0, graph.targets, weights * x[graph.indices]) + added

    return slow


def mean(graph, x, added, **options):
    return sparse.constant_sum(graph, x, "mean", added, **options)


# The operator, what it must equal, and the shapes of its inputs: of H heads with c channels each, C
# in all.
CASES = {
    "sum": (
        lambda g, x, **options: sparse.constant_sum(g, x, "ones", **options),
        lambda g, x: to_dense(g).double() @ x,
        [("sources", "C")],
    ),
    "weighted": (
        lambda g, x, w, **options: sparse.attention_sum(g, w[:, None], x[:, None], **options)[:, 0],
        lambda g, x, w: attention_by_edges(g, w[:, None], x[:, None])[:, 0],
        [("sources", "C"), ("edges",)],
    ),
    "mean and more": (mean, sum_by_edges("mean"), [("sources", "C"), ("targets", "C")]),
    "mean and a bias": (mean, sum_by_edges("mean"), [("sources", "C"), ("once", "C")]),
    "gcn": (
        lambda g, x, **options: sparse.constant_sum(g, x, "gcn", **options),
        sum_by_edges("gcn"),
        [("sources", "C")],
    ),
    "maximum": (sparse.maximum, max_by_loops, [("sources", "C")]),
    "softmax": (sparse.edge_softmax, softmax_by_loops, [("edges", "H")]),
    "pair softmax": (
        lambda g, s, t, **options: sparse.pair_softmax(g, s, t, SLOPE, **options),
        pair_softmax_by_loops,
        [("sources", "H"), ("targets", "H")],
    ),
    "pair scores": (
        lambda g, x, y, w, **options: sparse.pair_scores(g, x, y, w, SLOPE, **options),
        pair_scores_by_edges,
        [("sources", "C"), ("targets", "C"), ("once", "H", "c")],
    ),
    "attention": (
        sparse.attention_sum,
        attention_by_edges,
        [("edges", "H"), ("sources", "H", "c")],
    ),
}


def inputs_of(name, graph, heads=2, channels=3, dtype=torch.float64):
    sizes = {"H": heads, "c": channels, "C": heads * channels}
    return [
        features(graph, *(sizes[letter] for letter in shape), seed=i, of=of)
        .detach()
        .to(dtype)
        .requires_grad_()
        for i, (of, *shape) in enumerate(CASES[name][2])
    ]


@pytest.mark.parametrize("name", CASES)
def test_equal_to_loops_and_dense_matrices(name):
    function, slow, _ = CASES[name]
    for of_graph, graph in GRAPHS.items():
        if name == "maximum" and not graph.num_targets:
            continue
        inputs = inputs_of(name, graph)
        theirs = outcome(slow, graph, *inputs)
        for fused in (True, False):
            ours = outcome(partial(function, fused=fused), graph, *inputs)
            torch.testing.assert_close(
                ours,
                theirs,
                rtol=1e-12,
                atol=1e-12,
                msg=lambda why, i=(of_graph, fused): f"{i}: {why}",
            )


@st.composite
def rows_of_any_length(draw):
    """Rows that are empty or have hundreds of edges, some of them more than once, and loops."""
    num_targets = draw(st.integers(0, 12))
    num_sources = draw(st.sampled_from([max(1, num_targets), 1, 7, 12]))
    lengths = draw(st.lists(st.integers(0, 40), min_size=num_targets, max_size=num_targets))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    indices = torch.randint(num_sources, (sum(lengths),), generator=generator)
    indptr = F.pad(torch.tensor(lengths, dtype=torch.int64).cumsum(0), (1, 0))
    return Adjacency(indptr, indices, num_sources)


@settings(max_examples=60, deadline=None)
@given(
    rows_of_any_length(),
    st.sampled_from(sorted(CASES)),
    st.sampled_from([1, 2, 3, 8, 70]),
    st.sampled_from([1, 5, 16, 20, 33, 150]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_fused_and_plain_agree_on_any_graph(graph, name, heads, channels, dtype):
    """Whatever fills a vector of the machine or does not, in each head."""
    assume(name != "gcn" or graph.num_sources == graph.num_targets)
    inputs = inputs_of(name, graph, heads, channels, dtype)
    rounding = 1e-4 if dtype == torch.float32 else 1e-11
    fused, plain = (
        outcome(partial(CASES[name][0], fused=fused), graph, *inputs) for fused in (True, False)
    )
    torch.testing.assert_close(fused, plain, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_threads(name):
    """Thousands of edges, as torch gives few numbers to one thread; some end in one node."""
    graph = random_adjacency(900, 0.02)
    for dtype in (torch.float32, torch.float64):
        inputs = inputs_of(name, graph, channels=48, dtype=dtype)
        call = partial(outcome, CASES[name][0], graph, *inputs)
        assert_threads_change_nothing(call, (1, 2, 3))


@versions
def test_the_gradient_of_a_maximum_goes_to_the_first_that_attains_it(fused):
    graph = from_dense(torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 0]]).bool())
    x = torch.tensor([[1.0, 2.0], [3.0, 2.0], [3.0, 2.0]], requires_grad=True)
    y = sparse.maximum(graph, x, fused=fused)
    assert y.tolist() == [[3, 2], [3, 2], [0, 0]]
    (grad,) = torch.autograd.grad(y, x, torch.tensor([[1.0, 10.0], [100.0, 1000.0], [5.0, 5.0]]))
    assert grad.tolist() == [[0, 10], [101, 1000], [0, 0]]


@versions
def test_a_maximum_of_negative_numbers_and_of_nan(fused):
    graph = from_dense(torch.tensor([[1, 1], [0, 1]]).bool())
    x = torch.tensor([[-2.0, -1.0], [-3.0, torch.nan]])
    y = sparse.maximum(graph, x, fused=fused)
    assert y[:, 0].tolist() == [-2, -3]
    assert y[:, 1].isnan().all()


@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_summed_in_float32(name):
    graph = random_adjacency(60, 0.5)
    function, inputs = CASES[name][0], inputs_of(name, graph, dtype=torch.bfloat16)
    half = outcome(function, graph, *inputs)
    wide = outcome(function, graph, *(x.detach().float().requires_grad_() for x in inputs))
    for narrow, exact in zip(half, wide, strict=True):
        assert narrow.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.float(), exact, rtol=2**-6, atol=2**-6)


@versions
def test_large_scores_do_not_overflow(fused):
    graph = from_dense(torch.ones(1, 2, dtype=torch.bool))
    shares = sparse.edge_softmax(graph, torch.tensor([[1e4], [-1e4]]), fused=fused)
    assert shares.tolist() == [[1], [0]]
