"""Which block goes to which stage; every way to get a plan file wrong has its own sentence."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refusals import check_refusals
from vigpipe.parallel.plan import Plan, describe_cut, even_plan, read_plan

counts = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@settings(deadline=None, max_examples=100)
@given(counts)
def test_an_even_plan_has_each_block_once_and_larger_stages_first(case):
    num_blocks, num_stages = case
    plan = even_plan(num_blocks, num_stages)
    assert plan.num_stages == num_stages
    assert [block for stage in plan.stages for block in stage] == list(range(num_blocks))
    sizes = [len(stage) for stage in plan.stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_a_plan_file_is_read(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('model = "vig_digits"  # four blocks\nstages = [[0], [1, 2, 3]]\n')
    plan = read_plan(path, "vig_digits", 4)
    assert plan == Plan(((0,), (1, 2, 3)))
    assert describe_cut(plan.stages) == "1 + 3"


WRONG_CUTS = [
    ("[[0], [3]]", "block 1, 2 is in no stage; all of 0 to 3 must be"),
    ("[[0, 1, 1], [2, 3]]", "block 1 is in stages 0 and 0; a block belongs to exactly one"),
    ("[[2, 3], [0, 1]]", "block 0 comes after block 3; blocks must stay in order"),
    ("[[0, 1], [2, 3, 4]]", "stage 1 names block 4; the model has blocks 0 to 3"),
    ("[[-1, 0, 1], [2, 3]]", "stage 0 names block -1; the model has blocks 0 to 3"),
    ("[[0, 1], [], [2, 3]]", "stage 1 must be a list of at least one block number, got []"),
    ("[[0, 1], 2]", "stage 1 must be a list of at least one block number, got 2"),
    ("[[0, true], [2, 3]]", "stage 0: True is not a block number"),
    ("[[[0], 1], [2, 3]]", "stage 0: [0] is not a block number"),
    ("[]", "stages must be a list of lists of block numbers, got []"),
    ("2", "stages must be a list of lists of block numbers, got 2"),
]
WRONG_FILES = [
    ('model = "m"\nstages = [[0]]\nnote = 1', "unknown key 'note'; a plan has the keys model"),
    ("stages = [[0]]", "the key 'model' is missing; a plan has the keys model and stages"),
    ("model = 3\nstages = [[0]]", "this plan is for model 3, but --model is 'm'"),
    ("stages [[0]]", "not a TOML file ("),
    ('model = "\x81"', "is not UTF-8 text"),
]


def test_a_wrong_file_is_refused(tmp_path):
    rows = [(f'model = "m"\nstages = {stages}\n', says) for stages, says in WRONG_CUTS]
    path = tmp_path / "plan.toml"

    def read(text):
        path.write_text(text, encoding="latin-1")
        read_plan(path, "m", 4)

    check_refusals(
        [(text, re.escape(says)) for text, says in rows + WRONG_FILES],
        read,
        f"{re.escape(str(path))}.*",
    )
    for where, reason in [("none.toml", "No such file or directory"), (".", "it is a folder")]:
        check_refusals(
            [(tmp_path / where, rf"cannot be read \({reason}\); give a number of stages")],
            lambda path: read_plan(path, "m", 4),
            where=f"--stages {tmp_path / where}",
        )
