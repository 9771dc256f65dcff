"""The audit of one federation: every attack on the chosen clients, and what it amounts to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protofed.audit import verdicts
from protofed.audit.decoder import Effort
from protofed.audit.extractor import Extractor, make_extractor
from protofed.audit.membership import Auc, auc, mean_auc, nearness
from protofed.audit.pictures import side_by_side
from protofed.audit.reconstruction import (
    Breach,
    Figures,
    Rebuilt,
    breach,
    mean_figures,
    rebuild_computed,
    rebuild_prototypes,
    rebuild_sent,
)
from protofed.audit.victim import SentRows, Victim, make_victim
from protofed.clients import Prepared, RunContext
from protofed.errors import UserError, unknown_name
from protofed.federation import RunFolder

MOST_CLIENTS = 4


@dataclass(frozen=True)
class AuditOptions:
    """What is attacked, and how hard."""

    clients: tuple[str, ...] | None = None
    """None: the first client of every domain, at most four."""
    stages: tuple[str, ...] = ()
    """Also attack the features of these stages, whether or not they were sent; `all` for every one."""
    effort: Effort = field(default_factory=Effort)
    inception: Path | None = None


@dataclass
class Evidence:
    """What the attacks found, client by client."""

    features: dict[tuple[str, str], dict[str, Figures]] = field(default_factory=dict)
    """By stage and source (sent or computed)."""
    prototypes: dict[tuple[str, str], dict[str, Figures]] = field(default_factory=dict)
    """By field and stage."""
    membership: dict[str, dict[str, Auc]] = field(default_factory=dict)
    unattacked: dict[str, str] = field(default_factory=dict)
    pictures: list[tuple[str, str, bytes]] = field(default_factory=list)
    """File name, caption, PNG."""


@dataclass(frozen=True)
class Audit:
    """audit.json, and the pictures it names."""

    content: dict[str, Any]
    pictures: dict[str, bytes]


def audit_federation(
    prepared: Prepared,
    folder: RunFolder,
    options: AuditOptions,
    tell: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Attack what the clients of a finished run sent last."""
    context = prepared.context
    if context.method.pools_data:
        raise UserError("this method pools the data of all clients: there is no message to attack, everything is known")
    extractor = make_extractor(options.inception)
    evidence = Evidence()
    victims = [make_victim(prepared, folder, client) for client in _chosen(context, options.clients)]
    for victim in victims:
        tell(f"attacking {victim.client}")
        _Attack(victim, options, extractor, evidence).run()
    return Audit(
        _content(context, victims, options, extractor, evidence), {name: png for name, _, png in evidence.pictures}
    )


class _Attack:
    """All attacks on one client; decoders are shared between what lies at the same stage."""

    def __init__(self, victim: Victim, options: AuditOptions, extractor: Extractor, evidence: Evidence) -> None:
        self._victim = victim
        self._options = options
        self._extractor = extractor
        self._evidence = evidence
        self._breaches: dict[str, Breach] = {}

    def run(self) -> None:
        """Reconstruction at every stage in question, then prototypes, then membership."""
        located = [(rows, self._locate(rows)) for rows in self._victim.sent_rows()]
        embeddings = {stage: rows for rows, stage in located if rows.kind == "features" and stage is not None}
        for stage in dict.fromkeys([*embeddings, *self._wanted_stages()]):
            self._rebuild(stage, embeddings.get(stage))
        for rows, place in located:
            if rows.kind == "prototypes" and place is not None:
                self._rebuild_prototypes(rows, place)
            if place is not None:
                self._membership(rows, place)
        if self._victim.sends_weights:
            members, outsiders = (self._victim.confidence(images) for images in self._people())
            self._note_membership("weights", auc(members, outsiders))

    def _locate(self, rows: SentRows) -> str | None:
        stage = self._victim.stage_of(rows, self._victim.context.method.cut)
        if stage is None:
            shape = "x".join(map(str, rows.rows.shape[1:]))
            self._evidence.unattacked[rows.field] = f"{rows.kind} of shape {shape}, which no stage of the model has"
        return stage

    def _wanted_stages(self) -> list[str]:
        """The stages asked for; where the run kept no messages, at least the features of the model."""
        model = self._victim.net.model
        until_cut = model.stage_names[: model.stage_names.index(model.cut) + 1]
        if self._options.stages == ("all",):
            return list(until_cut)
        for stage in self._options.stages:
            if stage not in model.stage_names:
                raise unknown_name("stage of this model", stage, model.stage_names)
        return list(self._options.stages) or ([model.cut] if self._victim.upload is None else [])

    def _breach(self, stage: str, sent: SentRows | None) -> Breach:
        if stage not in self._breaches:
            self._breaches[stage] = breach(self._victim, stage, sent, self._options.effort)
        return self._breaches[stage]

    def _rebuild(self, stage: str, sent: SentRows | None) -> None:
        found = self._breach(stage, sent)
        self._note_features(stage, "computed", rebuild_computed(found, self._extractor))
        travelled = rebuild_sent(found, self._extractor)
        if travelled is not None:
            self._note_features(stage, "sent", travelled)

    def _rebuild_prototypes(self, rows: SentRows, stage: str) -> None:
        result = rebuild_prototypes(self._breach(stage, None), rows)
        self._evidence.prototypes.setdefault((rows.field, stage), {})[self._victim.client] = result.figures
        caption = (
            f"{self._victim.client}, prototypes {rows.field}: above nearest training images, below what was rebuilt"
        )
        self._note_picture(f"prototypes-{rows.field.replace('/', '-')}", caption, result)

    def _note_features(self, stage: str, source: str, result: Rebuilt) -> None:
        self._evidence.features.setdefault((stage, source), {})[self._victim.client] = result.figures
        what = "features that were sent" if source == "sent" else "features the model gives unseen images"
        caption = f"{self._victim.client}, stage {stage}, {what}: above originals, below what was rebuilt"
        self._note_picture(f"{source}-{stage}", caption, result)

    def _note_picture(self, name: str, caption: str, result: Rebuilt) -> None:
        picture = side_by_side(result.originals, result.images)
        self._evidence.pictures.append((f"{name}-{self._victim.client}.png", caption, picture))

    def _membership(self, rows: SentRows, stage: str) -> None:
        scores = [
            nearness(self._victim.features(images, stage), images.y, rows.rows, rows.labels)
            for images in self._people()
        ]
        self._note_membership(f"{rows.kind} {rows.field}", auc(*scores))

    def _people(self) -> tuple[Any, Any]:
        return self._victim.members, self._victim.outsiders

    def _note_membership(self, what: str, found: Auc) -> None:
        self._evidence.membership.setdefault(what, {})[self._victim.client] = found


