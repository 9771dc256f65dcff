"""What happens at a client: it trains, and it scores models. Every engine runs this, none repeats it."""

import traceback
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from protofed.clients.jobs import Evaluate, Failed, Job, Predict, Predicted, Result, Score, Train, Trained
from protofed.clients.optimizers import kept_state, make_optimizers, restore_state
from protofed.clients.rehearsal import Templates
from protofed.clients.samples import ClientSamples
from protofed.clients.setting import Setting
from protofed.clients.store import ClientState, ClientStore
from protofed.clients.training import train
from protofed.method import At
from protofed.models import everything, laid_out, nothing
from protofed.models.net import Net
from protofed.records import Message, Nothing, Record, Weights, decode, encode, map_tensors

R = TypeVar("R", bound=Record)


class ClientSide:
    """Plays any client: one model of each architecture in memory, into which the weights of whoever acts are loaded."""

    def __init__(self, setting: Setting, templates: Templates) -> None:
        self._setting = setting
        self._templates = templates
        self._nets = [Net(laid_out(deepcopy(model).to(setting.device), setting.layout)) for model in setting.models]
        self._store = ClientStore(setting.clients_folder)
        self._received: tuple[Message, Record] | None = None

    def perform(self, job: Job, message: Message) -> Result:
        """Do one job; whatever goes wrong in it is an answer, not an exception."""
        try:
            if isinstance(job, Train):
                return self._train(job, message)
            return self._evaluate(job, message) if isinstance(job, Evaluate) else self._predict(job, message)
        except Exception as error:
            return Failed(f"{type(error).__name__}: {error}", traceback.format_exc())

    def _train(self, job: Train, message: Message) -> Trained:
        setting, method = self._setting, self._setting.method
        down = self._open(message, self._templates.down, f"broadcast to {job.client}")
        net, state = self._enter(job.client, job.round, down)
        at = replace(setting.at(job.round, job.client), down=down, memory=state.memory, start=net.pick())
        samples = setting.samples(job.client)
        optimizers = make_optimizers(method, net, setting.plan, at.lr)
        restore_state(method, optimizers, state.optimizer)
        learnt = train(method, net, samples, at, optimizers)
        at = replace(at, notes=learnt.notes, taken=optimizers[0].taken, reach=optimizers[0].reach)
        upload, memory = method.upload(net, samples, at)
        sent = encode(upload, job.client)
        trained = ClientState(net.pick(), memory, kept_state(method, optimizers))
        self._store.propose(job.client, job.round, trained)
        return Trained(sent.blob, sent.size, learnt.loss, learnt.samples)

    def examine(self, job: Evaluate, message: Message) -> tuple[Weights, Tensor, Tensor]:
        """The model that a client would use now, and what it predicts beside what is right."""
        net, samples, predicted = self._predicted(job, message)
        # As files have it, however the kernels lie here.
        return map_tensors(net.pick(), lambda tensor: tensor.cpu().contiguous()), predicted, samples.y

    def _evaluate(self, job: Evaluate, message: Message) -> Score:
        _, samples, predicted = self._predicted(job, message)
        return Score(int((predicted == samples.y).sum()), len(samples))

    def _predicted(self, job: Evaluate, message: Message) -> tuple[Net, ClientSamples, Tensor]:
        if job.client is None:
            net, at = self._enter_server(job.round, message)
        else:
            down = self._open(message, self._templates.down, f"broadcast to {job.client}")
            net, state = self._enter(job.client, job.round, None if job.view == "local" else down)
            at = replace(self._setting.at(job.round, job.client), down=down, memory=state.memory)
        samples = self._setting.test_samples(job.domain, job.client, job.validates)
        return net, samples, self._probabilities(net, samples.batches(), at).argmax(1)

    def _predict(self, job: Predict, message: Message) -> Predicted:
        net, at = self._enter_server(job.round, message)
        batches = self._setting.test_samples(job.domain, None).batches()
        return Predicted(self._probabilities(net, batches, at).cpu().numpy())

    @torch.no_grad()
    def _probabilities(self, net: Net, batches: Any, at: At) -> Tensor:
        with net.eval():
            return torch.cat([self._setting.method.predict(net, x, at) for x, _ in batches])

    def _open(self, message: Message, like: Record, sender: str) -> Any:
        """The record in a message, decoded once for all clients that receive the same bytes."""
        if self._received is None or self._received[0] is not message:
            self._received = (message, self._here(decode(message.blob, like, sender)))
        return self._received[1]

    def _enter(self, client: str, round: int, down: Any | None) -> tuple[Net, ClientState]:
        """Load a client's own weights, and over them what it shares as it was broadcast."""
        architecture = self._setting.architecture_of(client)
        net, fresh = self._nets[architecture], self._templates.clients[architecture]
        loads = self._setting.method.loads
        replaced = down is not None and loads == everything and not _remembers(fresh)
        # What the broadcast replaces as a whole need not be read.
        state = fresh if replaced else self._store.read(client, round, fresh) or fresh
        state = self._here(state)
        net.load(state.model)
        if down is not None and loads != nothing:
            net.load(down.weights, loads)
        return net, state

    def _here(self, record: R) -> R:
        """The record on the device clients compute on; messages and states at rest are on the CPU."""
        device = self._setting.device
        return record if device.type == "cpu" else map_tensors(record, lambda tensor: tensor.to(device))

    def _enter_server(self, round: int, message: Message) -> tuple[Net, At]:
        """Load the complete model that comes with a job."""
        assert self._templates.global_model is not None, "a method without a global model has no global view"
        package = self._open(message, self._templates.global_model, "server")
        net = self._nets[0]
        net.load(package.weights)
        return net, replace(self._setting.at(round, None), down=package.down)


def _remembers(state: ClientState) -> bool:
    """Whether a client's state holds anything besides its model."""
    return bool(state.optimizer) or not isinstance(state.memory, Nothing)
