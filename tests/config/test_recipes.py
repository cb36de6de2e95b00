"""Recipes: what they resolve to, and that a run under one keeps the exactness contract."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss.cross_entropy import SoftTargetCrossEntropy
from timm.utils.model_ema import ModelEmaV3

from tests.test_cli import make_pictures
from tests.world import run_ranks
from vigpipe.checkpoint.weights_file import gather_named
from vigpipe.cli import main
from vigpipe.commands.check import differences, trace
from vigpipe.config.options import (
    MODEL_DEFAULTS,
    MOST_EMA,
    TrainConfig,
    check_numbers,
    uses_timm,
    with_model_defaults,
)
from vigpipe.config.recipes import RECIPES
from vigpipe.data.loss import Loss
from vigpipe.errors import InputError
from vigpipe.files.weights_metadata import read_metadata
from vigpipe.run.batches import batches
from vigpipe.run.evaluation import evaluate
from vigpipe.run.facts import prepare
from vigpipe.run.rank import make_rank_state
from vigpipe.run.step import train_step

CPU = torch.device("cpu")
NUM_STEPS = 3


def resolved(**options) -> TrainConfig:
    return with_model_defaults(TrainConfig(**options))


# ---- what they resolve to -------------------------------------------------------------------


def test_the_published_recipe_is_that_of_the_paper():
    """Han et al. 2022 (arXiv:2206.00272), table 3, and the command of its reference code."""
    config = resolved(model="pvig_s_224", recipe="imagenet", batch_size=1024)
    course = config.opt, config.lr, config.weight_decay, config.lr_schedule, config.min_lr
    assert course == ("adamw", 2e-3, 0.05, "cosine", 1e-5)
    assert (config.epochs, config.warmup_epochs, config.warmup_lr) == (300, 20, 1e-6)
    assert (config.auto_augment, config.color_jitter) == ("rand-m9-mstd0.5-inc1", 0.4)
    assert (config.mixup, config.cutmix, config.smoothing) == (0.8, 1.0, 0.1)
    assert (config.erasing, config.repeated_augment, config.drop_path) == (0.25, 3, 0.1)
    assert (config.ema, config.random_crop, config.augment) == (0.99996, "box", True)
    assert (config.image_size, config.crop_pct) == (224, 0.9)
    assert resolved(model="pvig_b_224").crop_pct == 0.95
    assert uses_timm(config)


def test_rate_and_average_go_with_the_batch():
    config = resolved(model="vig_ti_224", recipe="imagenet", batch_size=128)
    assert config.lr == pytest.approx(2.5e-4)
    assert config.ema is not None
    assert config.ema**8 == pytest.approx(0.99996)
    recipe = RECIPES["cifar"]
    config = resolved(model="vig_digits", recipe="cifar", batch_size=3 * recipe["lr_images"])
    assert config.lr == pytest.approx(3 * recipe["lr"])


def test_a_flag_wins_over_the_recipe_and_the_recipe_over_the_model():
    config = resolved(recipe="imagenet", mixup=0.0, ema=0.0, lr=0.5, auto_augment="none")
    assert (config.mixup, config.ema, config.lr, config.auto_augment) == (0.0, 0.0, 0.5, "none")
    assert (config.cutmix, config.epochs) == (1.0, 300)
    assert config.batch_size == MODEL_DEFAULTS["vig_digits"].batch_size  # recipes leave it open


def test_without_a_recipe_everything_of_it_is_off():
    config = resolved(model="vig_ti_224")
    off = config.mixup, config.cutmix, config.smoothing, config.erasing, config.ema
    assert off == (0.0,) * 5
    assert (config.auto_augment, config.repeated_augment) == ("none", 1)
    assert config.augment == MODEL_DEFAULTS["vig_ti_224"].augment
    assert not uses_timm(config)


def test_small_test_images_are_not_cut():
    assert resolved(model="vig_ti_224", image_size="32x24").crop_pct == 1.0
    assert resolved(model="vig_ti_224", image_size="33x24").crop_pct == 0.9
    assert resolved(model="vig_ti_224", image_size=32, crop_pct=0.875).crop_pct == 0.875


def test_a_part_of_a_recipe_turns_augmentation_on_and_no_augment_turns_all_off():
    config = resolved(color_jitter=0.3)
    assert config.augment
    assert uses_timm(config)
    config = resolved(recipe="cifar", augment=False)
    assert (config.random_crop, config.erasing, config.mixup) == ("box", 0.0, 0.2)
    assert not uses_timm(config)
    assert with_model_defaults(config) == config
    with pytest.raises(InputError, match=r"--erasing 0.5: .*--no-augment"):
        resolved(erasing=0.5, augment=False)


def test_no_moving_average_stays_at_its_first_weights():
    config = resolved(recipe="imagenet", batch_size=1)  # decays by 1024 to the batch
    assert config.ema == MOST_EMA
    check_numbers(config)


# ---- labels that are probabilities ----------------------------------------------------------


def test_the_loss_of_mixed_labels_is_timms_and_padding_adds_nothing():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    soft = mixup_target(torch.tensor([3, 0, 1, 1]), 4, 0.3, smoothing=0.1).double()
    loss = Loss()
    loss.begin(10)
    padded = torch.cat([soft, torch.zeros(2, 4, dtype=torch.float64)])
    share = loss(logits, padded)
    expected = SoftTargetCrossEntropy()(logits[:4], soft) * 4 / 10
    assert share.item() == pytest.approx(expected.item(), rel=1e-12)
    share.backward()
    assert logits.grad is not None
    assert not logits.grad[4:].any()
    assert logits.grad[:4].any()


# ---- the contract ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Everything of the published recipe on 2 × 13 pictures; steps of 22 and 4 samples."""
    root = make_pictures(tmp_path_factory.mktemp("data") / "pictures", 13, 4, (20, 18))
    return TrainConfig(
        data=str(root),
        recipe="imagenet",
        image_size=8,
        batch_size=22,
        microbatches=4,
        steps=NUM_STEPS,
        warmup_epochs=0,
        seed=3,
        ema=0.5,
    )


