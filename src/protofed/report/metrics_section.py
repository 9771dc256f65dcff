"""The section on metrics: tables with intervals, reliability and ROC curves, and confusion matrices, site by site."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protofed.metrics import (
    METRICS,
    KeptPredictions,
    PredictedSet,
    confusion_matrix,
    find_metric,
    main_metric,
    metrics_for,
    reliability_curve,
    roc_curve,
)
from protofed.pages.elements import details, method_table, plain_table, scroll, signed
from protofed.pages.markup import Html, join, tag
from protofed.report.content import MethodGroup, ReportedRun
from protofed.report.curve_charts import SquareLine, side_by_side, square_chart
from protofed.text import p_value, percent

_MOST_PARTS = 12
"""Test sets that are drawn one by one."""
_MOST_CLASSES = 12
"""Of a confusion matrix that can still be read."""
_MOST_WITH_SHARES = 5
"""Classes of a confusion matrix whose cells also say a share."""


@dataclass(frozen=True)
class _Judged:
    """The run of a method that is shown: its first that has kept predictions."""

    run: ReportedRun
    kept: KeptPredictions
    metrics: Mapping[str, Any]


def metrics_section(group: MethodGroup, _index: int, order: Mapping[str, int]) -> Html:
    """Everything about one group; empty where no run has kept its predictions."""
    judged = _judged(group)
    if not judged:
        return Html("")
    classes = next(iter(judged.values())).kept.classes
    parts: list[object] = [tag("p", _about(group, classes))]
    for view in group.views:
        repeats = view.name == "personal" and all(_same_again(each.kept) for each in judged.values())
        if not repeats:
            parts += _view(group, view.name, view.title, judged, order)
    return join(parts)


def _judged(group: MethodGroup) -> dict[str, _Judged]:
    found = {}
    for name, runs in group.runs.items():
        for run in runs:
            kept = run.predictions() if run.complete else None
            if kept is not None and run.summary.get("metrics") is not None:
                found[name] = _Judged(run, kept, run.summary["metrics"])
                break
    return found


def _same_again(kept: KeptPredictions) -> bool:
    """Whether every client would use the server's model, on images on which that is shown already."""
    shown = {own.content for own in kept.views.get("global", {}).values()}
    return all(own.content in shown for own in kept.views.get("personal", {}).values())


def _about(group: MethodGroup, classes: Sequence[str]) -> str:
    positive = f" {classes[1]} counts as positive, {classes[0]} as negative." if len(classes) == 2 else ""
    seeds = f" Curves and matrices are those of seed {group.seeds[0]}." if len(group.seeds) > 1 else ""
    return f"Final models, in %, with 95 % intervals over the test images.{positive}{seeds}"


def _view(
    group: MethodGroup, view: str, words: str, judged: Mapping[str, _Judged], order: Mapping[str, int]
) -> list[object]:
    own = {name: each for name, each in judged.items() if each.kept.views.get(view)}
    if not own:
        return []
    parts: list[object] = [tag("h3", f"By {words}")]
    if len(group.methods) > 1:
        parts.append(_compared(group, view, words, order))
    tables = {name: _all_metrics(name, each, view) for name, each in own.items()}
    confusions = {name: _confusions(each, view) for name, each in own.items()}
    if len(own) == 1:
        parts += tables.values()
    else:
        parts += [details(f"All metrics of {name}", table) for name, table in tables.items()]
    parts.append(_curves(own, view, order))
    for name, matrices in confusions.items():
        if matrices:
            title = "Confusion matrices" if len(own) == 1 else f"Confusion matrices of {name}"
            parts.append(details(title, matrices) if len(own) > 1 else join([tag("h4", title), matrices]))
    return parts


