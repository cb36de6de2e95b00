"""Run the blocks of a model through torch.compile."""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from vigpipe.errors import InputError
from vigpipe.files.cache import INDUCTOR_VARIABLE, hide_inductor_folder, inductor_folder
from vigpipe.model.staged import StagedModel
from vigpipe.ops.compiler import processor

_GRAPHS_PER_BLOCK = 8  # torch's own limit for a function: training, evaluation, sizes of batches


def compile_blocks(model: StagedModel, **options: Any) -> None:
    """Compile every block of a model or stage in place, so that names and shapes stay.

    Blocks with the same k, dilation, sizes and drop-path share their graphs. All blocks share the
    code of one `forward`, which torch compiles at most 8 times by default; after that it would warn
    and run uncompiled. That limit, which holds for the whole process, is therefore raised to 8 for
    each block, and a call that exceeds it raises InputError.
    """
    hide_inductor_folder()
    # This import takes 2 s, so it is left to those who compile.
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit as Limit

    _keep_for_later_runs()
    blocks = model.numbered_blocks
    num_graphs = _GRAPHS_PER_BLOCK * len(blocks)
    config.recompile_limit = max(config.recompile_limit, num_graphs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, num_graphs)
    config.fail_on_recompile_limit_hit = True
    for name, block in blocks.items():
        block.compile(dynamic=False, **options)
        call: Any = block._compiled_call_impl
        block._compiled_call_impl = partial(_call, call, Limit, name, num_graphs)


def _keep_for_later_runs() -> None:
    """Let torch keep what it compiles in vigpipe's cache.

    By default torch uses the folder for temporary files, which a cluster often deletes with the
    job. The name tells processors apart, because hosts that share a home directory may differ.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    with suppress(OSError):  # raised where there is no cache
        by_default = {None, default_cache_dir(), inductor_folder()}  # torch sets it itself
        if os.environ.get(INDUCTOR_VARIABLE) in by_default:  # else the user has named a folder
            kind = hashlib.sha256(processor()).hexdigest()[:16]
            os.environ[INDUCTOR_VARIABLE] = inductor_folder(kind)


def _call(
    compiled: Callable[..., Any], limit: type[Exception], name: str, num_graphs: int, *inputs: Any
) -> Any:
    try:
        return compiled(*inputs)
    except limit as error:
        raise InputError(
            f"--compile: block {name} needs another graph, and the blocks have the {num_graphs} "
            "that they may have: for each, training and evaluation with four sizes of a "
            "micro-batch; choose batches and micro-batches of fewer sizes, or leave --compile out"
        ) from error
