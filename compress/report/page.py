"""The HTML page of a report: one self-contained document without scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from html import escape
from typing import Any, NamedTuple

import yaml

from compress.budget import UNITS
from compress.errors import RecipeError
from compress.formatting import FRACTION_METRICS, format_count, format_time
from compress.recipe import Recipe

from .charts import metric_label, render_charts
from .group_table import GROUP_COLUMNS
from .operation_table import OPERATION_COLUMNS
from .report import Report

BAR = '<span class="bar"><i class="{}" style="width:{:.1%}"></i></span>'
TEST_PREFIX = "test "  # of the names of metrics on test data
REFUSED_COLUMNS = ("name", "reason", "width")
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
.small{align-items:stretch}.small figure{padding:.5rem .6rem}
.small figcaption{font-size:.8rem}.pair+.bar{margin-top:.1em;background:none}
figcaption{font-size:.9rem;margin-bottom:.3rem}svg{display:block;max-width:100%;height:auto;overflow:visible}
.key{white-space:nowrap;margin:0 .5em}.key i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.3rem clamp(.25rem,.8vw,.6rem);border-bottom:1px solid var(--grid);vertical-align:top}
th{font-weight:500;white-space:nowrap}tr:last-child td{border:0}td:first-child{min-width:7.2rem}
td:nth-child(n+3),th:nth-child(n+3),.sides td+td,.sides th+th{text-align:right}
.sides td+td{white-space:nowrap;min-width:0}
.operations td:nth-child(2){white-space:nowrap}.operations :is(td,th):last-child{text-align:left}
.bar,.bar i{display:block;height:.75em;border-radius:.2em}
.bar{min-width:3.4rem;margin-top:.35em;background:var(--pale)}
.bar .kept{background:var(--kept)}.bar .cut{background:var(--cut)}.bar .pale{background:var(--pale)}
td:nth-child(2){min-width:5.6rem}body>details{margin:.8rem 0}summary{cursor:pointer;font-weight:600;margin-bottom:.3rem}
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


def render_page(report: Report) -> str:
    """Return the report as one HTML document with numbers, charts and tables; it loads nothing from elsewhere."""
    method = (report.recipe.get("search") or {}).get("method")
    model_name = report.origin.get("model")
    title = (f"{model_name} pruned" if model_name else "Pruned") + (f" by {method}" if method else "")
    title += _describe_budget(report.recipe.get("budget") or {})
    body = f"<h1>{escape(title)}</h1>\n<p>{_origin_line(report)}{_verification_line(report)}</p>\n"
    body += _number_tiles(report) + render_charts(report) + _detail_tables(report)
    return html_document(title, body)


def html_document(title: str, body: str) -> str:
    """Return a complete page with the style of all pages."""
    return f"{HEAD}<title>{escape(title)}</title></head>\n<body>\n{body}</body>\n</html>\n"


def _describe_budget(budget: Mapping[str, Any]) -> str:
    """Return the limits of a recipe's budget: " to 50% of the MACs and 3M parameters"."""
    labels = {unit: UNITS[unit].label if unit in UNITS else unit for unit in budget}
    limits = [
        f"{100 * limit:.4g}% of the {labels[unit]}" if isinstance(limit, float) else f"{limit} {labels[unit]}"
        for unit, limit in budget.items()
        if isinstance(limit, (float, str))
    ]
    return f" to {' and '.join(limits)}" if limits else ""


def _origin_line(report: Report) -> str:
    """Return seed, date and version; the model's name is in the title."""
    labels = [label for label in report.origin_labels() if label != report.origin.get("model")]
    return f"{escape(', '.join(labels))}<br>\n" if labels else ""


def _verification_line(report: Report) -> str:
    """Return how many groups were verified, what that means, and how many were cut and left alone."""
    chosen = ""
    if report.operations:
        count = sum(row.places for row in report.operations)
        chosen = (
            f"{count} operation{'s were' if count != 1 else ' was'} chosen; the network was verified to compute what "
        )
        chosen += "the mixture does with all weight on them. "
        if not report.groups:
            return chosen.strip()
    count, cut = len(report.groups), sum(row.kept < row.width for row in report.groups)
    verified = f"{count} group{' was' if count == 1 else 's were'} verified before the search: on the example inputs, "
    verified += "removing dimensions gives the same outputs as setting them to zero. "
    refused = f"{len(report.refused)} other{'s' * (len(report.refused) != 1)} left alone"
    return f"{chosen}{verified * bool(count)}{cut} of {count} cut, {refused}."


class _Tile(NamedTuple):
    """A number with bars that compare the networks."""

    name: str
    number: str
    bars: dict[str, tuple[float, str]]  # network -> value and its text


def _number_tiles(report: Report) -> str:
    rows, tiles = report.groups, []
    for name, dense_count, compact_count in (
        ("MACs", report.dense.macs, report.pruned.macs),
        ("parameters", report.dense.params, report.pruned.params),
        ("dimensions", sum(row.width for row in rows), sum(row.kept for row in rows)),
    ):
        bars = {
            "dense": (float(dense_count), format_count(dense_count)),
            "compact": (float(compact_count), format_count(compact_count)),
        }
        tiles.append(_Tile(f"{name} left", f"{compact_count / max(dense_count, 1):.1%}", bars))
    dense, compact = report.dense.latency_ms, report.pruned.latency_ms
    if dense is not None and compact is not None:
        bars = {
            "dense": (dense, f"{format_time(dense, report.dense.latency_spread_ms)} ms"),
            "compact": (compact, f"{format_time(compact, report.pruned.latency_spread_ms)} ms"),
        }
        speedup = f"{dense / (compact or math.nan):.2f}x"
        tiles[2] = _Tile("latency speed-up", speedup, bars)  # more informative than the dimensions
    metrics = {"dense": report.dense.metrics, "after the cut": report.sliced, "compact": report.pruned.metrics}
    tiles += _metric_tiles(metrics)
    tiles += _metric_tiles({"dense": report.dense.test, "compact": report.pruned.test}, TEST_PREFIX)
    cards = "".join(map(_tile_card, tiles))
    return f'<div class="grid" style="--least:10rem;align-items:stretch">\n{cards}</div>\n'


