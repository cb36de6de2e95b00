"""Train Vision GNNs across pipeline stages and data-parallel replicas.

From Python: `vigpipe.train` trains as the command does, `vigpipe.load` gives a trained model with
its transform and class names, `vigpipe.prepack` makes it faster on a CPU, `vigpipe.predict`
classifies images, `vigpipe.load_graph_model` gives a trained model of a graph, and
`vigpipe.create_model` builds a model. Importing vigpipe also makes `timm.create_model` know the
models.
"""

from vigpipe.launch import safe_path as _safe_path  # noqa: F401 - before anything else

# isort: split
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from vigpipe.model.import_hooks import register
from vigpipe.version import __version__

if TYPE_CHECKING:
    from vigpipe.api import Training, train
    from vigpipe.errors import InputError, TrainingError
    from vigpipe.inference.load import LoadedModel, load, predict
    from vigpipe.inference.load_graph_model import LoadedGraphModel, load_graph_model
    from vigpipe.inference.predict import Prediction
    from vigpipe.inference.prepack import prepack
    from vigpipe.model.variants import create_model

__all__ = [
    "InputError",
    "LoadedGraphModel",
    "LoadedModel",
    "Prediction",
    "Training",
    "TrainingError",
    "__version__",
    "create_model",
    "load",
    "load_graph_model",
    "predict",
    "prepack",
    "train",
]
# Imported when they are first used: the command line does without torch for as long as it can.
_NAMES = {
    "vigpipe.api": ("Training", "train"),
    "vigpipe.errors": ("InputError", "TrainingError"),
    "vigpipe.inference.load": ("LoadedModel", "load", "predict"),
    "vigpipe.inference.load_graph_model": ("LoadedGraphModel", "load_graph_model"),
    "vigpipe.inference.predict": ("Prediction",),
    "vigpipe.inference.prepack": ("prepack",),
    "vigpipe.model.variants": ("create_model",),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            value = globals()[name] = resolve_name(f"{module}:{name}")
            return value
    raise AttributeError(f"module 'vigpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


register()
