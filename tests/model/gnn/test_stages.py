"""Graph models cut into stages, their random masks, recomputation and half precision."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.model.gnn.graphs import from_dense, random_adjacency, random_layers, to_dense
from tests.model.test_regions import Names
from vigpipe.config.choices import GRAPH_MODELS
from vigpipe.model.gnn.create import create_graph_model
from vigpipe.model.regions import listening
from vigpipe.parallel.plan import even_plan
from vigpipe.parallel.split import cut_stages

N = 40
every = pytest.mark.parametrize("name", GRAPH_MODELS)


def build(name: Any, norm: Any = "batch", dropout=0.4, dtype=torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    if name == "sage":
        options = {"aggregator": "pool", **options}
    if name.startswith("gat"):
        options = {"heads": 2, **options}
    sizes: Any = {"in_channels": 9, "num_classes": 5, "num_layers": 4, "width": 8}
    return create_graph_model(name, dropout=dropout, norm=norm, **sizes, **options).to(dtype)


def nodes(dtype=torch.float64) -> Any:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(2**62, (N,), generator=generator)
    return torch.randn(N, 9, generator=generator, dtype=dtype), keys


def backward(y):
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()


@pytest.mark.parametrize(("edges", "num_stages"), [("the same", 4), ("of each layer", 2)])
@every
def test_stages_are_the_model_bit_for_bit(name, edges, num_stages):
    adjacency = random_adjacency() if edges == "the same" else random_layers(N, 30, 18, 9, 5)
    whole = build(name).train()
    plan = even_plan(4, num_stages)
    stages = cut_stages(lambda: build(name), plan, tuple(range(num_stages)))
    x, keys = nodes()
    x.requires_grad_()
    y = whole(x, keys, adjacency)
    backward(y)

    inputs, outputs = [], []
    there = x.detach()
    for stage in stages:
        is_before_stem = name == "gcn2" and stage.has_stem
        assert is_before_stem or (there.shape[1:],) == stage.boundary_shapes(stage.span[0])
        inputs.append(there.clone().requires_grad_())
        outputs.append(stage.train()(inputs[-1], stage.draw(keys, torch.float64), adjacency))
        there = outputs[-1].detach()
        if not stage.has_readout:  # rows that a layer does not make are padding
            there = F.pad(there, (0, 0, 0, (N - len(there)) // 2))
    assert torch.equal(there, y)
    backward(outputs[-1])
    for i in range(num_stages - 1, 0, -1):
        outputs[i - 1].backward(inputs[i].grad[: len(outputs[i - 1])])
    assert torch.equal(inputs[0].grad, x.grad)
    grads = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    assert grads.keys() == dict(whole.named_parameters()).keys()
    for key, parameter in whole.named_parameters():
        assert torch.equal(grads[key], parameter.grad), key


@every
def test_recomputation_changes_no_bit(name):
    results = []
    for recompute in (False, True):
        model, (x, keys) = build(name).train(), nodes()
        model.recompute = recompute
        y = model(x, keys, random_adjacency())
        backward(y)
        results.append([y.detach(), *(p.grad for p in model.parameters()), *model.buffers()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@every
def test_masks_follow_the_nodes_through_any_order(name):
    model, adjacency = build(name).train(), random_adjacency()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(2))
    x, keys = nodes()
    reordered = from_dense(to_dense(adjacency)[order][:, order])
    one, other = model(x, keys, adjacency), model(x[order], keys[order], reordered)
    torch.testing.assert_close(other, one[order], rtol=1e-10, atol=1e-10)


@every
def test_masks_drop_something_in_training_only(name):
    model, adjacency, (x, keys) = build(name), random_adjacency(), nodes()
    assert not torch.equal(model(x, keys, adjacency), model(x, keys + 1, adjacency))
    assert not torch.equal(model(x, adjacency=adjacency), model(x, adjacency=adjacency))
    model.eval()
    assert torch.equal(model(x, None, adjacency), model(x, keys, adjacency))


@every
def test_edges_of_other_nodes_are_refused(name):
    model, (x, keys) = build(name), nodes()
    others = random_adjacency(41), random_adjacency().rows(0, 7), random_layers(N, 30, 18, 9)
    for adjacency in (None, *others):
        with pytest.raises(ValueError, match=r"needs the edges of its 40 nodes"):
            model(x, keys, adjacency)


@every
def test_the_layer_whose_results_are_not_finite_is_named(name):
    model, adjacency, (x, keys) = build(name, norm="none").eval(), random_adjacency(), nodes()
    model.set_detect_anomaly(True)
    model(x, keys, adjacency)
    x[3, 0] = torch.nan  # node 3 has no edges, so it stays the only one
    with pytest.raises(FloatingPointError, match=r"^block 0: 1 of 40 nodes have NaN or infinite"):
        model(x, keys, adjacency)
    model.set_detect_anomaly(False)
    assert not model(x, keys, adjacency)[3].isfinite().any()


@every
def test_layer_by_layer_equals_forward_and_only_evaluates(name):
    model, adjacency, (x, keys) = build(name), random_adjacency(), nodes()
    with pytest.raises(ValueError, match=r"call model\.eval"):
        model.by_layer(x, adjacency, chunk=10)
    expected = model.eval()(x, keys, adjacency)
    for chunk in (1, 7, 39, 40, 100):
        y = model.by_layer(x, adjacency, chunk=chunk)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        assert not y.requires_grad


class Views(Names):
    """A listener that gives functions views of their inputs."""

    def __call__(self, name, function, inputs):
        views = tuple(x.view_as(x) if isinstance(x, torch.Tensor) else x for x in inputs)
        return super().__call__(name, function, views)


@every
def test_regions_have_names_and_reorder_no_sum(name):
    results = []
    for listener in (None, Views()):
        model, (x, keys) = build(name).train(), nodes()
        x.requires_grad_()
        with listening(listener):
            y = model(x, keys, random_adjacency())
        backward(y)
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert listener is not None
    blocks = [f"block {i}{part}" for i in range(4) for part in ("", "/aggregation", "/update")]
    assert listener.heard == ["stem", *blocks, "readout"]


@every
def test_plain_and_fused_masks_are_the_same(name):
    model, adjacency, (x, keys) = build(name).train(), random_adjacency(), nodes()
    fused = model(x, keys, adjacency)
    model.set_impl("plain")
    assert not any(dropout.fused for dropout in model.modules() if hasattr(dropout, "stream"))
    torch.testing.assert_close(model(x, keys, adjacency), fused, rtol=1e-12, atol=1e-12)
