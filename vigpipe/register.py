"""Make timm know our models as soon as it is imported, and not import it before."""

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register() -> None:
    """Register the models now if timm is imported, else when it will be."""
    if "timm.models" in sys.modules:
        import vigpipe.model.registry  # noqa: F401
    else:
        sys.meta_path.insert(0, _AfterTimm())


class _AfterTimm(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Waits for the import of `timm.models`, lets its own loader run it, and steps aside."""

    loader: importlib.abc.Loader

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:  # noqa: ANN401
        """Nothing, until timm.models is asked for."""
        if fullname != "timm.models":
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
        """Run timm.models, then register."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        import vigpipe.model.registry  # noqa: F401
