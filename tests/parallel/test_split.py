"""The stages of a model are together exactly the model, and padding enters none of them."""

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from vigpipe.config.choices import NORMS
from vigpipe.model.blocks import VigShape
from vigpipe.model.keyed_dropout import PADDING, sample_keys
from vigpipe.model.variants import create_model
from vigpipe.model.vig import VisionGnn
from vigpipe.parallel.plan import Plan, even_plan
from vigpipe.parallel.split import StageModule, cut_stages

PYRAMID = VigShape(
    (2, 3), (8, 16), k=(3, 3), reductions=(2, 1), relative=True, stem=(2, 1, 1), stem_stride=4
)
# "patches" is a vig_ti_224 with fewer and narrower blocks, "pyramid" a pvig_ti_224; the others of
# these hand graphs on, some of them over a boundary, whatever the number of stages.
SHAPES = {
    "patches": (VigShape((4,), (16,), k=(3, 5)), {}),
    "pyramid": (PYRAMID, {"stochastic_dilation": 0.5}),
    "reuse": (VigShape((4,), (16,), k=(3, 5)), {"graph": "knn,reuse", "aggregator": "edge,gin"}),
    "lookahead": (VigShape((4,), (16,), k=(3, 5)), {"graph": "lookahead", "aggregator": "sage"}),
    "mixed": (PYRAMID, {"graph": "window,reuse,grid,pattern,lookahead", "aggregator": "maxmean"}),
}
# C, H, W
SIZES = {"vig_digits": (1, 8, 8), "vig_study": (3, 5, 4)}
SIZES |= {
    name: (3, 32, 80) if len(shape.blocks) == 1 else (3, 24, 40)
    for name, (shape, _) in SHAPES.items()
}
ROWS = 4
models = pytest.mark.parametrize("name", list(SIZES))


def builder(name, norm="batch", dtype=torch.float64, drop=0.3):
    def build():
        torch.manual_seed(0)
        channels, *size = SIZES[name]
        options = {"in_chans": channels, "img_size": tuple(size), "norm": norm}
        options |= {"num_classes": 10, "drop_path_rate": drop, "drop_rate": drop}
        if name in SHAPES:
            shape, more = SHAPES[name]
            return VisionGnn(shape, **options, **more).to(dtype)
        return create_model(name, **options).to(dtype)

    return build


def num_blocks(name):
    with torch.device("meta"):
        return len(builder(name)().numbered_blocks)


def wrapped(model, name, dtype=torch.float64, microbatch_size=ROWS, lowered=None) -> Any:
    return StageModule(model, microbatch_size, SIZES[name], dtype, lowered)


def parts_of(name, num_stages, **options):
    plan = even_plan(num_blocks(name), num_stages)
    models = cut_stages(builder(name, **options), plan, tuple(range(num_stages)))
    return [wrapped(model, name) for model in models]


def images_of(name, microbatch_size=ROWS):
    generator = torch.Generator().manual_seed(1)
    return torch.rand(microbatch_size, *SIZES[name], generator=generator, dtype=torch.float64)


def keys_of(num_samples, microbatch_size=ROWS):
    keys = torch.full((microbatch_size,), PADDING)
    keys[:num_samples] = sample_keys(0, 0, torch.arange(num_samples))
    return keys


def run_stage(stage_module, x, keys):
    """Run a stage on the only micro-batch of a step, whose padding has negative keys."""
    draws = stage_module.model.draw(keys, stage_module.dtype)
    stage_module.begin((int((keys >= 0).sum()),), draws)
    return stage_module(x)


def run_chain(stage_modules, images, keys):
    """Run forward through the stages and back; messages are copied, as a receiver has them.

    Returns:
        output, and gradients by parameter name.
    """
    inputs, outputs = [images], []
    for stage_module in stage_modules:
        outputs.append(run_stage(stage_module, inputs[-1], keys))
        received = torch.empty(stage_module.output_shape, dtype=torch.float64)
        inputs.append(received.copy_(outputs[-1].detach()).requires_grad_())
    generator = torch.Generator().manual_seed(2)
    gradient = torch.randn(outputs[-1].shape, generator=generator, dtype=torch.float64)
    for output, received in zip(reversed(outputs), reversed(inputs[:-1]), strict=True):
        output.backward(gradient)
        gradient = received.grad
    named = (
        pair for stage_module in stage_modules for pair in stage_module.model.named_parameters()
    )
    return outputs[-1].detach(), {name: parameter.grad for name, parameter in named}


