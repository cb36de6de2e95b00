"""The step that is profiled."""

from tests.profiling.quick import CPU, make_run
from vigpipe.profiling.trial import make_trial
from vigpipe.run.rank import make_rank_state


def test_the_profiled_model_is_the_unsplit_one_whatever_the_layout():
    split = make_run(stages=2, microbatches=2, dp=1)
    rank_state = make_rank_state(split.unsplit(), 0, CPU)
    measured, _ = make_trial(split, split.job.trials([3], 2)[0], CPU)
    assert measured.trained.parameters().keys() == rank_state.trained.parameters().keys()
