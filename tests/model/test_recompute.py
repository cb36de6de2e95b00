"""Recomputation: the same numbers, graphs chosen once, micro-batches counted once."""

from typing import Any

import pytest
import torch

import vigpipe.model.grapher
from vigpipe.model.blocks import VigShape
from vigpipe.model.vig import VisionGnn

SHAPE = VigShape((4,), (16,), k=(3, 5), stem=(2, 1), stem_stride=1, img_size=(6, 6))


def model(graph="knn"):
    torch.manual_seed(0)
    return VisionGnn(
        SHAPE, 5, drop_path_rate=0.3, drop_rate=0.3, graph=graph, stochastic_dilation=0.5
    )


def step(model, recompute):
    model.set_grad_checkpointing(recompute)
    images = torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    model(images, torch.arange(4)).square().sum().backward()
    gradients: dict[str, Any] = {n: p.grad for n, p in model.named_parameters()}
    return gradients


@pytest.mark.parametrize("graph", ["knn", "knn,reuse", "lookahead", "window,grid,pattern"])
def test_gradients_and_statistics_are_the_same_to_the_last_bit(graph):
    once, twice = model(graph), model(graph)
    expected = step(once, False)
    for name, gradient in step(twice, True).items():
        assert torch.equal(gradient, expected[name]), name
    for (name, ours), theirs in zip(twice.named_buffers(), once.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_graph_is_chosen_once(monkeypatch):
    calls = []

    def counted(*args, **options):
        calls.append(1)
        return knn_graph(*args, **options)

    knn_graph = vigpipe.model.grapher.knn_graph
    monkeypatch.setattr(vigpipe.model.grapher, "knn_graph", counted)
    for graph, made in (("knn", 4), ("knn,reuse", 2), ("lookahead", 3)):
        calls.clear()
        step(model(graph), True)
        assert len(calls) == made


def test_what_is_inside_the_blocks_is_forgotten():
    def kept_bytes(recompute):
        seen = {}

        def keep(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        net = model()
        net.set_grad_checkpointing(recompute)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            net(torch.rand(4, 3, 6, 6), torch.arange(4))
        return sum(seen.values())

    assert kept_bytes(True) < kept_bytes(False) / 3
