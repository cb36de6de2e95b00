"""Choices of a way to use ranks beside what all ways take."""

import csv
import sys
from dataclasses import replace

import pytest
import torch

from tests.profiling.test_ways import AS_FEW
from tests.world import run_command, run_ranks
from vigpipe.bench import plan_graph
from vigpipe.bench.options import PlanGraphBench
from vigpipe.bench.plan_graph import Row, bench_plan_graph, check, parse_cases, verdicts, write
from vigpipe.errors import InputError
from vigpipe.run.facts import prepare

CPU = torch.device("cpu")
SMALL = "gcn:8x3@sbm:400,4,12,6;sage:8x2+parts*2@sbm:400,4,12,6"


def row(case, way, predicted, measured, *, is_same=True, is_chosen=False):
    spread = measured / 2, 2 * measured
    return Row(
        case, way, "", is_same, is_chosen, predicted, measured, *spread, 2_000_000, 2_000_000
    )


ROWS = [
    row("narrow", "one rank", 1.0, 1.1, is_chosen=True),
    row("narrow", "mixed", 3.0, 3.3),
    row("narrow", "replicas of parts", 0.5, 0.4, is_same=False),
    row("wide", "one rank", 4.0, 4.4),
    row("wide", "mixed", 2.0, 2.5, is_chosen=True),
    row("wide", "halo", 2.1, 2.0),
]


def test_a_choice_is_judged_among_the_ways_with_the_steps_of_one_rank():
    narrow, wide = verdicts(ROWS)
    assert (narrow.best.way, narrow.loss) == ("one rank", 0.0)
    assert (wide.chosen.way, wide.best.way) == ("mixed", "halo")
    assert wide.loss == pytest.approx(0.25)


def test_the_page_says_how_many_choices_were_right_and_what_the_others_lost(tmp_path, capsys):
    write(tmp_path, ROWS, "2 ranks, 3 repeats", CPU)
    page = (tmp_path / "README.md").read_text()
    assert "Of 2 cases, the choice is the best way in 1, and within 10% of it in 1; at most" in page
    assert "at most 25.0% are lost" in page
    assert "differ by 9% (median), at most by 20%" in page
    assert "| wide   | mixed     | 2.5          | halo     | 2            | 25.0%  |" in page
    assert "replicas of parts" in page
    assert "25.0%" in capsys.readouterr().out
    with (tmp_path / "rows.csv").open() as file:
        assert [r["way"] for r in csv.DictReader(file)] == [r.way for r in ROWS]
    assert (tmp_path / "predicted.png").read_bytes().startswith(b"\x89PNG")


def test_a_case_is_a_model_with_its_size_and_perhaps_a_sampler_and_a_graph():
    first, other = parse_cases("gcn:256x3; gat:8x2+parts*4@sbm:400,4", PlanGraphBench(data="g.npz"))
    assert first.options == {
        **{"model": "gcn", "width": 256, "layers": 3},
        **{"sampler": "full", "microbatches": 1, "data": "g.npz"},
    }
    assert (other.name, other.options["data"]) == ("gat:8x2+parts*4@sbm:400,4", "sbm:400,4")
    assert (other.options["sampler"], other.options["microbatches"]) == ("parts", 4)


def test_at_least_six_cases_differ_in_model_width_and_graph():
    cases = [case.options for case in parse_cases(PlanGraphBench().cases, PlanGraphBench())]
    assert len(cases) >= 6
    for name, number in (("model", 3), ("width", 4), ("data", 4), ("sampler", 2)):
        assert len({case[name] for case in cases}) >= number


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cases": "gcn"}, "--cases gcn: must be MODEL:WIDTHxLAYERS"),
        ({"cases": "gcn:8x2+some*2"}, "must be MODEL:WIDTHxLAYERS"),
        ({"cases": "vig_digits:8x2"}, "--model vig_digits: is a model of images"),
        ({"cases": ";"}, "--cases ;: names none"),
        ({"ranks": 1}, "--ranks 1: must be at least 2"),
        ({"shards": 2}, "--shards 2: is chosen here; leave it out"),
    ],
)
def test_wrong_use_is_refused(options, said):
    with pytest.raises(InputError) as refused:
        check(replace(PlanGraphBench(), **options))
    assert said in str(refused.value)


def _bench(rank, world_size, folder):
    torch.set_num_threads(1)
    options = PlanGraphBench(cases=SMALL, data="sbm:400,4,12,6", shards=1)
    run = prepare(replace(options, shards=world_size), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (*AS_FEW, (plan_graph, "_MOST_STEPS", 1)):
            patch.setattr(module, name, value)
        bench_plan_graph(run, rank, CPU, folder, 1, options)


@pytest.mark.multiprocess
def test_every_way_is_predicted_and_measured(tmp_path):
    run_ranks(_bench, 2, tmp_path)
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    ways = {(row["case"][:4], row["way"]): row for row in rows}
    assert {way for case, way in ways if case == "gcn:"} == {
        *("one rank", "mixed", "halo", "layers", "replicas of parts", "layers, many parts")
    }
    assert {way for case, way in ways if case == "sage"} == {
        *("one rank", "mixed", "replicas", "layers")
    }
    for way in ("mixed", "halo"):
        found = ways["gcn:", way]
        assert 0 < int(found["sent_bytes"]) == int(found["predicted_bytes"])
    assert all(float(row["measured"]) > 0 for row in rows)


@pytest.mark.multiprocess
@pytest.mark.heavy
def test_the_command_starts_the_ranks(tmp_path):
    command = ["-m", "vigpipe", "bench", "plan-graph", "--cases", "gcn:8x2@sbm:400,4,12,6"]
    done = run_command(
        [sys.executable, *command, "--repeats", "1", "--out", str(tmp_path / "out")],
        {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "Of 1 cases" in done.stdout
