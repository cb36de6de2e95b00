"""The variants in figures, against the published ones."""

import sys

import pytest

from tests.world import run_command
from vigpipe.errors import InputError
from vigpipe.model.table import figures, main
from vigpipe.model.variants import VIG_SHAPES


# Parameters of the published files without the frozen tables; multiply-adds from the paper's tables
# 1 and 2 (arXiv:2206.00272), where they are called FLOPs and rounded to a tenth.
@pytest.mark.parametrize(
    ("name", "parameters", "billions"),
    [
        ("vig_ti_224", 7_184_744, 1.3),
        ("vig_s_224", 22_747_752, 4.5),
        ("vig_b_224", 86_841_832, 17.7),
        ("pvig_ti_224", 10_714_376, 1.7),
        ("pvig_s_224", 27_251_912, 4.6),
        ("pvig_m_224", 49_525_832, 8.9),
        ("pvig_b_224", 92_980_328, 16.8),
    ],
)
def test_published_figures(name, parameters, billions):
    found = figures(name)
    assert found.num_parameters == parameters
    assert found.num_macs / 1e9 == pytest.approx(billions, abs=0.1)


def test_figures_of_a_model_that_is_counted_by_hand():
    found = figures("vig_digits")
    assert (found.img_size, found.grid, found.blocks, found.channels) == (
        (8, 8),
        (8, 8),
        (4,),
        (48,),
    )
    n, c = 64, 48
    stem = n * 9 * (1 * 24 + 24 * 48)
    grapher = n * (c * c + 2 * c * 2 * c // 4 + 2 * c * c) + n * n * c
    ffn = n * 2 * c * 4 * c
    assert found.num_macs == stem + 4 * (grapher + ffn) + c * 1024 + 1024 * 10
    norms = [24, 48] + 4 * [c, 2 * c, c, 4 * c, c] + [1024]
    assert found.num_buffers == 2 * sum(norms) + len(norms)


def test_the_table_has_a_row_for_each_variant(capsys):
    main(["vig_digits", "pvig_cifar_ti"])
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head.split("|")[1].strip() == "variant"
    assert set(rule) <= set("|-:")
    assert [row.split("|")[1].strip() for row in rows] == ["`vig_digits`", "`pvig_cifar_ti`"]
    assert "192,122" in rows[0]


def test_an_unknown_variant_is_refused_in_one_sentence():
    with pytest.raises(InputError, match=f"vig_xl: .* {', '.join(VIG_SHAPES)}"):
        figures("vig_xl")
    done = run_command([sys.executable, "-m", "vigpipe.model.table", "vig_xl"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("vigpipe: vig_xl: no such variant")
