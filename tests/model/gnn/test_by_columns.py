"""A wide graph model that ranks share by columns gives what the model in one process gives."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hidden_sides import NoHiddenSides
from tests.model.gnn.graphs import from_dense, random_adjacency, random_layers
from tests.model.gnn.ranks import Threads, owned_by, whole_of
from tests.model.gnn.test_slicing import CLASSES, IN, KINDS, WIDTH, build
from tests.threads import in_threads
from vigpipe.model.gnn.by_columns import ByColumns
from vigpipe.model.gnn.columns import WideShare
from vigpipe.model.norm import PooledStatistics, merge_stats
from vigpipe.ops.sparse_rows import SparseRows

N = 40
DTYPES = {"double": (torch.float64, 1e-10), "float": (torch.float32, 1e-5)}

# Kind, layers, stages, norm, ranks, dtype, features, whether the input is divided, and whether each
# layer has edges of its own: every pair of values that can be.
CASES = [
    ("gcn", 3, 1, "batch", 1, "double", "dense", False, False),
    ("gcn", 1, 1, "none", 2, "double", "sparse in files", True, False),
    ("gcn", 2, 1, "layer", 2, "float", "in files", True, False),
    ("gcn", 3, 1, "layer", 4, "float", "sparse", False, False),
    ("gcn", 3, 2, "batch", 4, "float", "dense", False, True),
    ("mean", 1, 1, "none", 2, "float", "in files", True, False),
    ("mean", 2, 1, "none", 4, "double", "sparse", True, False),
    ("mean", 3, 1, "batch", 2, "float", "sparse in files", False, False),
    ("mean", 3, 2, "layer", 2, "double", "dense", True, True),
    ("max", 1, 1, "none", 2, "double", "dense", True, False),
    ("max", 2, 1, "none", 2, "float", "sparse in files", False, False),
    ("max", 3, 1, "batch", 2, "float", "in files", False, False),
    ("max", 3, 2, "layer", 4, "double", "sparse", True, True),
    ("pool", 1, 1, "none", 4, "float", "in files", False, False),
    ("pool", 2, 1, "layer", 2, "double", "sparse in files", False, False),
    ("pool", 3, 1, "none", 4, "float", "dense", True, True),
    ("pool", 3, 2, "batch", 4, "float", "sparse", True, True),
    ("gat", 1, 1, "none", 2, "double", "dense", False, False),
    ("gat", 2, 1, "none", 2, "double", "sparse in files", True, False),
    ("gat", 3, 1, "batch", 4, "double", "sparse", False, True),
    ("gat", 3, 2, "layer", 2, "float", "in files", True, False),
    ("gat of 2", 1, 1, "none", 2, "double", "sparse", True, False),
    ("gat of 2", 2, 1, "batch", 2, "double", "in files", True, False),
    ("gat of 2", 3, 1, "layer", 4, "double", "dense", True, True),
    ("gat of 2", 3, 2, "none", 4, "float", "sparse in files", False, False),
    ("gatv2 of 2", 1, 1, "none", 4, "double", "sparse", False, False),
    ("gatv2 of 2", 2, 1, "batch", 4, "float", "sparse in files", True, False),
    ("gatv2 of 2", 3, 1, "layer", 2, "double", "dense", False, True),
    ("gatv2 of 2", 3, 2, "none", 4, "float", "in files", False, False),
    ("gin", 1, 1, "none", 4, "float", "in files", False, False),
    ("gin", 2, 1, "layer", 2, "double", "dense", True, False),
    ("gin", 3, 1, "batch", 2, "float", "sparse", False, True),
    ("gin", 3, 2, "batch", 4, "float", "sparse in files", False, False),
    ("gcn2", 1, 1, "batch", 2, "double", "in files", True, False),
    ("gcn2", 1, 1, "layer", 4, "float", "sparse in files", False, False),
    ("gcn2", 2, 1, "batch", 2, "double", "dense", False, False),
    ("gcn2", 3, 1, "none", 2, "double", "dense", True, False),
    ("gcn2", 3, 2, "batch", 4, "float", "sparse", False, True),
]


def wide_model(kind, norm, dtype=torch.float64, layers=3) -> Any:
    """No tensor is the same in all channels, as those are that begin with zeros or ones."""
    torch.manual_seed(0)
    model = build(kind, norm, layers=layers).to(dtype).eval()
    for key, tensor in model.state_dict().items():
        if key.endswith(("bias", "running_mean", "eps")):
            tensor.normal_(0, 0.2)
        elif ".norm." in key and tensor.dim():
            tensor.uniform_(0.5, 1.5)
    return model


def features(dtype=torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, IN, generator=generator, dtype=dtype)
    return x * (torch.rand(N, IN, generator=generator) < 0.3)


def sparse(x: Tensor) -> SparseRows:
    places = from_dense(x != 0)
    return SparseRows(places, x[places.targets, places.indices])


@dataclass
class InFiles:
    """Features of which some rows can be had at a time."""

    x: Tensor | SparseRows
    dtype: torch.dtype
    device: str = "cpu"
    most: int = 7

    def __len__(self) -> int:
        return len(self.x)

    @property
    def shape(self):
        return self.x.shape

    def part(self, start, end):
        assert end - start <= self.most
        return self.x[start:end] if isinstance(self.x, Tensor) else self.x.part(start, end)


def cut(model: Any, num_stages: int) -> list[Any]:
    """Stages without tensors, which have one layer each but the first."""
    stages, num_layers = [], model.num_layers
    for i in range(num_stages):
        stage = deepcopy(model).to("meta")
        first = num_layers - num_stages + i if i else 0
        last = num_layers - num_stages + i + 1
        stage.keep(range(first, last), i == 0, i == num_stages - 1)
        stages.append(stage)
    return stages


def run_by_columns(
    model, num, x, adjacency, *, num_stages=1, partition_input=False, estimate=False, guard=True
) -> list[Any]:
    """What each of some ranks gets, and the statistics that it recorded."""
    slicing = model.slicing(partition_input)
    whole, owned = whole_of(model, slicing), [owned_by(model, slicing, num, k) for k in range(num)]
    stages = cut(model, num_stages)

    def work(columns):
        y, stats = x, {}
        with NoHiddenSides(WIDTH) if guard else nullcontext():
            for stage in stages:
                table = stage.slicing(partition_input)
                mine = {key: owned[columns.rank][key] for key in table.sides if key in owned[0]}
                all_has = {key: whole[key] for key in table.sides if key in whole}
                part = ByColumns(stage, WideShare(table, mine, all_has, columns, chunk=7))
                y = part.forward(y, adjacency, estimate=estimate)
                if not stage.has_readout:
                    ((length,),) = stage.boundary_shapes(stage.span[1])
                    assert y.shape[1] == length // num
                stats |= part.take_stats()
                assert not part.take_stats()
        return y, stats

    return in_threads(num, lambda meeting: work(Threads(meeting)))


def is_guarded(kind, num):
    """In one process a share is all, and GCNII's [h | h_0] is as wide as h in two."""
    return num > 1 and (kind, num) != ("gcn2", 2)


