"""The exactness contract (DESIGN, section 3): every layout trains like the unsplit model.

Forty-two samples in batches of 29: the second batch of an epoch has 13, neither divides by the 4
micro-batches, and a third set-up ends in a batch of 6 for 8 of them, so that two are empty.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.oracle import images_of, oracle, shortened, with_images
from tests.world import run_ranks
from vigpipe.commands.check import trace
from vigpipe.commands.differences import Trace, differences
from vigpipe.config.options import TrainConfig
from vigpipe.launch.device import weight_dtype
from vigpipe.run.evaluation import evaluate_all
from vigpipe.run.facts import Run, prepare
from vigpipe.run.rank import make_rank_state

pytestmark = pytest.mark.multiprocess

CPU = torch.device("cpu")
NUM_STEPS = 3
BASE = TrainConfig(
    batch_size=29,
    steps=NUM_STEPS,
    lr_schedule="constant",
    warmup_epochs=0,
    drop_path=0.3,
    dropout=0.2,
    clip=1.0,
    seed=7,
)
# D * M is the same throughout, so that all layouts see the same micro-batches.
NUM_MICROBATCHES = 4
LAYOUTS = {(s, d): NUM_MICROBATCHES // d for d in (1, 2) for s in (1, 2, 4)}
SETUPS = {
    (norm, dtype): replace(BASE, norm=norm, dtype=dtype)
    for norm in ("batch", "layer")
    for dtype in ("float64", "float32")
}


def make_job(config: TrainConfig, num_train: int = 42) -> Run:
    run = prepare(config, weight_dtype(config.dtype))
    return with_images(run, shortened(images_of(run), num_train, 37))


def traces(rank, world_size, configs, num_train=42):
    """On every rank: train with each configuration; the writer's traces come back."""
    torch.set_num_threads(1)  # another number of threads sums in another order
    runs = [make_job(config, num_train) for config in configs]
    return [trace(make_rank_state(run, rank, CPU), run.num_steps) for run in runs]


def on_ranks(configs, world_size, num_train=42) -> list[Trace]:
    if world_size == 1:
        ranks = [traces(0, 1, configs, num_train)]
    else:
        ranks = run_ranks(traces, world_size, configs, num_train, timeout=240)
    kept = [[t for t in of_config if t is not None] for of_config in zip(*ranks, strict=True)]
    assert [len(t) for t in kept] == [1] * len(configs)  # one rank writes, no more, no fewer
    return [t for (t,) in kept]


def schedules_of(stages: int, dp: int, norm: str, dtype: str) -> list[str]:
    """Schedules differ in the order of micro-batches only: 1f1b on two layouts, of two kinds."""
    on_these_ranks = (stages, dp) in ((4, 1), (2, 2))
    of_these_kinds = (norm, dtype) in (("batch", "float32"), ("layer", "float64"))
    return ["gpipe", "1f1b"] if on_these_ranks and of_these_kinds else ["gpipe"]


@cache
def of_layout(stages: int, dp: int) -> dict[tuple[str, str, str], Trace]:
    """All set-ups and schedules on one layout, in one world."""
    cases = {
        (norm, dtype, schedule): replace(
            config, stages=stages, dp=dp, microbatches=LAYOUTS[stages, dp], schedule=schedule
        )
        for (norm, dtype), config in SETUPS.items()
        for schedule in schedules_of(stages, dp, norm, dtype)
    }
    return dict(zip(cases, on_ranks(list(cases.values()), stages * dp), strict=True))


@cache
def of_oracle(norm: str, dtype: str) -> Trace:
    config = replace(SETUPS[norm, dtype], microbatches=NUM_MICROBATCHES)
    return oracle(make_job(config), NUM_STEPS)


def assert_within(ours: Trace, reference: Trace, dtype: torch.dtype) -> None:
    """The contract's words: within 1e-10 in float64, 1e-5 relative in float32."""
    for row in differences(ours, reference):
        assert row.within(dtype), row


def assert_identical(ours: Trace, reference: Trace) -> None:
    for row in differences(ours, reference):
        assert row.identical, row


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize(("stages", "dp"), LAYOUTS)
def test_every_layout_equals_the_unsplit_model(stages, dp, norm, dtype):
    for schedule in schedules_of(stages, dp, norm, dtype):
        ours = of_layout(stages, dp)[norm, dtype, schedule]
        assert_within(ours, of_oracle(norm, dtype), weight_dtype(dtype))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("dp", [1, 2])
def test_the_number_of_stages_does_not_change_a_bit(dp, norm, dtype):
    reference = of_layout(1, dp)[norm, dtype, "gpipe"]
    for stages in (2, 4):
        for schedule in schedules_of(stages, dp, norm, dtype):
            assert_identical(of_layout(stages, dp)[norm, dtype, schedule], reference)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_the_number_of_replicas_stays_within_the_contract(norm, dtype):
    ours, reference = (of_layout(1, dp)[norm, dtype, "gpipe"] for dp in (2, 1))
    assert_within(ours, reference, weight_dtype(dtype))


