"""`protofed deploy`: a federation between machines."""

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli.options import ConfigOption, takes_run_options
from protofed.cli.output import ProgressBar, console, exit_code, followers, show_summary, show_table
from protofed.cli.stopping import saying
from protofed.data import ReadOptions
from protofed.errors import UserError
from protofed.text import Table

deploy_app = typer.Typer(help="Run a federation between machines, on Flower.", no_args_is_help=True)
keys_app = typer.Typer(help="Create or revoke the keys of a federation.")
deploy_app.add_typer(keys_app, name="keys", invoke_without_command=True)

_ADDRESS = "0.0.0.0:9443"

Keys = Annotated[Path, typer.Option("--keys", help="the folder with the keys", show_default=False)]
Address = Annotated[str, typer.Option("--address", help="HOST:PORT to listen on")]


@keys_app.callback(invoke_without_command=True)
def keys_command(
    context: typer.Context,
    server: Annotated[str | None, typer.Option("--server", help="HOST:PORT at which sites reach the server")] = None,
    sites: Annotated[str | None, typer.Option("--sites", help="names of sites, for example north,south")] = None,
    out: Annotated[Path, typer.Option("--out", help="the folder for all keys; existing keys are kept")] = Path("keys"),
) -> None:
    """Create a certificate for the server and a key pair for every site.

    Example: protofed deploy keys --server federation.example.org:9443 --sites north,south --out keys
    """
    if context.invoked_subcommand is not None:
        return
    from protofed.deploy.keys import make_keys
    from protofed.engines.flower import prepare_flower

    if server is None or sites is None:
        raise UserError("give --server HOST:PORT and --sites NAME,NAME,...")
    prepare_flower()
    names = [name.strip() for name in sites.split(",") if name.strip()]
    made = make_keys(out, server, names)
    console().print(f"{out / 'server'} is for the server")
    for folder in made:
        console().print(f"{folder} is for the site {folder.name} only")


@keys_app.command("revoke")
def revoke_command(
    site: Annotated[str, typer.Argument(help="the site to shut out")],
    keys: Keys = Path("keys"),
) -> None:
    """Revoke a site: a running server refuses its key before the next round at the latest."""
    from protofed.deploy.keys import revoke

    revoke(keys, site)
    console().print(f"{site} is no longer a member")


@deploy_app.command("server")
@takes_run_options(
    without=(
        "method",
        "data",
        "data_root",
        "domains",
        "labels",
        "test_share",
        "group_by",
        "pages",
        "protocol",
        "clients",
        "fraction",
        "samples_per_client",
        "engine",
        "workers",
        "ensemble",
    ),
    config=("method", "min_sites", "round_timeout", "wait"),
)
def server_command(
    *,
    run_options: dict[str, Any],
    method: Annotated[str | None, typer.Argument(help="a method's name (default: i2pfl)")] = None,
    keys: Keys = Path("keys"),
    address: Address = _ADDRESS,
    out: Annotated[Path, typer.Option("--out", help="the run folder", show_default=False)] = Path("runs/deployed"),
    min_sites: Annotated[
        int | None,
        typer.Option(
            "--min-sites", help="minimum number of sites to start and to close a round (default: all, then 1)"
        ),
    ] = None,
    round_timeout: Annotated[float, typer.Option("--round-timeout", help="seconds a site has to answer")] = 600.0,
    wait: Annotated[float, typer.Option("--wait", help="seconds to wait for the sites before the first round")] = 600.0,
    stay: Annotated[
        float | None,
        typer.Option(
            "--stay",
            help="keep running this many seconds after the last round, so that sites can join or be forgotten",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --out")] = False,
    config: ConfigOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print only warnings")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print only the summary, as JSON")] = False,
) -> int:
    """Wait for the sites and train with them; the run folder is kept here, images and clients' models stay at the
    sites."""
    from protofed.deploy.keys import server_keys
    from protofed.deploy.server import WaitLimits, serve

    if method is not None:
        run_options["method"] = method
    progress = ProgressBar()
    limits = WaitLimits(min_sites, round_timeout, wait, stay)
    callbacks = followers(progress, quiet or as_json, config=config)
    try:
        with saying(
            lambda: "stopped; finished rounds are kept, and the same command with --resume continues from there"
        ):
            result = serve(server_keys(keys), address, out, run_options, limits, resume=resume, callbacks=callbacks)
    finally:
        progress.stop()
    if as_json:
        print(json.dumps(result.summary))
    elif not quiet:
        show_summary(result)
    return exit_code(result)


