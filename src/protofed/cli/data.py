"""`protofed data`: the data sets at hand, or one of them looked at: what there is, and all that is wrong with it."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli import completion
from protofed.cli.options import DataRootOption, JsonOption
from protofed.cli.output import bars, console, show_or_dump, show_table
from protofed.clients.feature_cache import FeatureCache
from protofed.data import DataSummary, ReadOptions, available, describe
from protofed.data.catalog import data_root_of, form_of
from protofed.data.sources import SOURCES, Benchmark, Original, Source
from protofed.data.survey import DataReport, page, survey
from protofed.data.survey.looks import Progress
from protofed.errors import UserError
from protofed.registry import load_plugin
from protofed.runs.place import relocate
from protofed.system import write_atomically
from protofed.text import Table, setting, size

_MOST_CLASSES = 12
_STATES = {
    "npz": "found, as DOMAIN.npz files",
    "folders": "found, as DOMAIN/train/CLASS folders",
    "original": "found, as original files",
    "registered": "original files not found; the embedded data of this name is used",
    "absent": "not found",
}


def data_command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME] | relocate RUN NEW",
            help="a name, a folder or a manifest to check; or the new place of a run's images",
            autocompletion=completion.data,
        ),
    ] = None,
    data_root: DataRootOption = None,
    labels: Annotated[
        str | None, typer.Option("--labels", help="regroup classes, as in a run: a rule or a file")
    ] = None,
    test_share: Annotated[float | None, typer.Option("--test-share", help="as in a run")] = None,
    group_by: Annotated[str | None, typer.Option("--group-by", help="as in a run")] = None,
    pages: Annotated[str | None, typer.Option("--pages", help="as in a run")] = None,
    as_page: Annotated[bool, typer.Option("--page", help="also write a page with pictures (NAME.data.html)")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="where to write the page; implies --page")] = None,
    check: Annotated[bool, typer.Option("--check", help="read original files: count images, verify checksums")] = False,
    plugin: Annotated[list[str] | None, typer.Option("--plugin", help="a Python file that registers data sets")] = None,
    cache: Annotated[
        bool, typer.Option("--cache", help="show the size and place of the cached features of frozen backbones")
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="with --cache: clear it")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the data sets that can be used by name, or check one of them or a folder of your own.

    It lists everything that is wrong at once, and how to fix it; --page writes a page with pictures.
    `protofed data relocate RUN NEW` tells a run where its images are now.

    Example: protofed data digits
    """
    if clear and not cache:
        raise UserError("--clear clears the cache; use it together with --cache")
    if cache:
        _show_cache(clear, as_json)
        return
    for path in plugin or []:
        load_plugin(path)
    if not words:
        _list_all(data_root, as_json)
        return
    if words[0] == "relocate" and len(words) > 1:
        _relocate(words[1:])
        return
    if len(words) > 1:
        raise UserError(f"give one data set at a time, not {', '.join(words)}")
    source = SOURCES.get(words[0])
    if source is not None and not (as_page or out):
        _describe_source(source, data_root_of(data_root), data_root, check, as_json)
        return
    with _progress(as_json) as tell:
        how = ReadOptions(test_share, group_by, pages)
        drawn = as_page or out is not None
        report = survey(words[0], data_root=data_root, labels=labels, reading=how, tell=tell, pictures=drawn)
    _show_look(report, words[0], (out or Path(f"{report.summary.name}.data.html")) if drawn else None, as_json)


def _show_look(report: DataReport, name: str, target: Path | None, as_json: bool) -> None:
    """Everything that was found; an error where the data cannot be trained on."""
    show_or_dump(report.as_dict(), as_json, lambda _: _show_report(report))
    if target is not None:
        _write_page(report, target, as_json)
    if report.errors:
        must = "has to" if len(report.errors) == 1 else "have to"
        raise UserError(f"{name} cannot be trained on yet: {len(report.errors)} of the problems above {must} be fixed")


def _relocate(words: list[str]) -> None:
    if len(words) != 2:
        raise UserError("give the folder of a run and the new place of its images: protofed data relocate RUN NEW")
    place = relocate(*words)
    console().print(f"{words[0]} will find its images at {place} from now on; the files are unchanged", soft_wrap=True)


