"""A run as run.json describes it: everything resolved before the first round."""

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from protofed.models.freezing import parameter_count
from protofed.runs.assembly import Assembly
from protofed.runs.place import place_record


def describe_run(assembly: Assembly) -> dict[str, Any]:
    """What run.json says; but for the engine nothing in it depends on when or where the run takes place."""
    context, options = assembly.context, assembly.options
    return {
        "options": options.model_dump(),
        "method": {
            "name": options.method,
            "kind": context.method.kind,
            "knobs": asdict(context.method),
            "run_defaults": assembly.run_defaults,
            "starts_from_means": assembly.starts_from_means,
        },
        "data": _data(assembly),
        "partition": _partition(assembly),
        "model": _model(assembly),
        "plan": asdict(context.plan),
        "guard": context.guard.model_dump(),
        **({"privacy": assembly.prepared.privacy_ledger().planned()} if context.guard.promises else {}),
        "robust": options.robust,
        "max_share": options.max_share,
        "seed": options.seed,
        "engine": {**asdict(assembly.engine), "layout": context.layout, "frozen": assembly.frozen},
        "warnings": list(assembly.warnings),
        "versions": {
            "protofed": version("protofed"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def _data(assembly: Assembly) -> dict[str, Any]:
    dataset = assembly.context.dataset
    return {
        "name": dataset.name,
        "source": dataset.source,
        "licence": dataset.licence,
        "classes": list(dataset.classes),
        "image_shape": list(dataset.image_shape),
        "normalise": asdict(dataset.normalise),
        "augment": str(assembly.context.augment),
        "domains": {
            name: {
                "train": len(domain.train),
                "test": len(domain.test),
                **({} if domain.validation is None else {"validation": len(domain.validation)}),
            }
            for name, domain in dataset.domains.items()
        },
        "place": place_record(dataset),
    }


def _partition(assembly: Assembly) -> dict[str, Any]:
    dataset, partition = assembly.context.dataset, assembly.context.partition
    per_class = partition.counts(dataset.pooled_labels(), len(dataset.classes))
    return {
        "protocol": partition.protocol,
        "hash": partition.hash,
        "held_out": list(partition.held_out),
        "clients": {
            client: {
                "domain": partition.domain[client],
                "train": len(partition.train[client]),
                "holdout": len(partition.holdout[client]),
                "per_class": counts.tolist(),
            }
            for client, counts in zip(partition.clients, per_class, strict=True)
        },
    }


def _model(assembly: Assembly) -> dict[str, Any]:
    context, network = assembly.context, assembly.network
    return {
        "name": ",".join(network.names),
        "options": assembly.options.settings_for("model"),
        "parameters": [parameter_count(model) for model in context.models],
        "start": {**network.summary(), "reason": network.reason or None},
        "dim": context.model.dim,
        "weights": None if assembly.weights is None else assembly.weights.summary(),
    }
