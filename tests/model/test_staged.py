"""The models by name, and a model that walks past what it does not have."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.refusals import check_refusals
from vigpipe.model.variants import create_model


def digits():
    torch.manual_seed(0)
    return create_model("vig_digits", num_classes=10, in_chans=1, img_size=(8, 8))


def test_unknown_names_are_refused_and_choices_that_the_study_does_not_have():
    rows: list[Any] = [
        ("vig_huge", {}, "--model vig_huge: no such model; choose one of vig_dig"),
        ("vig_study", {"aggregator": "gin"}, "--aggregator gin: vig_study has no such choice"),
        ("vig_study", {"stem_stride": 2}, "--stem-stride 2: vig_study has no such choice"),
        ("vig_study", {"compat": "reference"}, "--compat reference: vig_study has no such choice"),
        ("vig_study", {"stochastic_dilation": 0.1}, "--stochastic-dilation 0.1: vig_study has no"),
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


def test_keep_leaves_names_as_they_are_and_deletes_the_rest():
    model = digits()
    model.keep([1, 3], stem=False, readout=False)
    assert {name.split(".")[0] for name in model.state_dict()} == {"backbone"}
    assert list(model.numbered_blocks) == ["1", "3"]
    assert (model.has_stem, model.has_readout) == (False, False)


@pytest.mark.parametrize(
    ("stem", "readout", "kept"),
    [(True, False, {"stem", "pos_embed"}), (False, True, {"prediction"})],
)
def test_keep_leaves_the_stem_or_the_readout(stem, readout, kept):
    model = digits()
    model.keep([2], stem=stem, readout=readout)
    assert {name.split(".")[0] for name in model.state_dict()} == kept | {"backbone"}


def test_keeping_everything_changes_nothing():
    model = digits().eval()
    images = torch.rand(2, 1, 8, 8)
    before = model(images)
    model.keep(range(4), stem=True, readout=True)
    assert torch.equal(model(images), before)


def test_what_is_missing_is_walked_past():
    model, images = digits().eval(), torch.rand(2, 1, 8, 8)
    expected = model.numbered_blocks["2"](model.embed(images), None, None)[0]
    model.keep([2], stem=True, readout=False)
    assert torch.equal(model(images), expected)
    assert model(images).shape == (2, *model.boundary_shape(3))
