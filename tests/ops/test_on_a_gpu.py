"""What a GPU alone can show; `pytest -m gpu` runs it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.steps import state_after
from vigpipe.config.options import TrainConfig
from vigpipe.launch.device import allow_tf32, repeat_convolutions, weight_dtype
from vigpipe.ops import plain, self_check
from vigpipe.run.facts import prepare

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
CONFIG = TrainConfig(data="digits", batch_size=120, microbatches=2, epochs=1, cuda_graph=False)


@pytest.fixture(autouse=True)
def exact():
    repeat_convolutions()
    allow_tf32(False)


def trained(**options):
    config = replace(CONFIG, **options)
    return state_after(prepare(config, weight_dtype(config.dtype)), GPU)[1]


@pytest.mark.parametrize("name", ["knn", "aggregate", "csr"])
def test_the_kernels_compute_what_plain_torch_does(name):
    assert self_check.problem(name, GPU) == ""


@pytest.mark.parametrize(("n", "m"), [(196, None), (784, 49)])
@pytest.mark.parametrize("mode", ["max", "max_mean"])
def test_gradients_have_the_same_bits_in_every_run(n, m, mode):
    from vigpipe.ops import gpu

    draw = torch.Generator(GPU).manual_seed(0)
    x = torch.randn(64, n, 192, device=GPU, generator=draw)
    y = None if m is None else torch.randn(64, m, 192, device=GPU, generator=draw)
    graph = gpu.knn(x, y, None, 9, 1, True)
    out, winners = gpu.aggregate(x, y, graph, None, mode, False, True)
    grad = torch.randn(out.shape, device=GPU, generator=draw)
    runs: list[Any] = [
        gpu.aggregate_backward(grad, x, y, graph, winners, None, mode, False) for _ in range(5)
    ]
    wide = [None if t is None else t.double().requires_grad_() for t in (x, y)]
    plain.aggregate(wide[0], wide[1], graph, None, mode, False).backward(grad.double())
    for i, tensor in enumerate(wide):
        if tensor is not None:
            assert all(torch.equal(run[i], runs[0][i]) for run in runs)
            torch.testing.assert_close(runs[0][i].double(), tensor.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recorded_run_has_the_bits_of_one_that_is_not(dtype):
    """Weights, moments and statistics after an epoch, whose last batch is a smaller one."""
    state = trained(dtype=dtype)
    for other in (trained(dtype=dtype), trained(dtype=dtype, cuda_graph=None)):
        assert all(torch.equal(tensor, state[name]) for name, tensor in other.items())
