"""Models through torch.compile, torch.export and ONNX: the same logits.

Three models go through: a pyramid of six blocks with every policy and every aggregator, one block
or two like those of `vig_digits`, and one with gates and attention. What takes the time is the
tracing of blocks.
"""

import logging
from dataclasses import replace

import pytest
import torch

from vigpipe.model.blocks import VigShape
from vigpipe.model.mobile import MobileGnn, MobileShape
from vigpipe.model.norm import BatchNorm
from vigpipe.model.vig import VisionGnn

PYRAMID = VigShape(
    blocks=(3, 3), channels=(16, 24), k=(9, 9), max_dilation=2, reductions=(2, 1),
    relative=True, stem=(2, 1), stem_stride=2, img_size=(32, 24),
)  # fmt: skip
SMALL = VigShape(
    blocks=(2,), channels=(16,), stem=(1,), stem_stride=1, img_size=(8, 8), max_dilation=2
)
POLICIES = "knn,lookahead,reuse,window,pattern,grid"
AGGREGATORS = "max,edge,sage,gin,maxmean,max"
# Logits are of the order of 1. Another order of the same float32 sums moves them by some 1e-6.
# Where two nodes are equally near up to such rounding, the other one may be chosen: that moves one
# image's logits by some 1e-2, as pixels that were changed by 1e-6 did in eager mode.
TOLERANCE, NEAR_TIE = 1e-4, 0.1


def images(model, num, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((num, model.in_chans, *model.img_size), generator=generator)


def settled(model):
    """The model in eval mode with running statistics that fit, so that logits are of order 1."""
    for norm in model.modules():
        if isinstance(norm, BatchNorm):
            norm.momentum = 1.0
    with torch.no_grad():
        model.train()(images(model, 8, seed=1), torch.arange(8))
    return model.eval()


def pyramid():
    torch.manual_seed(0)
    return settled(
        VisionGnn(
            PYRAMID, 5, graph=POLICIES, aggregator=AGGREGATORS, norm="group", compat="reference"
        )
    )


def isotropic(num_blocks=2):
    torch.manual_seed(0)
    return settled(VisionGnn(replace(SMALL, blocks=(num_blocks,)), 5))


def mobile():
    torch.manual_seed(0)
    shape = MobileShape("adaptvig", ((1, 1), (0, 1)), (8, 16), 32, (2, 1), img_size=(32, 24))
    return settled(MobileGnn(shape, 5))


def greedy():
    torch.manual_seed(0)
    shape = MobileShape("greedyvig", ((0, 1), (1, 1)), (8, 16), 32, (2, 1), img_size=(32, 24))
    return settled(MobileGnn(shape, 5))


def assert_same(run, model, *nums):
    """`run` gives the model's logits for batches of these sizes."""
    for num in nums:
        x = images(model, num)
        with torch.no_grad():
            expected = model(x)
            found = run(x)
            assert found.shape == expected.shape
            gaps = (found - expected).abs().amax(1)  # (B,)
            assert (gaps > TOLERANCE).sum() <= num // 4, gaps
            assert gaps.max() < NEAR_TIE
            # The comparison says something: other images have other logits, of the order of 1.
            assert ((run(x.flip(-1)) - expected).abs().amax(1) > NEAR_TIE).all()
            assert 0.1 < expected.std() < 10


# ---- torch.compile -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch.compiler.reset()


@pytest.mark.heavy
@pytest.mark.parametrize("make", [lambda: isotropic(1), mobile], ids=["isotropic", "mobile"])
def test_compiled_by_inductor(make):
    model = make()
    assert_same(torch.compile(model, fullgraph=True), model, 4)


# ---- torch.export and ONNX ---------------------------------------------------------------------

ANY_BATCH = ({0: torch.export.Dim.DYNAMIC},)


def export(model):
    return torch.export.export(model, (images(model, 2),), dynamic_shapes=ANY_BATCH)


@pytest.mark.heavy
@pytest.mark.oldest
def test_every_policy_and_aggregator_is_exported_for_batches_of_any_size():
    model = pyramid()
    assert_same(export(model).module(), model, 4, 7)


# torch.export.load of torch 2.11 makes tensors of read-only bytes; later torch does not.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_a_program_exported_for_batches_of_any_size_is_saved_and_loaded(tmp_path):
    model = isotropic()
    program = export(model)
    torch.export.save(program, tmp_path / "model.pt2")
    assert_same(torch.export.load(tmp_path / "model.pt2").module(), model, 4, 7)


# torch 2.11's own code, in a copy of an exported program; later torch does without.
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.heavy
@pytest.mark.parametrize(
    "make", [pyramid, pytest.param(isotropic, marks=pytest.mark.oldest), mobile, greedy]
)
def test_onnx_for_batches_of_any_size(make, tmp_path):
    """In onnxruntime, after a way through a file."""
    onnxruntime = pytest.importorskip("onnxruntime")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    model = make()
    program = torch.onnx.export(
        model, (images(model, 2),), dynamo=True, dynamic_shapes=ANY_BATCH, verbose=False
    )
    assert program is not None
    file = tmp_path / "model.onnx"
    program.save(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert_same(
        lambda x: torch.from_numpy(session.run(None, {given.name: x.numpy()})[0]), model, 1, 4, 7
    )
