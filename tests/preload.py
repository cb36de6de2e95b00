"""What ranks and commands of tests have imported when they begin; see tests/warm.py.

Nothing here may start a thread or compute: a fork has neither the threads nor their locks' owners.
"""

import gc
import importlib
import inspect

MODULES = [
    "hypothesis",
    "pytest",
    "rich.progress",
    "tests.warm",
    "timm",
    "torch",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.testing",
    "vigpipe.cli",
    "vigpipe.commands.check",
    "vigpipe.commands.plan",
    "vigpipe.commands.plan_ways",
    "vigpipe.commands.inference",
    "vigpipe.commands.time",
    "vigpipe.graphs.job",
    "vigpipe.launch.local",
    "vigpipe.ops.registered",
    "vigpipe.run.evaluation",
    "vigpipe.training",
]

for name in MODULES:
    importlib.import_module(name)
# torchrun's agent looks at its stack 18 times, and each time inspect would search thousands of
# modules for the one that these frames are of: a second of a core for every torchrun.
inspect.modulesbyfile |= {"<string>": "__main__", "<frozen runpy>": "runpy"}
gc.freeze()  # or the first collection in each fork would copy every page
