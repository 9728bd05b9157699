"""The charts of the costs of scores: which groups a search wants smaller, and why."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from compress.search import CostHistory, sign_changes, smoothed, spread_over_kinds

from .report import Report
from .svg import CUT, INK, KEPT, LAST, MORE, PALE, chart_section, inline_svg, new_figure, set_ticks, small_charts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_GROUPS = 18  # with a chart of their own
MAX_POINTS = 50  # of a small chart
HEADROOM = 0.08
HALF_COLORS = {"all": MORE, "auxiliary": MORE, "primary": LAST}
CLASSIFIER_NOTE = "What the classifier reads costs as much as the loss exceeds the entropy of the predictions."
DISTILLATION_NOTE = (
    "The search distils: the costs are those of the whole loss, but loss and entropy those of the task, so they differ."
)
HALVES_NOTE = (
    "Auxiliary is the half of the data on which the kept weights are trained, primary the other one, which the "
    "search sees as new data."
)


def cost_charts(report: Report) -> str:
    """Draw loss and entropy, the costs as a whole and those of single groups, for each search and half of the data."""
    by_stage: dict[str, list[CostHistory]] = {}
    for history in report.costs:
        if history.steps and history.costs:
            by_stage.setdefault(history.stage, []).append(history)
    kinds = {row.name: row.kind_and_part for row in report.groups}
    charts: list[str] = []
    texts = ["Above zero, the search wants a group smaller; below zero, larger."]
    if any("all" in history.samples for history in report.costs):
        texts.append(CLASSIFIER_NOTE)
    for stage, histories in by_stage.items():
        for history in histories:
            name = stage if history.half == "all" else f"{stage}, {history.half} half"
            charts += _whole_charts(f"cost{len(charts)}", history, name)
        names = list(histories[0].costs)
        shown = spread_over_kinds({name: kinds.get(name, "operations") for name in names}, MAX_GROUPS)
        small = [
            _choice_chart(f"cost{len(charts)}-{i}", _for_scores(histories), name, _chosen(report, name))
            if name in histories[0].candidates
            else _group_chart(f"cost{len(charts)}-{i}", histories, name, kinds.get(name, ""))
            for i, name in enumerate(shown)
        ]
        charts += small_charts(small)
        texts += [text for text in _explanations(report, histories, len(shown)) if text not in texts]
    legend = {"wants it smaller": CUT, "wants it larger": KEPT}
    if any(history.half != "all" for history in report.costs):
        texts.append(HALVES_NOTE)
    if any(history.half != "all" and not history.candidates for history in report.costs):
        legend |= {"auxiliary half": MORE, "primary half": LAST}
    if any(history.candidates for history in report.costs):
        legend["chosen candidate"] = MORE
    if (report.recipe.get("search") or {}).get("distill"):
        texts.append(DISTILLATION_NOTE)
    return chart_section("Costs", " ".join(texts), charts, False, **legend)


def _whole_charts(id_prefix: str, history: CostHistory, name: str) -> list[str]:
    """Draw loss and entropy of all, right and wrong predictions, as far as they are known, and the costs as a whole."""
    charts = {
        key: _loss_chart(f"{id_prefix}-{key}", history, key, f"{name}: {caption}", *size)
        for key, caption, size in (
            ("all", "loss and entropy", (400, 200)),
            ("right", "right predictions", (220, 130)),
            ("wrong", "wrong predictions", (220, 130)),
        )
    }
    whole = _whole_chart(f"{id_prefix}-whole", history, f"{name}: costs as a whole")
    apart = [chart for key in ("right", "wrong") if (chart := charts[key])]
    return [*filter(None, [charts["all"]]), whole, *small_charts(apart)]


def _explanations(report: Report, histories: Sequence[CostHistory], shown: int) -> list[str]:
    """Return sentences on the groups of a search: those at zero, the last one, and how they are drawn."""
    first = histories[0]
    texts = ["The band of a group shows the sums of its dimensions above and below zero."]
    if first.candidates:  # the weights of bayesnas are free, those of the others a softmax
        is_free = (report.recipe.get("search") or {}).get("method") == "bayesnas"
        below = "is below zero" if is_free else "is below that of the choice (bold)"
        texts = [f"In the chart of a choice, a candidate whose cost {below} gains weight."]
    at_zero = [name for name in first.costs if not any(any(history.signs(name)) for history in histories)]
    if at_zero:
        count = f"{len(at_zero)} of {len(first.costs)} {'choices' if first.candidates else 'groups'}"
        texts.append(
            f"{count} {'is' if len(at_zero) == 1 else 'are'} at zero, as where a norm behind every reader undoes a "
            "common factor: only the dimensions compete with each other."
        )
    by_name: dict[str, list[str]] = {}
    for history in histories:
        if name := history.last_group:
            half = "" if history.half == "all" else f" on the {history.half} half"
            by_name.setdefault(name, []).append(f"{_describe_signs(history, name)}{half}")
    texts += [f"The last group with a cost, {escape(n)}, {' and '.join(parts)}." for n, parts in by_name.items()]
    if shown < len(first.costs):
        texts.append(f"Of {len(first.costs)} groups, {shown} are shown one by one.")
    return texts


def _describe_signs(history: CostHistory, name: str) -> str:
    """Return when a group's cost changes its sign."""
    signs, changes = [sign for sign in history.signs(name) if sign], history.sign_changes(name)
    if not changes:
        return f"stays {'above' if signs[0] > 0 else 'below'} zero"
    more = f", the first of {len(changes)} times" if changes[1:] else ""
    return f"{'falls below' if signs[0] > 0 else 'rises above'} zero at about step {changes[0]}{more}"


