"""Text from files shows as it is and never runs."""

from vigpipe.report.markup import Shortened, folded, paragraph, share, size, statistics_table, table
from vigpipe.timing.tables import statistics

HOSTILE = "<script>alert(1)</script> & <b>"
SAFE = "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &lt;b&gt;"


def test_every_text_is_escaped():
    for made in (
        paragraph(HOSTILE),
        table([HOSTILE], []),
        table(["name"], [[HOSTILE]]),
        folded(HOSTILE, ""),
        statistics_table([(HOSTILE, "forward", statistics([1.0]))]),
    ):
        assert SAFE in made
        assert "<script" not in made


def test_a_shortened_cell_keeps_the_whole_in_a_title_that_it_cannot_leave():
    made = table(["name"], [["a", Shortened("b<", '"><script>')]])
    assert '<td class="name">a</td><td title="&quot;&gt;&lt;script&gt;">b&lt;</td>' in made


def test_a_table_of_statistics_is_in_milliseconds_and_names_a_thing_once():
    made = statistics_table(
        [("FFN", "forward", statistics([0.001, 0.003])), ("FFN", "backward", statistics([1.5]))]
    )
    assert made.count(">FFN<") == 1
    assert (
        '<td class="name">forward</td><td>2.000</td><td>1.414</td><td>1.000</td><td>3.000</td>'
        "<td>2.000</td><td>2.900</td><td>2</td>" in made
    )
    assert "<td>1,500.000</td>" in made


def test_numbers_have_their_units():
    assert share(0.1234) == "12.3%"
    assert share(-0.05) == "−5.0%"
    assert [size(x) for x in (2e9, 3.5e6, 1200)] == ["2.00 GB", "3.50 MB", "1.2 kB"]
