"""Operators of torch: which are called, and which of its checks take no time."""

from torch.utils._python_dispatch import TorchDispatchMode

# Checks of torch.library.opcheck; the others, which compile, take a second each.
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


class Called(TorchDispatchMode):
    """The names of the operators that are called within, in order."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))
