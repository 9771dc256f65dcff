"""Local optimisers over named parameters, whose state is plain tensors so that it can be kept between rounds.

The arithmetic is that of `torch.optim.SGD` and `torch.optim.Adam` (tested against them); `torch._fused_*` and
`torch._foreach_*` update all parameters in one or a few calls.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import ClassVar, Self

import torch
from torch import Tensor

from protofed.method import Method, Plan, Step
from protofed.models.net import Net

State = dict[str, Tensor]

_STRIDE = "stride"
"""Of SGD; states that an earlier version kept lack it."""


class LocalOptimizer:
    """Follows one step of a method. It counts its steps, and how far a unit gradient would have moved a weight.

    Where clients step together every tensor is a stack of theirs; only the clipping has to know.
    """

    slots: ClassVar[tuple[str, ...]] = ()
    counters: ClassVar[tuple[str, ...]] = ("taken",)

    def __init__(
        self, params: Mapping[str, Tensor], plan: Plan, step: Step, lr: float, *, stacked: bool = False
    ) -> None:
        self._follow(params)
        self._stacked = stacked
        self.lr = lr if step.lr is None else step.lr
        self.momentum = plan.momentum if step.momentum is None else step.momentum
        self.weight_decay = plan.weight_decay
        self.clip = step.clip
        self.taken = 0
        self._kept = {slot: [torch.zeros_like(param.detach()) for param in self.params] for slot in self.slots}

    def _follow(self, params: Mapping[str, Tensor]) -> None:
        self.names = list(params)
        self.params = list(params.values())
        self._values = [param.detach() for param in self.params]  # the same memory, outside the graph

    @property
    def reach(self) -> float | None:
        """The path of a unit gradient over the steps taken, or None where there is no such thing."""
        return None

    def step(self, loss: Tensor) -> None:
        """One step down the loss; a parameter the loss does not depend on stays where it is."""
        self.follow(torch.autograd.grad(loss, self.params, allow_unused=True))

    def follow(self, gradients: Sequence[Tensor | None]) -> None:
        """One step by a gradient per parameter, or None for one that stays where it is."""
        used = [index for index, gradient in enumerate(gradients) if gradient is not None]
        present = [gradient for gradient in gradients if gradient is not None]
        params = [self._values[index] for index in used]
        kept = [[tensors[index] for index in used] for tensors in self._kept.values()]
        if self.clip is not None:
            _clip(present, self.clip, self._stacked)
        self.taken += 1
        self._update(params, present, kept)

    def _update(self, params: list[Tensor], gradients: list[Tensor], kept: list[list[Tensor]]) -> None:
        raise TypeError(f"{type(self).__name__} must define _update")

    def state(self) -> State:
        """What must be kept to continue later as if nothing had happened in between."""
        return {
            f"{slot}/{name}": tensor.clone()
            for slot, tensors in self._kept.items()
            for name, tensor in zip(self.names, tensors, strict=True)
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a kept state."""
        for slot in self.slots:
            self._kept[slot] = [state[f"{slot}/{name}"].clone() for name in self.names]

    def over(self, params: Mapping[str, Tensor], part: Callable[[Tensor], Tensor]) -> Self:
        """The same optimiser, as far as it has come, for other tensors, with `part` of all that it keeps."""
        other = copy(self)
        other._follow({name: params[name] for name in self.names})
        other._kept = {slot: [part(tensor) for tensor in tensors] for slot, tensors in self._kept.items()}
        return other

    def copy_counters(self, other: "LocalOptimizer") -> None:
        """Take over the step counts of another."""
        for counter in self.counters:
            setattr(self, counter, getattr(other, counter))

    def write_back(self, clients: Tensor, part: "LocalOptimizer") -> None:
        """Write the state of some clients back into the stacks of all."""
        for slot, tensors in self._kept.items():
            for tensor, rows in zip(tensors, part._kept[slot], strict=True):
                tensor.index_copy_(0, clients, rows)


