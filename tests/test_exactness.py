"""The exactness contract (docs/exactness.md): every layout trains like the unsplit model.

Eighteen samples in batches of 13: the second batch of an epoch has 5, and neither divides by the 4
micro-batches. Where there are 6 or 8 micro-batches, some of that batch have no sample.
"""

from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import images_of, oracle, shortened, with_images
from tests.world import run_each, run_ranks
from vigpipe.commands.check import trace
from vigpipe.commands.differences import Kinds, differences
from vigpipe.config.options import TrainConfig
from vigpipe.launch.device import weight_dtype
from vigpipe.run.evaluation import evaluate_all
from vigpipe.run.facts import Run, prepare
from vigpipe.run.rank import make_rank_state

pytestmark = pytest.mark.multiprocess

CPU = torch.device("cpu")
NUM_TRAIN = 18
BASE = TrainConfig(
    batch_size=13,
    microbatches=4,
    steps=3,
    lr_schedule="constant",
    warmup_epochs=0,
    drop_path=0.3,
    dropout=0.2,
    clip=0.1,
    norm="batch",
    dtype="float32",
    seed=7,
)
# Every pair of values of two columns is in some row. There are 4 micro-batches in each, so that
# rows of the same norm and dtype have one reference.
ROWS = [
    # stages, replicas, schedule, norm, dtype, recomputation
    (2, 1, "gpipe", "layer", "float32", "except-last"),
    (2, 2, "1f1b", "layer", "float64", "except-last"),
    (2, 2, "1f1b", "layer", "float64", "never"),
    (2, 2, "1f1b", "batch", "float32", "always"),
    (4, 1, "gpipe", "layer", "float32", "never"),
    (4, 1, "1f1b", "layer", "float32", "always"),
    (4, 1, "1f1b", "batch", "float64", "except-last"),
    (4, 1, "gpipe", "batch", "float64", "never"),
    (4, 2, "gpipe", "layer", "float64", "always"),
]
# Each block is a stage of its own, so that graphs cross every border.
DOUBLE = replace(BASE, dtype="float64")
FOUR = replace(DOUBLE, stages=4, steps=2)
VARIANTS = {
    "reuse": replace(FOUR, graph="knn,reuse", aggregator="max,maxmean"),
    "lookahead": replace(FOUR, graph="lookahead,reuse", aggregator="edge", recompute="except-last"),
    "fixed": replace(
        FOUR, graph="grid,pattern", aggregator="sage,gin", layer_decay=0.5, weight_decay=0.5
    ),
    "window": replace(FOUR, graph="window", stochastic_dilation=0.5),
    "interleaved": replace(DOUBLE, stages=2, schedule="interleaved1f1b", virtual_stages=2),
    "looped": replace(DOUBLE, stages=2, schedule="loopedbfs", virtual_stages=2),
    "study": replace(BASE, model="vig_study", drop_path=None, steps=1, stages=2),
    "study on kNN graphs": replace(
        BASE, model="vig_study", graph="knn", drop_path=None, stages=2, dp=2, steps=2
    ),
    "pyramid": replace(
        FOUR, model="pvig_cifar_ti", data="fake", batch_size=6, lr=1e-3, recompute="always", steps=1
    ),
}
# The models without kNN, whose second replica's last micro-batches of the second batch are empty.
MOBILE = replace(DOUBLE, data="fake", image_size=32, stages=2, dp=2, microbatches=5, lr=1e-3)
VARIANTS |= {
    "mobilevig": replace(MOBILE, model="mobilevig_ti", steps=1),
    "mobilevigv2": replace(MOBILE, model="mobilevigv2_cifar_ti", stages=4, steps=2),
    "greedyvig": replace(MOBILE, model="greedyvig_cifar_ti", recompute="except-last", steps=2),
    "adaptvig": replace(MOBILE, model="adaptvig_s", steps=1),
    # Two tensors cross its boundaries, the second of which no block changes.
    "logvig": replace(MOBILE, model="logvig_ti", stages=4, dp=1, steps=1),
    "logvig interleaved": replace(
        MOBILE,
        model="logvig_ti",
        schedule="interleaved1f1b",
        virtual_stages=2,
        microbatches=4,
        steps=1,
    ),
}
BACKWARD_IN_REVERSE = {"looped"}  # gradients are added up in another order
# Eight micro-batches, so that three of the second batch are empty. SGD: Adam would blow up
# gradients that are rounding noise (biases before a BatchNorm).
EIGHT = replace(DOUBLE, stages=2, dp=2, steps=2)
SUMS = {
    "double": EIGHT,
    "drain": replace(EIGHT, sync="drain", opt="sgd"),
    "ddp": replace(EIGHT, sync="ddp", opt="sgd"),
}
HALF = replace(EIGHT, norm="layer", drop_path=0.0, dropout=0.0, steps=1)
HALVES = {dtype: replace(HALF, dtype=dtype) for dtype in ("bfloat16", "float16", "float32")}


