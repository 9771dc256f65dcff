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


@dataclass(frozen=True)
class Setting:
    """Method, plan, model, data and who holds what."""

    method: Method
    plan: Plan
    model: Split
    """At its initial weights, which nobody changes: whoever trains takes a copy."""
    dataset: Dataset
    partition: Partition
    clients_folder: Path
    augment: Augment
    seed: int
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def pool(self) -> Images:
        """The training images of all domains; partitions index into it."""
        return self.dataset.pooled_train()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Training samples of every client, in canonical order."""
        return {client: len(self.partition.train[client]) for client in self.partition.clients}

    def at(self, round: int, client: str | None) -> At:
        """Where a hook of this federation stands; `held` are the client's class counts, or every class once."""
        classes = len(self.dataset.classes)
        return At(
            plan=self.plan,
            classes=classes,
            dim=self.model.dim,
            clients=self.sizes,
            seed=self.seed,
            round=round,
            client=client,
            held=torch.ones(classes) if client is None else self._held(client),
        )

    def samples(self, client: str) -> ClientSamples:
        """The client's training samples."""
        return self._prepared(self.pool.take(self.partition.train[client]), self.augment)

    def test_samples(self, domain: str | None, client: str | None) -> ClientSamples:
        """A domain's test set, or the client's own hold-out."""
        if domain is not None:
            return self._prepared(self.dataset.domains[domain].test, Augment())
        return self._prepared(self.pool.take(self.partition.holdout[str(client)]), Augment())

    def _prepared(self, images: Images, augment: Augment) -> ClientSamples:
        return ClientSamples(images, self.dataset.normalise, augment, self.dtype, self.device)

    def _held(self, client: str) -> Tensor:
        labels = self.pool.y[torch.from_numpy(self.partition.train[client])]
        return torch.bincount(labels, minlength=len(self.dataset.classes)).to(self.dtype)