def _compared(group: MethodGroup, view: str, words: str, order: Mapping[str, int]) -> Html:
    """The chosen metric: methods side by side, and the tests against the baseline."""
    scores = {name: entry[view] for name, entry in group.by_metric.items() if entry and entry.get(view)}
    if not scores:
        return Html("")
    names = list(next(iter(scores.values()))["parts"])
    names = names if len(names) <= _MOST_PARTS else []
    over_seeds = any(entry["test"] for entry in scores.values())
    rows = {}
    for name, entry in scores.items():
        figures = [_figure(entry["parts"].get(part), "mean") for part in names]
        rows[name] = [*figures, _figure(entry["average"], "mean"), percent(entry["worst"]["mean"])]
        rows[name] += [
            percent(entry["gap"]["mean"]),
            *_tests(entry["test_on_images"], entry["test"])[: 3 if over_seeds else 2],
        ]
    columns = [*names, "average", "worst", "gap", "difference", "p, images", *(["p, seeds"] if over_seeds else [])]
    metric = find_metric(group.metric)
    caption = f"{metric.heading} of {words}; differences from {group.baseline}"
    tests = {entry["test_on_images"]["test"] for entry in scores.values() if entry["test_on_images"]}
    note = (
        f"p, images: {' or '.join(sorted(tests))} test on the same test images. p, seeds: paired t-test over "
        "seeds. Both use Holm's correction for the number of methods. The gap is between the best and the worst "
        "site."
    )
    return join([method_table(caption, columns, rows, order), tag("p", note, class_="small") if tests else ""])


def _tests(on_images: Mapping[str, Any] | None, over_seeds: Mapping[str, Any] | None) -> list[str]:
    known = on_images or over_seeds
    difference = "–" if known is None else signed(known["difference"])
    return [
        difference,
        *(
            "–" if test is None or test["p_holm"] is None else p_value(test["p_holm"])
            for test in (on_images, over_seeds)
        ),
    ]


def _all_metrics(name: str, judged: _Judged, view: str) -> Html:
    """Every metric of one method, a column for each site."""
    scores, fairness = judged.metrics[view], judged.metrics["fairness"].get(view, {})
    main = main_metric(judged.kept.classes, judged.metrics["metric"])
    others = [metric for metric in metrics_for(judged.kept.classes, judged.metrics["metric"]) if metric != main]
    names = [part for part in scores if part != "pooled"]
    if not names or len(names) > _MOST_PARTS + 1:
        names = [part for part in ("average", "pooled") if part in scores]
    listed = {part: scores[part] for part in names}
    rows = [
        [
            metric.title,
            *(_figure(figures.get(metric.name), "value") for figures in listed.values()),
            *_worst_and_gap(fairness.get(metric.name)),
        ]
        for metric in (main, *others)
    ]
    rows.append(["images", *(figures.get("images", "") for figures in listed.values()), "", ""])
    return plain_table(f"{name}: metrics by site", ["metric", *listed, "worst site", "gap"], rows)


def _worst_and_gap(entry: Mapping[str, Any] | None) -> list[str]:
    return ["–", "–"] if entry is None else [entry["worst_part"], percent(entry["gap"])]


def _figure(figure: Mapping[str, Any] | None, key: str) -> Html:
    if figure is None or figure[key] is None:
        return Html("–")
    bounds = figure["interval"]
    spread = (
        ""
        if bounds is None
        else tag("span", " {:.1f} to {:.1f}".format(*(100 * bound for bound in bounds)), class_="soft")
    )
    return join([percent(figure[key]), spread])


def _curves(judged: Mapping[str, _Judged], view: str, order: Mapping[str, int]) -> Html:
    """Per site a reliability curve, and of two classes a ROC curve, with a line for every method."""
    names = list(next(iter(judged.values())).kept.views[view])
    if len(names) > _MOST_PARTS:
        return Html("")
    two = len(next(iter(judged.values())).kept.classes) == 2
    sets = {
        part: {name: each.kept.views[view][part] for name, each in judged.items() if part in each.kept.views[view]}
        for part in names
    }
    reliability = [_reliability(part, own, two, order) for part, own in sets.items()]
    rocs = [chart for part, own in sets.items() if two and (chart := _roc(part, own, order))]
    parts: list[object] = [tag("h4", "Reliability"), side_by_side(reliability), _reliability_table(sets)]
    if rocs:
        parts += [tag("h4", "ROC curves"), side_by_side(rocs)]
    return join(parts)


