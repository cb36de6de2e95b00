"""The values of single options: what they mean, and which of them are refused."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from tests.refusals import check_refusals
from vigpipe.config.auto_augment import check_auto_augment
from vigpipe.config.compress import Compression, parse_compress
from vigpipe.config.halo import HaloKind, parse_halo
from vigpipe.config.interval import Interval, parse_duration, parse_interval
from vigpipe.config.options import TrainConfig, check_numbers, parse_fanout, parse_image_size
from vigpipe.data.augment import Augmentation, TimmAugment


def interval(text):
    return parse_interval("--log-every", text)


MEANINGS: list[tuple[Callable[[Any], Any], Any, Any]] = [
    (parse_compress, "none", Compression("none")),
    (parse_compress, "bfloat16", Compression("bfloat16")),
    (parse_compress, "top-k:0.01", Compression("top-k", ratio=0.01)),
    (parse_compress, "top-k:1", Compression("top-k", ratio=1.0)),
    (parse_compress, "powersgd:4", Compression("powersgd", rank=4)),
    (parse_halo, None, HaloKind()),
    (parse_halo, "exact", HaloKind()),
    (parse_halo, "stale", HaloKind("stale")),
    (parse_halo, "sampled:0.1", HaloKind("sampled", 0.1)),
    (parse_halo, "sampled:1", HaloKind("sampled", 1.0)),
    (interval, "50", Interval(steps=50)),
    (interval, 7, Interval(steps=7)),
    (interval, "10m", Interval(seconds=600)),
    (interval, "1.5h", Interval(seconds=5400)),
    (interval, "90s", Interval(seconds=90)),
    (interval, "1d", Interval(seconds=86400)),
    (interval, "never", Interval()),
    (parse_duration, "2h", 7200),
    (parse_duration, "2", 0),
    (parse_image_size, None, None),
    (parse_image_size, 224, (224, 224)),
    (parse_image_size, "224x160", (224, 160)),
    (parse_fanout, None, ()),
    (parse_fanout, "25,10", (25, 10)),
    (parse_fanout, "-1,10", (-1, 10)),
]


def test_what_values_mean():
    found = [(parse, text, parse(text)) for parse, text, _ in MEANINGS]
    assert found == MEANINGS


def test_when_an_interval_is_over():
    every_four = Interval(steps=4)  # counted from the start of the run
    assert [step for step in range(1, 11) if every_four.is_over(step, 1e9)] == [4, 8]
    assert [Interval(seconds=20).is_over(1, seconds) for seconds in (0, 19.9, 20)] == [0, 0, 1]
    assert not any(Interval().is_over(step, 1e9) for step in range(1, 11))


GOOD_AUGMENTS = [
    "none", "original", "originalr-mstd0.5", "v0", "v0r", "3a", "rand", "rand-m9-mstd0.5-inc1",
    "rand-n3-p0.7-mmax20-m15", "rand-m7-mstd101", "rand-t3a", "augmix", "augmix-m5-w4-d2-a1.5-b1",
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD_AUGMENTS)
def test_timm_takes_every_name_that_is_taken(text):
    check_auto_augment(text)
    TimmAugment(Augmentation(auto_augment=text), (8, 8), (0.5,) * 3, flip=True)


# ---- what is refused ------------------------------------------------------------------------

NUMBERS = [f.name for f in fields(TrainConfig) if f.type in (float, float | None)]
COMPRESS = [
    *("zip", "", "top-k", "top-k:", "top-k:0", "top-k:0.000", "top-k:1.5", "top-k:x", "top-k:-0.1"),
    *("top-k:nan", "top-k:1e-2", "top-k:\u0660.\u0661", "powersgd", "powersgd:0", "powersgd:x"),
    *("powersgd:1.5", "powersgd:99999", "bfloat16:2", "none:1", "TOP-K:0.1"),
]
HALOS = [
    *("fresh", "", "sampled", "sampled:", "sampled:0", "sampled:1.1", "sampled:-1", "STALE"),
    *("sampled:nan", "sampled:1e-1", "stale:1", "exact:1", "sampled:\u0660.\u0661"),
]
INTERVALS = ["0", "-5", "5 m", "m", "", "nan", "1e9", "0s", "inf", "10000000000"]
SIZES = [0, -3, "224x", "x224", "1x2x3", "big", "32x0", 99999, 16385]
WRONG: list[tuple[str, Any, str]] = [
    *((name, x, f" {x}: must be a") for name in NUMBERS for x in (math.nan, math.inf, -1.0)),
    ("validation", 1, r" 1: .* from 0 to less than 1, such as 0\.1"),
    ("mixup", -0.1, " -0.1: must be a number from 0 to 100$"),
    ("ema", 1, " 1: .* to 0.999999; with 1 the average would never leave the first weights"),
    ("new_classifier", True, ": is for weights that are loaded"),
    *(("compress", text, ".* must be none; bfloat16; top-k:RATIO") for text in COMPRESS),
    *(("halo", text, ".* must be exact, stale, or sampled:P") for text in HALOS),
    *(("log_every", text, f" {text}: must be a number of steps such as") for text in INTERVALS),
    ("checkpoint_every", "0", " 0: must be a number of steps such as"),
    *(("image_size", x, f" {x}: .*HEIGHTxWIDTH.*224x160") for x in SIZES),
    *(("fanout", x, f" {x}: must be numbers of neigh") for x in ("0", "", "5,", "x", "-2")),
    ("auto_augment", "rand-n9999", ".* -n9999 must have a whole number from 1 to 16"),
    ("auto_augment", "rand-m99", ".* -m99 must have a whole number from 0 to 30"),
    ("auto_augment", "rand-mmax0", ".* -mmax0 must have a whole number from 1 to 30"),
    ("auto_augment", "rand-n1.5", ".* -n1.5 must have a whole number from 1 to 16"),
    ("auto_augment", "augmix-d9999-m3", ".* -d9999 must have a whole number from 1 to 16"),
    ("auto_augment", "augmix-a0", ".* -a0 must have a number from 0.01 to 100"),
    ("auto_augment", "rand-fast", ".* -fast is not one of"),  # timm leaves these out in silence
    ("auto_augment", "rand-mstdinf", ".* -mstdinf is not one of"),
    ("auto_augment", "rand-m9-m3", ".* -m3 is not one of .* each once"),
    ("auto_augment", "rand-m٣", ".* is not one of"),
    ("auto_augment", "original-m9", ".* -m9 is not one of -mstd with a number"),
    ("auto_augment", "rand-tnone", ".* -tnone must name one of weights, 3aw, 3a"),
    ("auto_augment", "", ".* '' is not one of"),
]


def test_wrong_values_are_told_with_their_option():
    rows = [(name, value, f"^--{name.replace('_', '-')}{words}") for name, value, words in WRONG]
    check_refusals(rows, lambda name, value: check_numbers(TrainConfig(**{name: value})))


def test_the_largest_and_smallest_values_are_taken():
    check_numbers(TrainConfig(validation=0.9999, ema=0.999999, smoothing=0.99, dropout=0.99))
    check_numbers(TrainConfig(image_size=16384, fanout="25,10", drop_path=0, crop_pct=0.1))
