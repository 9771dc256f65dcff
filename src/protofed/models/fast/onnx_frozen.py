"""Stages that are not trained, run by ONNX Runtime: normalisation folded, activations fused, a third of torch's time.

The graph is written from a trace of the stages, which takes milliseconds where torch's exporter takes seconds. It knows
the layers that networks of the catalogue are made of; what it makes of a stage is compared with torch before it is
used, and torch computes what it does not know.
"""

import logging
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from protofed.models.efficientnet import SameConv2d
from protofed.models.layers import ConvPoolReLU
from protofed.models.split import ImageShape, evaluation_mode

log = logging.getLogger("protofed")

TOLERANCE = 1e-4
"""Largest difference from torch, in units of the largest feature where that is above one."""

_OPSET, _IR_VERSION = 18, 9
_PIXELS = 2 * 224**2
"""At a time: with more, the output of a layer no longer fits into the cache."""
_TRIAL = 2
"""Images on which both are compared."""


class FrozenExtractor(Protocol):
    """Computes what comes out of frozen stages."""

    @property
    def runtime(self) -> str:
        """What computes, and in which version: other runtimes may round differently."""

    def features(self, x: Tensor) -> Tensor:
        """What the stages make of normalised images."""


class TorchExtractor:
    """The reference: the stages themselves, in evaluation mode."""

    runtime = f"torch {torch.__version__}"

    def __init__(self, stages: nn.Sequential) -> None:
        self._stages = stages

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """What the stages make of normalised images."""
        with evaluation_mode(self._stages):
            result: Tensor = self._stages(x)
        return result


class OnnxExtractor:
    """The same weights as a graph of ONNX Runtime, which computes float32 on the CPU with so many threads."""

    def __init__(self, stages: nn.Sequential, threads: int = 1) -> None:
        self._graph = onnx_graph(stages)
        self._threads = threads
        self._session: Any = None
        _extractors.add(self)

    @property
    def runtime(self) -> str:
        """What computes, and in which version."""
        return f"onnxruntime {version('onnxruntime')}"

    def features(self, x: Tensor) -> Tensor:
        """What the stages make of normalised images."""
        if self._session is None:
            self._session = self._open()
        at_once = max(1, _PIXELS // x.shape[2:].numel())
        parts = (part.contiguous().numpy() for part in torch.split(x.detach(), at_once))
        done = [torch.from_numpy(self._session.run(None, {"x": part})[0]) for part in parts]
        return done[0] if len(done) == 1 else torch.cat(done)

    def _open(self) -> Any:
        import onnxruntime  # type: ignore[import-untyped]

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Threads that spin while waiting take the core from other processes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return onnxruntime.InferenceSession(self._graph, options, providers=["CPUExecutionProvider"])

    def close(self) -> None:
        """End the threads; they start again when they are needed."""
        self._session = None


_extractors: WeakSet[OnnxExtractor] = WeakSet()


def _close_all() -> None:
    """Threads do not live on in a forked process, which would wait for them forever."""
    for extractor in _extractors:
        extractor.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_close_all)


def expected_runtime(stages: Iterable[nn.Module]) -> str:
    """What `frozen_extractor` will most probably compute with; only the extractor itself, once made, knows for sure."""
    fits = _fits_onnx(nn.Sequential(*stages)) and not _lacking()
    return f"onnxruntime {version('onnxruntime')}" if fits else TorchExtractor.runtime


def _fits_onnx(chain: nn.Sequential) -> bool:
    like = next(chain.parameters(), torch.empty(0))
    return like.dtype == torch.float32 and like.device.type == "cpu"


def _lacking() -> list[str]:
    return [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]


