"""What ranks and commands of tests have imported when they begin; see tests/warm.py.

Nothing here may start a thread or compute: a fork has neither the threads nor their locks' owners.
"""

import gc
import importlib

MODULES = [
    "hypothesis",
    "pytest",
    "rich.progress",
    "tests.warm",
    "timm",
    "torch",
    "torch.distributed.elastic.multiprocessing",
    "torch.distributed.launcher.api",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.testing",
    "vigpipe.cli",
    "vigpipe.commands.check",
    "vigpipe.commands.plan",
    "vigpipe.commands.predict",
    "vigpipe.commands.time",
    "vigpipe.launch.local",
    "vigpipe.run.evaluation",
    "vigpipe.train",
]

for name in MODULES:
    importlib.import_module(name)
gc.freeze()  # or the first collection in each fork would copy every page
