"""Options: their defaults, their bounds, and their way through a file and the command line."""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from vigpipe.cli import main
from vigpipe.config.check_job import check_job
from vigpipe.config.choices import GRAPH_MODELS, MODELS, SAMPLERS
from vigpipe.config.demands import filled_in
from vigpipe.config.files import as_toml
from vigpipe.config.options import (
    MODEL_DEFAULTS,
    TrainConfig,
    check_numbers,
    with_model_defaults,
)
from vigpipe.config.recipes import RECIPES


@pytest.fixture
def parse(monkeypatch):
    """Arguments -> the options that the command would run with."""
    seen = []
    monkeypatch.setattr(
        "vigpipe.cli.run_on_ranks", lambda config, *_, **__: seen.append(config) or 0
    )

    def parse(*arguments: str) -> TrainConfig:
        assert main(["train", *arguments]) == 0
        return seen.pop()

    return parse


CONFIGS = [
    TrainConfig(),
    TrainConfig(
        model="pvig_ti_224", weights=Path("a b/w.pth"), graph="knn,reuse,reuse", stem_stride=4,
        norm="layer", drop_path=0.1, dropout=0.2, data="pictures", data_dir=Path("some where"),
        download=True, image_size="224x160", recipe="imagenet", auto_augment="rand-m9-mstd0.5-inc1",
        mixup=0.3, repeated_augment=3, ema=0.99, augment=True, stages=Path("stages/two.toml"),
        schedule="gpipe", threads=2, timeout=1e6, opt="sgd", lr=1e-12, clip=1e12, steps=1000,
        seed=(1 << 63) - 1, out=Path("runs/a"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=["defaults", "much"])
def test_a_written_config_reads_back_as_it_was_but_without_the_folder(config, parse, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(as_toml(config)))
    assert parse("--config", str(path)) == replace(config, config=path, out=None)


def test_flags_win_over_the_file_and_the_file_over_the_defaults(parse, tmp_path):
    path = tmp_path / "some.toml"
    path.write_text('lr = 0.5\nepochs = 7\nnorm = "layer"\n')
    config = parse("--lr", "0.25", f"--config={path}", "--norm=group")
    assert (config.lr, config.epochs, config.norm) == (0.25, 7, "group")
    assert config.dp == TrainConfig().dp


def test_a_flag_can_turn_off_what_the_file_turns_on(parse, tmp_path):
    path = tmp_path / "some.toml"
    path.write_text("augment = true\nskip_bad_images = true\n")
    config = parse("--config", str(path), "--no-augment")
    assert (config.augment, config.skip_bad_images) == (False, True)


def test_a_number_of_stages_is_a_number_and_anything_else_a_file(parse):
    assert parse("--stages", "2").stages == 2
    assert parse("--stages", "stages/v2.5/two.toml").stages == Path("stages/v2.5/two.toml")


@pytest.mark.parametrize("model", MODELS)
def test_a_model_fills_in_only_what_was_left_open(model):
    defaults = asdict(MODEL_DEFAULTS[model])
    config = with_model_defaults(TrainConfig(model=model, lr=0.125))
    assert config.lr == 0.125
    for field in fields(TrainConfig):
        if field.name in defaults and field.name != "lr":
            assert getattr(config, field.name) == defaults[field.name]


def read_back(config: TrainConfig) -> TrainConfig:
    table: dict[str, Any] = as_toml(config) | {"data_dir": config.data_dir}
    return TrainConfig(**table)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_resolved_is_within_bounds_and_stays_when_read_back(model):
    for recipe in (None, *RECIPES):
        config = with_model_defaults(
            replace(TrainConfig(model=model), recipe=recipe, batch_size=48)
        )
        check_numbers(config)
        assert with_model_defaults(config) == config
        assert with_model_defaults(read_back(config)) == config


@pytest.mark.parametrize("model", GRAPH_MODELS)
def test_a_graph_model_has_no_options_of_images_and_stays_when_read_back(model):
    for sampler in SAMPLERS:
        config = filled_in(
            with_model_defaults(replace(TrainConfig(data="Cora"), model=model, sampler=sampler))
        )
        check_numbers(config)
        check_job(config)
        assert config.partition == ("metis" if sampler == "parts" else None)
        check_job(read_back(config))
        assert with_model_defaults(read_back(config)) == config
