"""A finished run audited: clients attacked, and the findings written beside the run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from protofed.audit.attack import AttackOptions, AttackResults, attack_client
from protofed.audit.decoder import Effort
from protofed.audit.extractor import make_extractor
from protofed.audit.findings import audit_content, audit_markdown, audit_tables
from protofed.audit.moments import second_moment_in
from protofed.audit.page import audit_page
from protofed.audit.victim import make_victim, rows_in
from protofed.clients import RunContext
from protofed.errors import UserError, unknown_name
from protofed.runs.opened import OpenRun
from protofed.system import one_thread, write_atomically
from protofed.text import split_names

_MOST_CLIENTS = 4


def audit(
    path: str | Path,
    *,
    clients: str | Sequence[str] | None = None,
    stages: str | Sequence[str] | None = None,
    steps: int = Effort.steps,
    inception: str | Path | None = None,
    out: str | Path | None = None,
    data_root: str | Path | None = None,
    with_training_images: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Attack what a complete run sent; audit.json, audit.md, a page and pictures go to `out`, by default RUN/audit.

    `clients` are attacked, by default the first of every domain, at most four. `stages` are attacked whether or not
    their features were sent; `all` means every one. The pictures show training images: the page has them only
    `with_training_images`. `tell` gets a line for every step of the work.
    """
    if steps < 1:
        raise UserError(f"steps={steps} is not valid: a decoder needs at least one step")
    options = AttackOptions(tuple(split_names(stages) or ()), Effort(steps=steps))
    with one_thread():
        opened = OpenRun(path, with_data=True, data_root=data_root)
        context = opened.context
        if context.method.pools_data:
            raise UserError(
                "this method pools the data of all clients: there is no message to attack, everything is known"
            )
        extractor = make_extractor(None if inception is None else Path(inception))
        victims = [make_victim(opened, client) for client in attacked_clients(context, split_names(clients) or [])]
        results = AttackResults()
        for number, victim in enumerate(victims, start=1):
            tell(f"attacking {victim.client} ({number} of {len(victims)})")
            attack_client(victim, options, extractor, results, tell)
    summary = opened.run.summary
    content = {
        "title": f"What {summary['method']} on {context.dataset.name} leaks",
        "run": {key: summary[key] for key in ("method", "data", "seed", "rounds")},
        **audit_content(victims, options, extractor, results, single_images(opened)),
    }
    content["tables"] = [table.as_dict() for table in audit_tables(content)]
    _write(opened.run.path / "audit" if out is None else Path(out), content, results, with_training_images)
    return content


def _write(folder: Path, content: dict[str, Any], results: AttackResults, with_training_images: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for picture in results.pictures:
        write_atomically(folder / picture.file, picture.png)
    write_atomically(folder / "audit.md", audit_markdown(content).encode())
    write_atomically(folder / "index.html", audit_page(content, folder, with_training_images).encode())
    write_atomically(folder / "audit.json", json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")


def single_images(opened: OpenRun) -> dict[str, list[str]]:
    """Of every client whose messages were kept: classes of which it sent a prototype that is one image's embedding."""
    context = opened.context
    found: dict[str, list[str]] = {}
    for client in context.partition.clients:
        upload = opened.last_upload_of(client)
        named: set[int] = set()
        for rows in [] if upload is None else rows_in(upload, len(context.dataset.classes)):
            if rows.counts is not None and second_moment_in(rows, context.model.dim) is None:
                named.update(rows.labels[rows.counts == 1].tolist())
        if named:
            found[client] = [context.dataset.classes[label] for label in sorted(named)]
    return found


def attacked_clients(context: RunContext, wanted: Sequence[str] = ()) -> list[str]:
    """Those asked for, else the first of every domain and then others, at most four."""
    partition = context.partition
    for client in wanted:
        if client not in partition.clients:
            raise unknown_name("client of this run", client, partition.clients)
    if wanted:
        return list(wanted)
    first_of: dict[str, str] = {}
    for client in partition.clients:
        first_of.setdefault(partition.domain[client], client)
    return list(dict.fromkeys([*first_of.values(), *partition.clients]))[:_MOST_CLIENTS]
