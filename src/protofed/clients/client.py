"""What happens at a client: it trains, and it scores models. Every engine runs this, none repeats it."""

import math
import traceback
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from protofed.clients import jobs
from protofed.clients.class_means import client_class_means
from protofed.clients.features import FeatureStore
from protofed.clients.frozen import FrozenStages, feature_store
from protofed.clients.optimizers import State, make_optimizers, restore_state
from protofed.clients.prepared import Prepared
from protofed.clients.samples import ClientSamples, to_device
from protofed.clients.store import ClientState, ClientStore, Sources
from protofed.clients.training import TrainingResult, train
from protofed.errors import NotFinite
from protofed.guards import PrivateGradients, guard_rows, privatise, sensitivity_of
from protofed.method import At
from protofed.models import everything, laid_out, nothing
from protofed.models.freezing import complete_tensors
from protofed.models.net import Net
from protofed.models.protopnet import project, prototypes_of
from protofed.records import Bytes, Message, Nothing, Quantiser, Record, Tally, conform, decode, encode, map_tensors
from protofed.system import disk_trouble, keep_freed_memory

A = TypeVar("A")
R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class ReadyClient:
    """A client about to train: its weights (`at.start`), its samples, and the state of its optimisers."""

    job: jobs.Train
    at: At
    samples: ClientSamples
    optimizer: State


