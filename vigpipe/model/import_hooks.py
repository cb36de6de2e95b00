"""Make other packages know what we have when they are imported, and not import them before."""

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register() -> None:
    """Put our models into timm's registry and our operators' FLOPs into torch's counter.

    Each now if the other package is imported, else when it will be.
    """
    _after("timm.models", "vigpipe.model.registry")
    _after("torch.utils.flop_counter", "vigpipe.ops.flops")


def _after(name: str, ours: str) -> None:
    if name in sys.modules:
        importlib.import_module(ours)
    else:
        sys.meta_path.insert(0, _After(name, ours))


class _After(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Waits for the import of a module, lets its own loader run it, imports ours, steps aside."""

    loader: importlib.abc.Loader

    def __init__(self, name: str, ours: str) -> None:
        self.name, self.ours = name, ours

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:  # noqa: ANN401
        """Nothing, until the module is asked for."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As its own loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then ours."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        importlib.import_module(self.ours)
