"""The comparison of operators finds what differs."""

import pytest

from tests.selftest.made_up import CPU, operator_rows
from vigpipe import ops
from vigpipe.selftest import operators
from vigpipe.selftest.rows import Budget
from vigpipe.selftest.worker import WorkerError


def outcomes(name):
    results = operators.compare(name, "cpu")
    return [operators.row_of(name, result).outcome for result in results]


@pytest.mark.parametrize("spoil", [1e-3, float("nan")])
def test_a_wrong_gradient_is_found(spoil, monkeypatch):
    right = ops.hidden

    def hidden(x, first, bias, second, *, fused):
        result = right(x, first, bias, second, fused=fused)
        return result + spoil * (first - first.detach()).sum() if fused else result

    monkeypatch.setattr(ops, "hidden", hidden)
    rows = [operators.row_of("hidden", r) for r in operators.compare("hidden", "cpu")]
    assert {row.outcome for row in rows} == {"failed"}
    assert all("backward differs" in row.note for row in rows)


def test_a_tie_that_is_decided_otherwise_is_found(monkeypatch):
    right = ops.knn

    def knn(x, y, bias, k, dilation, loop, *, fused):
        if not fused:
            return right(x, y, bias, k, dilation, loop, fused=False)
        # The candidates in the opposite order: of equally near ones, the last one comes first.
        y, last = (x if y is None else y).flip(1), (x if y is None else y).shape[1] - 1
        bias = None if bias is None else bias.flip(2)
        return last - right(x, y, bias, k, dilation, True, fused=False)

    monkeypatch.setattr(ops, "knn", knn)
    by_exactness = {True: set(), False: set()}
    for case, outcome in zip(operators.CASES["knn"](), outcomes("knn"), strict=True):
        if "no loops" not in case.sizes:
            by_exactness[case.is_exact].add(outcome)
    assert by_exactness == {True: {"failed"}, False: {"passed"}}


def test_a_neighbour_that_is_not_near_or_comes_twice_is_found():
    case = next(operators.CASES["knn"]())
    x, y, bias = case.tensors
    assert x is not None
    graph = ops.knn(x, y, bias, 9, fused=False)
    assert operators._off_in_nearness(case, graph, graph) == 0
    assert operators._off_in_nearness(case, graph.flip(2), graph) > 0.01
    twice = graph.clone()
    twice[0, 0, 1] = twice[0, 0, 0]
    assert operators._off_in_nearness(case, twice, graph) == float("inf")


def test_an_operator_that_crashes_does_not_end_the_others(monkeypatch):
    def call(function, name, device, seconds):
        if name == "aggregate":
            raise WorkerError("its process ended with SIGSEGV: it said nothing")
        return [operators.Compared("a case", "Triton (compiled)", 0.0, None, 0.0)]

    monkeypatch.setattr(operators, "call", call)
    rows = list(operators.measure(CPU, Budget(100)))
    assert [row.what for row in rows] == [
        "knn: a case (Triton)", "aggregate", "norm: a case (Triton)", "hidden: a case (Triton)"
    ]  # fmt: skip
    assert [row.outcome for row in rows] == ["passed", "failed", "passed", "passed"]
    assert "SIGSEGV" in rows[1].note


def test_the_page_says_what_serves():
    text = "\n".join(operators.section(list(operator_rows())))
    assert "knn: Triton (compiled at first use); aggregate: Triton" in text
    assert "forward differs by 1.2e+01, and 0e+00 is allowed" in text
