"""Nodes and edges of a graph, against torch-geometric's explainer and its layers' hooks."""

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.gnn.graphs import (
    PygModel,
    edge_index,
    from_dense,
    random_adjacency,
    with_weights,
)
from tests.model.gnn.test_parity import ALL, SIZES, TWICE
from vigpipe.errors import InputError
from vigpipe.graphs.graph import Graph
from vigpipe.inference.explain import node as explain_node_module
from vigpipe.inference.explain.explanation import Question
from vigpipe.inference.explain.node import NodeInputs, explain_node
from vigpipe.model.gnn.create import create_graph_model
from vigpipe.ops.adjacency import Adjacency

pytestmark = pytest.mark.filterwarnings("ignore:Input Tensor . did not already require gradients")

LAYERS, NODE, TARGET, MOST = 3, 7, 2, 6


def graph_of(adjacency: Adjacency, x: torch.Tensor) -> Graph:
    num, classes = len(x), tuple("abcde")
    labels, split = np.zeros(num, dtype=np.int64), np.zeros(num, dtype=np.int8)
    edges = adjacency.indptr.numpy(), adjacency.indices.numpy()
    weights = None if adjacency.edge_weights is None else adjacency.edge_weights.numpy()
    return Graph("g", *edges, x.numpy(), labels, split, classes, edge_weights=weights)


def models(name: Any, options: dict[str, Any], norm: str, weights: torch.Tensor | None = None):
    """A model of ours with statistics of its own, and torch-geometric's with its weights."""
    sizes: Any = {**SIZES, **options, "num_layers": LAYERS, "norm": norm}
    torch.manual_seed(0)
    ours = create_graph_model(name, **sizes).double()
    theirs = PygModel(name, **sizes, edge_weights=weights).double()
    state = {
        key: value.exp() if key.endswith("running_var") else value + 0.1 * torch.randn_like(value)
        for key, value in ours.state_dict().items()
        if value.is_floating_point()
    }
    for model in (ours, theirs):
        model.load_state_dict(state, strict=False)
    return ours.eval(), theirs.eval()


def without_loops() -> Adjacency:
    """torch-geometric's masks leave out the edges of a node to itself."""
    adjacency = random_adjacency()
    edges = torch.zeros(40, 40, dtype=torch.bool)
    edges[adjacency.targets, adjacency.indices] = True
    return from_dense(edges.fill_diagonal_(False))


