"""Schedules of which a rank soon takes forwards and backwards in turn."""

from vigpipe.schedules.rule import Action, Degrees, Rule


def _order_1f1b(rank: int, degrees: Degrees) -> list[Action]:
    return _alternating(rank, degrees, degrees.pipeline_size - 1 - rank, in_round=1)


def _why_not_1f1b(degrees: Degrees) -> str | None:
    if degrees.num_microbatches >= degrees.pipeline_size:
        return None
    return (
        "--schedule 1f1b needs at least as many micro-batches as stages, got --microbatches "
        f"{degrees.num_microbatches} < --stages {degrees.pipeline_size}; raise --microbatches or "
        "choose --schedule gpipe"
    )


def _order_interleaved(rank: int, degrees: Degrees) -> list[Action]:
    in_round = degrees.num_microbatches // _num_rounds(degrees)
    ahead = (degrees.virtual_stages - 1) * in_round + 2 * (degrees.pipeline_size - 1 - rank)
    return _alternating(rank, degrees, ahead, in_round)


def _why_not_interleaved(degrees: Degrees) -> str | None:
    size, num, rounds = degrees.pipeline_size, degrees.num_microbatches, _num_rounds(degrees)
    if num % rounds == 0:
        return None
    return (
        f"--schedule interleaved1f1b runs {num} micro-batches in {rounds} equal rounds over {size} "
        f"ranks, and {num} is not a multiple of {rounds}; choose --microbatches {size * rounds} or "
        f"{size * (rounds + 1)}"
    )


def _num_rounds(degrees: Degrees) -> int:
    return max(1, degrees.num_microbatches // degrees.pipeline_size)


def _alternating(rank: int, degrees: Degrees, ahead: int, in_round: int) -> list[Action]:
    """List `ahead` forwards, then forwards and backwards in turn, then the remaining backwards.

    After every `in_round` micro-batches the rank moves on to its next stage, or back to the first.
    """
    stages = degrees.stages_of(rank)
    turn = [
        (i, start + m)
        for start in range(0, degrees.num_microbatches, in_round)
        for i in range(len(stages))
        for m in range(in_round)
    ]
    forward = [Action("forward", stages[i], m) for i, m in turn]
    backward = [Action("backward", stages[len(stages) - 1 - i], m) for i, m in turn]
    ahead = min(ahead, len(turn))
    actions = forward[:ahead]
    for f, b in zip(forward[ahead:], backward, strict=False):
        actions += [f, b]
    return [*actions, *backward[len(turn) - ahead :]]


ONE_F_ONE_B = Rule("torch.distributed.pipelining:Schedule1F1B", _order_1f1b, _why_not_1f1b)
INTERLEAVED_1F1B = Rule(
    "torch.distributed.pipelining:ScheduleInterleaved1F1B",
    _order_interleaved,
    _why_not_interleaved,
    is_virtual=True,
)
