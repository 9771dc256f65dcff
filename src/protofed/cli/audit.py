"""`protofed audit`: what an attacker could rebuild from what a run sent."""

import json
from pathlib import Path
from typing import Annotated

import typer

from protofed.audit import Effort
from protofed.audit.audit import audit
from protofed.audit.findings import audit_tables
from protofed.cli.options import MovedDataOption, QuietOption, TrainingImagesOption
from protofed.cli.output import console, show_table


def audit_command(
    run: Annotated[Path, typer.Argument(help="the folder of a complete run, made with --keep-messages")],
    clients: Annotated[
        str | None,
        typer.Option("--clients", help="clients to attack (default: the first of every domain, at most 4)"),
    ] = None,
    stages: Annotated[
        str | None, typer.Option("--stages", help="also attack the features of these stages: layer1,pool or all")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="training steps of the attacker's decoder")] = Effort.steps,
    inception: Annotated[
        Path | None, typer.Option("--inception", help="weights of Inception-v3, for FID; without them: FID-like")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="where to write the findings (default: RUN/audit)")] = None,
    with_training_images: TrainingImagesOption = False,
    data_root: MovedDataOption = None,
    quiet: QuietOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print only audit.json")] = False,
) -> None:
    """Attack what the clients of a run sent: reconstruct images, and detect who took part.

    Example: protofed audit my-run --stages all
    """
    silent = quiet or as_json
    content = audit(
        run,
        clients=clients,
        stages=stages,
        steps=steps,
        inception=inception,
        out=out,
        data_root=data_root,
        with_training_images=with_training_images,
        tell=(lambda _: None) if silent else (lambda text: console().print(text)),
    )
    if as_json:
        print(json.dumps(content))
    elif not quiet:
        for table in audit_tables(content):
            show_table(table)
        for verdict in content["verdicts"]:
            console().print(f"- {verdict}")
        folder = run / "audit" if out is None else out
        console().print(f"written to {folder}; see the page {folder / 'index.html'}", soft_wrap=True)
