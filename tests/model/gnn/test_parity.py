"""Logits and all gradients against torch-geometric's layers with the same weights."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.model.gnn.graphs import PygModel, edge_index, pyg, random_adjacency
from vigpipe.config.choices import GRAPH_MODELS
from vigpipe.model.gnn.create import create_graph_model

pytestmark = pytest.mark.oldest

SIZES: dict[str, Any] = {"in_channels": 9, "num_classes": 5, "width": 8}
ALL = ("none", "batch", "layer")
# Kinds of layers, and the norms between three of them; each model has each norm once or more.
CASES = [
    ("gcn", {}, ALL),
    ("sage", {"aggregator": "mean"}, ("none",)),
    ("sage", {"aggregator": "max"}, ("batch",)),
    ("sage", {"aggregator": "pool"}, ("layer",)),
    ("gat", {"heads": 4}, ("none", "batch")),
    ("gat", {"heads": 2, "aggregator": "v2"}, ("none", "layer")),
    ("gin", {}, ALL),
    ("gcn2", {}, ALL),
]


def outcome(model: Any, x, *rest):
    x = x.clone().requires_grad_()
    y = model(x, *rest)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters()}


# Whether edges have weights, too, which a maximum cannot have.
TWICE = [
    (*case, weighted)
    for weighted in (False, True)
    for case in CASES
    if not weighted or case[1].get("aggregator") not in ("max", "pool")
]


@pytest.mark.parametrize(("name", "options", "norms", "weighted"), TWICE)
def test_equal_to_torch_geometric(name, options, norms, weighted):
    adjacency = random_adjacency(weighted=weighted)
    assert (adjacency.indices == adjacency.targets).any()
    for num_layers, norm in [(1, "none"), *((3, norm) for norm in norms)]:
        torch.manual_seed(0)
        sizes: Any = {**SIZES, **options, "num_layers": num_layers, "norm": norm}
        ours = create_graph_model(name, **sizes).double()
        theirs = PygModel(name, **sizes, edge_weights=adjacency.edge_weights).double()
        theirs.load_state_dict(ours.state_dict())
        x = torch.randn(40, 9, dtype=torch.float64)
        tolerance = 1e-10 if norm == "none" else 1e-9
        close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
        for training in (True, False):  # in the second, with the running statistics of the first
            ours.train(training)
            theirs.train(training)
            expected = outcome(theirs, x, edge_index(adjacency))
            close(outcome(ours, x, None, adjacency), expected)
            ours.zero_grad()
            theirs.zero_grad()
        close(ours.state_dict(), dict(theirs.state_dict()))


@pytest.mark.parametrize(
    ("name", "aggregator", "theirs", "options"),
    [
        ("gcn", None, "GCN", {}),
        ("sage", None, "GraphSAGE", {}),
        ("gin", None, "GIN", {"train_eps": True}),
        ("gat", "v1", "GAT", {}),
        ("gat", "v2", "GAT", {"v2": True}),
    ],
)
def test_names_are_those_of_the_basic_models(name, aggregator, theirs, options):
    model = create_graph_model(name, num_layers=3, aggregator=aggregator, **SIZES)
    basic = getattr(pyg(), theirs)(9, 8, 3, 5, **options)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    assert shapes == {key: value.shape for key, value in basic.state_dict().items()}


@pytest.mark.parametrize("name", GRAPH_MODELS)
def test_initial_weights_have_the_ranges_of_torch_geometric(name):
    """Largest values of 20,000 weights and more are within 1 % of a uniform distribution's end."""
    sizes: Any = {"in_channels": 300, "num_classes": 200, "width": 200, "num_layers": 2}
    torch.manual_seed(0)
    ours = create_graph_model(name, **sizes).state_dict()
    theirs = PygModel(name, **sizes).state_dict()
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        spread = 0.01 if weight.numel() > 10_000 else 0.1
        torch.testing.assert_close(weight.abs().max(), theirs[key].abs().max(), rtol=spread, atol=0)