def of_row(stages: int, dp: int, schedule: Any, norm: Any, dtype: Any, recompute: Any):
    split = replace(BASE, stages=stages, dp=dp, microbatches=4 // dp, schedule=schedule)
    return replace(split, norm=norm, dtype=dtype, recompute=recompute)


def unsplit(config: TrainConfig) -> TrainConfig:
    """The same replicas of one stage each."""
    config = replace(config, recompute="never", schedule="gpipe")
    return replace(config, stages=1, virtual_stages=1)


def in_one_process(config: TrainConfig) -> TrainConfig:
    """The unsplit model, with all micro-batches."""
    return replace(unsplit(config), dp=1, microbatches=config.dp * config.microbatches)


def make_job(config: TrainConfig) -> Run:
    run = prepare(config, weight_dtype(config.dtype))
    return with_images(run, shortened(images_of(run), NUM_TRAIN, 37))


def traced(rank, world_size, config):
    """On every rank: train; the writer's trace comes back."""
    torch.set_num_threads(1)  # another number of threads sums in another order
    run = make_job(config)
    return trace(make_rank_state(run, rank, CPU), run.num_steps)


def on_ranks(configs, world_size) -> list[Kinds]:
    if world_size == 1:
        by_config = [[traced(0, 1, config)] for config in configs]
    else:
        by_config = run_each(traced, world_size, configs)
    kept = [[t for t in by_rank if t is not None] for by_rank in by_config]
    assert [len(t) for t in kept] == [1] * len(configs)  # one rank writes, no more, no fewer
    return [t for (t,) in kept]


def size(config: TrainConfig) -> int:
    """The number of its ranks."""
    assert isinstance(config.stages, int)
    return config.stages * config.dp


@cache
def of_world(num_ranks: int) -> dict[TrainConfig, Kinds]:
    """All configurations above on that many ranks, in one world."""
    identical = [*(of_row(*row) for row in ROWS), *VARIANTS.values()]
    configs = [c for config in identical for c in (config, unsplit(config))]
    configs += [*SUMS.values(), HALVES["bfloat16"], HALVES["float16"]]
    configs += [in_one_process(config) for config in HALVES.values()]
    here = [c for c in dict.fromkeys(configs) if size(c) == num_ranks]
    return dict(zip(here, on_ranks(here, num_ranks), strict=True))


@pytest.fixture(scope="module", autouse=True)
def _forget_at_the_end():
    """Half a GB of gradients."""
    yield
    of_world.cache_clear()
    of_oracle.cache_clear()


def trace_of(config: TrainConfig) -> Kinds:
    return of_world(size(config))[config]


@cache
def of_oracle(config: TrainConfig) -> Kinds:
    run = make_job(config)
    return oracle(run, run.num_steps)


def losses(trained: Kinds) -> list[float]:
    return trained["loss"]["loss"].tolist()


def assert_within(ours: Kinds, reference: Kinds, dtype: torch.dtype) -> None:
    """The contract's words: within 1e-10 in float64, 1e-5 relative in float32."""
    for row in differences(ours, reference):
        assert row.within(dtype), row


def assert_identical(ours: Kinds, reference: Kinds) -> None:
    for row in differences(ours, reference):
        assert row.identical, row


def test_every_pair_of_values_is_in_a_row():
    for i, j in combinations(range(len(ROWS[0])), 2):
        pairs = {(row[i], row[j]) for row in ROWS}
        assert pairs == set(product(*({row[k] for row in ROWS} for k in (i, j))))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_layout_equals_the_unsplit_model(row):
    config = of_row(*row)
    ours = trace_of(config)
    assert_identical(ours, trace_of(unsplit(config)))  # stages do not change a bit
    assert_within(ours, of_oracle(in_one_process(config)), weight_dtype(config.dtype))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_graph_aggregator_schedule_and_model_keeps_the_contract(name):
    config = VARIANTS[name]
    ours = trace_of(config)
    if name not in BACKWARD_IN_REVERSE:
        assert_identical(ours, trace_of(unsplit(config)))
    if name != "pyramid":  # the oracle reads images of one channel
        assert_within(ours, of_oracle(in_one_process(config)), weight_dtype(config.dtype))


@pytest.mark.oldest
@pytest.mark.parametrize("sync", SUMS)
def test_micro_batches_without_samples_change_nothing_however_gradients_are_summed(sync):
    reference = of_oracle(in_one_process(replace(SUMS[sync], sync=None)))
    assert_within(trace_of(SUMS[sync]), reference, torch.float64)


@pytest.mark.oldest
def test_an_uneven_plan_and_three_replicas_keep_the_contract(tmp_path: Path):
    plan = tmp_path / "uneven.toml"
    plan.write_text('model = "vig_digits"\nstages = [[0], [1, 2, 3]]\n')
    split = replace(DOUBLE, stages=plan, dp=3, microbatches=2)
    (ours,) = on_ranks([split], 6)
    assert_within(ours, of_oracle(in_one_process(split)), torch.float64)


def test_the_comparison_sees_another_seed():
    config = in_one_process(of_row(*ROWS[-2]))
    (other,) = on_ranks([replace(config, seed=8)], 1)
    rows = differences(other, trace_of(config))
    assert [row.relative > 1e-3 for row in rows] == [True] * 4


def test_another_cut_of_the_batch_changes_batch_norm_but_not_layer_norm():
    batch, layer = (replace(BASE, norm=norm, dtype="float64") for norm in ("batch", "layer"))
    cut_in_2 = on_ranks([replace(config, microbatches=2) for config in (batch, layer)], 1)
    assert_within(cut_in_2[1], of_oracle(layer), torch.float64)
    assert differences(cut_in_2[0], of_oracle(batch))[0].relative > 1e-6


def scores(rank, world_size, config) -> Any:
    rank_state = make_rank_state(make_job(config), rank, CPU)
    trace(rank_state, 1)
    first = evaluate_all(rank_state)
    trace(rank_state, 1)  # training goes on after an evaluation as if there had been none
    return first, trace(rank_state, 1), evaluate_all(rank_state)


def test_evaluation_counts_every_image_once_and_leaves_training_alone():
    config = replace(EIGHT, steps=3, validation=0.02, ema=0.5)
    ranks = run_ranks(scores, 4, config)
    alone = scores(0, 1, in_one_process(config))
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
    """In the first step, before any update."""
    (ours,) = losses(trace_of(HALVES[dtype]))
    lowered, full = (
        losses(trace_of(in_one_process(HALVES[name])))[0] for name in (dtype, "float32")
    )
    assert ours == pytest.approx(lowered, rel=1e-6)
    assert lowered != full
    assert lowered == pytest.approx(full, rel=0.05)


def crossing(rank, world_size) -> Any:
    """Two steps of two stages, exchanged in full and in half precision.

    Returns:
        Of each: the losses and gradients, and the dtypes of what this rank's stage takes and gives.
    """
    torch.set_num_threads(1)
    found = []
    for boundary in ("full", "bfloat16"):
        # No near-tie can flip on a grid.
        config = replace(BASE, stages=2, boundary=boundary, graph="grid")
        rank_state = make_rank_state(make_job(config), rank, CPU)
        part = rank_state.pipeline.stage_modules[0]
        found.append((trace(rank_state, 2), (part.input_dtype, part.output_dtype)))
    return found


def test_a_narrow_boundary_stays_near_a_full_one_and_trains_every_stage():
    (_, (_, first)), ((exact, _), (near, last)) = run_ranks(crossing, 2)
    assert first == (torch.float32, torch.bfloat16)
    assert last == (torch.bfloat16, torch.float32)
    assert losses(near) != losses(exact)  # it was rounded on the way
    assert losses(near) == pytest.approx(losses(exact), rel=2e-2)
    moved = {name.split(".")[0] for name, g in near["gradients"].items() if g.abs().max() > 0}
    assert moved >= {"stem", "backbone", "prediction"}


# Dynamo itself looks at gradients of tensors that have none.
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_do_the_same_and_keep_to_the_layout():
    # Micro-batches of one size: each block compiles once.
    config = replace(BASE, batch_size=8, microbatches=2, drop_path=0.0, dropout=0.0)
    config = replace(config, graph="grid", dtype="float64", steps=2)
    eager, compiled = on_ranks([replace(config, compile=c) for c in (False, True)], 1)
    (piped,) = on_ranks([replace(config, compile=True, stages=2)], 2)
    assert_within(compiled, eager, torch.float64)
    assert_identical(piped, compiled)
