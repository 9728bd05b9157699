"""Page: the report to look at, as one HTML document that needs nothing from outside."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from html import escape
from typing import Any

import yaml

from .charts import FRACTIONS, charts, shown
from .reading import RecipeError
from .recipe import Recipe
from .report import Report, amount, export_report, timed

BAR = '<span class="bar"><i class="{}" style="width:{:.1%}"></i></span>'
REFUSED = ("name", "reason", "width")
UNITS = {"macs": "MACs", "params": "parameters", "dims": "dimensions"}
CSS = """
:root{color-scheme:light dark;--back:#f4f6f9;--card:#fff;--text:#1b2330;--soft:#5a6575;--grid:#d5dbe4;--pale:#c8d5ea;
--kept:#2460d8;--cut:#e07b2c;--more:#1c9a72;--last:#8a52c7}
@media screen and (prefers-color-scheme:dark){:root{--back:#10141a;--card:#191f28;--text:#e5e9f0;--soft:#9aa5b5;
--grid:#3a4452;--pale:#3b4d6b;--kept:#72a6ff;--cut:#f2a35f;--more:#4fcfa3;--last:#c39bf0}}
*{box-sizing:border-box}body{margin:0 auto;padding:1.5rem clamp(.75rem,3vw,2.5rem) 3rem;max-width:76rem;
background:var(--back);color:var(--text);font:15px/1.5 system-ui,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif}
h1{font-size:1.7rem;line-height:1.2;margin:.5rem 0 .25rem}h2{font-size:1.15rem;margin:2.2rem 0 .6rem}
p{margin:.25rem 0 .8rem}p,figcaption,th{color:var(--soft)}
h1,p,figcaption,.card,td:nth-child(-n+2){overflow-wrap:anywhere}
.grid{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,var(--least)),1fr));
align-items:start}.fill{grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--least)),1fr))}
.card,figure,details{background:var(--card);border:1px solid var(--grid);border-radius:.6rem;
padding:.8rem 1rem;margin:0;min-width:0}b{display:block;
font-size:clamp(1.4rem,5vw,2rem);line-height:1.3;font-weight:650}.pair{display:flex;flex-wrap:wrap;gap:0 .3em;
justify-content:space-between;font-size:.78rem;margin-top:.3rem}
.small figure{padding:.5rem .6rem}.small figcaption{font-size:.8rem}.pair+.bar{margin-top:.1em;background:none}
figcaption{font-size:.9rem;margin-bottom:.3rem}svg{display:block;max-width:100%;height:auto;overflow:visible}
.key{white-space:nowrap;margin:0 .5em}.key i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.3rem clamp(.25rem,.8vw,.6rem);border-bottom:1px solid var(--grid);vertical-align:top}
th{font-weight:500;white-space:nowrap}tr:last-child td{border:0}td:first-child{min-width:7.2rem}
td:nth-child(n+3),th:nth-child(n+3),.sides td+td,.sides th+th{text-align:right}
.bar,.bar i{display:block;height:.75em;border-radius:.2em}
.bar{min-width:3.4rem;margin-top:.35em;background:var(--pale)}
.bar .kept{background:var(--kept)}.bar .cut{background:var(--cut)}.bar .pale{background:var(--pale)}
td:nth-child(2){min-width:4.6rem}body>details{margin:.8rem 0}summary{cursor:pointer;font-weight:600;margin-bottom:.3rem}
pre{margin:0;overflow-x:auto;font:.85rem/1.45 ui-monospace,Menlo,monospace}
.columns{columns:17rem}.columns span{display:block;break-inside:avoid}details details{margin-top:.8rem}
@media print{body{background:none;padding:0;font-size:11px}h2,h2+p{break-after:avoid}
.card,figure,tr{break-inside:avoid}
*{print-color-adjust:exact}pre{white-space:pre-wrap}details::details-content{content-visibility:visible}}
"""
HEAD = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,"><style>{CSS}</style>
"""


def page(report: Report) -> str:
    """Lay the report out as one HTML document: numbers, pictures and tables, no script, nothing loaded from outside."""
    method = (report.recipe.get("search") or {}).get("method")
    name = report.origin.get("model")
    title = (f"{name} pruned" if name else "Pruned") + (f" by {method}" if method else "")
    for unit, left in (report.recipe.get("budget") or {}).items():
        title += f" to {100 * left:.4g}% of the {UNITS.get(unit, unit)}" if isinstance(left, float) else ""
    body = f"<h1>{escape(title)}</h1>\n<p>{_origin(report)}{_exactness(report)}</p>\n"
    body += _tiles(report) + charts(report) + _tables(report)
    return f"{HEAD}<title>{escape(title)}</title></head>\n<body>\n{body}</body>\n</html>\n"


def _origin(report: Report) -> str:
    """What tells the report from others."""
    said = [part for part in report.came_from() if part != report.origin.get("model")]  # which is in the title
    return f"{escape(', '.join(said))}<br>\n" if said else ""


def _exactness(report: Report) -> str:
    """How many groups were proved, and what that means; how many of them were cut, and how many left alone."""
    count, cut = len(report.groups), sum(row.kept < row.width for row in report.groups)
    proved = f"{count} group{' was' if count == 1 else 's were'} proved exact before the search: on the example "
    proved += "inputs, cutting dimensions out gives what setting them to zero gives. "
    left = f"{len(report.refused)} other{'s' * (len(report.refused) != 1)} left alone"
    return f"{proved * bool(count)}{cut} of {count} cut, {left}."


