"""The factor of the loss in float16 follows what the gradients bear, and nothing else changes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.oracle import images_of, shortened, with_images
from tests.small_model import whole_model
from tests.world import run_ranks
from vigpipe import training
from vigpipe.config.options import TrainConfig
from vigpipe.run import loss_scale
from vigpipe.run.facts import prepare
from vigpipe.run.loss_scale import LossScale

CPU = torch.device("cpu")
FIRST = 2.0**20  # some halvings are needed until gradients of a loss times this fit into float16
HALF = TrainConfig(
    data="fake",
    image_size=8,
    batch_size=4,
    microbatches=2,
    dtype="float16",
    steps=8,
    lr=1e-4,
    opt="adamw",
    checkpoint_every=2,
    keep=9,
    threads=1,
    evaluate_every=99,
)


def test_a_skipped_step_halves_the_factor_and_many_taken_ones_double_it(monkeypatch):
    monkeypatch.setattr(loss_scale, "NUM_TAKEN", 3)
    scale, seen = LossScale(CPU), []
    for is_taken in (True, False, True, True, True, True, False):
        scale.update(torch.tensor(is_taken))
        seen.append(float(scale.factor) / loss_scale.FIRST)
    assert seen == [1, 0.5, 0.5, 0.5, 1, 1, 0.5]


def test_gradients_are_divided_exactly():
    scale = LossScale(CPU)
    gradients = [torch.randn(5, 3), torch.randn(7)]
    scaled = [g * scale.factor for g in gradients]
    scale.unscale(scaled)
    assert all(map(torch.equal, scaled, gradients))


def train(folder: Path, config: TrainConfig, rank: int = 0) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    run = prepare(config, torch.float32)
    run = with_images(run, shortened(images_of(run), 16, 4))
    assert training.train(run, rank, CPU, folder) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "step" in row]


@whole_model()  # whose gradients are large enough
def test_steps_that_overflow_are_skipped_until_the_gradients_fit(tmp_path, monkeypatch, capsys):
    """And a run that goes on has the same factor and weights."""
    monkeypatch.setattr(loss_scale, "FIRST", FIRST)
    rows = train(tmp_path / "whole", HALF)
    skipped = [row["step"] for row in rows if row.get("event") == "overflow"]
    taken = [row["step"] for row in rows if "loss" in row and "top1" not in row]
    assert taken[0] > 2
    assert skipped[: taken[0] - 1] == list(range(1, taken[0]))
    # On some processors a later gradient is just too large once more.
    assert sorted(skipped + taken) == list(range(1, 9))
    assert f"the factor of the loss is {FIRST / 2:g} from here on" in capsys.readouterr().out
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000002"
    train(tmp_path / "rest", replace(HALF, resume=str(checkpoint)))
    whole, rest = (
        load_file(next((tmp_path / name / "checkpoints/step-00000008").glob("*.safetensors")))
        for name in ("whole", "rest")
    )
    assert whole["loss_scale/factor"] < FIRST
    assert whole.keys() == rest.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, rest[name]), name


def test_a_loss_that_is_not_finite_is_no_overflow_whatever_its_factor_is(tmp_path):
    """It was called one until the factor was 1, 16 steps later."""
    with pytest.raises(FloatingPointError, match=r"step [2-9]: the loss or a gradient is NaN"):
        train(tmp_path / "run", replace(HALF, lr=1e6, opt="sgd", clip=None))
    rows = [json.loads(row) for row in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    taken = [row["step"] for row in rows if "loss" in row]
    told = [row["step"] for row in rows if row.get("event") == "overflow"]
    assert sorted(taken + told) == list(range(1, len(rows) + 1))
    assert len(told) < 8


def failing(rank: int, world_size: int, folder: Path, config: TrainConfig) -> str:
    try:
        train(folder, config, rank)
    except FloatingPointError as error:
        return str(error)
    return "it has not failed"


@pytest.mark.multiprocess
def test_ranks_that_do_not_know_the_loss_agree_that_it_is_no_overflow(tmp_path):
    config = replace(HALF, lr=1e6, opt="sgd", clip=None, stages=2)
    first, second = run_ranks(failing, 2, tmp_path / "run", config)
    assert first == second
    assert re.match(r"step [2-9]: the loss or a gradient is NaN", first)
