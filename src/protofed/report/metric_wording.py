"""The metrics in words, for the head of the page."""

from protofed.metrics import ACCURACY, find_metric
from protofed.report.content import MethodGroup
from protofed.studies.schema import MetricOverSeeds
from protofed.text import interval, p_equals, percent

_CHANCE = 0.05


def metric_sentences(group: MethodGroup) -> list[str]:
    """By the metric that was chosen; of two classes also what accuracy hides. Empty where nothing was kept."""
    metric = find_metric(group.metric)
    sentences = []
    for view in group.views:
        scores = {name: entry[view.name] for name, entry in group.by_metric.items() if entry and entry.get(view.name)}
        if scores and metric.name != ACCURACY:
            whose = f" of {view.title}" if len(group.views) > 1 else ""
            sentences.append(_best(group, f"{metric.title}{whose}", scores))
    return sentences if sentences or len(group.methods) > 1 else _found(group)


def _best(group: MethodGroup, measure: str, scores: dict[str, MetricOverSeeds]) -> str:
    best = max(scores, key=lambda name: scores[name]["average"]["mean"])
    average, worst = scores[best]["average"], scores[best]["worst"]
    figure = f"{percent(average['mean'])} % ({interval(average['interval'])})"
    if len(scores) == 1:
        weakest = f"; it is lowest on {worst['names'][0]}, with {percent(worst['mean'])} %"
        return f"By {measure}, {best} reaches {figure} on average{weakest if len(scores[best]['parts']) > 1 else ''}."
    return f"By {measure}, {best} is best on average with {figure}{_against(group, scores, best)}."


def _against(group: MethodGroup, scores: dict[str, MetricOverSeeds], best: str) -> str:
    """The distance to the baseline, and whether these images might give it by chance."""
    test = scores[best]["test_on_images"]
    if best == group.baseline or test is None:
        return ""
    ahead = f", {100 * test['difference']:.2f} points above {group.baseline}"
    if test["p_holm"] is None:
        return ahead
    verdict = "more than chance explains on these images" if test["p_holm"] < _CHANCE else "which may be chance"
    return f"{ahead} ({p_equals(test['p_holm'])} over {test['images']} images), {verdict}"


def _found(group: MethodGroup) -> list[str]:
    """What a single run of two classes finds, which its accuracy does not tell."""
    runs = [run for runs in group.runs.values() for run in runs if run.complete]
    metrics = runs[0].summary.get("metrics") if runs else None
    if metrics is None or metrics["positive"] is None:
        return []
    views = [metrics[view] for view in ("global", "personal") if metrics[view] is not None]
    average = views[0].get("average") or views[0]["pooled"]
    values = [average[name]["value"] for name in ("sensitivity", "specificity")]
    if None in (*values, average["auc"]["value"]):
        return []
    negative, positive = runs[0].config["data"]["classes"]
    area = f"{percent(average['auc']['value'])} % ({interval(average['auc']['interval'])})"
    return [
        f"On average it finds {percent(values[0])} % of the {positive} images and clears {percent(values[1])} % of the "
        f"{negative} ones; its AUC is {area}."
    ]