def _metric_tiles(metrics: Mapping[str, Mapping[str, float | None]], prefix: str = "") -> list[_Tile]:
    """Return a tile for each metric, with a bar for each network that has it."""
    tiles = []
    for name in dict.fromkeys(name for values in metrics.values() for name, v in values.items() if v is not None):
        bars = {
            network: (value, metric_label(name, value))
            for network, values in metrics.items()
            if (value := values.get(name)) is not None
        }
        tiles.append(_Tile(prefix + name, bars.get("compact", (0.0, "-"))[1], bars))
    return tiles


def _tile_card(tile: _Tile) -> str:
    lengths = {name: value if math.isfinite(value) and value > 0 else 0.0 for name, (value, _) in tile.bars.items()}
    is_fraction = tile.name.removeprefix(TEST_PREFIX) in FRACTION_METRICS
    full_length = max([1.0] * is_fraction + [*lengths.values()], default=0.0) or 1.0
    lines = [
        f'<span class="pair"><span>{network}</span><span>{text}</span></span>'
        + BAR.format({"dense": "pale", "compact": "kept"}.get(network, "cut"), lengths[network] / full_length)
        for network, (_, text) in tile.bars.items()
    ]
    return f'<div class="card">{escape(tile.name)}<b>{tile.number}</b>{"".join(lines)}</div>\n'


def html_table(rows: Sequence[Sequence[object]], *headers: str) -> str:
    """Return a table; cells that are floats become bars. Empty without rows."""
    lines = ["".join(f"<th>{header}</th>" for header in headers)] if headers else []
    for row in rows:
        cells = (BAR.format("kept", cell) if isinstance(cell, float) else escape(str(cell)) for cell in row)
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f'<div class="wide"><table>\n{body}</table></div>' if rows else ""


def details_block(title: str, body: str, folded: bool = False) -> str:
    """Return a block that can be folded; empty without a body."""
    opened = "" if folded else " open"
    return f"<details{opened}><summary>{title}</summary>\n{body}</details>\n" if body else ""


def _detail_tables(report: Report) -> str:
    """Return export, groups, refused groups, notes, times, machine and recipe, as far as there are any."""
    groups = [[column.cell(row) for column in GROUP_COLUMNS] for row in report.groups]
    refused = [[row.get(key) for key in REFUSED_COLUMNS] for row in report.refused]
    times = [
        [stage, timedelta(seconds=round(s)) if 60 <= s < 1e9 else f"{s:.3g} s"]
        for stage, s in report.seconds.items()
        if not s < 0.001  # the stage had nothing to do
    ]
    wide = details_block("Exported", _export_block(report.export))
    operations = [[column.cell(row) for column in OPERATION_COLUMNS] for row in report.operations]
    operation_table = html_table(operations, *(column.header for column in OPERATION_COLUMNS))
    wide += details_block("Operations", f'<div class="operations">{operation_table}</div>' if operations else "")
    wide += details_block("Groups", html_table(groups, *(column.header for column in GROUP_COLUMNS)), len(groups) > 40)
    wide += details_block("Left alone", html_table(refused, *REFUSED_COLUMNS), len(refused) > 12)
    narrow = details_block("Notes", html_table([[note] for note in report.notes]))
    narrow += details_block("Time", html_table(times))
    narrow += details_block("Machine", html_table([[name, str(value)] for name, value in report.machine.items()]))
    recipe = details_block("Recipe", _recipe_block(report.recipe))
    return f'{wide}<div class="grid" style="--least:18rem">\n{narrow}</div>\n{recipe}'


def _recipe_block(recipe: dict[str, Any]) -> str:
    """Return the settings that differ from the defaults and, folded, all settings."""
    # One span per key, so that no key is split between columns.
    full = "".join(f"<span>{escape(_yaml_text({key: value}))}</span>" for key, value in recipe.items())
    try:
        loaded = Recipe.load(recipe)
    except RecipeError:  # written by another version, or its search is not registered here
        return f'<pre class="columns">{full}</pre>' if recipe else ""
    changed = loaded.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    changed["search"] = {"method": loaded.search.method, **changed.get("search", {})}
    short = f"<p>What differs from the defaults.</p>\n<pre>{escape(_yaml_text(changed))}</pre>\n"
    return f'{short}<details><summary>With all defaults</summary>\n<pre class="columns">{full}</pre></details>\n'


def _yaml_text(data: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(json.loads(json.dumps(data, default=str)), sort_keys=False, allow_unicode=True)
    return text


def _export_block(export: dict[str, Any]) -> str:
    """Return size, latency and difference of the exported file; empty if there is none."""
    if not export:
        return ""
    from compress.exporters import ExportReport

    exported = ExportReport.from_dict(export)
    table = html_table(exported.rows(), "", "dense", "exported", "left")
    return f'<p>{escape(exported.title)}</p>\n<div class="sides">{table}</div>'
