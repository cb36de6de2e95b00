"""Options: their defaults, their bounds, and their way through a file and the command line."""

import math
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vigpipe.cli import main
from vigpipe.config.check_job import check_job
from vigpipe.config.choices import GRAPH_MODELS, MODELS, NORMS, RECIPES, SAMPLERS
from vigpipe.config.files import as_toml, read_config_file
from vigpipe.config.options import (
    MODEL_DEFAULTS,
    TrainConfig,
    check_numbers,
    parse_image_size,
    with_model_defaults,
)
from vigpipe.errors import InputError
from vigpipe.schedules import SCHEDULES


@pytest.fixture
def parse(monkeypatch):
    """Arguments -> the options that the command would run with."""
    seen = []
    monkeypatch.setattr(
        "vigpipe.start.run_on_ranks", lambda config, *_, **__: seen.append(config) or 0
    )

    def parse(*arguments: str) -> TrainConfig:
        assert main(["train", *arguments]) == 0
        return seen.pop()

    return parse


names = st.text("abcdefghijklmnopqrstuvwxyz _-", min_size=1, max_size=8)
rates = st.floats(0, 0.9)
counts = st.integers(1, 1000)
configs = st.builds(
    TrainConfig,
    model=st.sampled_from(MODELS),
    weights=st.none() | names.map(Path),
    graph=st.sampled_from([None, "grid", "knn,reuse,reuse"]),
    stem_stride=st.none() | counts,
    norm=st.sampled_from(NORMS),
    drop_path=st.none() | rates,
    dropout=rates,
    data=names,
    data_dir=names.map(Path),
    download=st.booleans(),
    image_size=st.none() | counts | st.tuples(counts, counts).map(lambda s: f"{s[0]}x{s[1]}"),
    recipe=st.none() | st.sampled_from(RECIPES),
    auto_augment=st.sampled_from([None, "none", "rand-m9-mstd0.5-inc1"]),
    mixup=st.none() | rates,
    repeated_augment=st.none() | counts,
    ema=st.none() | rates,
    augment=st.none() | st.booleans(),
    stages=counts | names.map(lambda name: Path("stages", f"{name}.toml")),
    schedule=st.sampled_from(SCHEDULES),
    threads=st.none() | counts,
    timeout=st.floats(1, 1e6),
    opt=st.sampled_from([None, "adamw", "sgd"]),
    lr=st.none() | st.floats(0, 1e6),
    clip=st.none() | st.floats(1e-12, 1e12),
    steps=st.none() | counts,
    seed=st.integers(0, (1 << 63) - 1),
    out=st.none() | names.map(Path),
)


# Each example draws every option, and takes a quarter of a second.
@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(config=configs)
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


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_resolved_is_within_bounds_and_stays_when_read_back(model, recipe):
    config = with_model_defaults(TrainConfig(model=model, recipe=recipe, batch_size=48))
    check_numbers(config)
    assert with_model_defaults(config) == config
    table: dict[str, Any] = as_toml(config) | {"data_dir": config.data_dir}
    assert with_model_defaults(TrainConfig(**table)) == config


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("model", GRAPH_MODELS)
def test_a_graph_model_has_no_options_of_images_and_stays_when_read_back(model, sampler):
    config = with_model_defaults(TrainConfig(model=model, data="Cora", sampler=sampler))
    check_numbers(config)
    check_job(config)
    assert config.partition == ("metis" if sampler == "parts" else None)
    table: dict[str, Any] = as_toml(config) | {"data_dir": config.data_dir}
    again = TrainConfig(**table)
    check_job(again)
    assert with_model_defaults(again) == config


def test_every_model_has_defaults():
    assert set(MODEL_DEFAULTS) == {*MODELS, *GRAPH_MODELS}


NUMBERS = [f.name for f in fields(TrainConfig) if f.type in (float, float | None)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", NUMBERS)
def test_no_option_takes_what_is_not_a_sensible_number(name, value):
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} {value}"):
        check_numbers(replace(TrainConfig(), **{name: value}))


def test_not_all_training_images_can_be_held_out():
    with pytest.raises(InputError, match=r"--validation 1: .* from 0 to less than 1, such as 0\.1"):
        check_numbers(TrainConfig(validation=1))
    check_numbers(TrainConfig(validation=0.9999))


@pytest.mark.parametrize(
    ("value", "size"),
    [(None, None), (224, (224, 224)), ("32", (32, 32)), ("224x160", (224, 160))],
)
def test_an_image_size_is_a_side_or_height_and_width(value, size):
    assert parse_image_size(value) == size


@pytest.mark.parametrize("value", [0, -3, "224x", "x224", "1x2x3", "big", "32x0", 99999])
def test_what_is_no_image_size_is_told_with_both_forms(value):
    with pytest.raises(InputError, match=f"--image-size {value}: .*HEIGHTxWIDTH.*224x160"):
        check_numbers(TrainConfig(image_size=value))


def test_an_unknown_key_is_told_with_the_known_ones(tmp_path):
    path = tmp_path / "some.toml"
    path.write_text("learning_rate = 1\n")
    with pytest.raises(InputError, match=r"'learning_rate'; the keys are .*\blr\b"):
        read_config_file(["train", "--config", str(path)])
