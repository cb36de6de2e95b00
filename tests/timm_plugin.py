"""A pytest plugin under which timm's own tests/test_models.py runs on our models alone.

`tests/model/test_timm.py` fetches that file and runs it with `-p tests.timm_plugin`.
"""

from collections.abc import Iterable
from fnmatch import fnmatch

import pytest
import timm

from vigpipe.model.shapes import MOBILE_SHAPES, SHAPES

TOO_LARGE = "minutes for what the tiny variants, of other widths and depths, show in seconds"
SCRIPTED = "TorchScript is deprecated in torch, and the models' control flow is Python's"
# What does not run: a test, or a test of one model; and why.
LEFT_OUT: dict[tuple[str, str | None], str] = {
    ("test_model_forward_torchscript", None): SCRIPTED,
    ("test_model_forward_fx_torchscript", None): SCRIPTED,
    ("test_prune_intermediate_layers_contract", "vig_ti_224"): TOO_LARGE,
    ("test_prune_intermediate_layers_contract", "pvig_cifar_ti"): (
        "its first features have 32 channels, rows and columns, so the test cannot tell that they "
        "are channels last, and compares them as if they were not"
    ),
}
PAIR = "in training the last node gives the logits of two heads, and the test takes one tensor"
LEFT_OUT |= {("test_model_backward_fx", name): PAIR for name in MOBILE_SHAPES}
LARGE = ("vig_s_224", "vig_b_224", "pvig_s_224", "pvig_m_224", "pvig_b_224")
# One variant of each family has all tests.
LARGE += tuple(
    n for n in MOBILE_SHAPES if not n.endswith("_ti") and n not in ("greedyvig_s", "adaptvig_s")
)
# What timm marks its tests with; its time limits belong to a plugin that is not needed here.
MARKERS = ["base", "forward", "backward", "cfg", "cfg_nonstd", "features", "fxforward"]
MARKERS += ["fxbackward", "torchscript", "timeout"]


def why_left_out(function: str, model: str) -> str | None:
    """The reason why a test does not run on a model, if there is one."""
    reason = LEFT_OUT.get((function, None)) or LEFT_OUT.get((function, model))
    return reason or (TOO_LARGE if model in LARGE else None)


def list_models(
    filter: str | Iterable[str] = "",
    module: str | Iterable[str] = "",
    pretrained: bool = False,
    exclude_filters: str | Iterable[str] = "",
    name_matches_cfg: bool = False,
    include_tags: bool | None = None,
) -> list[str]:
    """Our models in place of timm's.

    Where timm's tests list its modules, they mean those with feature maps at every block: ours too.
    """
    wanted = [filter] if isinstance(filter, str) else filter
    unwanted = [exclude_filters] if isinstance(exclude_filters, str) else exclude_filters
    return [
        name
        for name in SHAPES
        if not pretrained  # we publish no weights
        and (not filter or any(fnmatch(name, pattern) for pattern in wanted))
        and not any(fnmatch(name, pattern) for pattern in unwanted)
    ]


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are imported, and with that made for each model that is listed."""
    import vigpipe.model.registry  # noqa: F401

    timm.list_models = list_models
    timm.list_pretrained = lambda *_, **__: []
    for name in MARKERS:
        config.addinivalue_line("markers", f"{name}: timm's")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop what is not about one of our models, and skip what is left out."""
    dropped: list[pytest.Item] = []
    for item in items:
        assert isinstance(item, pytest.Function)
        callspec = getattr(item, "callspec", None)
        model = callspec.params.get("model_name") if callspec else None
        if model not in SHAPES:
            dropped.append(item)
            continue
        reason = why_left_out(item.originalname, model)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        item.user_properties += [("function", item.originalname), ("model", model)]
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=dropped)
