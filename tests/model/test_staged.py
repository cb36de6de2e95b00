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
    ]
    make: Any = partial(create_model, num_classes=10, img_size=(8, 8))
    check_refusals((partial(make, name, **options), words) for name, options, words in rows)


def test_the_study_is_a_grid_unless_it_is_told_otherwise():
    def graphs(**options):
        with torch.device("meta"):
            model = create_model("vig_study", num_classes=2, img_size=(8, 8), **options)
        return {conv.graph for conv in model.modules() if hasattr(conv, "graph")}

    assert graphs() == {"grid"}
    assert graphs(graph="knn") == {"knn"}
