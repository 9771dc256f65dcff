"""Charts of explanations and embeddings, by matplotlib, which is imported when one is drawn."""

from collections.abc import Mapping, Sequence
from colorsys import hsv_to_rgb
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofed.errors import missing_extra
from protofed.pages.drawing import COLOURS


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("charts need matplotlib, which is not installed", "report") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw_curves(curves: Mapping[str, Mapping[str, Any]], fractions: Sequence[float], path: Path) -> None:
    """Deletion and insertion, a client per colour; random boxes dashed."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, kind, title in zip(axes, ("deletion", "insertion"), ("blurred away", "put in"), strict=True):
        for number, (client, curve) in enumerate(curves.items()):
            colour = COLOURS[number % len(COLOURS)]
            axis.plot(fractions, curve[kind], color=colour, marker="o", label=client)
            axis.plot(fractions, curve[f"{kind}_random"], color=colour, linestyle="--")
        axis.set(
            title=f"{kind}: pixels of the box {title}", xlabel="fraction of the box (dashed: random boxes)", ylim=(0, 1)
        )
    axes[0].set_ylabel("probability of the prediction")
    axes[0].legend(fontsize=8)
    _save(figure, path)


def draw_embeddings(panels: Sequence[Sequence[Mapping[str, Any]]], path: Path) -> None:
    """t-SNE maps, a row per run and a column per round (of single rounds a column per run), coloured by class.

    Where there are several domains, the same again coloured by domain below.
    """
    pyplot = _pyplot()
    across = [[row[0] for row in panels]] if all(len(row) == 1 for row in panels) else panels
    first = across[0][0]
    kinds = ["class", "domain"] if len(first["domains"]) > 1 else ["class"]
    figure, axes = pyplot.subplots(
        len(across) * len(kinds),
        len(across[0]),
        figsize=(3.3 * len(across[0]) + 1.6, 3.2 * len(across) * len(kinds)),
        squeeze=False,
        layout="constrained",
    )
    for number, row in enumerate(axes):
        kind = kinds[number % len(kinds)]
        for axis, panel in zip(row, across[number // len(kinds)], strict=True):
            _scatter(axis, panel, kind)
            if kind == "class":
                axis.set_title(panel["title"], fontsize=8)
        row[0].set_ylabel(f"by {kind}", fontsize=9)
        names = first["classes" if kind == "class" else "domains"]
        handles = [_mark(pyplot, shade, name) for shade, name in zip(_palette(len(names)), names, strict=True)]
        columns = 1 + (len(names) - 1) // 16
        row[-1].legend(
            handles=handles,
            title=kind,
            loc="center left",
            bbox_to_anchor=(1, 0.5),
            fontsize=7,
            ncols=columns,
            frameon=False,
        )
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


def _scatter(axis: Any, panel: Mapping[str, Any], kind: str) -> None:
    """All points in one call, so that no class lies on top of the others."""
    points = np.asarray(panel["points"])
    groups, names = ("y", "classes") if kind == "class" else ("domain", "domains")
    shades = _palette(len(panel[names]))
    axis.scatter(points[:, 0], points[:, 1], s=9, alpha=0.8, linewidths=0, c=[shades[group] for group in panel[groups]])
    axis.set(xticks=[], yticks=[])


def _palette(count: int) -> list[str]:
    """As many colours; of many the hues are evenly spaced, since no set tells them apart at a glance."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    shades = (hsv_to_rgb(k / count, 0.85, 0.55 + 0.4 * (k % 2)) for k in range(count))
    return ["#" + "".join(f"{round(255 * part):02x}" for part in shade) for shade in shades]


def _mark(pyplot: Any, colour: str, name: str) -> Any:
    return pyplot.Line2D([], [], linestyle="", marker="o", color=colour, label=name)


def _save(figure: Any, path: Path) -> None:
    # Without a date in it the same figure is the same file.
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    _pyplot().close(figure)