def explained(theirs, x, edges, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch_geometric.explain import CaptumExplainer, Explainer
    config: Any = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    explainer = Explainer(
        theirs,
        CaptumExplainer("InputXGradient"),
        "phenomenon",
        config,
        node_mask_type="attributes",
        edge_mask_type="object",
    )
    monkeypatch.setattr(torch, "ones", partial(torch.ones, dtype=torch.float64))  # its masks
    found = explainer(x, edges, target=torch.full((len(x),), TARGET), index=NODE)
    monkeypatch.undo()
    return found.node_mask.sum(1), found.edge_mask


def logit_without(theirs, x, edges, layer: int, edge: int | slice) -> torch.Tensor:
    """The logit if messages of an edge do not arrive in a layer; -inf is no maximum."""

    def leave_out(module, _, messages):
        messages = messages.clone()
        no_message = -torch.inf if module.aggr == "max" else 0.0
        messages[edge] = no_message
        return messages

    handle = theirs.convs[layer].register_message_forward_hook(leave_out)
    try:
        return theirs(x, edges)[NODE, TARGET]
    finally:
        handle.remove()


@pytest.mark.parametrize(("name", "options", "norms", "weighted"), TWICE)
def test_equal_to_torch_geometrics_explainer_and_to_its_layers_without_messages(
    name, options, norms, weighted, monkeypatch
):
    adjacency = without_loops()
    edges = edge_index(adjacency)
    if weighted:
        adjacency, norms = with_weights(adjacency), norms[:1]
    for norm in norms if norms != ALL else ("none", "batch"):
        ours, theirs = models(name, options, norm, adjacency.edge_weights)
        torch.manual_seed(1)
        x = torch.randn(40, 9, dtype=torch.float64)
        around = NodeInputs.of(graph_of(adjacency, x), NODE, LAYERS, torch.float64)
        found = explain_node(ours, around, Question(TARGET, MOST))
        logits = theirs(x, edges)[NODE]
        torch.testing.assert_close(found.logits, logits, rtol=1e-10, atol=1e-10)

        of_nodes, of_edges = explained(theirs, x, edges, monkeypatch)
        gradient = np.zeros(40)
        gradient[around.nodes] = found.gradient
        np.testing.assert_allclose(gradient, of_nodes.detach(), rtol=1e-9, atol=1e-10)
        numbers = {tuple(pair): e for e, pair in enumerate(edges.T.tolist())}
        total = np.zeros(len(numbers))
        for shares in found.edges:
            pairs = zip(around.nodes[shares.sources], around.nodes[shares.targets], strict=True)
            of_ours = [numbers[pair] for pair in pairs]
            total[of_ours] += shares.gradient
            assert len(shares.measured) == min(MOST, len(of_ours))
            for i in shares.measured:
                drop = logits[TARGET] - logit_without(theirs, x, edges, shares.block, of_ours[i])
                assert shares.drops[i] == pytest.approx(drop.item(), rel=1e-9, abs=1e-10)
        np.testing.assert_allclose(total, of_edges.detach(), rtol=1e-9, atol=1e-10)

        assert np.count_nonzero(~np.isnan(found.drops)) == MOST
        for i in np.flatnonzero(~np.isnan(found.drops)):
            changed = x.index_fill(0, torch.tensor([around.nodes[i]]), 0)
            drop = logits[TARGET] - theirs(changed, edges)[NODE, TARGET]
            assert found.drops[i] == pytest.approx(drop.item(), rel=1e-9, abs=1e-10)


def test_without_all_edges_of_a_layer_sums_are_empty():
    adjacency = without_loops()
    ours, theirs = models("gin", {}, "none")
    x = torch.randn(40, 9, dtype=torch.float64)
    around = NodeInputs.of(graph_of(adjacency, x), NODE, LAYERS, torch.float64)
    found = explain_node(ours, around, Question(None, 1))
    assert found.target == found.logits.argmax()
    edges, found = edge_index(adjacency), explain_node(ours, around, Question(TARGET, 1))
    for shares in found.edges:
        # Of the edges that do not count, the messages do not arrive either, and nothing changes.
        rest = logit_without(theirs, x, edges, shares.block, slice(None))
        drop = theirs(x, edges)[NODE, TARGET] - rest
        assert shares.all_out == pytest.approx(drop.item(), rel=1e-9)


def test_a_node_without_edges_rests_on_itself():
    x = torch.randn(40, 9, dtype=torch.float64)
    graph = graph_of(random_adjacency(), x)
    for name in ("gcn", "sage", "gat", "gin", "gcn2"):
        ours, _ = models(name, {}, "none")
        around = NodeInputs.of(graph, 3, LAYERS, torch.float64)
        found = explain_node(ours, around, Question(None, MOST))
        assert around.nodes.tolist() == [3]
        assert len(found.drops) == 1
        assert [(len(shares.gradient), shares.all_out) for shares in found.edges] == [(0, 0.0)] * 3


def test_edges_of_a_node_to_itself_are_edges_like_others():
    adjacency = random_adjacency()
    x = torch.randn(40, 9, dtype=torch.float64)
    node = int(adjacency.targets[adjacency.indices == adjacency.targets][0])
    around = NodeInputs.of(graph_of(adjacency, x), node, 1, torch.float64)
    sizes: Any = {**SIZES, "num_layers": 1}
    model = create_graph_model("gin", **sizes).double().eval()
    (shares,) = explain_node(model, around, Question(0, 40)).edges
    (loop,) = np.flatnonzero((shares.sources == 0) & (shares.targets == 0))
    edges = torch.zeros(40, 40, dtype=torch.bool)
    edges[adjacency.targets, adjacency.indices] = True
    edges[node, node] = False
    drop = model(x, None, adjacency)[node, 0] - model(x, None, from_dense(edges))[node, 0]
    assert shares.drops[loop] == pytest.approx(drop.item(), rel=1e-9)


def test_too_many_numbers_are_refused(monkeypatch):
    monkeypatch.setattr(explain_node_module, "_MOST_NUMBERS", 10)
    graph = graph_of(random_adjacency(), torch.randn(40, 9))
    with pytest.raises(InputError, match="nodes within 3 steps with 9 features each"):
        NodeInputs.of(graph, NODE, LAYERS, torch.float32)
