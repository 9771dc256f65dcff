"""What happens at a client: it trains, and it scores models. Every engine runs this, none repeats it."""

import traceback
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from protofed.clients.jobs import Evaluate, Failed, Job, Result, Score, Train, Trained
from protofed.clients.optimizers import kept_state, make_optimizers, restore_state
from protofed.clients.rehearsal import Templates
from protofed.clients.setting import Setting
from protofed.clients.store import ClientState, ClientStore
from protofed.clients.training import train
from protofed.method import At
from protofed.models import nothing
from protofed.models.net import Net
from protofed.records import Message, Record, decode, encode


class ClientSide:
    """Plays any client: one model in memory, into which the weights of whoever acts are loaded."""

    def __init__(self, setting: Setting, templates: Templates) -> None:
        self._setting = setting
        self._templates = templates
        self._net = Net(deepcopy(setting.model))
        self._store = ClientStore(setting.clients_folder)
        self._received: tuple[Message, Record] | None = None

    def perform(self, job: Job, message: Message) -> Result:
        """Do one job; whatever goes wrong in it is an answer, not an exception."""
        try:
            return self._train(job, message) if isinstance(job, Train) else self._evaluate(job, message)
        except Exception as error:
            return Failed(f"{type(error).__name__}: {error}", traceback.format_exc())

    def _train(self, job: Train, message: Message) -> Trained:
        setting, net, method = self._setting, self._net, self._setting.method
        down = self._open(message, self._templates.down, f"broadcast to {job.client}")
        state = self._enter(job.client, job.round, down)
        at = replace(setting.at(job.round, job.client), down=down, memory=state.memory, start=net.pick())
        samples = setting.samples(job.client)
        optimizers = make_optimizers(method, net, setting.plan, at.lr)
        restore_state(method, optimizers, state.optimizer)
        learnt = train(method, net, samples, at, optimizers)
        # A client whose only batch was skipped has seen nothing; a clean look stands in for it.
        notes = learnt.notes or self._clean_notes(at)
        done = replace(at, notes=notes, taken=optimizers[0].taken, reach=optimizers[0].reach)
        upload, memory = method.upload(net, samples, done)
        sent = encode(upload, job.client)
        state = ClientState(net.pick(), memory, kept_state(method, optimizers))
        self._store.propose(job.client, job.round, state)
        return Trained(sent.blob, sent.size, learnt.loss, learnt.samples)

    def _clean_notes(self, at: At) -> dict[str, torch.Tensor]:
        method = self._setting.method
        if not method.keeps_notes:
            return {}
        samples = self._setting.samples(str(at.client))
        with torch.no_grad(), self._net.eval():
            x, y = next(samples.batches())
            return method.observe(self._net, x, y)

    @torch.no_grad()
    def _evaluate(self, job: Evaluate, message: Message) -> Score:
        setting, net, method = self._setting, self._net, self._setting.method
        at = setting.at(job.round, job.client)
        if job.client is None:
            assert self._templates.global_model is not None, "a method without a global model has no global view"
            package = self._open(message, self._templates.global_model, "server")
            net.load(package.weights)
            at = replace(at, down=package.down)
        else:
            down = self._open(message, self._templates.down, f"broadcast to {job.client}")
            state = self._enter(job.client, job.round, None if job.view == "local" else down)
            at = replace(at, down=down, memory=state.memory)
        correct = total = 0
        with net.eval():
            for x, y in setting.test_samples(job.domain, job.client).batches():
                correct += int((method.predict(net, x, at).argmax(1) == y).sum())
                total += len(y)
        return Score(correct, total)

    def _open(self, message: Message, like: Record, sender: str) -> Any:
        """The record in a message, decoded once for all clients that receive the same bytes."""
        if self._received is None or self._received[0] is not message:
            self._received = (message, decode(message.blob, like, sender))
        return self._received[1]

    def _enter(self, client: str, round: int, down: Any | None) -> ClientState:
        """Load a client's own weights, and over them what it shares as it was broadcast."""
        state = self._store.read(client, round, self._templates.client) or self._templates.client
        self._net.load(state.model)
        loads = self._setting.method.loads
        if down is not None and loads != nothing:
            self._net.load(down.weights, loads)
        return state
