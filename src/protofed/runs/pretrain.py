"""Weights to start from: centralised training on any data set."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from protofed.errors import UserError
from protofed.runs.opened import Run
from protofed.runs.run import run

DEFAULT_EPOCHS = 20


def pretrain(
    data: str,
    *,
    out: str | Path,
    model: str = "resnet10",
    epochs: int = DEFAULT_EPOCHS,
    callbacks: Iterable[Any] = (),
    **options: Any,
) -> Run:
    """Train one model on all images of a data set and write its weights to `out`, for `weights=` of other runs.

    The other options are those of `run`. The run that made them stays beside the weights, in a folder named after
    them; where it was interrupted it is continued.
    """
    target = Path(out)
    if target.suffix != ".safetensors":
        raise UserError(
            f"{target} is not a .safetensors file; use for example --out {target.stem or 'weights'}.safetensors"
        )
    if target.exists():
        raise UserError(f"{target} already exists; remove it or give another --out")
    folder = target.with_suffix(".run")
    # An epoch is a round, so that progress shows and an interruption costs an epoch; the optimiser goes on over rounds.
    settings = {**options, "model": model, "rounds": epochs, "epochs": 1}
    done = run("centralized", data, out=folder, resume=(folder / "run.json").exists(), callbacks=callbacks, **settings)
    shutil.copyfile(folder / "model.safetensors", target)
    return done
