"""One run from options to summary."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from protofed.engines import make_engine
from protofed.errors import UserError
from protofed.federation import Engine, Federation, RoundPolicy, RunFolder
from protofed.runs.assembly import Assembly, ClientSideRecipe, assemble
from protofed.runs.estimate import estimate_seconds, refuse_if_too_large
from protofed.runs.network import keep_backbone
from protofed.runs.opened import Run
from protofed.runs.options import Options, make_options
from protofed.runs.place import data_here, refuse_other_images
from protofed.runs.summary import summarise_run
from protofed.system import one_thread

log = logging.getLogger("protofed")

MAY_CHANGE = {"data_root", "engine", "workers", "device", "plugin", "keep_messages"}
"""Options that decide where a run happens and what is kept of it, not what comes out of it."""


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

    Without `out` the run goes to `runs/NAME`. With `resume` options that are not given are those of the folder.
    """
    given = {"method": method, "data": data, **options}
    given = {name: value for name, value in given.items() if value is not None}
    if resume:
        if out is None:
            raise UserError("--resume needs --out, the folder of the run to continue")
        stored = Run(out).options
        refuse_changes(stored, given)
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
            if resume and Run(folder.path).complete:
                log.warning("the run in %s is complete already", folder.path)
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
    start = time.perf_counter()
    options, context = assembly.options, assembly.context
    try:
        policy = RoundPolicy(
            options.participation,
            options.evaluate_every,
            options.evaluate_local,
            options.ensemble or context.method.ensembles,
            options.keep_messages,
            min_clients,
            options.head == "closed-form",
            options.snapshots(),
        )
        federation = Federation(assembly.prepared, engine, folder, policy)
        if resume:
            federation.resume()
        else:
            context.partition.save(folder.path / "partition.npz")
            keep_backbone(assembly.network, context.models, folder.path)
            folder.write_json(
                "run.json", {**assembly.description(), "personal_test": federation.evaluator.personal_test}
            )
        tell(callbacks, "run_start", result, federation.rounds_done)
        for record in rounds(federation):
            tell(callbacks, "round_end", result, record)
        projection = federation.project() if options.project else None
    finally:
        engine.close()
    federation.write_results(folder.path)
    summary = summarise_run(assembly, folder.rounds(), time.perf_counter() - start)
    beside = {"privacy": federation.privacy(context.plan.rounds), "projection": projection}
    folder.write_json("summary.json", {**summary, **{key: value for key, value in beside.items() if value is not None}})
    tell(callbacks, "run_end", result)
    return result


def refuse_changes(stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """A resumed run must be the run that was begun."""
    wanted = make_options({**stored, **given}).model_dump()
    changed = sorted(name for name in given if name not in MAY_CHANGE and wanted[name] != stored.get(name))
    if changed:
        texts = ", ".join(f"{name} (was {stored.get(name)}, now {wanted[name]})" for name in changed)
        raise UserError(f"--resume continues a run as it was begun, but these options differ: {texts}")


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
