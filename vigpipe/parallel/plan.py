"""Which block goes to which stage: an even cut, or a plan file (format: stages/README.md)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from vigpipe.errors import InputError
from vigpipe.files.shipped import shipped
from vigpipe.files.untrusted import CHECK, read_toml


@dataclass(frozen=True)
class Plan:
    """The blocks of each stage; the stem belongs to the first stage, the readout to the last.

    Attributes:
        stages: block numbers of every stage, consecutive and in the order of the model.
    """

    stages: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        """Number of stages, virtual ones counted."""
        return len(self.stages)

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.stages))

    def is_first(self, stage_index: int) -> bool:
        """Whether this stage has the stem."""
        return stage_index == 0

    def is_last(self, stage_index: int) -> bool:
        """Whether this stage has the readout."""
        return stage_index == self.num_stages - 1


def describe_cut(stages: Sequence[Sequence[int]]) -> str:
    """Say how many blocks each stage has, such as `5 + 7`."""
    return " + ".join(str(len(blocks)) for blocks in stages)


def even_plan(num_blocks: int, num_stages: int) -> Plan:
    """Cut as evenly as the number of blocks allows; the first stages are the larger ones.

    Raises:
        InputError: there are more stages than blocks, or no stage at all.
    """
    if not 1 <= num_stages <= num_blocks:
        raise InputError(
            f"--stages: {num_stages} stages for {num_blocks} blocks; a stage needs at least one "
            f"block, so choose 1 to {num_blocks} (virtual stages counted)"
        )
    smallest, larger = divmod(num_blocks, num_stages)
    stages: list[tuple[int, ...]] = []
    for i in range(num_stages):
        start = i * smallest + min(i, larger)
        stages.append(tuple(range(start, start + smallest + (i < larger))))
    return Plan(tuple(stages))


def read_plan(path: Path, model: str, num_blocks: int) -> Plan:
    """Read a plan file and check it against the model.

    Args:
        path: the file, in the format of stages/README.md, or the name of one of vigpipe's plans.
        model: name of the model that the plan must be for.
        num_blocks: number of blocks of that model.

    Raises:
        InputError: the file cannot be read, has an unknown or missing key, is for another model, or
            does not give every block of the model to exactly one stage, in order.
    """
    plans = {
        plan.stem: plan for plan in sorted(shipped("stages").glob("*.toml"), key=lambda p: p.stem)
    }
    if str(path) in plans and not path.exists():
        path = plans[str(path)]
    advice = f"give a number of stages, a plan file, or a plan of vigpipe's ({', '.join(plans)})"
    if os.path.isdir(path):
        raise InputError(f"--stages {path}: cannot be read (it is a folder); {advice}")
    try:
        content = read_toml(path)
    except InputError as error:
        raise InputError(f"--stages {str(error).removesuffix(CHECK)}; {advice}") from error
    keys, has = ("model", "stages"), "a plan has the keys model and stages"
    for key in content:
        if key not in keys:
            raise InputError(f"{path}: unknown key {key!r}; {has}")
    for key in keys:
        if key not in content:
            raise InputError(f"{path}: the key {key!r} is missing; {has}")
    if content["model"] != model:
        raise InputError(
            f"{path}: this plan is for model {content['model']!r}, but --model is {model!r}"
        )
    return _checked_plan(content["stages"], num_blocks, path)


def _checked_plan(stages: object, num_blocks: int, path: Path) -> Plan:
    """Turn what should be lists of block numbers, as read from a file, into a Plan."""

    def wrong(what: str) -> InputError:
        return InputError(f"{path}: {what}")

    if not isinstance(stages, list) or not stages:
        raise wrong(f"stages must be a list of lists of block numbers, got {stages!r}")
    owner: dict[int, int] = {}
    for index, blocks in enumerate(stages):
        if not isinstance(blocks, list) or not blocks:
            raise wrong(
                f"stage {index} must be a list of at least one block number, got {blocks!r}"
            )
        for block in blocks:
            if type(block) is not int:
                raise wrong(f"stage {index}: {block!r} is not a block number")
            if not 0 <= block < num_blocks:
                has = f"the model has blocks 0 to {num_blocks - 1}"
                raise wrong(f"stage {index} names block {block}; {has}")
            if block in owner:
                both = f"{owner[block]} and {index}"
                raise wrong(f"block {block} is in stages {both}; a block belongs to exactly one")
            owner[block] = index
    missing = sorted(set(range(num_blocks)) - set(owner))
    if missing:
        names = ", ".join(map(str, missing))
        raise wrong(f"block {names} is in no stage; all of 0 to {num_blocks - 1} must be")
    for before, after in pairwise(owner):
        if after != before + 1:
            raise wrong(f"block {after} comes after block {before}; blocks must stay in order")
    return Plan(tuple(tuple(blocks) for blocks in stages))
