"""The models by name."""

from functools import partial
from typing import Any

import torch

from tests.refusals import check_refusals
from vigpipe.model.variants import create_model


def test_unknown_names_are_refused_and_choices_that_the_study_does_not_have():
    rows: list[Any] = [
        ("vig_huge", {}, "--model vig_huge: no such model; choose one of vig_dig"),
        ("vig_study", {"aggregator": "gin"}, "--aggregator gin: vig_study has no such choice"),
        ("vig_study", {"stem_stride": 2}, "--stem-stride 2: vig_study has no such choice"),
        ("vig_study", {"graph": "window"}, "--graph window: vig_study has grid and knn"),
        ("vig_digits", {"num_classes": -3}, "num_classes=-3: must be from 0 to"),
        ("vig_digits", {"in_chans": 0}, "in_chans=0: must be from 1 to"),
        ("vig_digits", {"img_size": 0}, r"img_size=\(0, 0\): each side must be from 1 to 16384"),
        ("vig_digits", {"drop_path_rate": 2}, "drop_path_rate=2: must be at least 0 and below 1"),
        ("vig_digits", {"drop_rate": float("nan")}, "drop_rate=nan: must be at least 0"),
        ("vig_digits", {"narrow": 0}, "0 sub-networks cannot equally share"),
        ("vig_digits", {"img_size": (8, "8")}, "img_size=.*must be a whole number or"),
        ("vig_study", {"img_size": (-1, 8)}, r"img_size=\(-1, 8\): each side"),
        ("vig_study", {"num_classes": True}, "num_classes=True: must be a whole number"),
    ]
    make: Any = partial(create_model, num_classes=10, img_size=(8, 8))
    check_refusals((partial(make, name, **options), words) for name, options, words in rows)
    for name in ("vig_digits", "vig_study"):  # as timm has it: no classes, no last layer
        model = make(name, num_classes=0, in_chans=1).eval()
        assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 1024)


def test_the_study_is_a_grid_unless_it_is_told_otherwise():
    def graphs(**options):
        with torch.device("meta"):
            model = create_model("vig_study", num_classes=2, img_size=(8, 8), **options)
        return {conv.graph for conv in model.modules() if hasattr(conv, "graph")}

    assert graphs() == {"grid"}
    assert graphs(graph="knn") == {"knn"}
