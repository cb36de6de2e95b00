"""Nodes and edges of an image, against differences and convolutions without the edge."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from vigpipe.inference.explain import image as explain_image_module
from vigpipe.inference.explain.explanation import Question, strongest
from vigpipe.inference.explain.image import explain_image
from vigpipe.model.blocks import VigShape
from vigpipe.model.staged import StagedModel
from vigpipe.model.study import VigStudy
from vigpipe.model.vig import VisionGnn

MOST, TARGET, STEP = 6, 1, 1e-6
SHAPE = VigShape((3,), (16,), k=(3, 5), stem=(2, 1), stem_stride=1, img_size=(5, 4))
PYRAMID = VigShape(
    *((1, 2), (16, 32)),
    k=(4, 4),
    reductions=(2, 1),
    relative=True,
    stem=(2, 1),
    stem_stride=1,
    img_size=(5, 6),
)
ONE_NEIGHBOUR = VigShape((2,), (16,), k=(1, 1), stem=(2, 1), stem_stride=1, img_size=(4, 4))
MODELS = [
    *((SHAPE, "knn", name) for name in ("max", "edge", "sage", "gin", "maxmean")),
    (SHAPE, "lookahead,reuse,knn", "max"),
    (SHAPE, "grid,window,reuse", "max,gin"),
    (PYRAMID, "knn", "max"),
    (PYRAMID, "pattern,knn", "maxmean"),
    (ONE_NEIGHBOUR, "knn", "max"),
]


def made(model: StagedModel) -> StagedModel:
    """A model in float64 whose logits are moderate, with statistics of its own."""
    model = model.double()
    model.train()(torch.randn(8, *image_of(model).shape[1:], dtype=torch.float64))
    return model.eval()


def image_of(model) -> Tensor:
    return torch.randn(1, model.in_chans, *model.img_size, dtype=torch.float64)


@contextmanager
def altered(model: VisionGnn, block: int, change: Callable[..., Tensor]) -> Iterator[None]:
    """In a block, the result of `change(conv, result, x, graph, y)` takes a convolution's place."""
    conv = model.get_submodule(f"backbone.{block}.0.graph_conv.gconv")
    handle = conv.register_forward_hook(lambda conv, args, y: change(conv.forward, y, *args))
    try:
        yield
    finally:
        handle.remove()


def without(edges: list[tuple[int, int]]) -> Callable[..., Tensor]:
    """Leave edges out of the graphs of their nodes, by the node and the edge's place."""

    def change(conv, result, x, graph, y):
        result = result.clone()
        for node, place in edges:
            rest = torch.cat((graph[..., :place], graph[..., place + 1 :]), -1)
            itself = torch.arange(x.shape[1]).view(1, -1, 1)
            own = conv(x, rest, y) if rest.shape[-1] else conv(x, itself, None)
            result[:, node] = own[:, node]
        return result

    return change


def itself_only(conv, result, x, graph, y):
    return conv(x, torch.arange(x.shape[1]).view(1, -1, 1), None)


def towards(node: int, place: int, share: float) -> Callable[..., Tensor]:
    """What a node receives goes some way to what it would receive without an edge."""

    def change(conv, result, x, graph, y):
        return result + share * (without([(node, place)])(conv, result, x, graph, y) - result)

    return change


@pytest.mark.parametrize(("shape", "graph", "aggregator"), MODELS)
def test_drops_are_those_without_the_edge_and_gradients_those_of_differences(
    shape, graph, aggregator, monkeypatch
):
    monkeypatch.setattr(explain_image_module, "MOST_SQUARES", 64)
    torch.manual_seed(0)
    options = {"num_classes": 3, "graph": graph, "aggregator": aggregator}
    model = made(VisionGnn(shape, **options))
    assert isinstance(model, VisionGnn)
    image = image_of(model)
    found = explain_image(model, image, Question(TARGET, MOST))
    with torch.no_grad():
        logits = model(image)[0]
        nodes = model.embed(image)
        torch.testing.assert_close(found.logits, logits)

        def logit(x: Tensor) -> float:
            return model.read_out(model.run_blocks(x, None), None)[0, TARGET].item()

        whole = logit(nodes)
        for row, column in np.ndindex(*found.gradient.shape):
            changed = nodes.clone()
            changed[:, row, column] = 0
            assert found.drops[row, column] == pytest.approx(whole - logit(changed), abs=1e-9)
            ends = []
            for factor in (1 + STEP, 1 - STEP):
                changed[:, row, column] = factor * nodes[:, row, column]
                ends.append(logit(changed))
            difference = (ends[0] - ends[1]) / (2 * STEP)
            assert found.gradient[row, column] == pytest.approx(difference, rel=1e-4, abs=1e-6)

        assert [shares.block for shares in found.edges] == [
            i for i, spec in enumerate(model.specs) if spec.rule
        ]
        for shares in found.edges:
            degree = len(shares.targets) // (int(shares.targets.max()) + 1)
            assert len(shares.measured) == MOST
            assert set(shares.measured) == set(strongest(shares.gradient, MOST))
            for number in [*shares.measured[:4], 0, len(shares.targets) - 1]:
                edge = divmod(int(number), degree)
                ends = []
                for share in (STEP, -STEP):
                    with altered(model, shares.block, towards(*edge, share)):
                        ends.append(logit(nodes))
                difference = (ends[1] - ends[0]) / (2 * STEP)
                expected = pytest.approx(difference, rel=1e-4, abs=1e-6)
                assert shares.gradient[number] == expected, (shares.block, edge)
                if number in shares.measured:
                    with altered(model, shares.block, without([edge])):
                        drop = whole - logit(nodes)
                    assert shares.drops[number] == pytest.approx(drop, abs=1e-9)
            with altered(model, shares.block, itself_only):
                assert shares.all_out == pytest.approx(whole - logit(nodes), abs=1e-9)


def test_squares_of_nodes_cover_the_image(monkeypatch):
    monkeypatch.setattr(explain_image_module, "MOST_SQUARES", 8)
    torch.manual_seed(0)
    model = made(VisionGnn(SHAPE, num_classes=3))
    image = image_of(model)
    found = explain_image(model, image, Question(None, MOST))
    assert found.target == found.logits.argmax()
    assert (found.side, found.gradient.shape, found.drops.shape) == (2, (5, 4), (3, 2))
    with torch.no_grad():
        nodes = model.embed(image)
        nodes[:, 4:, 2:] = 0  # the last row has one node
        rest = model.read_out(model.run_blocks(nodes, None), None)[0, found.target]
    assert found.drops[2, 1] == pytest.approx(found.logit - rest.item(), abs=1e-9)


def test_the_study_has_nodes_alone():
    torch.manual_seed(0)
    model = made(VigStudy(num_classes=3, img_size=(4, 6)))
    image = image_of(model)
    found = explain_image(model, image, Question(TARGET, MOST))
    assert (found.edges, found.gradient.shape, found.side) == ((), (4, 6), 1)
    with torch.no_grad():
        image[:, :, 3, 2] = 0
        rest = model(image)[0, TARGET]
    assert found.drops[3, 2] == pytest.approx(found.logit - rest.item(), abs=1e-9)
