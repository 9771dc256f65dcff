"""Charts of explanations and embeddings, by matplotlib, which is imported when one is drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofed.errors import UserError

# Okabe and Ito's colours, which the colour-blind can tell apart, then shades for more classes.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#000000", "#8c564b", "#999999")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError("charts need matplotlib; install it with pip install 'protofed[report]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw_curves(curves: Mapping[str, Mapping[str, Any]], fractions: Sequence[float], path: Path) -> None:
    """Deletion and insertion, a client per colour; random boxes dashed."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, kind, title in zip(axes, ("deletion", "insertion"), ("blurred away", "put in"), strict=True):
        for number, (client, found) in enumerate(curves.items()):
            colour = COLOURS[number % len(COLOURS)]
            axis.plot(fractions, found[kind], color=colour, marker="o", label=client)
            axis.plot(fractions, found[f"{kind}_random"], color=colour, linestyle="--")
        axis.set(
            title=f"{kind}: pixels of the box {title}", xlabel="share of the box (dashed: random boxes)", ylim=(0, 1)
        )
    axes[0].set_ylabel("probability of the prediction")
    axes[0].legend(fontsize=8)
    _save(figure, path)


def draw_embeddings(panels: Sequence[Sequence[Mapping[str, Any]]], path: Path) -> None:
    """A grid of t-SNE maps: a row per run, a column per round; colour is the class, shape the domain."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        len(panels), len(panels[0]), figsize=(3.4 * len(panels[0]) + 1.6, 3.3 * len(panels)), squeeze=False
    )
    for row, panel_row in zip(axes, panels, strict=True):
        for axis, panel in zip(row, panel_row, strict=True):
            _scatter(axis, panel)
    first = panels[0][0]
    handles = [
        *(_mark(pyplot, COLOURS[k % len(COLOURS)], "o", name) for k, name in enumerate(first["classes"])),
        *(_mark(pyplot, "#777777", _MARKERS[d % len(_MARKERS)], name) for d, name in enumerate(first["domains"])),
    ]
    figure.legend(handles=handles, loc="center right", fontsize=7, frameon=False)
    figure.tight_layout(rect=(0, 0, 1 - 1.3 / figure.get_figwidth(), 1))
    _save(figure, path)


def draw_hausdorff(
    rounds: Sequence[int], series: Mapping[str, Mapping[str, Sequence[float | None]]], path: Path
) -> None:
    """Mean distance of clients' class manifolds to the union, over the rounds; dashed after completion."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(5.2, 3.4))
    for number, (run, lines) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        axis.plot(rounds, _numbers(lines["before"]), color=colour, marker="o", label=run)
        if any(value is not None for value in lines["after"]):
            axis.plot(
                rounds, _numbers(lines["after"]), color=colour, marker="s", linestyle="--", label=f"{run}, completed"
            )
    axis.set(xlabel="round", ylabel="Hausdorff distance to the union")
    axis.legend(fontsize=8)
    _save(figure, path)


def _numbers(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _scatter(axis: Any, panel: Mapping[str, Any]) -> None:
    points, y, domain = (np.asarray(panel[key]) for key in ("points", "y", "domain"))
    for k in range(len(panel["classes"])):
        for d in range(len(panel["domains"])):
            chosen = (y == k) & (domain == d)
            axis.scatter(
                points[chosen, 0],
                points[chosen, 1],
                s=9,
                alpha=0.8,
                linewidths=0,
                color=COLOURS[k % len(COLOURS)],
                marker=_MARKERS[d % len(_MARKERS)],
            )
    axis.set(xticks=[], yticks=[])
    axis.set_title(panel["title"], fontsize=8)


def _mark(pyplot: Any, colour: str, marker: str, name: str) -> Any:
    return pyplot.Line2D([], [], linestyle="", marker=marker, color=colour, label=name)


def _save(figure: Any, path: Path) -> None:
    # Without a date in it the same figure is the same file.
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    _pyplot().close(figure)
