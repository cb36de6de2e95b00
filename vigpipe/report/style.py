"""The frame of a page: its light and dark style, and a policy that forbids network requests."""

from vigpipe.report.markup import escape
from vigpipe.version import __version__

# The policy forbids every network request, even if a script of the page should try one.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
)

STYLE = """
:root { color-scheme: light dark; --text: #1d2126; --faint: #59626d; --line: #d9dee4;
        --back: #ffffff; --panel: #f4f6f8; --warn: #a3221f; --go: #00664a; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e7eb; --faint: #9aa4af; --line: #383e46; --back: #16181c; --panel: #1f2227;
          --warn: #ff8f87; --go: #5fd3ae; }
}
body { margin: 0; background: var(--back); color: var(--text);
       font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 1rem 1.25rem 3rem; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem; padding-top: .6rem;
     border-top: 1px solid var(--line); overflow-wrap: anywhere; }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
h4 { font-size: .95rem; margin: 1.2rem 0 .3rem; }
p { max-width: 75ch; margin: .4rem 0; overflow-wrap: anywhere; }
.running { color: var(--go); font-weight: 600; }
.note, footer { color: var(--faint); font-size: .9rem; }
.warning { color: var(--warn); font-weight: 600; }
.wide { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
th { color: var(--faint); font-weight: 600; white-space: normal; vertical-align: bottom; }
th.name, td.name { text-align: left; }
td.name { white-space: normal; }
.runs th, .runs td { text-align: left; vertical-align: top; white-space: normal;
                     overflow-wrap: anywhere; min-width: 5rem; }
.runs td.name { min-width: 8.5rem; }
td[title] { text-decoration: underline dotted; cursor: help; }
.terms { columns: 30rem; column-gap: 2rem; list-style: none; margin: .4rem 0; padding: 0;
         color: var(--faint); font-size: .9rem; }
.terms li { break-inside: avoid; }
dfn { font-style: normal; font-weight: 600; }
tbody tr:hover { background: var(--panel); }
summary { cursor: pointer; margin: .8rem 0 .3rem; }
footer { margin-top: 3rem; }
/* Charts take the page's colours; numbers in boxes and hover texts keep their own. */
.js-plotly-plot text:not(.bartext):not(.hoverlayer text) { fill: var(--text) !important; }
.js-plotly-plot .gridlayer path { stroke: var(--line) !important; }
.js-plotly-plot .zerolinelayer path { stroke: var(--faint) !important; }
.js-plotly-plot .zoombox-corners { stroke: var(--text) !important; }
"""

_HEAD = f"""<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<style>{STYLE}</style>"""


def document(mark: str, title: str, body: str, advice: str = "") -> str:
    """Make the HTML of a page that opens from disk, and draws its charts without a network.

    By the mark a command knows its own pages again. Title and advice, which stands at the foot, are
    plain text, and the body is HTML.
    """
    from plotly.offline import get_plotlyjs

    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{mark}\n<title>{escape(title)}</title>\n'
        f"{_HEAD}\n<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n"
        f"<footer>vigpipe {escape(__version__)}{escape(advice)}</footer>\n"
        "</main>\n</body>\n</html>\n"
    )
