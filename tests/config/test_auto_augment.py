"""Which names of augmentations are taken, and that timm takes them as they are meant."""

import pytest

from vigpipe.config.auto_augment import check_auto_augment
from vigpipe.config.options import TrainConfig, check_numbers
from vigpipe.data.augment import Augmentation, TimmAugment
from vigpipe.errors import InputError

GOOD = [
    "none", "original", "originalr-mstd0.5", "v0", "v0r", "3a", "rand", "rand-m9-mstd0.5-inc1",
    "rand-n3-p0.7-mmax20-m15", "rand-m7-mstd101", "rand-t3a", "augmix", "augmix-m5-w4-d2-a1.5-b1",
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_timm_takes_every_name_that_is_taken(text):
    check_auto_augment(text)
    TimmAugment(Augmentation(auto_augment=text), (8, 8), 0.5, 3, flip=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rand-n999999999", "-n999999999 is not one of"),  # took days an image
        ("rand-n9999", "-n9999 must have a whole number from 1 to 16"),
        ("rand-m99", "-m99 must have a whole number from 0 to 30"),
        ("rand-mmax0", "-mmax0 must have a whole number from 1 to 30"),
        ("rand-n0", "-n0 must have a whole number from 1 to 16"),
        ("rand-n1.5", "-n1.5 must have a whole number from 1 to 16"),
        ("rand-p2", "-p2 must have a number from 0 to 1"),
        ("augmix-w9999", "-w9999 must have a whole number from 1 to 16"),
        ("augmix-d9999-m3", "-d9999 must have a whole number from 1 to 16"),
        ("augmix-a0", "-a0 must have a number from 0.01 to 100"),
        ("rand-fast", "-fast is not one of"),  # timm leaves these out in silence
        ("rand-mstdinf", "-mstdinf is not one of"),
        ("rand-m9-m3", "-m3 is not one of .* each once"),
        ("rand--m9", "- is not one of"),
        ("rand-m٣", "is not one of"),
        ("original-m9", "-m9 is not one of -mstd with a number"),
        ("none-m9", "'none' is not one of rand, |'none' is not one of original"),
        ("rand-tnone", "-tnone must name one of weights, 3aw, 3a"),
        ("random", "'random' is not one of"),
        ("", "'' is not one of"),
    ],
)
def test_what_timm_would_misunderstand_or_never_finish_is_refused(text, why):
    with pytest.raises(InputError, match=why):
        check_numbers(TrainConfig(auto_augment=text))