def _for_scores(histories: Sequence[CostHistory]) -> CostHistory:
    """Return the costs on the half of the data that every search trains its scores on."""
    return next((history for history in histories if history.half == "primary"), histories[0])


def _chosen(report: Report, group: str) -> str | None:
    return next((row.chosen for row in report.operations if row.name == group), None)


def _loss_chart(id_prefix: str, history: CostHistory, key: str, caption: str, width: int, height: int) -> str:
    """Draw loss and entropy; the area between them is the cost of what the classifier reads. Empty if not known."""
    losses = history.samples.get(key)
    known = [] if losses is None else [i for i, loss in enumerate(losses.loss) if loss is not None]
    if losses is None or not known:
        return ""
    steps, loss, entropy = (
        np.array([values[i] for i in known], dtype=float) for values in (history.steps, losses.loss, losses.entropy)
    )
    figure, ax = new_figure(width, height, 40, 14, 22, 32)
    ax.margins(y=HEADROOM)
    for above, color in ((loss >= entropy, CUT), (loss <= entropy, KEPT)):
        ax.fill_between(steps, loss, entropy, where=above, interpolate=True, color=color, alpha=0.45, lw=0)
    ax.plot(steps, loss, color=INK, lw=1.5, label="loss")
    ax.plot(steps, entropy, color=INK, lw=1.2, ls=":", label="entropy")
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.97), ncols=2, handlelength=1.4, columnspacing=1.2)
    _finish(ax, width, height)
    share = losses.share[known[-1]]
    alt_text = f"{caption}: loss {loss[-1]:.3g}, entropy {entropy[-1]:.3g}, cost {loss[-1] - entropy[-1]:.3g} "
    alt_text += f"at step {steps[-1]:g}"
    if key != "all":
        alt_text, caption = f"{alt_text}, {share:.0%} of the samples", f"{caption}, {share:.0%} at the end"
    return inline_svg(figure, id_prefix, alt_text, caption)


