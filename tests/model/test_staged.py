"""The models by name."""

from functools import partial
from typing import Any

import pytest
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


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_torchscript_and_batches_without_images_are_refused_or_right():
    """Symptom: errors of TorchScript's compiler, and NaN in the study's running statistics."""
    rows: list[Any] = []
    for name in ("vig_digits", "vig_study"):
        model = create_model(name, num_classes=3, in_chans=3, img_size=8)
        none = torch.zeros(0, 3, 8, 8)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        rows += [
            (partial(torch.jit.trace, model, torch.zeros(2, 3, 8, 8)), "torch.jit.trace and"),
            (partial(torch.jit.script, model), "torch.jit.script do not take the models"),
            (partial(model, none), "a batch without images"),
        ]
        check_refusals(rows)
        assert model.eval()(none).shape == (0, 3)
        assert all(value.equal(before[key]) for key, value in model.state_dict().items())
        rows.clear()
