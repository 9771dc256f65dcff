"""What is fixed before the first round and known to the server and every client."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from protofed.clients.samples import ClientSamples, SampleKind, SampleSet
from protofed.data import Augment, Dataset, Images, Partition
from protofed.guards import UNGUARDED, Guard, noise_on_sum, sensitivity_of
from protofed.method import At, Method, Plan
from protofed.models import Split
from protofed.models.fast.stand_ins import Recipe
from protofed.records import Robust
from protofed.seeding import generator


@dataclass(frozen=True)
class FrozenPart:
    """Of the stages of one architecture that no step trains and that do the same in training as in evaluation."""

    recipes: Mapping[str, Recipe] = field(default_factory=dict)
    """For the stand-ins of those with batch normalisation to be folded."""
    prefix: tuple[str, ...] = ()
    """The leading ones: what comes out of them is kept."""
    shape: tuple[int, ...] = ()
    """Of what comes out of the prefix for one image."""


@dataclass(frozen=True)
class RunContext:
    """Method, plan, model, data and who holds what."""

    method: Method
    plan: Plan
    models: tuple[Split, ...]
    """At their initial weights, on the CPU; training works on copies. Clients get them in turn."""
    dataset: Dataset
    partition: Partition
    clients_folder: Path
    augment: Augment
    balanced: bool
    """Whether an epoch draws every class equally often."""
    validation: float
    """Part of every client's training data that is kept from training to validate on."""
    seed: int
    dtype: torch.dtype
    device: torch.device
    layout: str = "standard"
    """Memory layout of the convolution kernels."""
    autocast: bool = False
    """Whether losses and predictions are computed in bfloat16 where that is safe; weights stay as they are."""
    frozen: tuple[FrozenPart, ...] = ()
    """For each architecture; empty: all stages are computed as if they were trained."""
    guard: Guard = UNGUARDED
    """What is done to an upload before it leaves a client."""
    views: int = 1
    """Augmented views of every training image, where the first stages are frozen; the first is the image itself."""
    robust: Robust | None = None
    """A robust rule that replaces the mean over clients."""
    max_share: float | None = None
    """The most that one client may count in a mean over clients."""

    @property
    def model(self) -> Split:
        """The architecture of the server, and of all clients where there is only one."""
        return self.models[0]

    @cached_property
    def tested_on(self) -> dict[str, str]:
        """The domain whose test set a client's own model is scored on where the client keeps no images for that.

        It is the client's own. Where images are pooled there is none, unless all are of one domain and clients share no
        model that could be scored on it.
        """
        domains = list(self.dataset.domains)
        only = domains[0] if self.method.kind == "personal" and len(domains) == 1 else ""
        return {client: domain or only for client, domain in self.partition.domain.items()}

    def precision(self) -> AbstractContextManager[None]:
        """What a loss or a prediction is computed in."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()

    def architecture_of(self, client: str | None) -> int:
        """Which of the models a client has."""
        return 0 if client is None else self._position[client] % len(self.models)

    @cached_property
    def _position(self) -> dict[str, int]:
        return {client: index for index, client in enumerate(self.partition.clients)}

    @cached_property
    def _labels(self) -> Tensor:
        """Those of the pooled training set."""
        return self.dataset.pooled_labels()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Samples every client trains on, in canonical order."""
        return {client: len(train) for client, (train, _) in self._dealt.items()}

    def at(self, round: int, client: str | None) -> At:
        """Where a hook of this federation stands; `held` are the client's class counts, or every class once."""
        at = self._at
        held = torch.ones(at.classes, device=self.device) if client is None else self._held[self._position[client]]
        return replace(at, round=round, client=client, held=held)

    @cached_property
    def _at(self) -> At:
        """Where everybody stands alike."""
        at = At(
            plan=self.plan,
            classes=len(self.dataset.classes),
            dim=self.model.dim,
            clients=self.sizes,
            domains=self.partition.domain,
            image_shape=self.dataset.image_shape,
            seed=self.seed,
        )
        return self.with_noise_of(self.sizes, at)

    def with_noise_of(self, clients: Iterable[str], at: At) -> At:
        """Told how strong the guard's noise is on a sum over these clients."""
        sensitivity = sensitivity_of(self.method, self.guard, at)
        noise, noised = noise_on_sum(self.guard, sensitivity, [self.sizes[name] for name in clients], at.classes)
        return replace(at, noise=noise, noised=noised)

    def train_images(self, client: str) -> Images:
        """What the client trains on, as pixels."""
        return self.dataset.take_train(self._dealt[client][0])

    def _taken(self, places: Tensor) -> Images:
        """Images by their places in the pool; where their features are kept, the pixels stay where they are until one
        is asked for."""
        return self._unread_pool.take(places) if self._keeps_features else self.dataset.take_train(places)

    @cached_property
    def _unread_pool(self) -> Images:
        return self.dataset.unread_train()

    @cached_property
    def _keeps_features(self) -> bool:
        return any(part.prefix for part in self.frozen)

    def samples(self, client: str) -> ClientSamples:
        """The client's training samples, with those it validates on beside them."""
        validation = self._dealt[client][1]
        kept = self._key("validation", client)
        beside = self._clean(self._taken(validation), kept) if len(validation) else None
        return ClientSamples(
            self._taken(self._dealt[client][0]),
            self.dataset.normalise,
            self.augment,
            self.dtype,
            self.device,
            self.balanced,
            beside,
            self._key("train", client),
            self.views,
        )

    def test_samples(
        self, domain: str | None, client: str | None, validates: bool = False, alike: Sequence[str] = ()
    ) -> ClientSamples:
        """A domain's test set, the client's own hold-out, or what it keeps of its training data to validate on.

        Those of `alike`, further clients, follow the client's own.
        """
        if domain is not None:
            return self._clean(self.dataset.domains[domain].test, self._key("test", domain))
        own = [self.own_test(name, validates) for name in (str(client), *alike)]
        key = None if alike else self._key("validation" if validates else "holdout", str(client))
        return self._clean(self._taken(torch.cat(own)), key)

    def sample_set(self, key: SampleSet) -> ClientSamples:
        """The samples that a key names."""
        if key.kind == "train":
            return self.samples(key.owner)
        if key.kind == "test":
            return self.test_samples(key.owner, None)
        return self.test_samples(None, key.owner, validates=key.kind == "validation")

    def test_size(self, client: str, validates: bool = False) -> int:
        """How many samples a client tests on, or validates on."""
        return len(self.own_test(client, validates))

    def own_test(self, client: str, validates: bool) -> Tensor:
        """What a client tests on, or validates on, as places in the pooled training set."""
        return self._dealt[client][1] if validates else torch.from_numpy(self.partition.holdout[client])

    def sample_counts(self, client: str) -> dict[SampleKind, int]:
        """How many samples a client trains on, validates on and is tested on."""
        train, validation = self._dealt[client]
        return {"train": len(train), "validation": len(validation), "holdout": len(self.partition.holdout[client])}

    def _key(self, kind: SampleKind, owner: str) -> SampleSet | None:
        """The key under which something is kept for some samples."""
        return SampleSet(kind, owner) if self._keeps_features else None

    def _clean(self, images: Images, key: SampleSet | None) -> ClientSamples:
        return ClientSamples(images, self.dataset.normalise, Augment(), self.dtype, self.device, key=key)

    @cached_property
    def _dealt(self) -> dict[str, tuple[Tensor, Tensor]]:
        """What every client trains on and what it validates on, as indices into the pool; settled once."""
        return {client: self._train_and_validation(client) for client in self.partition.clients}

    def _train_and_validation(self, client: str) -> tuple[Tensor, Tensor]:
        """The site's own validation images where it has some, else a part of its training images."""
        indices = torch.from_numpy(self.partition.train[client])
        if self.validation and len(given := self._set_aside.get(client, indices[:0])):
            return indices, given
        kept = min(round(self.validation * len(indices)), len(indices) - 1)
        if kept == 0:
            return indices, indices[:0]
        order = torch.randperm(len(indices), generator=generator(self.seed, "validation", client))
        return indices[order[kept:].sort().values], indices[order[:kept].sort().values]

    @cached_property
    def _set_aside(self) -> dict[str, Tensor]:
        """What sites have set aside to validate on, dealt out to the clients that hold their images."""
        places = self.dataset.validation_offsets
        dealt: dict[str, Tensor] = {}
        clients_of: dict[str, list[str]] = {}
        for client in self.partition.clients if places else ():
            clients_of.setdefault(self.partition.domain[client], []).append(client)
        for domain, clients in clients_of.items():
            wheres = [places[domain]] if domain in places else [] if domain else list(places.values())
            positions = torch.tensor([position for where in wheres for position in where], dtype=torch.int64)
            dealt |= {client: positions[number :: len(clients)] for number, client in enumerate(clients)}
        return dealt

    @cached_property
    def _held(self) -> Tensor:
        """Samples of each class every client trains on, [clients, C]."""
        labels, classes = self._labels, len(self.dataset.classes)
        counts = [torch.bincount(labels[train], minlength=classes) for train, _ in self._dealt.values()]
        return torch.stack(counts).to(self.device, self.dtype)