class ClientSide:
    """Plays any client: one model per architecture is in memory, and the acting client's weights are loaded into it."""

    def __init__(self, prepared: Prepared, features: FeatureStore | None = None, threads: int = 1) -> None:
        keep_freed_memory()
        self._context = context = prepared.context
        self._templates = prepared.templates
        self._nets = [Net(laid_out(deepcopy(model).to(context.device), context.layout)) for model in context.models]
        store = features or feature_store(context)
        parts = range(len(context.frozen))
        self._frozen = [FrozenStages(context, number, self._nets[number], store, threads) for number in parts]
        self._store = ClientStore(context.clients_folder)
        self._received: tuple[Message, Record] | None = None

    def perform(self, job: jobs.Job, message: Message) -> jobs.Result:
        """Do one job; an error in it becomes a `Failed` result, not an exception."""
        if isinstance(job, jobs.Train):
            return attempted(lambda: self.finish(*self._train(job, message)))
        if isinstance(job, jobs.TrainGroup):
            return attempted(lambda: self._train_group(job, message))
        if isinstance(job, jobs.Summarise):
            return attempted(lambda: self._summarise(job))
        if isinstance(job, jobs.Evaluate):
            return attempted(lambda: self._evaluate(job, message))
        if isinstance(job, jobs.Project):
            return attempted(lambda: self._project(job, message))
        return attempted(lambda: self._predict(job, message))

    def net_of(self, client: str) -> Net:
        """The network of a client's architecture, at the weights of the client that acted last."""
        return self._nets[self._context.architecture_of(client)]

    def prepare(self, job: jobs.Train, message: Message) -> ReadyClient:
        """Load a client's weights, with the broadcast over them, into its network, and get its samples."""
        down = self._open(message, self._templates.down, f"broadcast to {job.client}")
        net, state = self._enter(job.client, job.round, down)
        at = replace(self._context.at(job.round, job.client), down=down, memory=state.memory, start=net.pick())
        samples = self._context.samples(job.client)
        self._skip_frozen(job.client)
        return ReadyClient(job, at, samples, state.optimizer)

    def finish(self, ready: ReadyClient, result: TrainingResult) -> jobs.Trained:
        """Make the upload from what training left in the client's network, and propose the client's new state."""
        guard = self._context.guard
        quantiser = None if guard.quantise is None else Quantiser(guard.quantise, ready.at.rng("guard quantise"))
        upload, state = self._outcome(ready, result)
        sent = encode(upload, ready.job.client, quantiser)
        self._store.propose(ready.job.client, ready.job.round, state)
        return self._trained(sent.blob, sent.size, result)

    def _outcome(self, ready: ReadyClient, result: TrainingResult) -> tuple[Record, ClientState]:
        """The upload as the guard lets it leave, and the client's next state."""
        net, guard = self.net_of(ready.job.client), self._context.guard
        at = replace(
            ready.at,
            notes=result.notes,
            taken=result.taken,
            reach=result.reach,
            guarded=lambda seen: guard_rows(guard, seen, ready.at),
        )
        upload, memory = self._upload(net, ready, result, at)
        private = privatise(guard, upload, at, sensitivity_of(self._context.method, guard, at))
        return private, ClientState(net.pick(), memory, result.optimizer)

    def _trained(self, blob: bytes, size: Bytes, result: TrainingResult) -> jobs.Trained:
        """A loss depends on the samples, too, and carries no noise."""
        return jobs.Trained(blob, size, {} if self._context.guard.promises else result.loss, result.samples)

    def _upload(self, net: Net, ready: ReadyClient, result: TrainingResult, at: At) -> tuple[Record, Record]:
        """The upload and the next memory; whatever goes wrong in it after a loss that is not finite is due to that."""
        try:
            return self._context.method.upload(net, ready.samples, at)
        except Exception as error:
            if all(math.isfinite(value) for value in result.loss.values()):
                raise
            raise NotFinite(f"{ready.job.client}: its training ended in a loss that is not finite") from error

    def _train_group(self, job: jobs.TrainGroup, message: Message) -> jobs.TrainedGroup:
        tally = Tally()

        def added(client: str) -> jobs.Trained:
            ready, result = self._train(jobs.Train(job.round, client), message)
            upload, state = self._outcome(ready, result)
            # What is added up here is not sent, but counted as if it were.
            received, size = conform(upload, self._templates.upload, client)
            self._store.propose(client, job.round, state)
            tally.add(client, received)
            return self._trained(b"", size, result)

        each = tuple(attempted(partial(added, client)) for client in job.clients)
        return jobs.TrainedGroup(encode(tally.sums(), "group").blob if tally.clients else b"", each)

    def _train(self, job: jobs.Train, message: Message) -> tuple[ReadyClient, TrainingResult]:
        context, ready = self._context, self.prepare(job, message)
        net = self.net_of(job.client)
        optimizers = make_optimizers(context.method, net, context.plan, ready.at.lr)
        restore_state(context.method, optimizers, ready.optimizer)
        private = PrivateGradients(context.guard, ready.at) if context.guard.trains_privately else None
        result = train(context.method, net, ready.samples, ready.at, optimizers, context.precision, private)
        return ready, result

    def _summarise(self, job: jobs.Summarise) -> jobs.Trained:
        """Under the initial network, which every client has."""
        architecture = self._context.architecture_of(job.client)
        net = self._nets[architecture]
        net.load(self._to_device(self._templates.clients[architecture]).model)
        self._skip_frozen(job.client)
        samples = self._context.samples(job.client)
        sent = encode(client_class_means(net, samples), job.client)
        return jobs.Trained(sent.blob, sent.size, {}, len(samples))

    def examine(self, job: jobs.Evaluate, message: Message) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """All tensors of the model that a client would use now, its class probabilities, and the labels."""
        net, probabilities, right = self._predicted(job, message)
        whole = complete_tensors(net.model, net.pick().tensors())
        # Contiguous, as in files, whatever the memory layout here.
        return {name: tensor.detach().cpu().contiguous() for name, tensor in whole.items()}, probabilities, right

    def _evaluate(self, job: jobs.Evaluate, message: Message) -> jobs.Score | jobs.Predicted:
        _, probabilities, right = self._predicted(job, message)
        if job.probabilities:
            return _predicted(probabilities)
        correct = probabilities.argmax(1) == right
        if job.domain is not None:
            return jobs.Score(int(correct.sum()), len(correct))
        sizes = [self._context.test_size(client, job.validates) for client in (str(job.client), *job.alike)]
        parts = tuple(jobs.Score(int(own.sum()), len(own)) for own in torch.split(correct, sizes))
        return jobs.Score(sum(part.correct for part in parts), len(correct), parts)

    def _predicted(self, job: jobs.Evaluate, message: Message) -> tuple[Net, Tensor, Tensor]:
        """The model, its class probabilities, and the labels."""
        if job.view == "global" or job.client is None:
            net, at = self._enter_server(job.round, message)
        else:
            down = self._open(message, self._templates.down, f"broadcast to {job.client}")
            net, state = self._enter(job.client, job.round, None if job.view == "local" else down)
            at = replace(self._context.at(job.round, job.client), down=down, memory=state.memory)
        # Features are kept for each client's own test set.
        alone = [replace(job, client=client, alike=()) for client in (job.client, *job.alike)]
        tests = alone if self._frozen else [job]
        probabilities, right = zip(*(self._predict_test(net, test, at) for test in tests), strict=True)
        return net, torch.cat(probabilities), torch.cat(right)

    def _predict_test(self, net: Net, job: jobs.Evaluate, at: At) -> tuple[Tensor, Tensor]:
        """The net's class probabilities on the test samples of a job, and the labels."""
        samples = self._context.test_samples(job.domain, job.client, job.validates, job.alike)
        self._skip_frozen(job.client)
        return self._probabilities(net, samples.batches(), at), samples.y

    def _project(self, job: jobs.Project, message: Message) -> jobs.Projected:
        """On the client's model as its training left it; nothing but the two scores leaves the client."""
        down = self._open(message, self._templates.down, f"broadcast to {job.client}")
        net, state = self._enter(job.client, job.round, None)
        at = replace(self._context.at(job.round, job.client), down=down, memory=state.memory)
        own, tested = self._context.samples(job.client), self._context.test_samples(job.domain, job.client)
        self._skip_frozen(job.client)
        before = self._score(net, tested, at)
        nearest = project(net, own.batches())
        vectors = prototypes_of(net.model).vectors.detach().clone()
        images = own.pixels(nearest.image.clamp(min=0))
        self._store.keep_sources(job.client, Sources(vectors, nearest.image, nearest.row, nearest.column, images))
        return jobs.Projected(before, self._score(net, tested, at))

    def _score(self, net: Net, samples: ClientSamples, at: At) -> jobs.Score:
        predicted = self._probabilities(net, samples.batches(), at).argmax(1)
        return jobs.Score(int((predicted == samples.y).sum()), len(samples))

    def _predict(self, job: jobs.Predict, message: Message) -> jobs.Predicted:
        net, at = self._enter_server(job.round, message)
        samples = self._context.test_samples(job.domain, None)
        self._skip_frozen(None)
        return _predicted(self._probabilities(net, samples.batches(), at))

    def _skip_frozen(self, client: str | None) -> None:
        """Let the client's net reuse the output of its frozen stages."""
        if self._frozen:
            self._frozen[self._context.architecture_of(client)].install()

    @torch.no_grad()
    def _probabilities(self, net: Net, batches: Any, at: At) -> Tensor:
        with net.eval(), self._context.precision():
            return torch.cat([self._context.method.predict(net, x, at) for x, _ in batches])

    def _open(self, message: Message, like: Record, sender: str) -> Any:
        """The record in a message, decoded once for all clients that receive the same bytes."""
        if self._received is None or self._received[0] is not message:
            self._received = (message, self._to_device(decode(message.blob, like, sender)))
        return self._received[1]

    def _enter(self, client: str, round: int, down: Any | None) -> tuple[Net, ClientState]:
        """Load a client's own weights, and over them what it shares as it was broadcast."""
        architecture = self._context.architecture_of(client)
        net, fresh = self._nets[architecture], self._templates.clients[architecture]
        loads = self._context.method.loads
        replaced = down is not None and loads == everything and not _remembers(fresh)
        # A model that the broadcast replaces entirely need not be read.
        state = fresh if replaced else self._store.read(client, round, fresh) or fresh
        state = self._to_device(state)
        net.load(state.model)
        if down is not None and loads != nothing:
            net.load(self._context.method.weights_for(client, down), loads)
        return net, state

    def _to_device(self, record: R) -> R:
        """The record on the device clients compute on; messages and states at rest are on the CPU."""
        device = self._context.device
        return record if device.type == "cpu" else map_tensors(record, lambda tensor: to_device(tensor, device))

    def _enter_server(self, round: int, message: Message) -> tuple[Net, At]:
        """Load the complete model that comes with a job."""
        assert self._templates.global_model is not None, "a method without a global model has no global view"
        package = self._open(message, self._templates.global_model, "server")
        net = self._nets[0]
        net.load(package.weights)
        return net, replace(self._context.at(round, None), down=package.down)


def attempted(work: Callable[[], A]) -> A | jobs.Failed:
    """The result of `work`, or a `Failed` with the reason."""
    try:
        return work()
    except OSError as error:
        kind = jobs.DiskFailed if disk_trouble(error) else jobs.Failed
        return kind(disk_trouble(error) or f"{type(error).__name__}: {error}", traceback.format_exc())
    except Exception as error:
        return jobs.Failed(
            f"{type(error).__name__}: {error}", traceback.format_exc(), not_finite=isinstance(error, NotFinite)
        )


def _predicted(probabilities: Tensor) -> jobs.Predicted:
    """As an array; numpy has no bfloat16, in which they may have been computed."""
    short = probabilities.dtype in (torch.bfloat16, torch.float16)
    return jobs.Predicted((probabilities.float() if short else probabilities).cpu().numpy())


def _remembers(state: ClientState) -> bool:
    """Whether a client's state holds anything besides its model."""
    return bool(state.optimizer) or not isinstance(state.memory, Nothing)
