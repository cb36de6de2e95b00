"""One HTML page about an evaluation: numbers by class, confusions, and the worst mistakes."""

import base64
import html
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from vigpipe.config.verbs import MADE_BY_EVALUATE
from vigpipe.files.atomic import write_atomically
from vigpipe.files.outputs import told_if_unwritable
from vigpipe.inference.results import Results
from vigpipe.messages import one_line
from vigpipe.report.markup import escape, paragraph, table
from vigpipe.report.style import document

NUM_WORST = 48  # mistakes that are shown
_SIDE = 160  # pixels that a picture is shrunk to
_MOST_IN_TABLE = 60  # classes of a table of confusions
_STYLE = """<style>
.mistakes { display: flex; flex-wrap: wrap; gap: .8rem; }
figure { margin: 0; width: 10rem; font-size: .85rem; overflow-wrap: anywhere; }
figure img { width: 10rem; height: 10rem; object-fit: contain; background: var(--panel); }
figure img.small { image-rendering: pixelated; }
figcaption .path { color: var(--faint); }
.confusion td { min-width: 2rem; }
.confusion td.name { text-align: left; }
</style>"""


def write_mistakes(
    results: Results,
    out: Path,
    name_of: Callable[[int], str],
    picture_of: Callable[[int], Image.Image] | None,
) -> None:
    """Write the page; `picture_of` reads an image by its number, and is None for nodes."""
    body = "\n".join([_STYLE, *_numbers(results), *_worst(results, name_of, picture_of)])
    title = f"vigpipe evaluate: {one_line(results.data)}"
    with told_if_unwritable(f"--page {out}", "choose another file"):
        write_atomically(out, document(MADE_BY_EVALUATE, title, body))


def _numbers(results: Results) -> Iterator[str]:
    yield paragraph(f"{one_line(results.title)}: {results.summary}.")
    yield "<h2>By class</h2>"
    yield table(*results.class_table())
    if results.judged.has_several:
        return
    classes = results.judged.by_class.classes
    if len(classes) > _MOST_IN_TABLE:
        yield "<h2>The most frequent mistakes</h2>"
        rows = [[a, b, f"{n:,}"] for a, b, n in results.mistakes()[:_MOST_IN_TABLE]]
        yield table(["class", "predicted", results.unit], rows, num_names=2)
        return
    yield "<h2>Confusions</h2>"
    yield paragraph(
        f"{results.unit.capitalize()} of each class, in rows, by what was predicted, in columns. "
        "The darker, the larger the share of its row."
    )
    yield _confusions(results.names(classes), results.judged.confusion(classes))


def _confusions(names: list[str], counts: np.ndarray) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = []
    for i, (name, row) in enumerate(zip(names, counts, strict=True)):
        cells = []
        for j, number in enumerate(row):
            colour = "0 128 96" if i == j else "192 48 32"
            share = 0.75 * number / max(1, row.sum())
            style = f' style="background: rgb({colour} / {share:.2f})"' if number else ""
            cells.append(f"<td{style}>{f'{number:,}' if number else ''}</td>")
        rows.append(f'<tr><td class="name">{escape(name)}</td>{"".join(cells)}</tr>')
    return (
        f'<div class="wide"><table class="confusion"><thead><tr><th></th>{head}</tr></thead>\n'
        "<tbody>\n" + "\n".join(rows) + "\n</tbody></table></div>"
    )


def _worst(
    results: Results,
    name_of: Callable[[int], str],
    picture_of: Callable[[int], Image.Image] | None,
) -> Iterator[str]:
    """Show the mistakes with the largest loss, worst first."""
    judged = results.judged
    wrong = np.flatnonzero(~judged.is_right)
    worst = wrong[np.argsort(-judged.losses[wrong], kind="stable")][:NUM_WORST]
    yield "<h2>Worst mistakes</h2>"
    if not len(worst):
        yield paragraph("There is none: all are right.")
        return
    which = "worst first" if len(worst) == len(wrong) else f"the worst {len(worst)} of them"
    yield paragraph(f"{len(wrong):,} of {len(judged.labels):,} {results.unit} are wrong; {which}:")
    if picture_of is None:
        rows = [[one_line(name_of(i)), *_facts(results, i)] for i in worst]
        yield table(["", "is", "predicted", "loss"], rows, num_names=3)
        return
    yield '<div class="mistakes">'
    for i in worst:
        actual, predicted, _ = _facts(results, i)
        yield _figure(picture_of(i), f"{predicted}, is {actual}", one_line(name_of(i)))
    yield "</div>"


def _facts(results: Results, index: int) -> tuple[str, str, str]:
    judged = results.judged
    loss = f"{judged.losses[index]:.4f}"
    if judged.has_several:
        sets = judged.labels[index], judged.predicted[index]
        actual, predicted = (
            ", ".join(results.names(np.flatnonzero(row))) or "none" for row in sets
        )
        return actual, predicted, loss
    actual, predicted = results.names([judged.labels[index], judged.predicted[index]])
    return (
        f"{actual} ({judged.of_right[index]:.0%})",
        f"{predicted} ({judged.probabilities[index]:.0%})",
        loss,
    )


def _figure(picture: Image.Image, text: str, path: str) -> str:
    is_small = max(picture.size) < _SIDE
    if not is_small:
        picture = picture.copy()
        picture.thumbnail((_SIDE, _SIDE))
    content = io.BytesIO()
    picture.save(content, "PNG")
    data = base64.b64encode(content.getvalue()).decode()
    style = ' class="small"' if is_small else ""
    return (
        f'<figure><img{style} alt="{html.escape(text)}" src="data:image/png;base64,{data}">'
        f'<figcaption>{escape(text)}<br><span class="path">{escape(path)}</span></figcaption>'
        "</figure>"
    )
