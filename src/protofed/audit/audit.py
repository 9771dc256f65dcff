"""A run folder audited: assembled as it was, attacked, and the findings written beside it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protofed.audit import AuditOptions, Effort, audit_federation
from protofed.errors import UserError
from protofed.federation import RunFolder
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options
from protofed.runs.results import Run
from protofed.system import one_thread, write_atomically
from protofed.text import Table, split_names

_FIGURES = (
    ("images", "images", "{:.0f}"),
    ("fid", "{label}", "{:.4g}"),
    ("ssim_max", "max SSIM", "{:.4f}"),
    ("ssim", "mean SSIM", "{:.4f}"),
    ("rms_min", "min RMS", "{:.4f}"),
    ("rms", "mean RMS", "{:.4f}"),
    ("psnr", "PSNR", "{:.1f}"),
    ("below_risk_line", "RMS < 0.1", "{:.1%}"),
    ("class_mean_rms", "RMS of class mean", "{:.4f}"),
)


def audit(
    path: str | Path,
    *,
    clients: str | Sequence[str] | None = None,
    stages: str | Sequence[str] | None = None,
    steps: int = Effort.steps,
    inception: str | Path | None = None,
    out: str | Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Attack what a complete run sent, and write audit.json, audit.md and pictures to `out`, by default RUN/audit."""
    if steps < 1:
        raise UserError(f"steps={steps} is not valid: a decoder needs at least one step")
    run = Run(path)
    about = run.summary
    options = AuditOptions(
        clients=tuple(split_names(clients) or ()) or None,
        stages=tuple(split_names(stages) or ()),
        effort=Effort(steps=steps),
        inception=None if inception is None else Path(inception),
    )
    with one_thread():
        assembly = assemble(make_options(run.options), run.path / "clients")
        found = audit_federation(assembly.prepared, RunFolder(run.path), options, tell)
    content = {
        "title": f"What {about['method']} on {assembly.context.dataset.name} leaks",
        "run": {"method": about["method"], "data": about["data"], "seed": about["seed"], "rounds": about["rounds"]},
        **found.content,
    }
    folder = run.path / "audit" if out is None else Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in found.pictures.items():
        write_atomically(folder / name, picture)
    write_atomically(folder / "audit.md", audit_markdown(content).encode())
    write_atomically(folder / "audit.json", json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")
    return content


def audit_tables(content: dict[str, Any]) -> list[Table]:
    """Every table of an audit that has rows."""
    tables = (_reconstruction_table(content), _prototypes_table(content), _membership_table(content))
    return [table for table in tables if table.rows]


def _reconstruction_table(content: dict[str, Any]) -> Table:
    label = content["extractor"]["label"]
    columns = ["features", *(title.format(label=label) for _, title, _ in _FIGURES)]
    rows = [
        [f"{entry['stage']} ({entry['source']})", *(_cell(entry["mean"][key], form) for key, _, form in _FIGURES)]
        for entry in content["reconstruction"]
    ]
    return Table("Images rebuilt from features, mean over clients", columns, rows)


def _prototypes_table(content: dict[str, Any]) -> Table:
    columns = ["prototypes", "number", "RMS to nearest image", "by the class mean", "RMS < 0.1"]
    keys = (
        ("prototypes", "{:.0f}"),
        ("rms_to_nearest", "{:.4f}"),
        ("rms_of_class_mean_to_nearest", "{:.4f}"),
        ("below_risk_line", "{:.1%}"),
    )
    entries = content["prototypes"]
    rows = [[entry["field"], *(_cell(entry["mean"][key], form) for key, form in keys)] for entry in entries]
    return Table("Images rebuilt from prototypes, mean over clients", columns, rows)


def _membership_table(content: dict[str, Any]) -> Table:
    rows = [
        [
            entry["by"],
            f"{entry['mean']['auc']:.3f}",
            f"{entry['mean']['low']:.3f} to {entry['mean']['high']:.3f}",
            str(entry["mean"]["members"]),
            str(entry["mean"]["outsiders"]),
        ]
        for entry in content["membership"]
    ]
    return Table("Who took part", ["by", "AUC", "95 % interval", "members", "others"], rows)


def audit_markdown(content: dict[str, Any]) -> str:
    """audit.md: verdicts, tables, pictures."""
    blocks = [f"# {content['title']}", "\n".join(f"- {verdict}" for verdict in content["verdicts"])]
    for table in audit_tables(content):
        blocks += [f"## {table.title}", table.markdown()]
    attack, extractor = content["attack"], content["extractor"]
    blocks.append(
        f"The attacker has {attack['attacker_has']} ({content['model']}). {extractor['label']}: features of "
        f"{extractor['name']}."
    )
    blocks += [f"![{item['caption']}]({item['image']})\n\n{item['caption']}" for item in content["items"]]
    return "\n\n".join(blocks) + "\n"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
