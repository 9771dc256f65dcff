"""Every attack on one client: images rebuilt from features and prototypes, and membership."""

import io
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from protofed.audit.decoder import Effort
from protofed.audit.extractor import Extractor
from protofed.audit.membership import Auc, auc, nearness
from protofed.audit.moments import leading_directions, lies_within, nearer_than_reference, second_moment_in
from protofed.audit.reconstruction import (
    Figures,
    Reconstruction,
    TrainedDecoder,
    rebuild_computed,
    rebuild_prototypes,
    rebuild_sent,
    train_stage_decoder,
)
from protofed.audit.victim import SentRows, Victim
from protofed.closed_form.sketch import Sketch
from protofed.errors import unknown_name
from protofed.records import Nothing, parts_of


@dataclass(frozen=True)
class AttackOptions:
    """Which stages are attacked beside what was sent, and how hard."""

    stages: tuple[str, ...] = ()
    effort: Effort = field(default_factory=Effort)


@dataclass(frozen=True)
class _AttackPicture:
    """Originals above what was rebuilt of them."""

    file: str
    caption: str
    png: bytes


@dataclass
class AttackResults:
    """The figures of all attacks, client by client."""

    features: dict[tuple[str, str], dict[str, Figures]] = field(default_factory=dict)
    """By stage and source (sent or computed)."""
    prototypes: dict[tuple[str, str], dict[str, Figures]] = field(default_factory=dict)
    """By field and stage."""
    membership: dict[str, dict[str, Auc]] = field(default_factory=dict)
    """By what the attacker goes by."""
    not_attacked: dict[str, str] = field(default_factory=dict)
    """Fields of messages, and why not."""
    pictures: list[_AttackPicture] = field(default_factory=list)