def assert_equal(ones, others):
    assert ones.keys() == others.keys()
    for name, value in ones.items():
        assert torch.equal(value, others[name]), name


# ---- the cut --------------------------------------------------------------------------------


def test_parts_together_have_exactly_the_unsplit_keys():
    with torch.device("meta"):
        build = builder("vig_study")
        expected = list(build().state_dict())
        for plan in (Plan(((0,), (1, 2, 3, 4), (5, 6), (7,))), even_plan(8, 8)):
            parts = cut_stages(build, plan, tuple(range(plan.num_stages)))
            assert [key for part in parts for key in part.state_dict()] == expected


def test_a_rank_builds_the_parts_it_is_asked_for():
    plan = even_plan(8, 4)
    first, last = cut_stages(builder("vig_study"), plan, (1, 3))
    assert list(first.numbered_blocks) == ["2", "3"]
    assert list(last.numbered_blocks) == ["6", "7"]
    assert (first.has_stem, first.has_readout) == (False, False)
    assert (last.has_stem, last.has_readout) == (False, True)
    addresses = [
        {p.data_ptr() for p in stage_module.parameters()} for stage_module in (first, last)
    ]
    assert not addresses[0] & addresses[1]


def state_of(stage_modules):
    """Weights and buffers of all stages."""
    states = [stage_module.model.state_dict() for stage_module in stage_modules]
    return {name: value.clone() for state in states for name, value in state.items()}


@cache
def whole(name):
    """The unsplit model's state, what a step of it gives, and its state after that."""
    part = parts_of(name, 1)
    return state_of(part), run_chain(part, images_of(name), keys_of(ROWS)), state_of(part)


# All pairs of a model, a number of stages, and whether their forwards are computed twice.
CUTS = [
    *(("vig_digits", 3, False), ("vig_digits", 4, True)),
    *(("vig_study", 4, False), ("vig_study", 3, True)),
    *(("patches", 3, False), ("patches", 4, True)),
    *(("pyramid", 4, False), ("pyramid", 3, True)),
    *(("reuse", 3, False), ("reuse", 4, True)),
    *(("lookahead", 4, False), ("lookahead", 3, True)),
    *(("mixed", 3, False), ("mixed", 4, True)),
]


@pytest.mark.parametrize(("name", "num_stages", "is_recomputed"), CUTS)
def test_parts_in_a_row_equal_the_whole_bit_for_bit(name, num_stages, is_recomputed):
    """Results, gradients and statistics; a graph that was chosen twice could differ."""
    before, expected, after = whole(name)
    stage_modules = parts_of(name, num_stages)
    assert_equal(state_of(stage_modules), before)
    assert stage_modules[0].input_shape == (ROWS, *SIZES[name])
    for one, other in pairwise(stage_modules):
        assert one.output_shape == other.input_shape
    assert stage_modules[-1].output_shape == (ROWS, 10)
    for stage_module in stage_modules:
        stage_module.num_recomputed = int(is_recomputed)
    output, gradients = run_chain(stage_modules, images_of(name), keys_of(ROWS))
    assert torch.equal(output, expected[0])
    assert_equal(gradients, expected[1])
    assert_equal(state_of(stage_modules), after)


def test_only_the_first_micro_batches_are_recomputed():
    (stage_module,) = parts_of("vig_digits", 1)
    stage_module.num_recomputed = 2
    for _ in range(2):  # steps
        stage_module.begin(
            (ROWS,) * 3, stage_module.model.draw(keys_of(3 * ROWS, 3 * ROWS), torch.float64)
        )
        recomputed = []
        for _ in range(3):
            stage_module(images_of("vig_digits"))
            recomputed.append(stage_module.model.recompute)
        assert recomputed == [True, True, False]