def given(x) -> dict[str, Any]:
    return {
        "dense": x,
        "sparse": sparse(x),
        "in files": InFiles(x, x.dtype),
        "sparse in files": InFiles(sparse(x), x.dtype),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_results_are_those_of_the_wide_model(case):
    kind, layers, num_stages, norm, num, dtype, form, partition_input, own_edges = case
    dtype, tolerance = DTYPES[dtype]
    model, x = wide_model(kind, norm, dtype, layers), features(dtype)
    adjacency: Any = random_layers(N, 30, 18, 9) if own_edges else random_adjacency()
    with torch.no_grad():
        expected = model(x, adjacency=adjacency)
    guard = is_guarded(kind, num)
    options = {"num_stages": num_stages, "partition_input": partition_input, "guard": guard}
    results = run_by_columns(model, num, given(x)[form], adjacency, **options)
    for y, _ in results:
        assert y.shape == (adjacency.num_targets, CLASSES)
        assert torch.equal(y, results[0][0])
        assert (y - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_narrow_model_takes_its_columns_of_the_input(kind):
    torch.manual_seed(0)
    model = build(kind, in_channels=3).double().eval()
    columns = torch.tensor([0, 2, 5])
    expected = model(features()[:, columns], adjacency=random_adjacency())
    model.input_channels = columns
    for x in given(features()).values():
        if isinstance(x, InFiles):
            x.most = N  # which the mean of whole rows asks for
        some = {"x": torch.empty(N, 0), "features": x}
        results = [model.by_layer(adjacency=random_adjacency(), chunk=7, **some)]
        if not isinstance(x, InFiles):
            results += [model(adjacency=random_adjacency(), **some) for _ in range(2)]
        for y in results:
            torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_the_guard_sees_what_the_ranks_make():
    model = wide_model("gcn", "none")
    with pytest.raises(AssertionError, match="makes a tensor with a hidden side"):
        run_by_columns(model, 1, features(), random_adjacency())


NUMS = dict(zip(KINDS, (1, 2, 4, 4, 2, 2, 4, 4, 2), strict=True))


@pytest.mark.parametrize(("kind", "num"), NUMS.items())
def test_estimated_statistics_are_those_of_training(kind, num):
    model = wide_model(kind, "batch")
    batches = [random_adjacency(seed=seed) for seed in range(2)]
    trained = deepcopy(model).train()
    pooled = PooledStatistics([trained], len(batches))
    expected = [trained(features(), adjacency=adjacency).detach() for adjacency in batches]
    stats = pooled.take().split(pooled.sizes, 2)
    names = [key for key, norm in trained.named_modules() if norm in pooled.norms]
    slicing, options = model.slicing(), {"estimate": True, "guard": is_guarded(kind, num)}
    shares: list[Any] = [
        run_by_columns(model, num, features(), adjacency, **options) for adjacency in batches
    ]
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    for rank in range(num):
        for batch, y in zip(shares, expected, strict=True):
            close(batch[rank][0], y)
            assert batch[rank][1].keys() == set(names)
        for key, of_batches in zip(names, stats, strict=True):
            own = torch.cat([batch[rank][1][key] for batch in shares])
            entries = slicing.owned_entries(f"{key}.weight", num, rank)
            close(merge_stats(own), merge_stats(of_batches[:, :, entries]))


def test_edges_of_other_nodes_are_refused():
    with pytest.raises(ValueError, match="needs the edges of its 40 nodes"):
        run_by_columns(build("gcn").double(), 2, features(), random_adjacency(41))