class Sgd(LocalOptimizer):
    """Stochastic gradient descent with momentum."""

    slots = ("momentum",)
    counters = ("taken", "_stride", "_reach")

    def __init__(
        self, params: Mapping[str, Tensor], plan: Plan, step: Step, lr: float, *, stacked: bool = False
    ) -> None:
        super().__init__(params, plan, step, lr, stacked=stacked)
        self._stride = self._reach = 0.0

    def state(self) -> State:
        """The velocity, and that which a unit gradient would have given."""
        return {**super().state(), _STRIDE: torch.tensor(self._stride, dtype=torch.float64)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a kept velocity."""
        super().restore(state)
        # Clients that step together have taken equally many.
        self._stride = float(state[_STRIDE].flatten()[0])

    @property
    def reach(self) -> float:
        """lr x a_i of FedNova: steps, each counted as often as momentum repeats it."""
        return self.lr * self._reach

    def _update(self, params: list[Tensor], gradients: list[Tensor], kept: list[list[Tensor]]) -> None:
        self._stride = self.momentum * self._stride + 1
        self._reach += self._stride
        torch._fused_sgd_(
            params,
            [_laid_out_as(param, gradient) for param, gradient in zip(params, gradients, strict=True)],
            kept[0] if self.momentum else [],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # a velocity of zero says the same
        )


class Adam(LocalOptimizer):
    """Adam with the usual constants; weight decay acts inside the gradient."""

    slots = ("mean", "square")
    counters = ("taken", "_steps_ever")
    betas = (0.9, 0.999)
    epsilon = 1e-8

    def __init__(
        self, params: Mapping[str, Tensor], plan: Plan, step: Step, lr: float, *, stacked: bool = False
    ) -> None:
        super().__init__(params, plan, step, lr, stacked=stacked)
        self._steps_ever = 0

    def _update(self, params: list[Tensor], gradients: list[Tensor], kept: list[list[Tensor]]) -> None:
        self._steps_ever += 1
        if self.weight_decay:
            gradients = list(torch._foreach_add(gradients, params, alpha=self.weight_decay))
        first, second = self.betas
        means, squares = kept
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        deviations = torch._foreach_sqrt(squares)
        torch._foreach_div_(deviations, (1 - second**self._steps_ever) ** 0.5)
        torch._foreach_add_(deviations, self.epsilon)
        torch._foreach_addcdiv_(params, means, deviations, -self.lr / (1 - first**self._steps_ever))

    def state(self) -> State:
        """The moments, and how many steps they are made of."""
        return {**super().state(), "steps": torch.tensor(self._steps_ever)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from kept moments."""
        super().restore(state)
        # Clients that step together have taken equally many.
        self._steps_ever = int(state["steps"].flatten()[0])


def make_optimizers(
    method: Method, net: Net, plan: Plan, lr: float, stacks: Mapping[str, Tensor] | None = None
) -> list[LocalOptimizer]:
    """One optimiser per step of the method, over the parameters that step trains, or over stacks of them."""
    kind = {"sgd": Sgd, "adam": Adam}[plan.optimizer]
    made = []
    for step in method.steps:
        own = net.params(step.trains)
        params = own if stacks is None else {name: stacks[name] for name in own}
        made.append(kind(params, plan, step, lr, stacked=stacks is not None))
    return made


def kept_state(method: Method, optimizers: Sequence[LocalOptimizer]) -> State:
    """What a client remembers of its optimisers: nothing, unless the method keeps them."""
    if not method.persist_optimizer:
        return {}
    return {f"{index}/{key}": value for index, one in enumerate(optimizers) for key, value in one.state().items()}


def restore_state(method: Method, optimizers: Sequence[LocalOptimizer], state: Mapping[str, Tensor]) -> None:
    """Put what was remembered into new optimisers."""
    if not method.persist_optimizer:
        return
    for index, one in enumerate(optimizers):
        one.restore({key.removeprefix(f"{index}/"): value for key, value in state.items()})


def older_state(state: State) -> State:
    """What an earlier version would have kept of the same optimisers; it started without the rest."""
    return {key: value for key, value in state.items() if key.rpartition("/")[2] != _STRIDE}


def _laid_out_as(param: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with its numbers in the order of the parameter's, which is all that the fused kernel looks at."""
    return gradient if gradient.stride() == param.stride() else torch.empty_like(param).copy_(gradient)


def _clip(gradients: list[Tensor], most: float, stacked: bool) -> None:
    """Shrink the gradients together so that their joint norm, of each client if they are stacks, is at most `most`."""
    norms = [
        torch.linalg.vector_norm(gradient.flatten(1) if stacked else gradient, dim=1 if stacked else None)
        for gradient in gradients
    ]
    factor = (most / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1.0)
    if not stacked:
        torch._foreach_mul_(gradients, factor)
        return
    for gradient in gradients:
        gradient.mul_(factor.reshape(-1, *[1] * (gradient.dim() - 1)))
