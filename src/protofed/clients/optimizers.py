"""Local optimisers, and their state as plain tensors so that it can be kept between rounds."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from protofed.method import Method, Plan
from protofed.models.net import Net

_SLOTS = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq", "step")}


def make_optimizers(method: Method, net: Net, plan: Plan, lr: float) -> list[Optimizer]:
    """One optimiser per step of the method, over the parameters that step trains."""
    made: list[Optimizer] = []
    for step in method.steps:
        params = list(net.params(step.trains).values())
        step_lr = lr if step.lr is None else step.lr
        if plan.optimizer == "adam":
            made.append(Adam(params, lr=step_lr, weight_decay=plan.weight_decay, foreach=True))
        else:
            made.append(SGD(params, lr=step_lr, momentum=plan.momentum, weight_decay=plan.weight_decay, foreach=True))
    return made


def fresh_state(method: Method, net: Net, plan: Plan) -> dict[str, Tensor]:
    """The state before the first step, all zeros; empty where optimisers start afresh every round."""
    if not method.persist_optimizer:
        return {}
    return {
        key: torch.zeros((), dtype=torch.float32) if slot == "step" else torch.zeros_like(param.detach())
        for key, slot, param in _entries(method, net, plan)
    }


def restore_state(
    optimizers: list[Optimizer], state: Mapping[str, Tensor], method: Method, net: Net, plan: Plan
) -> None:
    """Put kept state into new optimisers."""
    if not method.persist_optimizer:
        return
    for key, slot, param in _entries(method, net, plan):
        optimizers[int(key.split("/")[0])].state[param][slot] = state[key].clone()


def current_state(optimizers: list[Optimizer], method: Method, net: Net, plan: Plan) -> dict[str, Tensor]:
    """The state as tensors by name."""
    if not method.persist_optimizer:
        return {}
    return {
        key: optimizers[int(key.split("/")[0])].state[param][slot].detach().clone()
        for key, slot, param in _entries(method, net, plan)
    }


def _entries(method: Method, net: Net, plan: Plan) -> list[tuple[str, str, nn.Parameter]]:
    """Key, slot and parameter of every tensor that the optimisers of a method keep."""
    slots = _SLOTS[plan.optimizer] if plan.optimizer == "adam" or plan.momentum > 0 else ()
    return [
        (f"{index}/{slot}/{name}", slot, param)
        for index, step in enumerate(method.steps)
        for name, param in net.params(step.trains).items()
        for slot in slots
    ]
