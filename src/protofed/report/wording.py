"""The result in words."""

from protofed.metrics import ACCURACY
from protofed.report.content import MethodGroup, ReportContent, ScoreView
from protofed.report.metric_wording import metric_sentences
from protofed.runs.health import line_of
from protofed.text import counted, duration, p_equals, percent, size

_CHANCE = 0.05
_MOST_WARNINGS = 6


def headline(content: ReportContent) -> list[str]:
    """A few sentences a reader may stop after."""
    warned = _warnings(content)
    sentences = [sentence for group in content.groups for sentence in _of_group(content, group)]
    if warned:
        return [*warned, *sentences]
    if not sentences:
        return [
            "Nothing is finished yet." if not content.tables else "Computed from exact message sizes, without training."
        ]
    return sentences


def _warnings(content: ReportContent) -> list[str]:
    """What went wrong, before any figure."""
    several = len(content.all_runs) > 1
    lines = [
        f"{run.config['method']['name']}, seed {run.seed}: {line_of(warning)}" if several else line_of(warning)
        for run in content.all_runs
        for warning in run.outcome_warnings
    ]
    more = [f"{len(lines) - _MOST_WARNINGS} more warnings are in the runs' summary.json."]
    return lines[:_MOST_WARNINGS] + (more if len(lines) > _MOST_WARNINGS else [])


def view_title(view: ScoreView) -> str:
    """What was scored."""
    return view.title


def _of_group(content: ReportContent, group: MethodGroup) -> list[str]:
    where = f"{group.title}: " if len(content.groups) > 1 else ""
    by_metric = metric_sentences(group)
    if len(group.methods) == 1:
        own = _alone(group)
        # What was chosen goes first; what two classes hide behind their accuracy goes after it.
        own = [*by_metric, *own] if group.metric != ACCURACY else [*own[:1], *by_metric, *own[1:]]
        return [where + sentence for sentence in own]
    compared = [*by_metric, *(sentence for view in group.views for sentence in _compared(group, view))]
    return [where + sentence for sentence in compared] + _cheapest(group)


def _alone(group: MethodGroup) -> list[str]:
    (name,) = group.methods
    runs = group.runs[name]
    if not group.views or not runs:
        return []
    view = group.views[0]
    row, run = view.rows[name], runs[0]
    what = "domains" if view.name == "global" else "clients"
    so_far = "" if run.complete else f" so far, after {len(run.rounds)} of {run.planned_rounds} rounds"
    chance = f" (chance: {percent(view.chance['average'])} %)" if view.chance else ""
    reached = f"{percent(row.average['mean'])} %{_named(group)}"
    sentences = [f"{name} reaches {reached} on average over all {what}{so_far}{chance}."]
    if row.worst is not None and len(row.columns) > 1:
        sentences.append(f"It is weakest on {row.worst['names'][0]}, with {percent(row.worst['mean'])} %.")
    cost = group.costs[name]
    sent = f"{size(cost.bytes['up']['total'])} up and {size(cost.bytes['down']['total'])} down"
    sentences.append(f"{counted(len(run.rounds), 'round')} took {duration(cost.seconds['total'])} and sent {sent}.")
    return sentences


def _named(group: MethodGroup) -> str:
    """Accuracy is called by its name where something else goes before it."""
    return "" if group.metric == ACCURACY else " accuracy"


def _compared(group: MethodGroup, view: ScoreView) -> list[str]:
    best = max(view.rows, key=lambda name: view.rows[name].average["mean"])
    row = view.rows[best]
    average = f"{percent(row.average['mean'])} %{_named(group)}"
    if len(view.rows) == 1:
        return [f"For {view_title(view)}, only {best} can be scored: {average} on average."]
    sentences = [f"For {view_title(view)}, {best} is best on average with {average}{_against(group, view, best)}."]
    worst = {name: other.worst["mean"] for name, other in view.rows.items() if other.worst is not None}
    if worst and len(row.columns) > 1:
        firm = max(worst, key=lambda name: worst[name])
        also = "also " if firm == best else ""
        sentences.append(f"{firm} {also}has the best worst case: {percent(worst[firm])} %.")
    return sentences


def _against(group: MethodGroup, view: ScoreView, best: str) -> str:
    """The distance to the baseline, and whether it may be chance."""
    baseline = group.baseline
    if baseline not in view.rows:
        return ""
    assert baseline is not None
    if best == baseline:
        return ", and it is the baseline: no other method is better"
    gap = 100 * (view.rows[best].average["mean"] - view.rows[baseline].average["mean"])
    ahead = f", {gap:.2f} points above {baseline}"
    test = view.rows[best].test
    if test is None or test["p_holm"] is None:
        return f"{ahead}; with so few seeds that may be chance"
    verdict = "more than chance explains" if test["p_holm"] < _CHANCE else "which may be chance"
    return f"{ahead} over {test['seeds']} seeds ({p_equals(test['p_holm'])}), {verdict}"


def _cheapest(group: MethodGroup) -> list[str]:
    total = {name: sum(cost.bytes[way]["total"] for way in ("up", "down")) for name, cost in group.costs.items()}
    sending = {name: bytes for name, bytes in total.items() if bytes}
    if len(sending) < 2:
        return []
    least, most = min(sending, key=lambda name: sending[name]), max(sending, key=lambda name: sending[name])
    ratio = sending[most] / sending[least]
    if ratio < 1.05:
        return [f"All methods send about as much: {size(sending[least])} up and down per run."]
    times = f"{ratio:.1f} times" if ratio < 10 else f"{ratio:.0f} times"
    return [f"{least} sends least, {size(sending[least])} per run; {most} sends {times} as much."]
