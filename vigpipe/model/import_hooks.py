"""Register our models and operators with other packages once those are imported, not before."""

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register() -> None:
    """Register models with timm, and FLOPs with torch's counter, once these are imported."""
    _import_after("timm.models", "vigpipe.model.registry")
    _import_after("torch.utils.flop_counter", "vigpipe.ops.flops")


def _import_after(awaited: str, module: str) -> None:
    if awaited in sys.modules:
        importlib.import_module(module)
    else:
        sys.meta_path.insert(0, _ImportAfter(awaited, module))


class _ImportAfter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook: once a module has been loaded by its own loader, import a second module."""

    loader: importlib.abc.Loader

    def __init__(self, awaited: str, module: str) -> None:
        self.awaited, self.module = awaited, module

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.awaited:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        importlib.import_module(self.module)
