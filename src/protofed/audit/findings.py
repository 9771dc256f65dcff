"""What the attacks found: the content of audit.json, its tables, and audit.md."""

from collections.abc import Mapping, Sequence
from typing import Any

from protofed.audit import verdicts
from protofed.audit.attack import AttackOptions, AttackResults
from protofed.audit.extractor import Extractor
from protofed.audit.membership import mean_auc
from protofed.audit.reconstruction import mean_figures
from protofed.audit.victim import Victim
from protofed.text import Table

_FIGURES = (
    ("images", "images", "{:.0f}"),
    ("fid", "{label}", "{:.4g}"),
    ("ssim_max", "max SSIM", "{:.4f}"),
    ("ssim", "mean SSIM", "{:.4f}"),
    ("rms_min", "min RMS", "{:.4f}"),
    ("rms", "mean RMS", "{:.4f}"),
    ("psnr", "PSNR", "{:.1f}"),
    ("below_risk_line", "RMS < 0.1", "{:.1%}"),
    ("class_mean_rms", "class mean: RMS", "{:.4f}"),
    ("class_mean_below_risk_line", "class mean: < 0.1", "{:.1%}"),
)
_PROTOTYPE_FIGURES = (
    ("prototypes", "number", "{:.0f}"),
    ("rms_to_nearest", "RMS to nearest image", "{:.4f}"),
    ("below_risk_line", "RMS < 0.1", "{:.1%}"),
    ("rms_of_class_mean_to_nearest", "class mean: RMS", "{:.4f}"),
    ("class_mean_below_risk_line", "class mean: < 0.1", "{:.1%}"),
)


def audit_content(
    victims: Sequence[Victim],
    options: AttackOptions,
    extractor: Extractor,
    results: AttackResults,
    single_images: Mapping[str, list[str]],
) -> dict[str, Any]:
    """The keys of audit.json; docs/privacy.md explains them."""
    reconstruction, prototypes = _reconstruction(results), _prototypes(results)
    membership = _membership(results)
    return {
        "items": [
            {"image": picture.file, "caption": picture.caption, "training_images": True} for picture in results.pictures
        ],
        "clients": [victim.client for victim in victims],
        "messages": _kept_messages(victims),
        "model": victims[0].model_source,
        "attack": {
            "attacker_has": "half of each client's training images, and the model",
            "steps": options.effort.steps,
            "batch": options.effort.batch,
            "lr": options.effort.lr,
            "seed": victims[0].context.seed,
        },
        "extractor": {"label": extractor.label, "name": extractor.name},
        "reconstruction": reconstruction,
        "prototypes": prototypes,
        "membership": membership,
        "single_images": dict(single_images),
        "not_attacked": results.not_attacked,
        "verdicts": [
            *_without_messages(victims),
            *verdicts.of_guard(victims[0].context.guard),
            *verdicts.of_single_images(single_images),
            *_verdicts(_strongest(reconstruction)),
            *_verdicts(prototypes),
            *(f"Not attacked: {name} ({why})." for name, why in results.not_attacked.items()),
            *_verdicts(membership),
            verdicts.of_weights(any(victim.sends_weights for victim in victims)),
        ],
    }


def _reconstruction(results: AttackResults) -> list[dict[str, Any]]:
    sent = {stage for stage, source in results.features if source == "sent"}
    return [
        {
            "stage": stage,
            "source": source,
            "mean": (mean := mean_figures(clients)),
            "clients": clients,
            "verdict": verdicts.of_features(stage, mean, stage in sent),
        }
        for (stage, source), clients in results.features.items()
    ]


def _prototypes(results: AttackResults) -> list[dict[str, Any]]:
    return [
        {
            "field": name,
            "stage": stage,
            "mean": (mean := mean_figures(clients)),
            "clients": clients,
            "verdict": verdicts.of_prototypes(name, mean),
        }
        for (name, stage), clients in results.prototypes.items()
    ]


def _membership(results: AttackResults) -> list[dict[str, Any]]:
    return [
        {
            "by": by,
            "mean": (mean := mean_auc(list(clients.values()))).as_dict(),
            "clients": {client: each.as_dict() for client, each in clients.items()},
            "verdict": verdicts.of_membership(by, mean),
        }
        for by, clients in results.membership.items()
    ]


def _verdicts(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    return [entry["verdict"] for entry in entries]


def _strongest(reconstruction: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per stage: that of what was sent where there is one."""
    by_stage: dict[str, dict[str, Any]] = {}
    for entry in reconstruction:
        if entry["stage"] not in by_stage or entry["source"] == "sent":
            by_stage[entry["stage"]] = entry
    return list(by_stage.values())


def _kept_messages(victims: Sequence[Victim]) -> bool:
    return all(victim.upload is not None for victim in victims)


def _without_messages(victims: Sequence[Victim]) -> list[str]:
    if _kept_messages(victims):
        return []
    return [
        "This run kept no messages, so what was actually sent could not be attacked; run it with "
        "--keep-messages. The features below are what the clients' models would produce."
    ]


def audit_tables(content: Mapping[str, Any]) -> list[Table]:
    """Every table of an audit that has rows."""
    label = content["extractor"]["label"]
    tables = [
        Table(
            "Images reconstructed from features, mean over clients",
            ["features", *(title.format(label=label) for _, title, _ in _FIGURES)],
            [
                [f"{entry['stage']} ({entry['source']})", *_cells(entry["mean"], _FIGURES)]
                for entry in content["reconstruction"]
            ],
        ),
        Table(
            "Images reconstructed from prototypes, mean over clients",
            ["prototypes", *(title for _, title, _ in _PROTOTYPE_FIGURES)],
            [[entry["field"], *_cells(entry["mean"], _PROTOTYPE_FIGURES)] for entry in content["prototypes"]],
        ),
        Table(
            "Who took part",
            ["by", "AUC", "95 % interval", "members", "others"],
            [_membership_row(entry["by"], entry["mean"]) for entry in content["membership"]],
        ),
    ]
    return [table for table in tables if table.rows]


def _cells(figures: Mapping[str, float | None], columns: Sequence[tuple[str, str, str]]) -> list[str]:
    return ["-" if (value := figures[key]) is None else form.format(value) for key, _, form in columns]


def _membership_row(by: str, mean: Mapping[str, Any]) -> list[str]:
    interval = f"{mean['low']:.3f} to {mean['high']:.3f}"
    return [by, f"{mean['auc']:.3f}", interval, str(mean["members"]), str(mean["outsiders"])]


def audit_markdown(content: Mapping[str, Any]) -> str:
    """audit.md: verdicts, tables, pictures."""
    blocks = [f"# {content['title']}", "\n".join(f"- {verdict}" for verdict in content["verdicts"])]
    for table in audit_tables(content):
        blocks += [f"## {table.title}", table.markdown()]
    attack, extractor = content["attack"], content["extractor"]
    blocks.append(
        f"The attacker has {attack['attacker_has']} ({content['model']}). {extractor['label']}: features of "
        f"{extractor['name']}."
    )
    blocks += [f"![{item['caption']}]({item['image']})\n\n{item['caption']}" for item in content["items"]]
    return "\n\n".join(blocks) + "\n"