def _reliability(part: str, sets: Mapping[str, PredictedSet], two: bool, order: Mapping[str, int]) -> Html:
    lines = {}
    for name, predicted in sets.items():
        points = reliability_curve(predicted)
        lines[order[name]] = SquareLine(
            [(point.claimed, point.happened) for point in points], [point.images for point in points]
        )
    axes = ("probability of positive, %" if two else "probability of the predicted class, %", "observed frequency, %")
    return square_chart(part, axes, lines, _said("calibration error", "ece", sets))


def _roc(part: str, sets: Mapping[str, PredictedSet], order: Mapping[str, int]) -> Html:
    lines = {order[name]: SquareLine(points) for name, own in sets.items() if (points := roc_curve(own))}
    if not lines:
        return Html("")
    axes = ("1 − specificity, %", "sensitivity, %")
    return square_chart(part, axes, lines, _said("area under the curve", "auc", sets))


def _said(words: str, metric: str, sets: Mapping[str, PredictedSet]) -> str:
    """The chart for those who do not see it."""
    figures = {name: METRICS[metric].of(predicted) for name, predicted in sets.items()}
    return f"{words} " + ", ".join(f"{name} {percent(value)} %" for name, value in figures.items())


def _reliability_table(sets: Mapping[str, Mapping[str, PredictedSet]]) -> Html:
    rows = [
        [part, name, percent(point.claimed), percent(point.happened), point.images]
        for part, own in sets.items()
        for name, predicted in own.items()
        for point in reliability_curve(predicted)
    ]
    columns = ["test images", "method", "mean probability", "observed frequency", "images"]
    return details("Data behind the curves", plain_table("Reliability, in bins of a tenth", columns, rows))


def _confusions(judged: _Judged, view: str) -> Html:
    """A matrix for every site, its cells as dark as they are full."""
    classes, sets = judged.kept.classes, judged.kept.views[view]
    if len(classes) > _MOST_CLASSES or len(sets) > _MOST_PARTS:
        return Html("")
    return side_by_side([_confusion(part, own, classes) for part, own in sets.items()], _matrix_width(classes))


def _confusion(part: str, predicted: PredictedSet, classes: Sequence[str]) -> Html:
    matrix = confusion_matrix(predicted.labels, predicted.probabilities)
    shares = len(classes) <= _MOST_WITH_SHARES
    rows = [
        tag("tr", tag("th", name, scope="row"), *(_confused(count, sum(row), shares) for count in row))
        for name, row in zip(classes, matrix.tolist(), strict=True)
    ]
    head = tag("tr", tag("td"), *(tag("th", name, scope="col") for name in classes))
    caption = f"{part}: images by true class (rows) and predicted class (columns)"
    table = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *rows), class_="heat")
    return scroll(table, caption)


def _confused(count: int, total: int, with_share: bool) -> Html:
    """One cell: images, and their share of the class where there is room; a count of 0 is left blank."""
    share = count / total if total else 0.0
    beside = tag("span", f" {share:.0%}", class_="soft") if with_share and count else ""
    return tag("td", count or "", beside, style=f"--fill:{share:.3f}")


def _matrix_width(classes: Sequence[str]) -> str:
    """Room for a whole matrix, by the names of its classes."""
    cell = max(5.0 if len(classes) <= _MOST_WITH_SHARES else 2.6, 0.55 * max(map(len, classes)) + 1.0)
    return f"{min(cell * (len(classes) + 1), 60.0):.1f}rem"