def recipe_run(rank, world_size, config) -> Any:
    """Train, score and average as one rank; what the writer has in the end."""
    torch.set_num_threads(1)
    rank_state = make_rank_state(prepare(config, torch.float32), rank, CPU)
    kept = trace(rank_state, NUM_STEPS)
    plain = evaluate(rank_state, ("test",))
    with rank_state.trained.averaged():
        average = evaluate(rank_state, ("test",))
        to = rank_state.run.layout.pipeline_size - 1
        state = gather_named(rank_state.trained.state(), rank_state.mesh.groups.pipeline, to)
    after = gather_named(rank_state.trained.state(), rank_state.mesh.groups.pipeline, to)
    return (kept, plain, average, state, after) if rank_state.is_writer else None


def on_layout(config, stages, dp):
    config = replace(config, stages=stages, dp=dp, microbatches=4 // dp)
    if stages * dp == 1:
        return recipe_run(0, 1, config)
    (kept,) = [run for run in run_ranks(recipe_run, stages * dp, config) if run is not None]
    return kept


@pytest.fixture(scope="module")
def alone(full):
    return on_layout(full, 1, 1)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("stages", "dp", "workers"),
    [(2, 1, 0), pytest.param(2, 1, 2, marks=pytest.mark.heavy), (2, 2, 0)],
)
def test_a_full_recipe_gives_the_same_run_on_every_layout(stages, dp, workers, full, alone):
    kept, plain, average, state, _ = on_layout(replace(full, workers=workers), stages, dp)
    for row in differences(kept, alone[0]):
        assert row.identical if dp == 1 else row.within(torch.float32), row
    assert plain["test"].num_samples == average["test"].num_samples == 8
    if dp == 1:
        assert (plain, average) == alone[1:3]
        assert all(torch.equal(state[name], tensor) for name, tensor in alone[3].items())
    assert state.keys() == alone[3].keys()
    for name, tensor in alone[3].items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)
    assert average != plain


def test_the_average_is_timms_and_the_weights_come_back(full, alone):
    rank_state = make_rank_state(prepare(full, torch.float32), 0, CPU)
    reference = ModelEmaV3(torch.nn.ModuleList(rank_state.trained.models), decay=0.5)
    for batch in batches(rank_state):
        train_step(rank_state, batch)
        reference.update(torch.nn.ModuleList(rank_state.trained.models))
    expected = {k.removeprefix("0."): v for k, v in reference.module.state_dict().items()}
    _, _, _, state, after = alone
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert all(
        torch.equal(after[name], tensor) for name, tensor in rank_state.trained.state().items()
    )
    assert not torch.equal(after["pos_embed"], state["pos_embed"])


@pytest.mark.parametrize("part", ["mixup", "cutmix", "smoothing", "erasing"])
def test_every_part_of_the_recipe_shows_in_the_losses(part, full, alone):
    without = make_rank_state(prepare(replace(full, **{part: 0.0}), torch.float32), 0, CPU)
    kept = trace(without, 1)
    assert kept is not None
    assert kept["loss"]["loss"][0] != alone[0]["loss"]["loss"][0]


def test_a_run_leaves_its_average_its_scores_and_what_the_weights_are_of(full, tmp_path):
    options = ["--data", full.data, "--recipe", "cifar", "--image-size", "8x10", "--steps", "2"]
    options += ["--batch-size", "13", "--ema", "0.5", "--threads", "1", "--out", str(tmp_path)]
    assert main(["train", *options]) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert rows[-1]["ema"].keys() == {"loss", "top1", "top5"}
    assert summary["ema"] == rows[-1]["ema"]
    assert rows[-1]["ema"]["loss"] != rows[-1]["loss"]
    metadata = read_metadata(tmp_path / "model-ema.safetensors")
    assert metadata == read_metadata(tmp_path / "model.safetensors")
    assert json.loads(metadata["class_names"]) == ["cat", "dog"]
    facts = ("model", "num_classes", "in_chans", "img_size", "mean", "std", "crop_pct", "norm")
    values = [metadata[name] for name in facts]
    assert values == ["vig_digits", "2", "3", "8x10", "0.0", "1.0", "1.0", "batch"]
    assert not metadata.keys() & {"graph", "aggregator", "stem_stride", "compat"}
