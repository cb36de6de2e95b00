"""Train Vision GNNs across pipeline stages and data-parallel replicas.

From Python: `vigpipe.train` trains as the command does, `vigpipe.load` gives a trained model with
its transform and class names, `vigpipe.prepack` makes it faster on a CPU, `vigpipe.predict`
classifies images, `vigpipe.load_graph_model` gives a trained model of a graph, and
`vigpipe.create_model` builds a model. Importing vigpipe also makes `timm.create_model` know the
models.
"""

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
_MODULES = {
    "InputError": "vigpipe.errors",
    "LoadedGraphModel": "vigpipe.inference.load_graph_model",
    "LoadedModel": "vigpipe.inference.load",
    "Prediction": "vigpipe.inference.predict",
    "Training": "vigpipe.api",
    "TrainingError": "vigpipe.errors",
    "create_model": "vigpipe.model.variants",
    "load": "vigpipe.inference.load",
    "load_graph_model": "vigpipe.inference.load_graph_model",
    "predict": "vigpipe.inference.load",
    "prepack": "vigpipe.inference.prepack",
    "train": "vigpipe.api",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _MODULES:
        raise AttributeError(f"module 'vigpipe' has no attribute {name!r}")
    value = globals()[name] = resolve_name(f"{_MODULES[name]}:{name}")
    return value


def __dir__() -> list[str]:
    return __all__


register()
