"""`protofed data`: the data sets at hand, or one of them described: what it is, how to get it, whether it is there."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli import completion
from protofed.cli.options import DataRootOption, JsonOption
from protofed.cli.output import console, show_or_dump, show_table
from protofed.clients.feature_cache import FeatureCache
from protofed.data import DataSummary, available, describe
from protofed.data.catalog import data_root_of, form_of
from protofed.data.sources import SOURCES, Benchmark, Original, Source
from protofed.errors import UserError
from protofed.registry import load_plugin
from protofed.text import Table, setting, size

_STATES = {
    "npz": "there, as DOMAIN.npz files",
    "folders": "there, as DOMAIN/train/CLASS folders",
    "original": "there, as original files",
    "registered": "its original files are not there; the embedded data of this name is used",
    "absent": "not there",
}


def data_command(
    name: Annotated[
        str | None, typer.Argument(help="a name, a folder or a manifest to describe", autocompletion=completion.data)
    ] = None,
    data_root: DataRootOption = None,
    check: Annotated[bool, typer.Option("--check", help="read original files: count images, verify checksums")] = False,
    plugin: Annotated[list[str] | None, typer.Option("--plugin", help="a Python file that registers data sets")] = None,
    cache: Annotated[
        bool, typer.Option("--cache", help="how much of frozen backbones' features is kept on disk, and where")
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="with --cache: remove all of it")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the data sets that can be used by name, or describe one of them or a folder of your own.

    Example: protofed data digits
    """
    if clear and not cache:
        raise UserError("--clear removes the cache; give --cache with it")
    if cache:
        _show_cache(clear, as_json)
        return
    for path in plugin or []:
        load_plugin(path)
    if name is None:
        _list_all(data_root, as_json)
        return
    root = data_root_of(data_root)
    source = SOURCES.get(name)
    if source is None:
        summary = describe(name, data_root)
        show_or_dump({**asdict(summary), "wrong_files": []}, as_json, lambda _: _show_summary(summary))
    else:
        _describe_source(source, root, data_root, check, as_json)


def _show_cache(clear: bool, as_json: bool) -> None:
    """Features that are kept from run to run."""
    cache = FeatureCache()
    content = cache.clear() if clear else cache.content()
    shown = {**asdict(content), "path": str(content.path), "cleared": clear}
    verb = "removed" if clear else "kept"
    text = (
        f"{content.features} features ({size(content.bytes)} of at most {size(content.limit)}) {verb}: {content.path}"
    )
    show_or_dump(shown, as_json, lambda _: console().print(text, soft_wrap=True))


def _describe_source(source: Source, root: Path | None, data_root: str | None, check: bool, as_json: bool) -> None:
    """A data set of which the original files are known, whether they are there or not."""
    form = form_of(source.name, root)
    # Reading a large set of photographs takes long, so originals are counted on demand only.
    read = form in ("npz", "folders", "registered") or (form == "original" and check)
    summary = describe(source.name, data_root) if read else None
    wrong = source.wrong_files(root) if root and check and form == "original" else []
    if as_json:
        card = {"original_files": {**_facts(source, root), "state": form}, "wrong_files": wrong}
        print(json.dumps({**(asdict(summary) if summary else {"name": source.name}), **card}))
        return
    if summary:
        _show_summary(summary)
    _show_source(source, root, form)
    for file in wrong:
        console().print(f"warning: the checksum of {file} is not the one known; download it again")


def _list_all(data_root: str | None, as_json: bool) -> None:
    infos = available(data_root)
    if as_json:
        print(json.dumps([asdict(info) for info in infos]))
        return
    rows = [[info.name, ", ".join(info.domains), info.description] for info in infos]
    show_table(Table("Data sets at hand (--data NAME)", ["name", "domains", "what it is"], rows, numeric=False))
    at_hand = {info.name for info in infos}
    others = [[name, source.description] for name, source in SOURCES.items() if name not in at_hand]
    title = "Read from original files, once they are in a data root (protofed data NAME says how)"
    show_table(Table(title, ["name", "what it is"], others, numeric=False))
    console().print("Your own: --data FOLDER with DOMAIN.npz files or DOMAIN/train/CLASS/ images, or a manifest.")


def _show_summary(summary: DataSummary) -> None:
    out = console()
    channels, height, width = summary.image_shape
    out.print(f"{summary.name}: {summary.description}")
    out.print(f"{len(summary.classes)} classes: {', '.join(summary.classes)}; images {height}x{width}x{channels}")
    out.print(f"Source: {summary.source}\nLicence: {summary.licence}")
    rows = [[domain.name, str(domain.train), str(domain.test)] for domain in summary.domains]
    show_table(Table("Domains", ["domain", "train", "test"], rows))
    for warning in summary.warnings:
        out.print(f"warning: {warning}")


def _show_source(source: Source, root: Path | None, form: str) -> None:
    """The page about the original files."""
    lines = [f"{source.name}, original files: {source.description}"]
    if isinstance(source, Benchmark):
        places = _member_places(source, root)
        lines.append("It is made of these sets, each explained by `protofed data NAME`:")
        lines += [f"  {member}: {place or 'not there'}" for member, place in places.items()]
    if isinstance(source, Original):
        lines += [f"From: {source.publisher}", f"Download: {source.download}", f"Licence: {source.terms}"]
        lines += ["Layout under the data root:", *(f"  {line}" for line in source.layout)]
        lines += [f"Split: {source.split}", f"Images: read at {source.size}, unless --image-size gives another"]
        lines += [
            f"Domain {name}: {train} training, {test} test images" for name, (train, test) in source.counts.items()
        ]
        lines += [f"md5 {digest}  {file}" for file, digest in source.md5.items()]
    lines += [
        f"--set data.{option.name}={option.values} (default {setting(option.default)}): {option.description}"
        for option in source.options.values()
    ]
    where = f" in {root}" if root else "; no data root is given (--data-root, or PROTOFED_DATA)"
    lines.append(f"State: {_STATES[form]}{where}")
    if form == "absent":
        lines.append(str(source.missing(root)))
    for line in lines:
        # Paths and layouts may hold brackets, which are no markup.
        console().print(line, markup=False, soft_wrap=True)


def _facts(source: Source, root: Path | None) -> dict[str, Any]:
    """The page for machines."""
    facts: dict[str, Any] = {
        "description": source.description,
        "licence": source.licence,
        "domains": source.domains,
        "settings": {
            option.name: {"values": option.values, "default": option.default, "description": option.description}
            for option in source.options.values()
        },
    }
    if isinstance(source, Benchmark):
        return {**facts, "members": _member_places(source, root)}
    if isinstance(source, Original):
        shown = ("publisher", "download", "layout", "split", "counts", "md5")
        return {**facts, **{key: getattr(source, key) for key in shown}}
    return facts


def _member_places(source: Benchmark, root: Path | None) -> dict[str, str | None]:
    places = {name: source.member(name).locate(root) if root else None for name in source.members}
    return {name: str(place) if place else None for name, place in places.items()}