# A later block needs the graph in "reuse" and "lookahead", so it crosses; K more channels.
@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("patches", [16, 16, 16]),
        ("reuse", [16 + 3, 16, 16 + 4]),
        ("lookahead", [16 + 3, 16 + 3, 16 + 4]),
    ],
)
def test_indices_cross_only_where_a_policy_needs_them(name, channels):
    stage_modules = parts_of(name, 4)
    assert [stage_module.output_shape[-1] for stage_module in stage_modules[:-1]] == channels


# ---- shapes, strides, dtypes ----------------------------------------------------------------


@models
def test_a_boundary_has_the_declared_shape_however_many_samples(name):
    """And is contiguous, for gloo sends nothing else; torch 2.11 compares strides, too.

    The result of no samples was an expanded scalar once.
    """
    stage_modules = parts_of(name, 2)
    for num_samples in (0, 1, ROWS):
        x, keys = images_of(name), keys_of(num_samples)
        for stage_module in stage_modules:
            x = run_stage(stage_module, x, keys)
            assert x.shape == stage_module.output_shape
            assert x.is_contiguous()


def test_autocast_narrows_what_is_inside_and_not_what_crosses():
    model = builder("vig_study", "layer", torch.float32)().eval()
    images = images_of("vig_study").float()
    narrow, wide = (
        run_stage(
            wrapped(model, "vig_study", torch.float32, lowered=lowered), images, keys_of(ROWS)
        )
        for lowered in (torch.bfloat16, None)
    )
    assert narrow.dtype == wide.dtype == torch.float32
    difference = (narrow - wide).abs().max() / wide.abs().max()
    assert 0 < difference < 0.1  # bfloat16 has 8 bits, and there are 8 blocks


# ---- padding --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "norm"),
    [(name, "batch") for name in SIZES] + [("vig_digits", norm) for norm in NORMS[1:]],
)
def test_padding_rows_change_nothing(name, norm):
    """Outputs, gradients and statistics are those of the samples alone, to the last bit."""
    padded, alone = (builder(name, norm)() for _ in range(2))
    images = images_of(name)
    images[2:] = torch.nan  # whatever a buffer holds
    output = run_stage(wrapped(padded, name), images, keys_of(2))
    expected = run_stage(
        wrapped(alone, name, microbatch_size=2), images[:2], keys_of(2, microbatch_size=2)
    )
    assert torch.equal(output, torch.cat((expected, torch.zeros(2, 10, dtype=torch.float64))))
    output[:2].square().sum().backward()
    expected.square().sum().backward()
    gradients = [{n: p.grad for n, p in m.named_parameters()} for m in (padded, alone)]
    assert_equal(*gradients)
    assert_equal(padded.state_dict(), alone.state_dict())


@models
def test_padding_rows_get_a_gradient_of_zero(name):
    _, stage_module = parts_of(name, 2)
    x = torch.rand(stage_module.input_shape, dtype=torch.float64, requires_grad=True)
    run_stage(stage_module, x, keys_of(2)).square().sum().backward()
    assert x.grad is not None
    assert x.grad[:2].any()
    assert not x.grad[2:].any()


@models
def test_a_micro_batch_of_padding_gives_zeros_and_gradients_of_zero(name):
    for stage_module in parts_of(name, 2):
        before = state_of([stage_module])
        x = torch.rand(stage_module.input_shape, dtype=torch.float64, requires_grad=True)
        y = run_stage(stage_module, x, keys_of(0))
        assert y.shape == stage_module.output_shape
        assert not y.any()
        y.backward(torch.ones_like(y))
        for key, value in [*stage_module.named_parameters(), ("input", x)]:
            assert value.grad is not None, key
            assert value.grad.shape == value.shape
            assert not value.grad.any(), key
        assert_equal(stage_module.model.state_dict(), before)


def test_a_micro_batch_of_padding_gives_zeros_in_evaluation():
    stage_module = parts_of("vig_digits", 1)[0].eval()
    with torch.no_grad():
        assert not run_stage(stage_module, images_of("vig_digits"), keys_of(0)).any()
