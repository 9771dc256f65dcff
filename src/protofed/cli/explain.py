"""`protofed explain`: which part of an image spoke for a decision."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from protofed.cli.options import ModelOfOption, MovedDataOption, QuietOption
from protofed.cli.output import console, percent, show_table
from protofed.text import Table, split_names

_ShiftsOption = Annotated[
    int, typer.Option("--shifts", min=1, max=16, help="make exact maps N times finer, from N x N shifted copies")
]
_EvidenceOption = Annotated[
    Literal["auto", "exact", "prototypes"],
    typer.Option("--evidence", help="exact: maps that add up to the logits; auto: what the model uses to decide"),
]


def explain_command(
    run: Annotated[Path, typer.Argument(help="the folder of a finished run")],
    images: Annotated[Path | None, typer.Option("--images", help="a folder of images, or one image file")] = None,
    domain: Annotated[str | None, typer.Option("--domain", help="test images of this domain of the run")] = None,
    label: Annotated[
        str | None, typer.Option("--label", help="with --domain: only this class (name or number)")
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="maximum number of images")] = 8,
    clients: Annotated[str | None, typer.Option("--clients", help="a,b (default: all; global: the server's)")] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="prototypes or exact maps per client")] = 3,
    project: Annotated[
        bool, typer.Option("--project", help="first find each client's training patches nearest to its prototypes")
    ] = False,
    projected: Annotated[
        bool, typer.Option("--projected", help="explain with the prototypes moved onto those patches")
    ] = False,
    faithfulness: Annotated[
        bool, typer.Option("--faithfulness", help="also test whether the box matters more than a random one")
    ] = False,
    evidence: _EvidenceOption = "auto",
    shifts: _ShiftsOption = 1,
    model_of: ModelOfOption = "last",
    out: Annotated[Path | None, typer.Option("--out", help="for pictures and page (RUN/explanations)")] = None,
    data_root: MovedDataOption = None,
    quiet: QuietOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print only explanations.json")] = False,
) -> None:
    """Show which part of an image led to a decision, for every client, and how far clients agree.

    Example: protofed explain my-run --domain clinic --label diseased --count 4 --out why
    """
    from protofed.explain import explain

    content = explain(
        run,
        images=images,
        domain=domain,
        label=label,
        count=count,
        clients=split_names(clients),
        top=top,
        out=out,
        data_root=data_root,
        project=project,
        projected=projected,
        faithful=faithfulness,
        evidence=evidence,
        shifts=shifts,
        model_of=model_of,
    )
    if as_json:
        print(json.dumps(content))
        return
    if quiet:
        return
    _show(content)
    console().print(
        f"{content['seconds_per_image']:.2f} s per image ({content['cpu_seconds_per_image']:.2f} s of CPU time); "
        f"page: {out or run / 'explanations'}/index.html"
    )


def _show(content: dict[str, Any]) -> None:
    rows = [
        [
            image["name"],
            view["client"],
            view["predicted"],
            percent(view["probability"]),
            _named(prototype),
            f"{prototype['lift']:+.3f}",
            "flat" if prototype["box"] is None else "{}-{}, {}-{}".format(*prototype["box"]),
        ]
        for image in content["images"]
        for view in image["clients"]
        for prototype in view["prototypes"][:1]
    ]
    spoke = "evidence" if content["evidence"] == "exact" else "prototype"
    columns = ["image", "client", "prediction", "%", spoke, "lift", "rows, columns"]
    show_table(Table(f"The most important {spoke}", columns, rows))
    for table in content["tables"]:
        show_table(Table(**table))
    for finding in content["findings"]:
        console().print(finding)
    for note in content["notes"]:
        console().print(f"note: {note}")


def _named(evidence: dict[str, Any]) -> str:
    if "rival" not in evidence:
        return f"{evidence['class']} #{evidence['prototype']}"
    return f"{evidence['class']}" + ("" if evidence["rival"] is None else f", not {evidence['rival']}")
