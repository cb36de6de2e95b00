"""The comparison of the Triton operators with plain torch before they serve on a kind of GPU.

`python tests/ops/test_self_check.py run` compares the kernels in Triton's interpreter, on the CPU,
and prints what was found.
"""

import importlib.util
import json

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.ops.called import Called
from tests.ops.programs import run_program
from vigpipe import ops
from vigpipe.ops import self_check

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="no Triton")
CPU = torch.device("cpu")


def first_two_swapped(graph):
    return graph[..., [1, 0, *range(2, graph.shape[-1])]]


def raises(*_):
    raise RuntimeError("ptxas ended with\nan error")


# The changed operator by its name, and what takes its place.
FAULTS = {
    "ties in another order": ("knn", lambda made: lambda *a: first_two_swapped(made(*a))),
    "a bias that is not added": ("knn", lambda made: lambda x, y, _, *a: made(x, y, None, *a)),
    "outputs a little off": ("aggregate", lambda made: lambda *a, **b: more(made(*a, **b))),
    "the last winner of a tie": ("aggregate", lambda made: lambda *a, **b: last(made, *a, **b)),
    "no gradient of the nodes": (
        "aggregate_backward",
        lambda made: lambda *a: (0 * a[1], *made(*a)[1:]),
    ),
    "another winner": ("maxima", lambda made: lambda *a: (made(*a)[0], made(*a)[1] + 1)),
    "no slope": ("pair_scores", lambda made: lambda *a: made(*a[:-1], 1.0)),
    "no gradient of the shares": (
        "attention_backward",
        lambda made: lambda *a: (0 * a[1], made(*a)[1]),
    ),
    "no backward": ("aggregate_backward", lambda made: raises),
}
OPERATORS = ("knn", "aggregate", "csr")


def more(results):
    return results[0] * 1.02, results[1]


def last(made, x, y, graph, *rest, **options):
    """Aggregate over the neighbours in the reverse order, and rename the winners."""
    out, winners = made(x, y, graph.flip(-1), *rest, **options)
    return out, graph.shape[-1] - 1 - winners


def problem(name):
    self_check._problems.clear()
    with torch.inference_mode(), torch.autocast("cpu"):  # which must not reach the comparison
        return self_check.problem(name, CPU)


def run():
    from tests.ops.test_gpu import mend_interpreter

    mend_interpreter()
    print(json.dumps({name: problem(name) for name in OPERATORS}))


@pytest.mark.triton
@pytest.mark.oldest
@pytest.mark.heavy
def test_the_kernels_pass_in_the_interpreter(tmp_path):
    found = run_program(__file__, "run", tmp_path, TRITON_INTERPRET="1")
    assert found == dict.fromkeys(OPERATORS, "")


@pytest.fixture
def kernels(monkeypatch):
    """The modules of the kernels, for which those in C++ stand: the interpreter is slow."""
    from vigpipe.ops import gpu, native
    from vigpipe.ops.csr import gpu as csr
    from vigpipe.ops.csr import native as native_csr

    modules = dict.fromkeys(("knn", "aggregate", "aggregate_backward"), (gpu, native))
    modules |= {name: (csr, native_csr) for name, _ in self_check.csr_cases()}
    for name, (module, in_cpp) in modules.items():
        monkeypatch.setattr(module, name, getattr(in_cpp, name))
    monkeypatch.setattr(self_check, "_problems", {})
    return {name: module for name, (module, _) in modules.items()}


@pytest.fixture
def found(kernels, monkeypatch):
    """Find what is wrong with an operator when a fault is planted in a kernel."""

    def found(fault):
        changed, change = FAULTS[fault]
        module = kernels[changed]
        monkeypatch.setattr(module, changed, change(getattr(module, changed)))
        return problem(
            "csr" if module.__name__.endswith("csr.gpu") else changed.removesuffix("_backward")
        )

    return found


@pytest.mark.parametrize("name", OPERATORS)
def test_correct_kernels_pass(kernels, name):
    assert problem(name) == ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(found, fault):
    # A fault that broke the call would be found whatever the comparison does.
    assert ("differs from plain torch" in found(fault)) == (FAULTS[fault][1](None) is not raises)


def test_the_sentence_says_what_differs_or_fails(found):
    assert found("a bias that is not added") == (
        "the Triton operator knn differs from plain torch (float32 with a bias) on cpu (cpu)"
    )
    assert found("no backward") == (
        r"the Triton operator aggregate fails with RuntimeError: ptxas ended with\nan error on cpu "
        "(cpu)"
    )


@pytest.fixture
def calls(monkeypatch):
    """Pretend that there are GPUs; the comparisons made on them."""
    made = []

    def check(device):
        made.append(device)
        return "a case" if device.index == 1 else ""

    monkeypatch.setattr(ops, "_versions", {})
    monkeypatch.setattr(self_check, "_problems", {})
    monkeypatch.setattr(self_check, "_check_knn", check)
    monkeypatch.setattr(ops, "_can_compute", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: "H2" if device.index == 1 else "H1"
    )
    return made


def serving(index, is_fake=False):
    return ops._version("cuda", index, "knn", is_fake)


def test_each_kind_of_gpu_is_compared_once_and_has_its_own_version(calls, capsys):
    assert [serving(index) for index in (0, 0, 2, 1, 1)] == ["Triton", "Triton", "Triton", "", ""]
    assert calls == [torch.device("cuda", 0), torch.device("cuda", 1)]
    sentence = "the Triton operator knn differs from plain torch (a case) on cuda:1 (H2, sm_90)"
    assert capsys.readouterr().err == (
        f"vigpipe: {sentence}; the plain operators serve, which are slower\n"
    )


def test_the_doctor_says_what_was_found(calls):
    assert ops.versions("cuda:0")["knn"] == "Triton (equal to plain torch on H1, sm_90)"
    assert ops.versions("cuda:1")["knn"] == (
        "plain torch (the Triton operator knn differs from plain torch (a case) on cuda:1 (H2, "
        "sm_90))"
    )


def test_for_fake_tensors_the_comparison_is_put_off(calls):
    assert serving(1, is_fake=True) == "Triton"
    assert not calls
    assert serving(1) == ""


def test_nothing_is_computed_under_fake_tensors_or_while_a_cuda_graph_is_captured(monkeypatch):
    assert not ops._can_compute()  # no GPU
    is_capturing = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(is_capturing))
    mode = FakeTensorMode()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ops._can_compute()
    with mode:  # torch.export hides a fake tensor in another
        assert not ops._can_compute()
    is_capturing.append(True)
    assert not ops._can_compute()


def test_a_traced_call_takes_what_the_comparison_found(calls):
    served = []

    def traced(x):
        served.append(serving(1))
        return x + 1

    torch.compile(traced, backend="eager", fullgraph=True)(torch.zeros(1))
    assert served == [""]


def test_fake_cuda_tensors_run_the_fused_operators():
    with FakeTensorMode(), Called() as called:
        x = torch.empty(2, 12, 16, device="cuda", requires_grad=True)
        graph = ops.knn(x, None, None, 4, 2)
        found = ops.aggregate(x, None, graph)
    assert graph.device.type == found.device.type == "cuda"
    assert {"vigpipe::knn", "vigpipe::aggregate"} <= set(called.names)


if __name__ == "__main__":
    run()
