"""Make the section about replicas with steps of their own: who did what when, and how evenly."""

from collections.abc import Iterator

from vigpipe.job.rows import trained_on
from vigpipe.replication.metrics import (
    EVENNESS,
    SERVER,
    heads_of_each,
    partial_items,
    rows_of_each,
    rows_of_evenness,
    rows_of_server,
)
from vigpipe.report.charts import as_html, replica_chart
from vigpipe.report.markup import paragraph, table
from vigpipe.report.replica_files import ReportedReplicas
from vigpipe.report.terms import explain

MOST_SPANS = 4000  # more would make the chart slow


def replica_section(replicas: ReportedReplicas, index: int, unit: str) -> Iterator[str]:
    """Make the HTML about the replicas of the run at this position of the page."""
    if replicas.each:
        yield table(heads_of_each(trained_on(unit)), rows_of_each(replicas.each))
        if of_partial := partial_items(replicas.each):
            yield paragraph(of_partial)
        if replicas.server:
            yield table(SERVER, rows_of_server(replicas.server))
            yield explain("staleness")
        yield table(EVENNESS, rows_of_evenness(replicas.balance))
        yield explain("item", "worked", "waited", "averaged", "CV", "imbalance of loads")
        yield explain("efficiency")
        yield paragraph(
            "With --items pool the items are meant to be uneven, the work even.", "note"
        )
    doings = sorted(replicas.doings, key=lambda doing: doing.start)
    if doings:
        left_out = len(doings) - MOST_SPANS
        last = f"the last {MOST_SPANS:,} of {len(doings):,} spans"
        yield paragraph(
            f"Who did what when, {last if left_out > 0 else 'the whole run'}. Waits below a "
            "millisecond are not drawn. The clocks of several hosts may differ."
        )
        chart = replica_chart(doings[-MOST_SPANS:], replicas.num_replicas)
        yield as_html(chart, f"replicas-{index}")