def _whole_chart(id_prefix: str, history: CostHistory, caption: str) -> str:
    """Draw the costs of what the classifier reads, of all groups together and of the last one; dots: sign changes."""
    figure, ax = new_figure(400, 200, 46, 14, 22, 32)
    ax.margins(y=HEADROOM)
    curves: dict[str, tuple[Sequence[float | None], list[int], str]] = {}
    if "all" in history.samples:
        difference = history.samples["all"].difference
        known = [(step, value) for step, value in zip(history.steps, difference, strict=True) if value is not None]
        signs = [int(np.sign(value)) for value in smoothed([value for _, value in known])]
        curves["loss minus entropy"] = difference, sign_changes([step for step, _ in known], signs), INK
    curves["all groups"] = history.total, [], MORE
    if (last := history.last_group) is not None:
        curves["the last group"] = history.costs[last], history.sign_changes(last), CUT
    texts = []
    for label, (values, changes, color) in curves.items():
        y = np.array([np.nan if value is None else value for value in values], dtype=float)
        ax.plot(history.steps, y, color=color, lw=1.5, label=label)
        if changes:
            ax.plot(changes[0], 0, "o", color=color, ms=5)
        texts.append(f"{label} {y[0]:.3g} to {y[-1]:.3g}" + (f", sign at step {changes[0]}" if changes else ""))
    ax.axhline(0, color=INK, lw=0.8)
    ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.97), ncols=3, handlelength=1.4, columnspacing=1.2)
    _finish(ax, 400, 200)
    return inline_svg(figure, id_prefix, f"{caption}: {'; '.join(texts)}", caption)


def _group_chart(id_prefix: str, histories: Sequence[CostHistory], name: str, kind: str) -> str:
    """Draw the cost of a group on each half, with the sums of its dimensions above and below zero as a band."""
    figure, ax = new_figure(150, 92, 44, 14, 4, 32)
    ax.margins(y=HEADROOM)
    texts = []
    for history in histories:
        steps, cost, pull = (_thinned(v) for v in (history.steps, history.costs[name], history.pull[name]))
        color = HALF_COLORS.get(history.half, KEPT)
        ax.fill_between(steps, cost - pull, pull, color=color, alpha=0.25, lw=0)
        ax.plot(steps, cost, color=color, lw=1.5)
        half = "" if history.half == "all" else f"{history.half} "
        texts.append(f"{half}{history.costs[name][0]:.3g} to {history.costs[name][-1]:.3g}")
    ax.axhline(0, color=INK, lw=0.8)
    _finish(ax, 150, 92)
    caption = f"{name} ({kind})" if kind else name
    return inline_svg(figure, id_prefix, f"Cost of {name}: {'; '.join(texts)}", caption)


def _choice_chart(id_prefix: str, history: CostHistory, name: str, chosen: str | None) -> str:
    """Draw the cost of a choice and those of its candidates at full weight."""
    figure, ax = new_figure(150, 92, 44, 14, 4, 32)
    ax.margins(y=HEADROOM)
    steps = _thinned(history.steps)
    for candidate, values in history.candidates[name].items():
        is_chosen = candidate == chosen
        ax.plot(steps, _thinned(values), color=MORE if is_chosen else PALE, lw=1.4 if is_chosen else 0.9)
    ax.plot(steps, _thinned(history.costs[name]), color=INK, lw=1.6)
    ax.axhline(0, color=INK, lw=0.5, ls=":")
    _finish(ax, 150, 92)
    finals = ", ".join(f"{candidate} {values[-1]:.3g}" for candidate, values in history.candidates[name].items())
    alt_text = f"Cost of {name}: {history.costs[name][-1]:.3g} at step {history.steps[-1]}; {finals}"
    return inline_svg(figure, id_prefix, alt_text, f"{name}: {chosen}" if chosen else name)


def _thinned(values: Sequence[float]) -> np.ndarray:
    """Return at most `MAX_POINTS` means of consecutive values, all over about as many."""
    array = np.array(values, dtype=float)
    each = -(-len(array) // MAX_POINTS)
    return np.array([part.mean() for part in np.array_split(array, -(-len(array) // each))])


def _finish(ax: Axes, width: int, height: int) -> None:
    ax.set_xlabel("step", labelpad=1)
    ax.grid()
    set_ticks(ax.xaxis, 2 + width // 100)
    set_ticks(ax.yaxis, 2 + height // 50)