def attack_client(
    victim: Victim,
    options: AttackOptions,
    extractor: Extractor,
    results: AttackResults,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Attack one client in every way; the figures go to `results`, what takes long is announced to `tell`."""
    _ClientAttack(victim, options, extractor, results, tell).run()


class _ClientAttack:
    """All attacks on one client; targets at the same stage share a decoder."""

    def __init__(
        self,
        victim: Victim,
        options: AttackOptions,
        extractor: Extractor,
        results: AttackResults,
        tell: Callable[[str], None],
    ) -> None:
        self._tell = tell
        self._victim = victim
        self._options = options
        self._extractor = extractor
        self._results = results
        self._decoders: dict[str, TrainedDecoder] = {}
        self._second_moments: dict[str, Tensor] = {}

    def run(self) -> None:
        """Reconstruction at every stage in question, then prototypes, then membership."""
        located, moments = self._located_rows(), self._second_moments
        embeddings = {stage: rows for rows, stage in located if rows.kind == "features"}
        for stage in dict.fromkeys([*embeddings, *self._wanted_stages()]):
            self._rebuild_features(stage, embeddings.get(stage))
        for rows, stage in located:
            if rows.kind == "prototypes":
                self._rebuild_prototypes(rows, stage)
            self._membership_by_rows(rows, stage)
            if rows.adds_up:
                self._attack_sums(rows, stage)
                for field, moment in moments.items():
                    self._attack_second_moment(field, moment, rows, stage)
        if self._victim.sends_weights:
            self._membership_by_weights()

    def _located_rows(self) -> list[tuple[SentRows, str]]:
        """What was sent with the stage whose features it looks like; what fits no stage is noted."""
        preferred = self._victim.context.method.cut
        located = []
        for name, item in parts_of(self._victim.upload or Nothing()).items():
            if isinstance(item.value, Sketch):
                self._results.not_attacked[name] = "the leading directions of features around their class means"
        for rows in self._victim.sent_rows():
            moment = second_moment_in(rows, self._victim.context.model.dim)
            if moment is not None:
                self._second_moments[rows.field] = moment
                continue
            stage = self._victim.stage_of(rows, preferred)
            if stage is None:
                shape = "x".join(map(str, rows.rows.shape[1:]))
                self._results.not_attacked[rows.field] = (
                    f"{rows.kind} of shape {shape}, which no stage of the model has"
                )
            else:
                located.append((rows, stage))
        return located

    def _wanted_stages(self) -> list[str]:
        """The stages asked for; where the run kept no messages, at least the features of the model."""
        model = self._victim.net.model
        if self._options.stages == ("all",):
            return list(model.stage_names[: model.stage_names.index(model.cut) + 1])
        for stage in self._options.stages:
            if stage not in model.stage_names:
                raise unknown_name("stage of this model", stage, model.stage_names)
        return list(self._options.stages) or ([model.cut] if self._victim.upload is None else [])

    def _decoder(self, stage: str, sent: SentRows | None) -> TrainedDecoder:
        if stage not in self._decoders:
            self._decoders[stage] = train_stage_decoder(self._victim, stage, sent, self._options.effort, self._tell)
        return self._decoders[stage]

    def _rebuild_features(self, stage: str, sent: SentRows | None) -> None:
        decoder = self._decoder(stage, sent)
        self._add_features(stage, "computed", rebuild_computed(decoder, self._extractor))
        from_sent = rebuild_sent(decoder, self._extractor)
        if from_sent is not None:
            self._add_features(stage, "sent", from_sent)

    def _attack_sums(self, rows: SentRows, stage: str) -> None:
        """Is a given image in the sum?"""
        members, outsiders = nearer_than_reference(self._victim, rows, stage)
        self._add_membership(f"class sums {rows.field} compared with a reference", auc(members, outsiders))

    def _attack_second_moment(self, field: str, moment: Tensor, means: SentRows, stage: str) -> None:
        """Its leading directions as pictures, and whose features lie in them."""
        self._rebuild_prototypes(leading_directions(moment, means, f"{field}-directions"), stage)
        members, outsiders = (
            lies_within(self._victim.features(images, stage), moment)
            for images in (self._victim.members, self._victim.outsiders)
        )
        self._add_membership(f"second moment {field}", auc(members, outsiders))

    def _rebuild_prototypes(self, rows: SentRows, stage: str) -> None:
        rows = self._victim.of_own_classes(rows)
        result = rebuild_prototypes(self._decoder(stage, None), rows)
        self._results.prototypes.setdefault((rows.field, stage), {})[self._victim.client] = result.figures
        caption = (
            f"{self._victim.client}, prototypes {rows.field}: nearest training images above, reconstructions below"
        )
        self._add_picture(f"prototypes-{rows.field.replace('/', '-')}", caption, result)

    def _add_features(self, stage: str, source: str, result: Reconstruction) -> None:
        self._results.features.setdefault((stage, source), {})[self._victim.client] = result.figures
        what = "features that were sent" if source == "sent" else "the model's features of unseen images"
        caption = f"{self._victim.client}, stage {stage}, {what}: originals above, reconstructions below"
        self._add_picture(f"{source}-{stage}", caption, result)

    def _add_picture(self, name: str, caption: str, result: Reconstruction) -> None:
        png = side_by_side(result.originals, result.images)
        self._results.pictures.append(_AttackPicture(f"{name}-{self._victim.client}.png", caption, png))

    def _membership_by_rows(self, rows: SentRows, stage: str) -> None:
        members, outsiders = (
            nearness(self._victim.features(images, stage), images.y, rows.rows, rows.labels)
            for images in (self._victim.members, self._victim.outsiders)
        )
        self._add_membership(f"{rows.kind} {rows.field}", auc(members, outsiders))

    def _membership_by_weights(self) -> None:
        victim = self._victim
        self._add_membership("weights", auc(victim.confidence(victim.members), victim.confidence(victim.outsiders)))

    def _add_membership(self, by: str, result: Auc) -> None:
        self._results.membership.setdefault(by, {})[self._victim.client] = result


_SHOWN = 8
_GAP = 2
_SIDE = 56


def side_by_side(originals: Tensor, images: Tensor, shown: int = _SHOWN) -> bytes:
    """A PNG: some originals in the upper row, below each what an attacker rebuilt; spread over the whole set."""
    pick = torch.arange(min(shown, len(originals))) * len(originals) // max(1, min(shown, len(originals)))
    zoom = max(1, _SIDE // max(originals.shape[2:]))
    rows = [torch.cat([_framed(image, zoom) for image in part[pick]], 2) for part in (originals, images)]
    grid = (torch.cat(rows, 1).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(grid)).save(file, "PNG")
    return file.getvalue()


def _framed(image: Tensor, zoom: int) -> Tensor:
    """Three channels, enlarged without smoothing, with a white edge."""
    colour = image if image.shape[0] == 3 else image[:1].repeat(3, 1, 1)
    large = colour.repeat_interleave(zoom, 1).repeat_interleave(zoom, 2)
    return torch.nn.functional.pad(large, [_GAP] * 4, value=1.0)
