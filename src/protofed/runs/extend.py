"""A run goes on: with the same options, or with more rounds where nothing of what is done depends on their number."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protofed.errors import UserError
from protofed.federation import RunFolder
from protofed.method import Plan
from protofed.runs.assembly import Assembly
from protofed.runs.config_file import write_config
from protofed.runs.description import describe_run
from protofed.runs.opened import Run
from protofed.runs.options import Options, make_options

MAY_CHANGE = {"engine", "workers", "device", "plugin", "keep_messages"}
"""Options that decide where a run happens and what is kept of it, not what comes out of it."""

MOVES = {"data_root"}
"""Options that say where images are now; which ones they are is checked."""

EXTENDS = {"rounds", "plan", "stop_when_flat"}
"""Options that decide when a run ends, not what comes out of its rounds."""


def resume_command(folder: Path) -> str:
    """What a shell takes to go on with a run."""
    return shlex.join(["protofed", "run", "--resume", "--out", str(folder)])


def refuse_changes(stored: Mapping[str, Any], given: Mapping[str, Any], may_change: set[str] = MAY_CHANGE) -> None:
    """A resumed run must be the run that was begun."""
    wanted = make_options({**stored, **given}).model_dump()
    changed = sorted(name for name in given if name not in may_change and wanted[name] != stored.get(name))
    if changed:
        texts = ", ".join(f"{name} (was {stored.get(name)}, now {wanted[name]})" for name in changed)
        raise UserError(f"--resume continues a run with its original options, but these differ: {texts}")


def refuse_extension(run: Run, assembly: Assembly) -> None:
    """More rounds are refused where the rounds that are done would have gone otherwise among more of them."""
    config, plan, done = run.config, assembly.context.plan, len(run.rounds)
    begun = Plan(**{**config["plan"], "epochs": tuple(config["plan"]["epochs"])})
    reason = _why_not(begun, plan, done, assembly)
    if reason:
        raise UserError(
            f"the run in {run.path} was started with {begun.rounds} rounds and cannot be extended to "
            f"{plan.rounds}: {reason}; give another --out to run it anew"
        )


def _why_not(begun: Plan, plan: Plan, done: int, assembly: Assembly) -> str:
    """The reason in a few words; empty where nothing speaks against it."""
    options, method = assembly.options, assembly.context.method
    if plan.rounds <= done:
        return f"{done} rounds are done"
    if plan.epochs == begun.epochs:
        return "" if options.stop_when_flat else f"{options.method} follows its own plan"
    if plan.epochs[:done] != begun.epochs[:done]:
        return "the epochs of finished rounds would change"
    if done and any(plan.lr_at(round) != begun.lr_at(round) for round in range(done)):
        return f"the {begun.schedule} schedule of the learning rate was laid out over {begun.rounds} rounds"
    if done and method.depends_on_rounds:
        return f"with {options.method} {method.depends_on_rounds}"
    if options.ensemble or method.ensembles:
        return "its last exchange was not averaged, because the clients' models predict as an ensemble"
    if "epsilon=" in (options.guard or "").replace(" ", ""):
        return f"the noise was chosen so that {begun.rounds} rounds spend the epsilon of --guard"
    return ""


def extends(run: Run, options: Options) -> bool:
    """Whether the run is to end otherwise than when it was begun."""
    stored = make_options(run.options)
    return any(getattr(options, name) != getattr(stored, name) for name in EXTENDS)


def extend(folder: RunFolder, assembly: Assembly) -> None:
    """Write down when the run ends now.

    The summary goes first: should the process be killed in between, the run is one that only has to be summed up again.
    """
    (folder.path / "summary.json").unlink(missing_ok=True)
    config = folder.read_json("run.json")
    changed = {name: getattr(assembly.options, name) for name in EXTENDS}
    plan = describe_run(assembly)["plan"]
    described = {**config, "options": {**config["options"], **changed}, "plan": plan}
    folder.write_json("run.json", described)
    write_config(folder.path, described)