@deploy_app.command("site")
def site_command(
    data: Annotated[str, typer.Option("--data", help="the site's own images: a folder with one domain, or a manifest")],
    keys: Keys = Path("keys"),
    state: Annotated[Path, typer.Option("--state", help="where the site keeps its memory and its log")] = Path("site"),
    server: Annotated[str | None, typer.Option("--server", help="HOST:PORT, if not that of the keys")] = None,
    policy: Annotated[Path | None, typer.Option("--policy", help="a TOML file with what this site allows")] = None,
    labels: Annotated[str | None, typer.Option("--labels", help='regroup classes, "0=healthy,1-4=diseased"')] = None,
    classes: Annotated[str | None, typer.Option("--classes", help="all classes, if this site lacks some")] = None,
    test_share: Annotated[
        float | None,
        typer.Option("--test-share", help="fraction held out for testing, if the data has no test part (0.2)"),
    ] = None,
    group_by: Annotated[str | None, typer.Option("--group-by", help="folder | none | a regular expression")] = None,
    pages: Annotated[
        str | None, typer.Option("--pages", help="for files with several pages: all | first | 1,3-5")
    ] = None,
    weights: Annotated[str | None, typer.Option("--weights", help="the same initial weights as the server's")] = None,
    plugin: Annotated[list[str] | None, typer.Option("--plugin", help="a Python file that registers methods")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu | cuda")] = "cpu",
    check: Annotated[bool, typer.Option("--check", help="check data, keys and policy, then exit")] = False,
    once: Annotated[bool, typer.Option("--once", help="exit after one run")] = False,
) -> None:
    """Take part next to the data: only records leave, and sent.jsonl in --state lists each of them."""
    from protofed.deploy.keys import site_keys
    from protofed.deploy.node import SuperNode
    from protofed.deploy.policy import Policy
    from protofed.deploy.site import Site, SiteData
    from protofed.engines.flower import prepare_flower
    from protofed.system import make_private

    os.umask(0o077)  # what a site writes is its own
    prepare_flower()
    own = site_keys(keys, server)
    try:
        make_private(keys)
    except UserError as problem:  # a folder that may only be read, as in a container
        console().print(f"warning: {problem}", markup=False)
    rules = Policy.read(policy)
    site = Site(
        own.name,
        SiteData(data, labels, classes, ReadOptions(test_share, group_by, pages)),
        state,
        rules,
        weights=weights,
        plugins=plugin or (),
        device=device,
        tell=_tell,
        keys=own,
    )
    _show_site(site, own.server, rules.as_dict())
    if check:
        return
    node = SuperNode(own, state)
    node.start()
    try:
        node.serve(site.answer, lambda: once and site.finished)
    finally:
        node.end()


@deploy_app.command("status")
def status_command(
    keys: Keys = Path("keys"),
    address: Address = _ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Show who is a member and who is connected; run it on the server's machine."""
    from protofed.deploy.keys import server_keys
    from protofed.deploy.link import SuperLink

    nodes = SuperLink(server_keys(keys), address).nodes()
    if as_json:
        print(json.dumps([{"site": node.name, "online": node.online, "since": node.since} for node in nodes]))
        return
    rows = [[node.name, "yes" if node.online else "no", node.since or "never"] for node in nodes]
    show_table(Table("Members of the federation", ["site", "connected", "last connected"], rows, numeric=False))


def _tell(line: str) -> None:
    """A line of a site's console, there at once also where it goes to a file."""
    console().print(f"{datetime.now():%H:%M:%S} {line}", markup=False, highlight=False, soft_wrap=True)
    console().file.flush()


def _show_site(site: Any, server: str, rules: Any) -> None:
    (domain,) = site.dataset.domains.values()
    shape = "x".join(str(side) for side in site.dataset.image_shape)
    train, test = (
        part.y.bincount(minlength=len(site.dataset.classes)).tolist() for part in (domain.train, domain.test)
    )
    rows = [[name, str(train[k]), str(test[k])] for k, name in enumerate(site.dataset.classes)]
    show_table(Table(f"Images of {site.name}, {shape}, for the server at {server}", ["class", "train", "test"], rows))
    for warning in site.dataset.warnings:
        console().print(f"warning: {warning}")
    allowed = [f"{rule}={','.join(value) if isinstance(value, tuple) else value}" for rule, value in rules.items()]
    console().print(f"policy: {'; '.join(allowed) or 'everything is allowed'}")
