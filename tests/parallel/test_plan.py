"""Which block goes to which stage; every way to get a plan file wrong has its own sentence."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vigpipe.errors import InputError
from vigpipe.parallel.plan import Plan, checked_plan, describe_cut, even_plan, read_plan

many = settings(deadline=None, max_examples=100)
counts = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


def written(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "plan.toml"
    path.write_bytes(text.encode(encoding))
    return path


# ---- even cuts ------------------------------------------------------------------------------


def test_ten_blocks_on_four_stages():
    plan = even_plan(10, 4)
    assert plan.stages == ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
    assert (plan.num_blocks, describe_cut(plan.stages)) == (10, "3 + 3 + 2 + 2")


@many
@given(counts)
def test_an_even_plan_has_each_block_once_and_stages_differ_by_one_block_at_most(case):
    num_blocks, num_stages = case
    plan = even_plan(num_blocks, num_stages)
    assert plan.num_stages == num_stages
    assert [block for stage in plan.stages for block in stage] == list(range(num_blocks))
    sizes = [len(stage) for stage in plan.stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert checked_plan([list(stage) for stage in plan.stages], num_blocks, "here") == plan


@pytest.mark.parametrize("num_stages", [0, -1, 5])
def test_more_stages_than_blocks_or_none_are_an_error(num_stages):
    expected = rf"--stages: {num_stages} stages for 4 blocks; .* choose 1 to 4"
    with pytest.raises(InputError, match=expected):
        even_plan(4, num_stages)


def test_stem_goes_with_the_first_stage_and_readout_with_the_last():
    plan = even_plan(6, 3)
    assert [plan.is_first(i) for i in range(3)] == [True, False, False]
    assert [plan.is_last(i) for i in range(3)] == [False, False, True]
    assert even_plan(6, 1).is_first(0)
    assert even_plan(6, 1).is_last(0)


# ---- plan files -----------------------------------------------------------------------------


def test_a_plan_file_is_read(tmp_path):
    path = written(tmp_path, 'model = "vig_digits"  # four blocks\nstages = [[0], [1, 2, 3]]\n')
    assert read_plan(path, "vig_digits", 4) == Plan(((0,), (1, 2, 3)))


WRONG_CUTS = [
    ("[[0, 1], [3]]", "block 2 is in no stage; all of 0 to 3 must be"),
    ("[[0], [3]]", "block 1, 2 is in no stage; all of 0 to 3 must be"),
    ("[[0, 1], [1, 2, 3]]", "block 1 is in stages 0 and 1; a block belongs to exactly one"),
    ("[[0, 1, 1], [2, 3]]", "block 1 is in stages 0 and 0; a block belongs to exactly one"),
    ("[[0, 2], [1, 3]]", "block 2 comes after block 0; blocks must stay in order"),
    ("[[2, 3], [0, 1]]", "block 0 comes after block 3; blocks must stay in order"),
    ("[[0, 1], [2, 3, 4]]", "stage 1 names block 4; the model has blocks 0 to 3"),
    ("[[-1, 0, 1], [2, 3]]", "stage 0 names block -1; the model has blocks 0 to 3"),
    ("[[0, 1], [], [2, 3]]", "stage 1 must be a list of at least one block number, got []"),
    ("[[0, 1], 2]", "stage 1 must be a list of at least one block number, got 2"),
    ('[[0, 1], "23"]', "stage 1 must be a list of at least one block number, got '23'"),
    ('[[0, "1"], [2, 3]]', "stage 0: '1' is not a block number"),
    ("[[0, 1.0], [2, 3]]", "stage 0: 1.0 is not a block number"),
    ("[[0, true], [2, 3]]", "stage 0: True is not a block number"),
    ("[[[0], 1], [2, 3]]", "stage 0: [0] is not a block number"),
    ("[]", "stages must be a list of lists of block numbers, got []"),
    ("2", "stages must be a list of lists of block numbers, got 2"),
]
WRONG_FILES = [
    ('model = "m"\nstages = [[0]]\nnote = 1', "unknown key 'note'; a plan has the keys model"),
    ("stages = [[0]]", "the key 'model' is missing; a plan has the keys model and stages"),
    ('model = "m"', "the key 'stages' is missing; a plan has the keys model and stages"),
    ('model = "n"\nstages = [[0]]', "this plan is for model 'n', but --model is 'm'"),
    ("model = 3\nstages = [[0]]", "this plan is for model 3, but --model is 'm'"),
    ("stages [[0]]", "not a TOML file ("),
]


def test_a_wrong_file_is_an_error(tmp_path):
    rows = [(f'model = "m"\nstages = {stages}\n', says) for stages, says in WRONG_CUTS]
    failed = []
    for text, says in [*rows, *WRONG_FILES]:
        path = written(tmp_path, text)
        try:
            told = f"it is read: {read_plan(path, 'm', 4)}"
        except InputError as error:
            told = str(error)
        failed += [] if f"{path}: {says}" in told else [(text, says, told)]
    assert not failed


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    path = written(tmp_path, 'model = "é"\nstages = [[0]]', encoding="latin-1")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read_plan(path, "é", 1)


def test_a_missing_file_is_an_error(tmp_path):
    path = tmp_path / "none.toml"
    expected = re.escape(f"--stages {path}: cannot be read (No such file or directory); ")
    with pytest.raises(InputError, match=expected):
        read_plan(path, "m", 1)


def test_a_folder_is_an_error(tmp_path):
    with pytest.raises(InputError, match=re.escape(f"--stages {tmp_path}: cannot be read (")):
        read_plan(tmp_path, "m", 1)