def test_the_comparison_sees_another_seed():
    config = replace(SETUPS["batch", "float64"], microbatches=NUM_MICROBATCHES, seed=8)
    (other,) = on_ranks([config], 1)
    rows = differences(other, of_layout(1, 1)["batch", "float64", "gpipe"])
    assert [row.relative > 1e-3 for row in rows] == [True] * 4


def test_another_cut_of_the_batch_changes_batch_norm_but_not_layer_norm():
    cut_in_2 = [replace(SETUPS[n, "float64"], microbatches=2) for n in ("batch", "layer")]
    batch, layer = on_ranks(cut_in_2, 1)
    rows = differences(layer, of_layout(1, 1)["layer", "float64", "gpipe"])
    assert all(row.within(torch.float64) for row in rows)
    rows = differences(batch, of_layout(1, 1)["batch", "float64", "gpipe"])
    assert rows[0].relative > 1e-6


def test_the_study_model_keeps_the_contract():
    configs = [
        replace(BASE, model="vig_study", graph=graph, drop_path=None, dp=2, microbatches=4, steps=2)
        for graph in ("grid", "knn")
    ]
    of_two_stages = on_ranks([replace(config, stages=2) for config in configs], 4)
    of_one = on_ranks(configs, 2)
    for config, split, unsplit in zip(configs, of_two_stages, of_one, strict=True):
        assert_identical(split, unsplit)
        run = make_job(config)
        assert_within(split, oracle(run, run.num_steps), torch.float32)


VARIANTS = {
    "reuse": {"graph": "knn,reuse", "aggregator": "max,maxmean"},
    "lookahead": {"graph": "lookahead", "aggregator": "edge"},
    "fixed": {"graph": "grid,pattern", "aggregator": "sage,gin"},
    "window": {"graph": "window", "stochastic_dilation": 0.5},
    "layer decay": {"layer_decay": 0.5, "weight_decay": 0.5},
    "always": {"recompute": "always"},
    "except-last": {"recompute": "except-last", "graph": "lookahead,reuse"},
}


