"""Regions: their names in every model, and that a listener's aliases reorder no sum."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from vigpipe.model.regions import listening, region
from vigpipe.model.staged import StagedModel
from vigpipe.model.study import VigStudy
from vigpipe.model.variants import create_model


class Names:
    """A listener that keeps the paths of the regions, in the order in which they begin."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.path: list[str] = []

    def __call__(self, name: str, function: Any, inputs: tuple[Any, ...]) -> Any:
        self.path.append(name)
        self.heard.append("/".join(self.path))
        result = function(*inputs)
        self.path.pop()
        return result


def digits(**options: Any) -> StagedModel:
    model = create_model("vig_digits", num_classes=3, in_chans=1, img_size=(8, 8), **options)
    return model.train()


def study(graph: Any) -> StagedModel:
    return VigStudy(num_classes=3, in_chans=2, img_size=(4, 4), graph=graph).train()


def heard_in(model: StagedModel, *shape: int) -> list[str]:
    names = Names()
    with listening(names):
        model(torch.rand(*shape), torch.arange(shape[0]))
    return names.heard


def test_a_listener_hears_name_function_and_inputs_and_answers():
    heard = []

    def listener(name, function, inputs):
        heard.append((name, inputs))
        return function(*inputs) + 1

    with listening(listener):
        assert region("product", lambda a, b: a * b, 3, 4) == 13
    assert heard == [("product", (3, 4))]
    assert region("product", lambda a, b: a * b, 3, 4) == 12
    with listening(None):
        assert region("sum", sum, (1, 2)) == 3


def test_the_listener_before_listens_again_even_after_an_error():
    outer, inner = Names(), Names()
    with listening(outer):
        with pytest.raises(ZeroDivisionError), listening(inner):
            region("inner", lambda: 1 / 0)  # pyrefly: ignore[division-by-zero]
        region("outer", lambda: None)
    region("nobody", lambda: None)
    assert (outer.heard, inner.heard) == (["outer"], ["inner"])


def test_the_regions_of_vig():
    of_block = ["", "/grapher", "/grapher/knn", "/grapher/aggregation", "/ffn"]
    blocks = [f"block {i}{part}" for i in range(4) for part in of_block]
    for model in (digits(), digits().eval()):
        assert heard_in(model, 2, 1, 8, 8) == ["stem", *blocks, "readout"]
    heard = heard_in(digits(graph="grid,pattern,knn,reuse"), 2, 1, 8, 8)
    # Only a choice of neighbours is a region.
    assert [name for name in heard if name.endswith("/knn")] == ["block 2/grapher/knn"]


@pytest.mark.parametrize("graph", ["grid", "knn"])
def test_the_regions_of_the_study(graph):
    chosen = ["/grapher/knn"] if graph == "knn" else []
    of_block = ["", "/grapher", *chosen, "/grapher/aggregation", "/ffn"]
    blocks = [f"block {i}{part}" for i in range(8) for part in of_block]
    assert heard_in(study(graph), 2, 2, 4, 4) == ["stem", *blocks, "readout"]


# ---- compiled and exported -------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return region("doubled", torch.mul, x, 2.0)


def test_regions_vanish_when_compiled_or_exported():
    names, x = Names(), torch.ones(3)
    with listening(names):
        compiled = torch.compile(Doubled(), backend="eager", fullgraph=True)
        exported = torch.export.export(Doubled(), (x,))
        assert compiled(x).tolist() == exported.module()(x).tolist() == [2, 2, 2]
    assert names.heard == []


# ---- sums keep their order -------------------------------------------------------------------


class Aliases:
    """A listener that puts an alias in the place of every input that carries a gradient."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, Any, Any]] = []  # region, where gradients of the two go

    def __call__(self, name: str, function: Any, inputs: tuple[Any, ...]) -> Any:
        return function(*[self.alias(name, x) for x in inputs])

    def alias(self, name: str, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        alias = x.expand_as(x)
        edges = get_gradient_edge(x), get_gradient_edge(alias)
        self.pairs.append((name, *[(edge.node, edge.output_nr) for edge in edges]))  # pyrefly: ignore[bad-argument-type]
        return alias


def reordered(model: StagedModel, x: Tensor) -> list[str]:
    """Regions with an input that others use too, and that they themselves use more than once."""
    listener = Aliases()
    with listening(listener):
        y = model(x, torch.arange(len(x)))
    assert listener.pairs
    uses: Counter[tuple[Any, int]] = Counter()
    nodes, seen = [y.grad_fn], {y.grad_fn}
    while nodes:
        for node, index in nodes.pop().next_functions:
            if node is not None:
                uses[node, index] += 1
                if node not in seen:
                    seen.add(node)
                    nodes.append(node)
    return [name for name, x, alias in listener.pairs if uses[x] > 1 and uses[alias] > 1]


@pytest.mark.parametrize(
    ("graph", "aggregator"),
    [
        ("window,grid,pattern", "max,edge,sage,gin"),
        ("knn,reuse,lookahead", "gin,maxmean,max,edge"),
        ("knn", "maxmean"),
    ],
)
def test_aliases_reorder_no_sum_of_vig(graph, aggregator):
    model = digits(graph=graph, aggregator=aggregator, drop_path_rate=0.5)
    assert reordered(model, torch.rand(2, 1, 8, 8)) == []


@pytest.mark.filterwarnings("ignore:images of .* give too few nodes")
def test_aliases_reorder_no_sum_of_the_study_and_of_a_pyramid():
    for graph in ("grid", "knn"):
        assert reordered(study(graph), torch.rand(2, 2, 4, 4)) == []
    model = create_model("pvig_cifar_ti", num_classes=3, img_size=(16, 16)).train()
    assert reordered(model, torch.rand(2, 3, 16, 16)) == []


def test_the_search_finds_a_sum_that_would_be_reordered():
    class Wrong(nn.Module):
        def forward(self, x: Tensor, keys: Tensor) -> Tensor:
            return region("wrong", lambda y: y * y.exp(), x) + x

    assert reordered(Wrong(), torch.rand(2, requires_grad=True) * 1) == ["wrong"]  # pyrefly: ignore[bad-argument-type]
