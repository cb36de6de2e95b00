"""What passes from stage to stage, and that padding enters none of them.

That all stages are together exactly the model is in tests/test_exactness.py.
"""

from typing import Any

import pytest
import torch

from vigpipe.config.choices import NORMS
from vigpipe.model.blocks import VigShape
from vigpipe.model.keyed_dropout import PADDING, sample_keys
from vigpipe.model.variants import create_model
from vigpipe.model.vig import VisionGnn
from vigpipe.parallel.plan import even_plan
from vigpipe.parallel.split import StageModule, cut_stages

PYRAMID = VigShape(
    (2, 3), (8, 16), k=(3, 3), reductions=(2, 1), relative=True, stem=(2, 1, 1), stem_stride=4
)
# "patches" is a vig_ti_224 with fewer and narrower blocks, "pyramid" a pvig_ti_224; the others of
# these hand graphs on, some of them over a boundary, whatever the number of stages.
SHAPES: dict[str, tuple[VigShape, dict[str, Any]]] = {
    "patches": (VigShape((4,), (16,), k=(3, 5)), {}),
    "pyramid": (PYRAMID, {"stochastic_dilation": 0.5}),
    "reuse": (VigShape((4,), (16,), k=(3, 5)), {"graph": "knn,reuse", "aggregator": "edge,gin"}),
    "lookahead": (VigShape((4,), (16,), k=(3, 5)), {"graph": "lookahead", "aggregator": "sage"}),
}
# C, H, W
SIZES = {"vig_digits": (1, 8, 8), "vig_study": (3, 5, 4)}
SIZES |= {
    name: (3, 32, 80) if len(shape.blocks) == 1 else (3, 24, 40)
    for name, (shape, _) in SHAPES.items()
}
ROWS = 4
models = pytest.mark.parametrize("name", list(SIZES))


def build(name, norm="batch"):
    torch.manual_seed(0)
    channels, *size = SIZES[name]
    options: dict[str, Any] = {"in_chans": channels, "img_size": tuple(size), "norm": norm}
    options |= {"num_classes": 10, "drop_path_rate": 0.3, "drop_rate": 0.3}
    if name in SHAPES:
        shape, more = SHAPES[name]
        return VisionGnn(shape, **options, **more).double()
    return create_model(name, **options).double()


def wrapped(model, name, microbatch_size=ROWS) -> Any:
    return StageModule(model, microbatch_size, SIZES[name], torch.float64)


def parts_of(name, num_stages):
    plan = even_plan(len(build(name).numbered_blocks), num_stages)
    models = cut_stages(lambda: build(name), plan, tuple(range(num_stages)))
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


def assert_equal(ones, others):
    assert ones.keys() == others.keys()
    for name, value in ones.items():
        assert torch.equal(value, others[name]), name


def state_of(stage_modules):
    """Weights and buffers of all stages."""
    states = [stage_module.model.state_dict() for stage_module in stage_modules]
    return {name: value.clone() for state in states for name, value in state.items()}


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
    assert [stage_module.output_shapes[0][-1] for stage_module in stage_modules[:-1]] == channels


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
            assert (x.shape,) == stage_module.output_shapes
            assert x.is_contiguous()


@pytest.mark.parametrize(
    ("name", "norm"),
    [(name, "batch") for name in SIZES] + [("vig_digits", norm) for norm in NORMS[1:]],
)
def test_padding_rows_change_nothing(name, norm):
    """Outputs, gradients and statistics are those of the samples alone, to the last bit."""
    padded, alone = build(name, norm), build(name, norm)
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


def test_a_micro_batch_of_padding_gives_zeros_and_gradients_of_zero():
    for stage_module in parts_of("vig_digits", 2):
        before = state_of([stage_module])
        x = torch.rand(stage_module.input_shapes[0], dtype=torch.float64, requires_grad=True)
        y = run_stage(stage_module, x, keys_of(0))
        assert (y.shape,) == stage_module.output_shapes
        assert not y.any()
        y.backward(torch.ones_like(y))
        for key, value in [*stage_module.named_parameters(), ("input", x)]:
            assert value.grad is not None, key
            assert value.grad.shape == value.shape
            assert not value.grad.any(), key
        assert_equal(stage_module.model.state_dict(), before)
