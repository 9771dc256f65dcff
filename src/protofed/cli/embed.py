"""`protofed embed`: what the features of a run look like."""

import json
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.options import MovedDataOption, parse_integers
from protofed.cli.output import console, show_table
from protofed.text import Table, split_names


def embed_command(
    runs: Annotated[list[Path], typer.Argument(help="folders of finished runs on the same data")],
    out: Annotated[Path, typer.Option("--out", help="where to write pictures and figures")],
    rounds: Annotated[
        str | None, typer.Option("--rounds", help="0,5,20: snapshots to show (default: all, and the end)")
    ] = None,
    domains: Annotated[str | None, typer.Option("--domains", help="only these domains, for example a,b")] = None,
    label: Annotated[str | None, typer.Option("--label", help="only images of this class, by name or number")] = None,
    samples: Annotated[int, typer.Option("--samples", min=8, help="maximum number of test images in a map")] = 600,
    data_root: MovedDataOption = None,
    hausdorff: Annotated[
        bool, typer.Option("--hausdorff", help="also: distance of clients' class manifolds to the union of all")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print only embeddings.json")] = False,
) -> None:
    """Draw t-SNE maps of test features, by class and domain, with one row per run, one column per round, and scores.

    Example: protofed embed runs/fedavg runs/i2pfl --domains mnist,syn_generated --out embeddings
    """
    from protofed.explain import embed

    content = embed(
        runs,
        out=out,
        data_root=data_root,
        rounds=None if rounds is None else parse_integers(rounds, "--rounds"),
        domains=split_names(domains),
        label=label,
        samples=samples,
        hausdorff=hausdorff,
    )
    if as_json:
        print(json.dumps(content))
        return
    for table in content["tables"]:
        show_table(Table(**table))
    console().print(f"written to {out}; {out / 'index.html'} is a page of it", soft_wrap=True)
