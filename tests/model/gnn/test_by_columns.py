"""A wide graph model that ranks share by columns gives what the model in one process gives."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hidden_sides import NoHiddenSides
from tests.model.gnn.graphs import from_dense, random_adjacency, random_layers
from tests.model.gnn.ranks import Threads, owned_by, whole_of
from tests.model.gnn.test_slicing import CLASSES, IN, WIDTH, build, every
from tests.threads import in_threads
from vigpipe.model.gnn.by_columns import ByColumns
from vigpipe.model.gnn.columns import WideShare
from vigpipe.model.norm import PooledStatistics, merge_moments
from vigpipe.ops.adjacency import Adjacency
from vigpipe.ops.sparse_rows import SparseRows

N = 40
norms = pytest.mark.parametrize("norm", ["none", "batch", "layer"])


def wide_model(name, aggregator, heads, norm, dtype=torch.float64, layers=3) -> Any:
    """No tensor is the same in all channels, as those are that begin with zeros or ones."""
    torch.manual_seed(0)
    model = build(name, aggregator, heads, norm, layers=layers).to(dtype).eval()
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
    """What each of some ranks gets, and the moments that it recorded."""
    slicing = model.slicing(partition_input)
    whole, owned = whole_of(model, slicing), [owned_by(model, slicing, num, k) for k in range(num)]
    stages = cut(model, num_stages)

    def work(columns):
        y, moments = x, {}
        with NoHiddenSides(WIDTH) if guard else nullcontext():
            for stage in stages:
                table = stage.slicing(partition_input)
                mine = {key: owned[columns.place][key] for key in table.sides if key in owned[0]}
                all_has = {key: whole[key] for key in table.sides if key in whole}
                part = ByColumns(stage, WideShare(table, mine, all_has, columns, chunk=7))
                y = part.forward(y, adjacency, estimate=estimate)
                if not stage.has_readout:
                    (length,) = stage.boundary_shape(stage.span[1])
                    assert y.shape[1] == length // num
                moments |= part.take_moments()
                assert not part.take_moments()
        return y, moments

    return in_threads(num, lambda meeting: work(Threads(meeting)))


def is_guarded(name, num):
    """In one process a share is all, and GCNII's [h | h_0] is as wide as h in two."""
    return num > 1 and (name, num) != ("gcn2", 2)


def every_kind(x):
    return x, sparse(x), InFiles(x, x.dtype), InFiles(sparse(x), x.dtype)


def check(model, name, adjacency, tolerance, kinds=lambda x: [x], **options):
    x = features(next(model.parameters()).dtype)
    with torch.no_grad():
        expected = model(x, adjacency=adjacency)
    for num in (1, 2, 4):
        guard = is_guarded(name, num)
        for given in kinds(x):
            results = run_by_columns(model, num, given, adjacency, guard=guard, **options)
            for y, _ in results:
                assert y.shape == (adjacency.num_targets, CLASSES)
                assert torch.equal(y, results[0][0])
                assert (y - expected).norm() <= tolerance * expected.norm()


@norms
@every
def test_results_are_those_of_the_wide_model(name, aggregator, heads, norm):
    model = wide_model(name, aggregator, heads, norm)
    check(model, name, random_adjacency(), 1e-10, kinds=every_kind)


@norms
@every
def test_results_of_two_stages_are_those_of_the_wide_model(name, aggregator, heads, norm):
    model = wide_model(name, aggregator, heads, norm)
    check(model, name, random_adjacency(), 1e-10, num_stages=2)


@norms
@every
def test_results_are_near_in_single_precision(name, aggregator, heads, norm):
    model = wide_model(name, aggregator, heads, norm, torch.float32)
    check(model, name, random_adjacency(), 1e-5)


@pytest.mark.parametrize("num_stages", [1, 2])
@every
def test_layers_may_have_edges_of_their_own(name, aggregator, heads, num_stages):
    model = wide_model(name, aggregator, heads, "batch")
    x, adjacency = features(), random_layers(N, 30, 18, 9)
    expected = model(x, adjacency=adjacency)
    for num in (2, 4):
        guard = is_guarded(name, num)
        results = run_by_columns(model, num, x, adjacency, num_stages=num_stages, guard=guard)
        for y, _ in results:
            torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layers", [1, 2])
@every
def test_the_input_may_be_divided(name, aggregator, heads, layers):
    model = wide_model(name, aggregator, heads, "none", layers=layers)
    check(model, name, random_adjacency(), 1e-10, kinds=every_kind, partition_input=True)


@every
def test_a_narrow_model_takes_its_columns_of_the_input(name, aggregator, heads):
    torch.manual_seed(0)
    model = build(name, aggregator, heads, in_channels=3).double().eval()
    for columns in (torch.tensor([0, 2, 5]), torch.tensor([1, 2, 3])):
        expected = model(features()[:, columns], adjacency=random_adjacency())
        model.input_channels = columns
        for x in every_kind(features()):
            if isinstance(x, InFiles):
                x.most = N  # which the mean of whole rows asks for
            some = {"x": torch.empty(N, 0), "features": x}
            y = model.by_layer(adjacency=random_adjacency(), chunk=7, **some)
            torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
            if not isinstance(x, InFiles):
                for _ in range(2):
                    y = model(adjacency=random_adjacency(), **some)
                    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        model.input_channels = None


def test_the_guard_sees_what_the_ranks_make():
    model = wide_model("gcn", None, 1, "none")
    with pytest.raises(AssertionError, match="makes a tensor with a hidden side"):
        run_by_columns(model, 1, features(), random_adjacency())


@every
def test_estimated_statistics_are_those_of_training(name, aggregator, heads):
    model = wide_model(name, aggregator, heads, "batch")
    batches = [random_adjacency(seed=seed) for seed in range(3)]
    trained = deepcopy(model).train()
    pooled = PooledStatistics([trained], len(batches))
    expected = [trained(features(), adjacency=adjacency).detach() for adjacency in batches]
    moments = pooled.take().split(pooled.sizes, 2)
    names = [key for key, norm in trained.named_modules() if norm in pooled.norms]
    slicing = model.slicing()
    for num in (1, 2, 4):
        shares: list[Any] = [
            run_by_columns(
                model, num, features(), adjacency, estimate=True, guard=is_guarded(name, num)
            )
            for adjacency in batches
        ]
        for rank in range(num):
            for batch, y in zip(shares, expected, strict=True):
                torch.testing.assert_close(batch[rank][0], y, rtol=1e-10, atol=1e-10)
                assert batch[rank][1].keys() == set(names)
            for key, of_batches in zip(names, moments, strict=True):
                own = torch.cat([batch[rank][1][key] for batch in shares])
                entries = slicing.owned_entries(f"{key}.weight", num, rank)
                torch.testing.assert_close(
                    merge_moments(own),
                    merge_moments(of_batches[:, :, entries]),
                    rtol=1e-10,
                    atol=1e-10,
                )


def test_edges_of_other_nodes_are_refused():
    model = build("gcn", None, 1).double()
    others: Adjacency = random_adjacency(41)
    with pytest.raises(ValueError, match="needs the edges of its 40 nodes"):
        run_by_columns(model, 2, features(), others)
