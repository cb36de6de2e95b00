"""The fused operators as torch sees them: checks of torch's own, compilers, exporters, counters."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.ops.called import QUICK
from vigpipe import ops


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert all(version.startswith("C++") for version in ops.versions("cpu").values())


def features(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).requires_grad_()


# The check itself reads gradients of copies that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_finds_nothing_wrong_with_them():
    x, y = features(2, 10, 16), features(2, 6, 16)
    graph = torch.randint(6, (2, 10, 4), generator=torch.Generator().manual_seed(1))
    calls = {  # the first of each is compiled, too
        "knn": [(x.detach(), y.detach(), None, 3, 2, True), (x.detach(), None, None, 3, 1, False)],
        "aggregate": [
            (x, None, graph, None, "max_mean", False, True),
            (x, y, graph, None, "max", True, True),
            (None, y, graph, torch.rand(2, 10, 4, requires_grad=True), "sum", False, True),
        ],
        "norm": [
            (x, features(16), features(16), None, None, 1e-5, True, None),
            (
                *(x, features(16), features(16), features(2, 10, 16), torch.rand(2), 1e-5, False),
                features(16),
            ),
        ],
        "axial": [
            (features(2, 5, 4, 16), SOFT, 1, None, torch.tensor(3.0, requires_grad=True)),
            (features(2, 5, 4, 16), [1, 2, 1], 1, torch.rand(2), None),
        ],
        "axial_far": [(features(2, 5, 4, 16).detach(),)],
        "grouped": [(features(20, 8), features(12, 2), 4)],
        "hidden": [(features(40, 3), features(3, 32), features(32), features(3, 32))],
    }
    for name, (first, *others) in calls.items():
        operator = getattr(torch.ops.vigpipe, name).default
        torch.library.opcheck(operator, first)
        for arguments in others:
            torch.library.opcheck(operator, arguments, test_utils=QUICK)


SOFT = [0, 1, 0, 1, -2, 0, 1, 2, 1, 0, 0, 1]  # links: axis, shift, gated


def both(x):
    graph = ops.knn(x, None, None, 4, 2)
    return graph, ops.aggregate(x, None, graph)


def test_compile_keeps_them_in_one_graph():
    x = features(2, 12, 16)
    graph, found = torch.compile(both, backend="eager", fullgraph=True)(x)
    expected = both(x)
    assert torch.equal(graph, expected[0])
    assert torch.equal(found, expected[1])


def test_an_exported_program_calls_them():
    class Both(torch.nn.Module):
        def forward(self, x):
            return both(x)

    program = torch.export.export(Both(), (features(2, 12, 16).detach(),))
    called = {str(node.target) for node in program.graph.nodes}
    assert {"vigpipe.knn.default", "vigpipe.aggregate.default"} <= called
    x = torch.randn(2, 12, 16)
    assert torch.equal(program.module()(x)[0], both(x)[0])


def test_flops_are_those_of_the_matrix_products():
    with FlopCounterMode(display=False) as counter:
        ops.knn(torch.zeros(2, 12, 16), torch.zeros(2, 6, 16), None, 2)
    assert counter.get_total_flops() == 2 * 2 * 12 * 6 * 16
    inputs = features(40, 3), features(3, 32), features(32), features(3, 32)
    with FlopCounterMode(display=False) as counter:
        ops.hidden(*inputs).sum().backward()
    forward, recomputed, d_x, d_first, d_out = 6, 3, 3, 3, 6
    expected = forward + recomputed + d_x + d_first + d_out
    assert counter.get_total_flops() == 2 * 40 * 32 * expected


def test_on_the_meta_device_nothing_is_computed():
    x = torch.zeros(2, 12, 16, device="meta")
    graph, found = both(x)
    assert graph.shape == (2, 12, 4)
    assert found.shape == x.shape
    assert found.is_meta
