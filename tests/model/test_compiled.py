"""Blocks through torch.compile: one whole graph each, with the fused operators in it."""

import copy
import os
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._subclasses import FakeTensorMode

from vigpipe.errors import InputError
from vigpipe.model.blocks import VigShape
from vigpipe.model.compiled import compile_blocks
from vigpipe.model.norm import PooledStatistics
from vigpipe.model.vig import VisionGnn

# Dynamo reads gradients of tensors that are no leaves, and hides its warnings of that from people.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

NUM_BLOCKS = 2
SHAPE = VigShape(
    (NUM_BLOCKS,), (16,), k=(2, 4), max_dilation=2, stem=(2, 1), stem_stride=1, img_size=(6, 6)
)


@pytest.fixture(autouse=True)
def _no_other_graphs():
    """A limit of one graph for a function shows that `compile_blocks` raises it."""
    torch._dynamo.reset()
    limits = {"recompile_limit": 1, "accumulated_recompile_limit": 1}
    with torch._dynamo.config.patch({**limits, "fail_on_recompile_limit_hit": False}):
        yield
    torch._dynamo.reset()


def model_of_blocks():
    torch.manual_seed(0)
    return VisionGnn(SHAPE, num_classes=3)


def compiled(model, backend):
    """Compile the blocks; a break in a graph, or a graph too many, is an error."""
    counter = CompileCounterWithBackend(backend)
    compile_blocks(model, backend=counter, fullgraph=True)
    return counter


def assert_one_graph_each(counter):
    assert counter.frame_count == NUM_BLOCKS
    for graph in counter.graphs:
        called = [str(node.target) for node in graph.graph.nodes]
        assert called.count("vigpipe.knn") == called.count("vigpipe.aggregate") == 1


@pytest.mark.parametrize("is_training", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_a_compiled_block_is_one_graph_with_the_same_results(is_training):
    eager = model_of_blocks().train(is_training)
    model = copy.deepcopy(eager)
    counter = compiled(model, "aot_eager")
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):  # the second batch needs no other graphs
        images = torch.randn(4, 3, 6, 6, generator=draw)
        keys = torch.arange(4) if is_training else None
        outputs = [m(images, keys) for m in (eager, model)]
        torch.testing.assert_close(outputs[1], outputs[0])
        for output in outputs:
            output.square().sum().backward()
    assert_one_graph_each(counter)
    for got, want in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    for got, want in zip(model.buffers(), eager.buffers(), strict=True):  # running statistics
        torch.testing.assert_close(got, want)


@pytest.mark.heavy
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch knows no CUDA")
def test_on_a_gpu_it_is_one_graph_too():
    model = model_of_blocks()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cuda").train()
        counter = compiled(model, "eager")  # others would start the GPU for the backward
        for _ in range(2):
            images = torch.empty(4, 3, 6, 6, device="cuda")
            keys = torch.empty(4, dtype=torch.int64, device="cuda")
            assert model(images, keys).is_cuda
    assert_one_graph_each(counter)


@pytest.mark.heavy
def test_micro_batches_share_the_graphs_and_their_statistics_are_kept():
    """Moments were appended to a list, whose length made a graph anew for every micro-batch."""
    eager = VisionGnn(SHAPE, num_classes=3, drop_path_rate=0.5)
    model = copy.deepcopy(eager)
    pools = [PooledStatistics([m], num_microbatches=3) for m in (eager, model)]
    counter = compiled(model, "aot_eager")
    draw = torch.Generator().manual_seed(0)
    for _ in range(2):  # steps
        for images in torch.randn(12, 3, 6, 6, generator=draw).split(4):
            for m in (eager, model):
                m(images, torch.arange(4)).sum().backward()
        for pool in pools:
            pool.update(pool.take())
    assert_one_graph_each(counter)
    for got, want in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(got, want)
    assert all(norm.running_mean.any() for norm in pools[1].norms)


def test_equal_blocks_share_a_graph():
    equal = replace(SHAPE, blocks=(4,), k=(3, 3), max_dilation=1)
    model = VisionGnn(equal, num_classes=3).train()
    counter = compiled(model, "eager")
    model(torch.randn(2, 3, 6, 6), torch.arange(2))
    assert counter.frame_count == 1


@torch.no_grad()
def test_a_block_that_would_run_uncompiled_is_an_error(monkeypatch):
    """torch warned at its limit, and blocks 10 and 11 of vig_ti_224 ran eagerly."""
    monkeypatch.setattr("vigpipe.model.compiled._GRAPHS_PER_BLOCK", 2)
    model = model_of_blocks().eval()
    compiled(model, "eager")
    for size in (1, 2):  # two blocks have four graphs
        model(torch.zeros(size, 3, 6, 6))
    with pytest.raises(InputError, match=r"--compile: block 0 needs another graph.*the 4 that"):
        model(torch.zeros(3, 3, 6, 6))


def test_what_torch_compiles_is_kept_where_later_jobs_find_it(tmp_path, monkeypatch):
    monkeypatch.setenv("VIGPIPE_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as torch does
    compiled(model_of_blocks(), "eager")
    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert folder.startswith(f"{tmp_path}/inductor-")
    monkeypatch.setenv("VIGPIPE_CACHE", "elsewhere")
    compiled(model_of_blocks(), "eager")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == folder  # of the user, from here on