def _chosen(context: RunContext, wanted: Sequence[str] | None) -> list[str]:
    partition = context.partition
    for client in wanted or ():
        if client not in partition.clients:
            raise unknown_name("client of this run", client, partition.clients)
    if wanted:
        return list(wanted)
    first: dict[str, str] = {}
    for client in partition.clients:
        first.setdefault(partition.domain[client], client)
    chosen = list(first.values())
    more = [client for client in partition.clients if client not in chosen]
    return [*chosen, *more][:MOST_CLIENTS]


def _content(
    context: RunContext, victims: list[Victim], options: AuditOptions, extractor: Extractor, evidence: Evidence
) -> dict[str, Any]:
    """The keys of audit.json; docs/privacy.md explains them."""
    travelled = {stage for stage, source in evidence.features if source == "sent"}
    reconstruction = [
        {
            "stage": stage,
            "source": source,
            "mean": (mean := mean_figures(clients)),
            "clients": clients,
            "verdict": verdicts.of_features(stage, mean, stage in travelled),
        }
        for (stage, source), clients in evidence.features.items()
    ]
    prototypes = [
        {
            "field": name,
            "stage": stage,
            "mean": (mean := mean_figures(clients)),
            "clients": clients,
            "verdict": verdicts.of_prototypes(name, mean),
        }
        for (name, stage), clients in evidence.prototypes.items()
    ]
    membership = [
        {
            "by": what,
            "mean": (whole := mean_auc(list(clients.values()))).as_dict(),
            "clients": {client: found.as_dict() for client, found in clients.items()},
            "verdict": verdicts.of_membership(what, whole),
        }
        for what, clients in evidence.membership.items()
    ]
    return {
        "items": [{"image": name, "caption": caption} for name, caption, _ in evidence.pictures],
        "clients": [victim.client for victim in victims],
        "messages": all(victim.upload is not None for victim in victims),
        "model": victims[0].model_source,
        "attack": {
            "attacker_has": "half of each client's training images, and the model",
            "steps": options.effort.steps,
            "batch": options.effort.batch,
            "lr": options.effort.lr,
            "seed": context.seed,
        },
        "extractor": {"label": extractor.label, "name": extractor.name},
        "reconstruction": reconstruction,
        "prototypes": prototypes,
        "membership": membership,
        "not_attacked": evidence.unattacked,
        "verdicts": [
            *_without_messages(victims),
            *(entry["verdict"] for entry in _strongest(reconstruction)),
            *(entry["verdict"] for entry in prototypes),
            *(f"Not attacked: {name} ({why})." for name, why in evidence.unattacked.items()),
            *(entry["verdict"] for entry in membership),
            verdicts.of_weights(any(victim.sends_weights for victim in victims)),
        ],
    }


def _strongest(reconstruction: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per stage: that of what travelled where there is one."""
    by_stage: dict[str, dict[str, Any]] = {}
    for entry in reconstruction:
        if entry["stage"] not in by_stage or entry["source"] == "sent":
            by_stage[entry["stage"]] = entry
    return list(by_stage.values())


def _without_messages(victims: list[Victim]) -> list[str]:
    if all(victim.upload is not None for victim in victims):
        return []
    return [
        "This run kept no messages, so what was really sent could not be attacked; run it with --keep-messages. The "
        "features below are what the clients' models would give."
    ]
