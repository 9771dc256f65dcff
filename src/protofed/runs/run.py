"""One run from options to summary."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from protofed.engines import make_engine
from protofed.errors import UserError
from protofed.federation import Diverged, Engine, Federation, RoundPolicy, RunFolder
from protofed.federation.chance import chance_levels
from protofed.runs.assembly import Assembly, ClientSideRecipe, assemble
from protofed.runs.config_file import write_config
from protofed.runs.description import describe_run
from protofed.runs.estimate import estimate_seconds, refuse_if_too_large
from protofed.runs.extend import EXTENDS, MAY_CHANGE, MOVES, extend, extends, refuse_changes, refuse_extension
from protofed.runs.health import COLLAPSES, diagnose, divergence, line_of, with_kept_round
from protofed.runs.metrics import run_metrics
from protofed.runs.network import keep_backbone
from protofed.runs.opened import Run
from protofed.runs.options import Options, make_options
from protofed.runs.place import data_here, refuse_other_images
from protofed.runs.summary import Status, Stopwatch, summarise_run
from protofed.system import one_thread

log = logging.getLogger("protofed")


class Callback(Protocol):
    """Follows a run. Each method is optional."""

    def run_estimate(self, run: Run, seconds: float) -> None:
        """Estimated seconds of the remaining rounds, from one batch; only measured if a callback asks."""

    def run_start(self, run: Run, rounds_done: int) -> None:
        """Before the first round that is still to be done."""

    def round_end(self, run: Run, record: dict[str, Any]) -> None:
        """After a round is committed, with its line of rounds.jsonl."""

    def run_end(self, run: Run) -> None:
        """After the summary is written."""


def run(
    method: str | None = None,
    data: str | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Iterable[Any] = (),
    **options: Any,
) -> Run:
    """Train a federation; the options are those of `protofed run`, with underscores.

    Without `out` the run goes to `runs/NAME`. With `resume` options that are not given are those of the folder; more
    `rounds` than it started with extend it, if nothing in it depends on their number.
    """
    given = {"method": method, "data": data, **options}
    given = {name: value for name, value in given.items() if value is not None}
    if resume:
        if out is None:
            raise UserError("--resume needs --out, the folder of the run to continue")
        Run(out).refuse_damaged()
        stored = Run(out).options
        refuse_changes(stored, given, MAY_CHANGE | EXTENDS | MOVES)
        given = {**stored, **data_here(Run(out).config, given.get("data_root")), **_engine_of(Run(out)), **given}
    resolved = make_options(given)
    folder = RunFolder(Path(out) if out is not None else _free_name(resolved))
    if not resume:
        folder.refuse_if_taken()
    with one_thread():
        assembly = assemble(resolved, folder.clients)
        refuse_if_too_large(assembly)
        if resume:
            refuse_other_images(assembly.context.dataset, Run(folder.path).config)
            folder.lock()
        else:
            folder.create()
        try:
            if resume and extends(Run(folder.path), resolved):
                refuse_extension(Run(folder.path), assembly)
                extend(folder, assembly)
            elif resume and Run(folder.path).complete:
                log.warning("the run in %s is already complete; --resume --rounds N adds rounds", folder.path)
                return Run(folder.path)
            recipe = ClientSideRecipe.of(assembly)
            engine = make_engine(assembly.engine, assembly.prepared, recipe)
            return carry_out(assembly, folder, resume, list(callbacks), engine)
        except OSError:
            if not Run(folder.path).begun:
                folder.discard()  # nothing has happened in it, and the same command may be given again
            raise
        finally:
            folder.release()


def carry_out(
    assembly: Assembly,
    folder: RunFolder,
    resume: bool,
    callbacks: list[Any],
    engine: Engine,
    rounds: Callable[[Federation], Iterator[dict[str, Any]]] = Federation.rounds,
    min_clients: int = 1,
) -> Run:
    """Run what is assembled, in a folder that is locked, and close the engine."""
    result = Run(folder.path)
    for warning in assembly.warnings:
        log.warning("%s", warning)
    # Where clients have their own machines, the time here says nothing.
    if not engine.scattered and any(hasattr(callback, "run_estimate") for callback in callbacks):
        left = 1 - len(result.rounds) / assembly.context.plan.rounds
        tell(callbacks, "run_estimate", result, left * estimate_seconds(assembly) / assembly.engine.workers)
    clock = Stopwatch(whole=not resume)
    options, context = assembly.options, assembly.context
    try:
        policy = RoundPolicy(
            options.participation,
            options.evaluate_every,
            options.evaluate_local,
            options.ensemble or context.method.ensembles,
            options.keep_messages,
            min_clients,
            assembly.starts_from_means,
            options.snapshots(),
            options.stop_when_flat,
            options.metric,
        )
        federation = Federation(assembly.prepared, engine, folder, policy)
        if resume:
            federation.resume()
        else:
            keep_backbone(assembly.network, context.models, folder.path)
            write_description(assembly, federation, folder)
        tell(callbacks, "run_start", result, federation.rounds_done)
        if engine.scattered:
            log.warning("predictions for single images stay at the sites: this run can only be judged by accuracy")
        diverged = _run_rounds(federation, rounds, lambda record: tell(callbacks, "round_end", result, record))
        projection = federation.project() if options.project and diverged is None else None
    finally:
        engine.close()
    federation.write_results(folder.path)
    lines = folder.rounds()
    status: Status = "diverged" if diverged else "flat" if len(lines) < context.plan.rounds else "complete"
    beside = {"metrics": run_metrics(result), "privacy": federation.privacy(), "projection": projection}
    summary = {
        **summarise_run(assembly, lines, clock, status),
        "chance": chance_levels(federation.context),
        **_judged(federation, result, diverged),
        **{key: value for key, value in beside.items() if value is not None},
    }
    folder.write_json("summary.json", summary)
    tell(callbacks, "run_end", result)
    for warning in summary["warnings"]:
        log.warning("%s", line_of(warning))
    return result


def _run_rounds(
    federation: Federation,
    rounds: Callable[[Federation], Iterator[dict[str, Any]]],
    round_end: Callable[[dict[str, Any]], None],
) -> Diverged | None:
    """All rounds; how they ended, where they could not go on."""
    try:
        for record in rounds(federation):
            round_end(record)
    except Diverged as problem:
        return problem
    return None


def _judged(federation: Federation, run: Run, diverged: Diverged | None) -> dict[str, Any]:
    """`warnings` and `best` of the summary.

    The best round is kept where clients validated it, and where the run has collapsed, so that the last is of no use.
    """
    config, lines, folder = run.config, run.rounds, run.folder
    warnings = diagnose(config, lines)
    if diverged is not None:
        warnings = [divergence(config, lines, diverged.round, diverged.what)]
    collapsed = any(warning["kind"] in COLLAPSES for warning in warnings)
    if not (federation.evaluator.validates or collapsed):
        folder.forget_best()
        return {"warnings": warnings, "best": None}
    best = federation.keep_best()
    if best is None or (best.by == "train_loss" and best.round == len(lines)):
        folder.forget_best()  # the last model is as good as any
        return {"warnings": warnings, "best": None}
    folder.publish_best()
    has_model = (folder.best / "model.safetensors").exists()
    return {
        "warnings": with_kept_round(warnings, best, has_model),
        "best": {**asdict(best), "accuracy": lines[best.round - 1]["accuracy"]},
    }


def write_description(assembly: Assembly, federation: Federation, folder: RunFolder) -> None:
    """run.json, config.toml and who holds what: when a run begins, and anew when clients have joined it."""
    assembly.context.partition.save(folder.path / "partition.npz")
    views = {"personal_test": federation.evaluator.personal_test, "chance": chance_levels(assembly.context)}
    description = describe_run(assembly)
    folder.write_json("run.json", {**description, **views})
    write_config(folder.path, description)


def _engine_of(run: Run) -> dict[str, Any]:
    """The engine a run was begun on: what `auto` chose then is not chosen anew."""
    begun = run.config["engine"]
    return {"engine": begun["name"], "workers": begun["workers"] if begun["name"] == "workers" else None}


def _free_name(options: Options) -> Path:
    """runs/METHOD-DATA-seedN, numbered where that exists."""
    name = f"{Path(options.method).stem}-{Path(options.data).stem}-seed{options.seed}"
    candidates = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in range(1, 10**6))
    return next(path for path in candidates if not path.exists())


def tell(callbacks: Iterable[Any], event: str, *arguments: Any) -> None:
    """Call the event's method on every callback that has one."""
    for callback in callbacks:
        if hasattr(callback, event):
            getattr(callback, event)(*arguments)