def _tiles(report: Report) -> str:
    """For each measure, the number that counts and bars of the networks."""
    rows, tiles, cards = report.groups, [], []
    for name, before, after in (
        ("MACs", report.dense.macs, report.pruned.macs),
        ("parameters", report.dense.params, report.pruned.params),
        ("dimensions", sum(row.width for row in rows), sum(row.kept for row in rows)),
    ):
        bars = {"dense": (float(before), amount(before)), "compact": (float(after), amount(after))}
        tiles.append((f"{name} left", f"{after / max(before, 1):.1%}", bars))
    dense, compact = report.dense.latency_ms, report.pruned.latency_ms
    if dense is not None and compact is not None:
        bars = {
            "dense": (dense, f"{timed(dense, report.dense.latency_spread_ms)} ms"),
            "compact": (compact, f"{timed(compact, report.pruned.latency_spread_ms)} ms"),
        }
        tiles[2] = "latency speed-up", f"{dense / (compact or math.nan):.2f}x", bars  # says more than the dimensions
    metrics = {"dense": report.dense.metrics, "after the cut": report.sliced, "compact": report.pruned.metrics}
    for name in dict.fromkeys(name for values in metrics.values() for name, v in values.items() if v is not None):
        bars = {w: (v[name], shown(name, v[name])) for w, v in metrics.items() if v.get(name) is not None}
        tiles.append((name, bars.get("compact", (0.0, "-"))[1], bars))
    for name, number, bars in tiles:
        ends = {whose: value if math.isfinite(value) and value > 0 else 0.0 for whose, (value, _) in bars.items()}
        whole = max([1.0] * (name in FRACTIONS) + [*ends.values()], default=0.0) or 1.0
        lines = [
            f'<span class="pair"><span>{whose}</span><span>{text}</span></span>'
            + BAR.format({"dense": "pale", "compact": "kept"}.get(whose, "cut"), ends[whose] / whole)
            for whose, (_, text) in bars.items()
        ]
        cards.append(f'<div class="card">{escape(name)}<b>{number}</b>{"".join(lines)}</div>\n')
    return f'<div class="grid" style="--least:10rem;align-items:stretch">\n{"".join(cards)}</div>\n'


def _table(rows: list[list[Any]], *head: str) -> str:
    """Cells as text, floats as bars of that part."""
    lines = ["".join(f"<th>{name}</th>" for name in head)] if head else []
    for row in rows:
        cells = (BAR.format("kept", cell) if isinstance(cell, float) else escape(str(cell)) for cell in row)
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="wide"><table>\n{body}</table></div>' if rows else ""


def _tables(report: Report) -> str:
    """The groups, what was left alone, notes, times, machine and recipe, as far as there are any."""
    groups = [
        [row.name, row.kind, row.width, row.kept, row.kept / max(row.width, 1), amount(row.params), amount(row.macs)]
        for row in report.groups
    ]
    times = [
        [stage, timedelta(seconds=round(s)) if 60 <= s < 1e9 else f"{s:.3g} s"]
        for stage, s in report.seconds.items()
        if not s < 0.001  # there was nothing to do
    ]
    blocks = [
        ("Groups", _table(groups, "name", "kind", "width", "kept", "", "params/dim", "MACs/dim")),
        ("Left alone", _table([[r.get(k) for k in REFUSED] for r in report.refused], *REFUSED)),
        ("Exported", _exported(report.export)),
        ("Notes", _table([[note] for note in report.notes])),
        ("Time", _table(times)),
        ("Machine", _table([[name, str(value)] for name, value in report.machine.items()])),
        ("Recipe", _recipe(report.recipe)),
    ]
    folds = [f"<details open><summary>{title}</summary>\n{body}</details>\n" * bool(body) for title, body in blocks]
    wide = folds[2] + folds[0].replace(" open", "", len(groups) > 40)
    wide += folds[1].replace(" open", "", len(report.refused) > 12)
    return f'{wide}<div class="grid" style="--least:18rem">\n{"".join(folds[3:-1])}</div>\n{folds[-1]}'


def _recipe(recipe: dict[str, Any]) -> str:
    """What the recipe has that is no default, and all of it, folded."""
    whole = "".join(f"<span>{escape(_yaml({key: value}))}</span>" for key, value in recipe.items())  # none is divided
    try:
        read = Recipe.load(recipe)
        own = read.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    except RecipeError:  # of another version, or with a search that is not registered here
        return f'<pre class="columns">{whole}</pre>' if recipe else ""
    own["search"] = {"method": read.search.method, **own.get("search", {})}
    short = f"<p>What differs from the defaults.</p>\n<pre>{escape(_yaml(own))}</pre>\n"
    return f'{short}<details><summary>With all defaults</summary>\n<pre class="columns">{whole}</pre></details>\n'


def _yaml(data: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(json.loads(json.dumps(data, default=str)), sort_keys=False, allow_unicode=True)
    return text


def _exported(export: dict[str, Any]) -> str:
    """The file for deployment: size, times, how far it is off."""
    if not export:
        return ""
    found = export_report(export)
    table = _table([list(row) for row in found.rows()], "", "dense", "exported", "left")
    return f'<p>{escape(found.title)}</p>\n<div class="sides">{table}</div>'
