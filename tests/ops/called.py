"""Which operators of torch are called."""

from torch.utils._python_dispatch import TorchDispatchMode


class Called(TorchDispatchMode):
    """The names of the operators that are called within, in order."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))
