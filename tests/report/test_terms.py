"""Every word of the tables and charts is explained."""

from dataclasses import fields

from vigpipe.analysis.account import PARTS
from vigpipe.analysis.bubble import Bubble
from vigpipe.report.durations import PARTS_OF_BLOCK
from vigpipe.report.terms import TERMS
from vigpipe.timing.tables import OF_RANKS


def test_what_the_tables_name_has_a_line():
    shares = {field.name.replace("_", " ") for field in fields(Bubble)}
    wanted = shares | {*PARTS, *OF_RANKS, *PARTS_OF_BLOCK.values(), "stem", "readout"}
    assert wanted <= set(TERMS)