@contextmanager
def _progress(silent: bool) -> Iterator[Progress | None]:
    """A bar on a terminal."""
    if silent or not sys.stdout.isatty():
        yield None
        return
    with bars() as bar:
        task = bar.add_task("checking files", total=None, status="")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _write_page(report: DataReport, path: Path, silent: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(report).encode())
    if not silent:
        console().print(f"page written to {path}; it shows images, so be careful whom you give it to", soft_wrap=True)


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
        console().print(f"warning: the checksum of {file} does not match; download it again")


def _list_all(data_root: str | None, as_json: bool) -> None:
    infos = available(data_root)
    if as_json:
        print(json.dumps([asdict(info) for info in infos]))
        return
    rows = [[info.name, ", ".join(info.domains), info.description] for info in infos]
    show_table(Table("Available data sets (--data NAME)", ["name", "domains", "description"], rows, numeric=False))
    at_hand = {info.name for info in infos}
    others = [[name, source.description] for name, source in SOURCES.items() if name not in at_hand]
    title = "Read from original files placed in a data root (protofed data NAME explains how)"
    show_table(Table(title, ["name", "description"], others, numeric=False))
    console().print("Your own: --data FOLDER with DOMAIN.npz files or DOMAIN/train/CLASS/ images, or a manifest.")


def _show_summary(summary: DataSummary) -> None:
    out = console()
    channels, height, width = summary.image_shape
    out.print(f"{summary.name}: {summary.description}", markup=False, soft_wrap=True)
    out.print(f"{len(summary.classes)} classes: {', '.join(summary.classes)}; images {height}x{width}x{channels}")
    if summary.source != summary.description:
        out.print(f"Source: {summary.source}", markup=False, soft_wrap=True)
    if summary.licence:
        out.print(f"Licence: {summary.licence}", markup=False, soft_wrap=True)
    _show_counts(summary)
    for warning in summary.warnings:
        out.print(f"warning: {warning}", markup=False, soft_wrap=True)


def _show_counts(summary: DataSummary) -> None:
    """Images per site, part and class, where the classes fit on a screen."""
    classes = summary.classes if len(summary.classes) <= _MOST_CLASSES else ()
    rows = []
    for domain in summary.domains:
        parts = {"train": domain.train_per_class, "test": domain.test_per_class, "val": domain.validation_per_class}
        for part, counts in ((part, counts) for part, counts in parts.items() if counts):
            rows.append([domain.name, part, str(sum(counts)), *(map(str, counts) if classes else ())])
    show_table(Table("Images", ["domain", "part", "all", *classes], rows))


def _show_report(report: DataReport) -> None:
    """Counts, what the files are, every problem, and what to look at first."""
    _show_summary(replace(report.summary, warnings=()))
    rows = [
        [site.name, *(_most(each) for each in (site.sizes, site.channels, site.bits, site.formats))]
        for site in report.sites
    ]
    show_table(Table("Files", ["domain", "height x width", "channels", "depth", "format"], rows, numeric=False))
    out = console()
    for problem in report.problems:
        out.print(f"{problem.severity} ({problem.kind}): {problem}", markup=False, soft_wrap=True)
    if report.advice:
        out.print("Check before training:")
    for number, text in enumerate(report.advice, start=1):
        out.print(f"  {number}. {text}", markup=False, soft_wrap=True)


def _most(counts: Mapping[str, int]) -> str:
    """The most frequent values, and how many others there are."""
    first = list(counts.items())[:3]
    more = f", {len(counts) - 3} others" if len(counts) > 3 else ""
    return ", ".join(f"{name} ({count})" for name, count in first) + more


def _show_source(source: Source, root: Path | None, form: str) -> None:
    """The page about the original files."""
    lines = [f"{source.name}, original files: {source.description}"]
    if isinstance(source, Benchmark):
        places = _member_places(source, root)
        lines.append("It combines these data sets, each described by `protofed data NAME`:")
        lines += [f"  {member}: {place or 'not found'}" for member, place in places.items()]
    if isinstance(source, Original):
        lines += [f"From: {source.publisher}", f"Download: {source.download}", f"Licence: {source.terms}"]
        lines += ["Layout under the data root:", *(f"  {line}" for line in source.layout)]
        lines += [f"Split: {source.split}", f"Images: read at {source.size}, unless --image-size says otherwise"]
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