@cache
def of_variants(stages: int) -> dict[str, Trace]:
    """All variants; replicas share nothing that these change, and two of them are above."""
    configs = [
        replace(SETUPS["batch", "float32"], stages=stages, microbatches=NUM_MICROBATCHES, **options)
        for options in VARIANTS.values()
    ]
    return dict(zip(VARIANTS, on_ranks(configs, stages), strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_graph_aggregator_and_recomputation_keeps_the_contract(name):
    assert_identical(of_variants(4)[name], of_variants(1)[name])
    config = replace(SETUPS["batch", "float32"], microbatches=NUM_MICROBATCHES, **VARIANTS[name])
    run = make_job(config)
    assert_within(of_variants(1)[name], oracle(run, NUM_STEPS), torch.float32)


def test_recomputation_changes_nothing():
    assert_identical(of_variants(4)["always"], of_layout(1, 1)["batch", "float32", "gpipe"])


@pytest.mark.parametrize("model", ["vig_cifar_ti", "pvig_cifar_ti"])
def test_models_for_small_images_keep_the_contract(model):
    config = replace(
        BASE, model=model, data="fake", batch_size=8, microbatches=4, lr=1e-3, recompute="always",
        steps=2,
    )  # fmt: skip
    (split,) = on_ranks([replace(config, stages=4)], 4, num_train=12)
    (unsplit,) = on_ranks([config], 1, num_train=12)
    assert_identical(split, unsplit)


@pytest.mark.parametrize("schedule", ["interleaved1f1b", "loopedbfs"])
def test_virtual_stages_keep_the_contract(schedule):
    config = replace(
        SETUPS["batch", "float32"],
        stages=2,
        microbatches=NUM_MICROBATCHES,
        schedule=schedule,
        virtual_stages=2,
    )
    (ours,) = on_ranks([config], 2)
    reference = of_layout(1, 1)["batch", "float32", "gpipe"]
    if schedule == "interleaved1f1b":
        assert_identical(ours, reference)
    assert_within(ours, reference, torch.float32)  # loopedbfs goes backward in reverse order


def test_micro_batches_without_samples_change_nothing():
    # 35 = 29 + 6: the second batch leaves two of the eight micro-batches empty.
    config = replace(SETUPS["batch", "float64"], stages=2, dp=2, microbatches=4)
    ours, by_ddp = on_ranks([config, replace(config, sync="ddp", opt="sgd")], 4, num_train=35)
    assert_within(ours, oracle(make_job(config, 35), NUM_STEPS), torch.float64)
    sgd = make_job(replace(config, opt="sgd"), 35)
    assert_within(by_ddp, oracle(sgd, NUM_STEPS), torch.float64)


def test_the_other_ways_to_synchronise_agree_up_to_rounding():
    # SGD: Adam would blow up gradients that are rounding noise (biases before a BatchNorm).
    config = replace(SETUPS["batch", "float64"], stages=2, dp=2, microbatches=4, opt="sgd")
    reference = oracle(make_job(config), NUM_STEPS)
    for ours in on_ranks([replace(config, sync=sync) for sync in ("drain", "ddp")], 4):
        assert_within(ours, reference, torch.float64)


def test_an_uneven_plan_and_three_replicas_keep_the_contract(tmp_path):
    plan = tmp_path / "uneven.toml"
    plan.write_text('model = "vig_digits"\nstages = [[0], [1, 2, 3]]\n')
    layout = replace(SETUPS["batch", "float32"], stages=plan, dp=3, microbatches=2)
    (ours,), (unsplit,) = on_ranks([layout], 6), on_ranks([replace(layout, stages=1)], 3)
    assert_identical(ours, unsplit)
    (alone,) = on_ranks([replace(layout, stages=1, dp=1, microbatches=6)], 1)
    assert_within(ours, alone, torch.float32)


def scores(rank, world_size, config) -> Any:
    rank_state = make_rank_state(make_job(config), rank, CPU)
    trace(rank_state, 1)
    first = evaluate_all(rank_state)
    trace(rank_state, 1)  # training goes on after an evaluation as if there had been none
    return first, trace(rank_state, 1), evaluate_all(rank_state)


def test_evaluation_counts_every_image_once_and_leaves_training_alone():
    config = replace(
        SETUPS["batch", "float64"], stages=2, dp=2, microbatches=4, validation=0.02, ema=0.5
    )
    ranks = run_ranks(scores, 4, config, timeout=120)
    alone = scores(0, 1, replace(config, stages=1, dp=1, microbatches=8))
    for rank in (1, 3):  # the last stages
        for all_ours, references in ((ranks[rank][0], alone[0]), (ranks[rank][2], alone[2])):
            for ours, reference, images in zip(all_ours, references, (37, 37, 30, 30), strict=True):
                assert ours.num_samples == reference.num_samples == images
                assert (ours.top1, ours.top5) == (reference.top1, reference.top5)
                assert ours.loss == pytest.approx(reference.loss, rel=1e-10)
    assert ranks[0][0] == (None,) * 4
    assert_within(ranks[1][1], alone[1], torch.float64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_to_the_layout_and_near_float32(dtype):
    config = replace(SETUPS["layer", "float32"], dtype=dtype, drop_path=0.0, dropout=0.0)
    (ours,) = on_ranks([replace(config, stages=2, dp=2, microbatches=4)], 4)
    lowered, full = on_ranks(
        [replace(config, microbatches=8), replace(config, microbatches=8, dtype="float32")], 1
    )
    assert ours.losses[0] == pytest.approx(lowered.losses[0], rel=1e-6)  # before any update
    assert lowered.losses != full.losses
    assert lowered.losses[0] == pytest.approx(full.losses[0], rel=0.05)


def crossing(rank, world_size, boundary) -> Any:
    """Two steps of two stages: losses, and the dtypes of what this rank's stage takes and gives."""
    torch.set_num_threads(1)
    # No near-tie can flip on a grid.
    config = replace(BASE, stages=2, microbatches=4, boundary=boundary, graph="grid")
    rank_state = make_rank_state(make_job(config), rank, CPU)
    ours = trace(rank_state, 2)
    part = rank_state.pipeline.stage_modules[0]
    return ours, (part.input_dtype, part.output_dtype)


def test_a_narrow_boundary_stays_near_a_full_one_and_trains_every_stage():
    full = run_ranks(crossing, 2, "full")
    narrow = run_ranks(crossing, 2, "bfloat16")
    assert [dtypes for _, dtypes in narrow] == [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ]
    (exact, _), (near, _) = full[1], narrow[1]
    assert near.losses != exact.losses  # it was rounded on the way
    assert near.losses == pytest.approx(exact.losses, rel=2e-2)
    moved = {name.split(".")[0] for name, g in near.gradients[0].items() if g.abs().max() > 0}
    assert moved >= {"stem", "backbone", "prediction"}


# Dynamo itself looks at gradients of tensors that have none.
@pytest.mark.heavy
@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_do_the_same_and_keep_to_the_layout():
    # Micro-batches of one size: each block compiles once.
    config = replace(BASE, batch_size=8, drop_path=0.0, dropout=0.0, graph="grid", dtype="float64")
    eager, compiled = on_ranks(
        [replace(config, microbatches=2, compile=c) for c in (False, True)], 1, 16
    )
    (piped,) = on_ranks([replace(config, microbatches=2, compile=True, stages=2)], 2, 16)
    assert_within(compiled, eager, torch.float64)
    assert_identical(piped, compiled)
