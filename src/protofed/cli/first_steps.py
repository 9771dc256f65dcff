"""What `protofed` says alone: what to do next, which depends on what is here already."""

from pathlib import Path

from protofed.cli.output import console

_SHORT = "--samples-per-client 400 --rounds 10 --lr 0.03"
_BEGIN = {
    f"protofed run i2pfl {_SHORT} --out runs/first": "train on embedded digits, less than a minute",
    f"protofed compare fedavg i2pfl {_SHORT} --out runs/pair": "which method is better?",
    "protofed data my-data": "check your own images: my-data/SITE/train/CLASS and my-data/SITE/test/CLASS",
    "protofed methods": "list the methods to choose from",
}


def show_first_steps(place: Path | None = None) -> None:
    """A few commands, each with what it is for."""
    steps = {**_with_results(place or Path("runs")), **_BEGIN}
    out = console()
    out.print("protofed trains on images that several sites hold and may not share. What to do next:\n")
    for command, purpose in steps.items():
        out.print(f"  {command}", soft_wrap=True)
        out.print(f"      {purpose}", style="dim", soft_wrap=True)
    out.print(
        "\nprotofed --help lists all commands, protofed COMMAND --help explains one with an example.", soft_wrap=True
    )


def _with_results(runs: Path) -> dict[str, str]:
    """What can be done with the newest results in `runs`."""
    folders = [path.parent for name in ("comparison.json", "summary.json") for path in runs.glob(f"*/{name}")]
    going_on = [path.parent for path in runs.glob("*/run.json") if not (path.parent / "summary.json").exists()]
    steps = {}
    if folders:
        newest = max(folders, key=lambda path: path.stat().st_mtime)
        steps[f"protofed report {newest}"] = "a page of your newest result, to look at and to send"
    if going_on:
        newest = max(going_on, key=lambda path: path.stat().st_mtime)
        steps[f"protofed run --resume --out {newest}"] = "continue a run that is not complete"
    return steps
