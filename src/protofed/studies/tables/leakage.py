"""What runs of a published table leak: each is audited once, and the audit kept in its folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from protofed.audit.audit import attacked_clients, audit
from protofed.audit.decoder import Effort, decoder_step_seconds
from protofed.clients import RunContext
from protofed.errors import UserError
from protofed.runs.opened import Run

STEPS = Effort.steps
"""Effort of the attack behind a table."""

FIGURES = {
    "FID": "fid",
    "max SSIM": "ssim_max",
    "min L2": "rms_min",
    "mean SSIM": "ssim",
    "mean L2": "rms",
    "L2 < 0.1": "below_risk_line",
    "class mean: SSIM": "class_mean_ssim",
    "class mean: L2": "class_mean_rms",
    "class mean: L2 < 0.1": "class_mean_below_risk_line",
}
"""Columns of a table of leakage and the figures of an audit that they are: the paper's, ours, and what an attacker has
who knows nothing but the class, without which the others cannot be judged.
"""


def leakage(runs: Sequence[Run]) -> dict[str, Any] | None:
    """The figures of embeddings that were sent, mean over runs; None before there is one."""
    audits = [_embeddings_audit(_read_or_audit(run)) for run in runs]
    if not audits:
        return None
    return {
        "label": audits[0]["label"],
        "figures": {
            column: mean(values) if None not in (values := [each["mean"][key] for each in audits]) else None
            for column, key in FIGURES.items()
        },
    }


def attack_seconds(context: RunContext) -> float:
    """About the processor time of the attack on a run: its decoders take most of it."""
    shape = context.dataset.image_shape
    step = decoder_step_seconds(context.model.feature_shape(shape, context.method.cut), shape, Effort())
    return STEPS * step * len(attacked_clients(context))


def _read_or_audit(run: Run) -> dict[str, Any]:
    """The audit in the run's folder, or one made now; one with other effort than a table takes is let stand."""
    folders = (run.path / "audit", run.path / "audit" / "table")
    for folder in folders:
        stored = _read(folder / "audit.json")
        if stored is not None and stored["attack"]["steps"] == STEPS:
            return stored
    return audit(run.path, steps=STEPS, out=next(folder for folder in folders if not folder.exists()))


def _read(stored: Path) -> dict[str, Any] | None:
    if not stored.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(stored.read_bytes())
    except ValueError:
        raise UserError(f"{stored} is damaged; remove it to audit the run again") from None
    return content


def _embeddings_audit(content: Mapping[str, Any]) -> dict[str, Any]:
    """The embeddings that travelled; in a run without kept messages, those the models give."""
    by_source = {entry["source"]: entry for entry in content["reconstruction"]}
    entry = by_source.get("sent") or by_source.get("computed")
    if entry is None:
        raise UserError("the audit for a leakage table found no embeddings; the table's methods must send them")
    return {"mean": entry["mean"], "label": content["extractor"]["label"]}
