"""All results on one page: docs/results.md, from the JSON in results/ and the remarks in remarks/.

    python -m benchmarks.page [--check]

Figures are never typed: tables are made from the JSON of the run by the benchmark's own `sheets`, which are written to
results/NAME.md as well; where a benchmark has none, results/NAME.md is taken as it is. `--check` only says whether the
page is what this command would write.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from . import results

NAMES = [
    *("accuracy", "vs_scratch", "cifar", "transformer", "ranking", "compensate", "coverage", "surgery", "scale"),
    *("search_cost", "engine", "deploy", "detectors", "lenet", "preresnet"),
]
PAGE, REMARKS = results.ROOT / "docs" / "results.md", results.FOLDER.parent / "remarks"
HEAD = """# Results

What was measured, by which command, on what. Each section is a script in `benchmarks/`, with its result as JSON and as
a table in `benchmarks/results/`; this page is written by `python -m benchmarks.page`, and a test holds it to the JSON.
`make bench` runs short versions of all of them, which show that they run and no more.

"""
LONG = 25  # rows of a table beyond which it is folded


def section(name: str, folder: Any = results.FOLDER) -> str:
    """A benchmark's part of the page; nothing if it was never run."""
    content, written = results.load(name), folder / f"{name}.md"
    if not content:
        return ""
    module = importlib.import_module(f"benchmarks.{name}")
    question, _, rest = (module.__doc__ or "").strip().partition("\n")
    command = next(line.strip() for line in rest.splitlines() if line.strip().startswith("python -m")).split(" [")[0]
    parts = [f"## {name}", question, f"`{command}`", measured(content["environment"])]
    remarks = REMARKS / f"{name}.md"
    parts += [remarks.read_text(encoding="utf-8").strip()] if remarks.exists() else []
    if hasattr(module, "sheets"):
        parts += [folded(sheet) for sheet in module.sheets(content)]
    elif written.exists():
        parts.append(written.read_text(encoding="utf-8").strip())
    if (folder / f"{name}.png").exists():
        parts.append(f"![{question}](../benchmarks/results/{name}.png)")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def folded(sheet: results.Sheet) -> str:
    """The table; a long one opens on a click."""
    if len(sheet.rows) <= LONG:
        return sheet.markdown()
    table = results.Sheet(sheet.columns, sheet.rows).markdown()
    title = f"{sheet.title}\n\n" if sheet.title else ""
    return f"{title}<details><summary>All {len(sheet.rows)} rows</summary>\n\n{table}\n</details>"


def measured(about: dict[str, Any]) -> str:
    """When and on what, as far as it was written down."""
    when = f"on {about['date']} at revision {about['revision']}" if "date" in about else "on a day not written down"
    when = f"before it was committed on {about['committed']}" if "committed" in about else when
    machine = f"{about['cores']} cores" + (f" ({about['processor']})" if "processor" in about else "")
    machine += f", {about['memory_gb']} GB" if "memory_gb" in about else ""
    seeds = f"; seeds {', '.join(map(str, about['seeds']))}" if "seeds" in about else ""
    load = f"; load {about['load'][0]:g} at the end, of others, too" if "load" in about else ""
    tools = ", ".join(f"{name} {about[name]}" for name in ("python", "torch", "torchvision", "timm", "torch-pruning"))
    return f"*Measured {when}: {machine}; {tools}{seeds}{load}.*"


def text() -> str:
    return HEAD + "\n".join(filter(None, map(section, NAMES)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text()
        print(f"{PAGE.relative_to(results.ROOT)}: {'stale; run python -m benchmarks.page' if stale else 'up to date'}")
        return int(stale)
    for name in NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        if hasattr(module, "sheets") and (content := results.load(name)):
            results.write(f"{name}.md", "\n".join(sheet.markdown() for sheet in module.sheets(content)))
    PAGE.write_text(text(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(results.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
