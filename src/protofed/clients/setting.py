"""Everything that is settled before the first round, known to the server and to every client."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from protofed.clients.samples import ClientSamples
from protofed.data import Augment, Dataset, Images, Partition
from protofed.method import At, Method, Plan
from protofed.models import Split
from protofed.seeding import generator


@dataclass(frozen=True)
class Setting:
    """Method, plan, model, data and who holds what."""

    method: Method
    plan: Plan
    models: tuple[Split, ...]
    """At their initial weights and on the CPU: whoever trains takes a copy. Clients have them in turn."""
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
    """How the kernels of a client's network lie in memory."""

    @property
    def model(self) -> Split:
        """The architecture of the server, and of all clients where there is only one."""
        return self.models[0]

    def architecture_of(self, client: str | None) -> int:
        """Which of the models a client has."""
        return 0 if client is None else self._position[client] % len(self.models)

    @cached_property
    def _position(self) -> dict[str, int]:
        return {client: index for index, client in enumerate(self.partition.clients)}

    @cached_property
    def pool(self) -> Images:
        """The training images of all domains; partitions index into it."""
        return self.dataset.pooled_train()

    @cached_property
    def _labels(self) -> Tensor:
        return self.dataset.pooled_labels()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Samples every client trains on, in canonical order."""
        return {client: len(self._train_and_validation(client)[0]) for client in self.partition.clients}

    def at(self, round: int, client: str | None) -> At:
        """Where a hook of this federation stands; `held` are the client's class counts, or every class once."""
        classes = len(self.dataset.classes)
        return At(
            plan=self.plan,
            classes=classes,
            dim=self.model.dim,
            clients=self.sizes,
            image_shape=self.dataset.image_shape,
            seed=self.seed,
            round=round,
            client=client,
            held=(torch.ones(classes) if client is None else self._held(client)).to(self.device),
        )

    def samples(self, client: str) -> ClientSamples:
        """The client's training samples, with those it validates on beside them."""
        train, validation = self._train_and_validation(client)
        beside = self._clean(self.pool.take(validation)) if len(validation) else None
        return ClientSamples(
            self.pool.take(train),
            self.dataset.normalise,
            self.augment,
            self.dtype,
            self.device,
            self.balanced,
            beside,
        )

    def test_samples(self, domain: str | None, client: str | None, validates: bool = False) -> ClientSamples:
        """A domain's test set, the client's own hold-out, or what it keeps of its training data to validate on."""
        if domain is not None:
            return self._clean(self.dataset.domains[domain].test)
        kept = self._train_and_validation(str(client))[1] if validates else self.partition.holdout[str(client)]
        return self._clean(self.pool.take(kept))

    def _clean(self, images: Images) -> ClientSamples:
        return ClientSamples(images, self.dataset.normalise, Augment(), self.dtype, self.device)

    def _train_and_validation(self, client: str) -> tuple[Tensor, Tensor]:
        """Indices into the pool; at least one sample stays to train on."""
        indices = torch.from_numpy(self.partition.train[client])
        kept = min(round(self.validation * len(indices)), len(indices) - 1)
        if kept == 0:
            return indices, indices[:0]
        order = torch.randperm(len(indices), generator=generator(self.seed, "validation", client))
        return indices[order[kept:].sort().values], indices[order[:kept].sort().values]

    def _held(self, client: str) -> Tensor:
        labels = self._labels[self._train_and_validation(client)[0]]
        return torch.bincount(labels, minlength=len(self.dataset.classes)).to(self.dtype)