def frozen_extractor(stages: Iterable[nn.Module], image_shape: ImageShape, threads: int = 1) -> FrozenExtractor:
    """The fastest way to run a chain of frozen stages at the weights they have now; torch where there is no other."""
    chain = nn.Sequential(*stages)
    reference = TorchExtractor(chain)
    if not _fits_onnx(chain):
        return reference
    if lacking := _lacking():
        log.warning("frozen stages run on torch, which is slower: pip install %s", " ".join(lacking))
        return reference
    try:
        fast = OnnxExtractor(chain, threads)
        x = torch.randn(_TRIAL, *image_shape, generator=torch.Generator().manual_seed(0))
        expected = reference.features(x)
        difference = (fast.features(x) - expected).abs().max() / expected.abs().max().clamp(min=1)
    except Exception as error:  # a plugin's stage may hold anything, and ONNX Runtime refuses in its own ways
        log.warning(
            "frozen stages run on torch, which is slower: they cannot be exported to onnx (%s)",
            str(error).strip().partition("\n")[0],
        )
        return reference
    if not difference <= TOLERANCE:
        log.warning("frozen stages run on torch, which is slower: onnx differs by %.1e", difference)
        return reference
    return fast


@torch.no_grad()
def onnx_graph(stages: nn.Sequential) -> bytes:
    """A chain of stages in evaluation mode as an ONNX model, for any number of images."""
    from onnx import TensorProto, helper

    chain = deepcopy(stages).eval()
    for module in chain.modules():
        if isinstance(module, ConvPoolReLU):
            module.in_strips = False
    writer = _Writer(dict(chain.named_modules()))
    for node in _Tracer().trace(chain).nodes:
        if node.users or node.op == "output":
            writer.add(node)
    graph = helper.make_graph(
        writer.nodes,
        "frozen",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", None, None, None])],
        [helper.make_tensor_value_info(writer.result, TensorProto.FLOAT, None)],
        writer.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    content: bytes = model.SerializeToString()
    return content


class _Tracer(fx.Tracer):
    """Looks into every module but torch's own layers, and into no convolution whose padding follows its input."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, SameConv2d) or super().is_leaf_module(m, module_qualified_name)


class _Writer:
    """Writes one node after the other; every value keeps the name it has in the trace."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.result = ""
        self._modules = modules
        self.names: dict[fx.Node, str] = {}
        self._numbers = count()

    def add(self, node: fx.Node) -> None:
        """Write what this node of the trace does."""
        if node.op == "placeholder":
            self.names[node] = "x"
        elif node.op == "output":
            self.result = self.names[node.args[0]]  # type: ignore[index]
        elif node.op == "call_module":
            module = self._modules[str(node.target)]
            self.names[node] = _of(_LAYERS, type(module))(self, module, *self._inputs(node))
        elif node.op in ("call_function", "call_method"):
            self.names[node] = _of(_FUNCTIONS, node.target)(self, node, *self._inputs(node))
        else:
            raise ValueError(f"no onnx for {node.op} {node.target}")

    def _inputs(self, node: fx.Node) -> list[str]:
        return [self.names[source] for source in node.all_input_nodes]

    def write(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """The name of the result of one ONNX operator."""
        from onnx import helper

        name = f"{kind}{next(self._numbers)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def keep(self, value: Tensor) -> str:
        """The name of a constant."""
        from onnx import numpy_helper

        name = f"weight{next(self._numbers)}"
        self.weights.append(numpy_helper.from_array(value.detach().contiguous().numpy(), name))
        return name


def _of(table: Mapping[Any, Callable[..., str]], kind: Any) -> Callable[..., str]:
    if kind not in table:
        raise ValueError(f"no onnx for {getattr(kind, '__name__', kind)}")
    return table[kind]


def _constants(writer: _Writer, *values: Tensor | None) -> list[str]:
    """Constants of a node; a bias that is None has no place, for with an empty one ONNX Runtime would fuse nothing."""
    return [writer.keep(value) for value in values if value is not None]


def _convolution(writer: _Writer, conv: nn.Conv2d, x: str) -> str:
    if conv.padding_mode != "zeros":
        raise ValueError(f"no onnx for padding by {conv.padding_mode}")
    padding: dict[str, Any] = {}
    if isinstance(conv, SameConv2d) or conv.padding == "same":
        padding["auto_pad"] = "SAME_UPPER"
    elif conv.padding != "valid":
        padding["pads"] = [*conv.padding, *conv.padding]
    shape = {"kernel_shape": conv.kernel_size, "strides": conv.stride, "dilations": conv.dilation, "group": conv.groups}
    return writer.write("Conv", x, *_constants(writer, conv.weight, conv.bias), **shape, **padding)


def _normalisation(writer: _Writer, norm: nn.BatchNorm2d, x: str) -> str:
    """ONNX Runtime folds it into the convolution before it."""
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("no onnx for normalisation by the batch")
    parameters = (
        torch.ones_like(norm.running_var) if norm.weight is None else norm.weight,
        torch.zeros_like(norm.running_mean) if norm.bias is None else norm.bias,
        norm.running_mean,
        norm.running_var,
    )
    return writer.write("BatchNormalization", x, *_constants(writer, *parameters), epsilon=norm.eps)


def _max_pool(writer: _Writer, pool: nn.MaxPool2d, x: str) -> str:
    if pool.ceil_mode or pool.return_indices:
        raise ValueError("no onnx for this kind of max-pool")
    side, stride, padding, dilation = (
        [size] * 2 if isinstance(size, int) else list(size)
        for size in (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    )
    return writer.write("MaxPool", x, kernel_shape=side, strides=stride, pads=padding * 2, dilations=dilation)


def _average(writer: _Writer, pool: nn.AdaptiveAvgPool2d, x: str) -> str:
    if pool.output_size not in (1, (1, 1)):
        raise ValueError("no onnx for an average of regions")
    return writer.write("GlobalAveragePool", x)


def _flat(writer: _Writer, flatten: nn.Flatten, x: str) -> str:
    if (flatten.start_dim, flatten.end_dim) != (1, -1):
        raise ValueError("no onnx for flattening some dimensions")
    return writer.write("Flatten", x)


def _linear(writer: _Writer, linear: nn.Linear, x: str) -> str:
    return writer.write("Gemm", x, *_constants(writer, linear.weight, linear.bias), transB=1)


def _relu(writer: _Writer, _: object, x: str) -> str:
    return writer.write("Relu", x)


def _relu6(writer: _Writer, _: object, x: str) -> str:
    return writer.write("Clip", x, *_constants(writer, torch.tensor(0.0), torch.tensor(6.0)))


def _same(_: _Writer, __: object, x: str) -> str:
    return x


def _sum(writer: _Writer, node: fx.Node, *inputs: str) -> str:
    if len(inputs) != 2 or len(node.args) != 2 or node.kwargs:
        raise ValueError("no onnx for this kind of sum")
    return writer.write("Add", *inputs)


def _joined(writer: _Writer, node: fx.Node, *_: str) -> str:
    parts, axis = node.args
    return writer.write("Concat", *(writer.names[part] for part in parts), axis=axis)  # type: ignore[union-attr, index]


_LAYERS: Mapping[type[nn.Module], Callable[..., str]] = {
    nn.Conv2d: _convolution,
    SameConv2d: _convolution,
    nn.BatchNorm2d: _normalisation,
    nn.MaxPool2d: _max_pool,
    nn.AdaptiveAvgPool2d: _average,
    nn.Flatten: _flat,
    nn.Linear: _linear,
    nn.ReLU: _relu,
    nn.ReLU6: _relu6,
    nn.Identity: _same,
    nn.Dropout: _same,
}
_FUNCTIONS: Mapping[Any, Callable[..., str]] = {
    torch.relu: _relu,
    torch.relu_: _relu,
    functional.relu: _relu,
    operator.add: _sum,
    operator.iadd: _sum,
    torch.add: _sum,
    "add": _sum,
    "add_": _sum,
    torch.cat: _joined,
}
