"""Run the blocks of a model through torch.compile."""

from typing import Any

from vigpipe.model.staged import StagedModel

_GRAPHS_PER_BLOCK = 8  # torch's own limit for a function: training, evaluation, sizes of batches


def compile_blocks(model: StagedModel, **options: Any) -> None:  # noqa: ANN401
    """Compile every block in place, so that names and shapes stay.

    Blocks differ in k, dilation and sizes, so each has graphs of its own, but all share the code of
    one `forward`. torch compiles a code 8 times at most, and runs what comes after uncompiled, with
    a warning. So that limit, which holds for the process, is raised to 8 for each block.

    Args:
        model: the model, or a stage of it.
        options: of torch.compile, besides `dynamic`.
    """
    from torch._dynamo import config  # takes 2 s, which only those who compile pay

    blocks = list(model.numbered_blocks.values())
    num_graphs = _GRAPHS_PER_BLOCK * len(blocks)
    config.recompile_limit = max(config.recompile_limit, num_graphs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, num_graphs)
    for block in blocks:
        block.compile(dynamic=False, **options)
