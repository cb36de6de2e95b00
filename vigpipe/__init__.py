"""Train Vision GNNs across pipeline stages and data-parallel replicas.

`vigpipe.create_model` builds a model; importing vigpipe also makes `timm.create_model` know them.
"""

from typing import TYPE_CHECKING, Any

from vigpipe.model.import_hooks import register

if TYPE_CHECKING:
    from vigpipe.model.variants import create_model

__version__ = "0.1.0"
__all__ = ["__version__", "create_model"]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name == "create_model":  # imports torch, which the command line does without for as long
        from vigpipe.model.variants import create_model

        return create_model
    raise AttributeError(f"module 'vigpipe' has no attribute {name!r}")


register()
