"""What a run does not train: computed once where that is right, and with its batch normalisation folded."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from protofed.clients.context import FrozenPart, RunContext
from protofed.clients.feature_cache import FeatureCache
from protofed.clients.features import MEMORY_LIMIT, FeatureBlock, FeatureKey, FeatureStore, bytes_of
from protofed.clients.samples import ClientSamples, SampleBatch, SampleSet
from protofed.clients.training import set_modes, trained_names
from protofed.errors import UserError
from protofed.method import Method
from protofed.models import ImageShape, Split, tensors
from protofed.models.fast.onnx_frozen import FrozenExtractor, expected_runtime, frozen_extractor
from protofed.models.fast.stand_ins import Recipe, find_recipe, stand_in
from protofed.models.freezing import Frozen, unwrapped
from protofed.models.net import Net, Shortcut
from protofed.models.unit_length import Cheap
from protofed.seeding import generator

FROZEN = ("auto", "cached", "plain")


@dataclass(frozen=True)
class _FrozenChoice:
    """How frozen stages are handled, and why."""

    parts: tuple[FrozenPart, ...]
    """For each architecture; empty: every stage is computed as if it were trained."""
    why: str

    def summary(self) -> dict[str, object]:
        """As run.json has it."""
        return {
            "kept": [list(part.prefix) for part in self.parts],
            "folded": [list(part.recipes) for part in self.parts],
            "why": self.why,
        }


class _Problem(NamedTuple):
    """Why features of training cannot be kept, and what would be right."""

    what: str
    remedy: str


_EXTRACTED_TOGETHER = 32
_LOOKED_UP_TOGETHER = 16 * _EXTRACTED_TOGETHER
_TRIAL = 2
"""Images on which a stage is tried in both modes."""


def choose_frozen(name: str, context: RunContext) -> _FrozenChoice:
    """What `auto` does where it is right, or what the user asked for; `cached` where it is wrong is refused."""
    if name == "plain":
        return _FrozenChoice((), "asked for")
    parts = tuple(find_frozen(context.method, model, context.dataset.image_shape) for model in context.models)
    if _too_large(replace(context, frozen=parts)):
        problem = _Problem(
            "the features would not fit on the disk of the run folder", "free some space, or use --frozen auto"
        )
        parts = tuple(replace(part, prefix=()) for part in parts)
    elif not any(part.prefix for part in parts):
        problem = _Problem(
            f"the first stage of the model ({context.model.stage_names[0]}) is trained, or changes during training",
            "use a method with a frozen backbone, or --frozen auto",
        )
    elif context.augment and context.views == 1:
        # Clean passes, that is scoring and prototypes, may still use what was kept.
        problem = _Problem(
            "images are augmented anew in every epoch, so training features cannot be cached",
            "omit data.augment, or use --frozen auto",
        )
    else:
        return _FrozenChoice(parts, "the first stages are not trained, so their output is computed once per sample")
    if name == "cached":
        raise UserError(f"--frozen cached: {problem.what}; {problem.remedy}")
    return _FrozenChoice(parts if any(part.prefix or part.recipes for part in parts) else (), problem.what)


def _too_large(context: RunContext) -> bool:
    needed = sum(bytes_of(block, context.dtype) for block in _feature_blocks(context).values())
    folder = next(path for path in context.clients_folder.absolute().parents if path.exists())
    return needed - MEMORY_LIMIT > shutil.disk_usage(folder).free


@torch.no_grad()
def find_frozen(method: Method, model: Split, image_shape: ImageShape) -> FrozenPart:
    """The stages that no step trains and that do the same in training as in evaluation, found by trying both.

    Dropout and normalisation by the batch show as a difference, whatever module they are hidden in.
    """
    trained = trained_names(method, Net(model))
    untrained = {
        name
        for name, stage in model.stages().items()
        if not any(f"{name}.{param}" in trained for param, _ in stage.named_parameters())
    }
    if not any(_has_weights(model.get_submodule(name)) for name in untrained):
        return FrozenPart()
    net = Net(deepcopy(model))
    set_modes(method, net)
    like = next(model.parameters())
    x = torch.randn(_TRIAL, *image_shape, generator=generator(0, "frozen"), dtype=torch.float64).to(like)
    still, recipes, shapes = [], {}, {}
    for name, stage in net.model.stages().items():
        in_training = None
        if name in untrained and not isinstance(stage, Frozen):
            with torch.random.fork_rng(devices=[]):
                in_training = stage(x)
        stage.eval()
        h = stage(x)
        # A frozen stage always computes as in evaluation.
        if isinstance(stage, Frozen) or (in_training is not None and torch.equal(in_training, h)):
            still.append(name)
            recipe = find_recipe(unwrapped(stage), x[:1])
            if recipe.folds:
                recipes[name] = recipe
        x, shapes[name] = h, tuple(h.shape[1:])
    prefix = model.stage_names[: _leading(model, still)]
    return FrozenPart(recipes, prefix, shapes[prefix[-1]] if prefix else ())


def _leading(model: Split, still: list[str]) -> int:
    """How many stages come before the first that is not still, or not worth keeping; none where nothing is saved."""
    ends = (name not in still or isinstance(unwrapped(model.get_submodule(name)), Cheap) for name in model.stage_names)
    count = next((n for n, end in enumerate(ends) if end), len(model.stage_names))
    computes = any(_has_weights(model.get_submodule(name)) for name in model.stage_names[:count])
    return count if computes else 0


def _has_weights(stage: nn.Module) -> bool:
    return next(unwrapped(stage).parameters(), None) is not None


def _feature_blocks(context: RunContext) -> dict[FeatureKey, FeatureBlock]:
    """Room for the features of every sample set of a run: test sets, which all clients look at, before the others."""
    widths = {number: prod(part.shape) for number, part in enumerate(context.frozen) if part.prefix}
    blocks = {
        FeatureKey(SampleSet("test", name), number): FeatureBlock(len(domain.test), width)
        for number, width in widths.items()
        for name, domain in context.dataset.domains.items()
    }
    for client in context.partition.clients:
        number = context.architecture_of(client)
        if number in widths:
            for kind, count in context.sample_counts(client).items():
                rows = count * context.views if kind == "train" else count
                blocks[FeatureKey(SampleSet(kind, client), number)] = FeatureBlock(rows, widths[number])
    return {key: block for key, block in blocks.items() if block.rows}


def feature_store(context: RunContext, limit: int = MEMORY_LIMIT) -> FeatureStore | None:
    """A store for the features of a run, to be made before processes are forked; None where nothing is kept."""
    needed = _feature_blocks(context)
    # One exchange without training looks at training samples once, and there may be many sites.
    once = context.plan.epochs == (0,)
    passing = {key: block for key, block in needed.items() if once and key.samples.kind == "train"}
    kept = {key: block for key, block in needed.items() if key not in passing}
    return FeatureStore(kept, context.dtype, context.clients_folder.parent, limit, passing) if needed else None


class _StandIns(Mapping[str, nn.Module]):
    """Stand-ins that are made when they are asked for: where all features are kept, none is."""

    def __init__(self, recipes: Mapping[str, Recipe], make: Callable[[str, Recipe], nn.Module]) -> None:
        self._recipes = recipes
        self._make = make
        self._made: dict[str, nn.Module] = {}

    def __getitem__(self, name: str) -> nn.Module:
        if name not in self._made:
            self._made[name] = self._make(name, self._recipes[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._recipes)

    def __len__(self) -> int:
        return len(self._recipes)


class FrozenStages:
    """One architecture's frozen stages at work: their stand-ins, and the features behind its prefix."""

    def __init__(
        self, context: RunContext, architecture: int, net: Net, store: FeatureStore | None, threads: int = 1
    ) -> None:
        self._context = context
        self._architecture = architecture
        self._part = context.frozen[architecture]
        self._store = store if self._part.prefix else None
        self._model = context.models[architecture]
        self._net = net
        self._threads = threads

    @cached_property
    def _initial_tensors(self) -> dict[str, Tensor]:
        """Of the stages that are skipped or stood in for; others, such as a head that is computed, may change."""
        prefixes = tuple(f"{name}." for name in (*self._part.prefix, *self._part.recipes))
        return {
            name: tensor.detach().to(self._context.device)
            for name, tensor in tensors(self._model).items()
            if name.startswith(prefixes)
        }

    @cached_property
    def _shortcut(self) -> Shortcut:
        stages, context = self._model.stages(), self._context
        stand_ins = _StandIns(
            self._part.recipes,
            lambda name, recipe: stand_in(unwrapped(stages[name]), recipe, context.layout).to(context.device),
        )
        return Shortcut(stand_ins, len(self._part.prefix), self._lookup)

    def install(self) -> None:
        """Let the net skip its frozen stages, if those are as they were in the beginning."""
        own = tensors(self._net.model)
        same = all(torch.equal(own[name], tensor) for name, tensor in self._initial_tensors.items())
        self._net.shortcut = self._shortcut if same else None

    def _lookup(self, x: Tensor) -> Tensor | None:
        """The output of the prefix for a batch, in the memory layout the network would give it."""
        source = x.source if self._store is not None and isinstance(x, SampleBatch) else None
        if self._store is None or source is None:
            return None
        samples, rows = source
        kept = self._store.rows(FeatureKey(samples, self._architecture), partial(self._fill, samples))
        if kept is None:
            return None
        return _as_maps(kept.index_select(0, rows.cpu()), self._part.shape, self._last()).to(self._context.device)

    @torch.no_grad()
    def _fill(self, key: SampleSet, rows: Tensor) -> None:
        """In the samples' order and in chunks of a fixed size, so the result is the same in every process."""
        samples = self._context.sample_set(key)
        size = self._context.plan.batch if self._backbone is None else _LOOKED_UP_TOGETHER
        for start in range(0, samples.rows, size):
            chunk = torch.arange(start, min(start + size, samples.rows))
            h = self._computed(samples, chunk) if self._backbone is None else self._backbone.features(samples, chunk)
            _as_maps(rows[start : start + size], self._part.shape, self._last()).copy_(h.view(-1, *self._part.shape))

    def _computed(self, samples: ClientSamples, rows: Tensor) -> Tensor:
        """By the stages as they are."""
        first, last = int(rows[0]), int(rows[-1]) + 1
        x = samples.clean(slice(first, last)) if last <= len(samples) else samples.render(rows)
        return self._net.model.between(x, 0, len(self._part.prefix), self._shortcut.stand_ins)

    @cached_property
    def _backbone(self) -> "Backbone | None":
        """A faster runtime and a cache, where all clients have the same prefix weights."""
        stages = frozen_prefix(self._context, self._architecture)
        return Backbone(stages, self._context, self._threads) if stages else None

    def _last(self) -> bool:
        return self._context.layout == "channels-last" and len(self._part.shape) == 3


def frozen_prefix(context: RunContext, architecture: int) -> dict[str, nn.Module]:
    """The leading stages whose output is kept, by name; none where clients may have different weights in them."""
    model = context.models[architecture]
    prefix = context.frozen[architecture].prefix if context.frozen else ()
    stages = {name: model.get_submodule(name) for name in prefix}
    same = all(isinstance(stage, Frozen) or not tensors(stage) for stage in stages.values())
    return stages if same else {}


def _as_maps(rows: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    """Flat rows as feature maps, in the memory layout they were flattened from."""
    if not channels_last:
        return rows.view(-1, *shape)
    channels, height, width = shape
    return rows.view(-1, height, width, channels).permute(0, 3, 1, 2)


class Backbone:
    """Leading stages that are frozen for all clients, run by the fastest available runtime and cached."""

    def __init__(self, stages: Mapping[str, nn.Module], context: RunContext, threads: int) -> None:
        self._stages = {name: unwrapped(stage) for name, stage in stages.items()}
        self._image_shape = context.dataset.image_shape
        self._threads = threads
        # The cache is float32; a run in another precision needs all of its digits.
        self._cache = FeatureCache() if context.dtype == torch.float32 else None
        self._key = self._fingerprint(expected_runtime(self._stages.values()))

    @cached_property
    def _extractor(self) -> FrozenExtractor:
        """Made when an image has to be computed, which takes longer than to look up many."""
        extractor = frozen_extractor(self._stages.values(), self._image_shape, self._threads)
        self._key = self._fingerprint(extractor.runtime)
        return extractor

    def features(self, samples: ClientSamples, rows: Tensor) -> Tensor:
        """What comes out for some rows, one flat vector each."""
        if self._cache is None:
            return torch.cat([self._computed(samples, part) for part in torch.split(rows, _EXTRACTED_TOGETHER)])
        digests = [samples.digest(row) for row in rows.tolist()]
        key = self._key
        known = self._cache.read(key, digests)
        places = range(0, len(rows), _EXTRACTED_TOGETHER)
        parts = [range(start, min(start + _EXTRACTED_TOGETHER, len(rows))) for start in places]
        for part in parts:
            missing = [number for number in part if digests[number] not in known]
            if not missing:
                continue
            new = self._computed(samples, rows[missing])
            if self._key != key:
                return self.features(samples, rows)  # another runtime computes than was expected
            made = {digests[number]: feature for number, feature in zip(missing, new, strict=True)}
            self._cache.write(key, made)
            known.update(made)
        return torch.stack([known[digest] for digest in digests])

    def _computed(self, samples: ClientSamples, rows: Tensor) -> Tensor:
        return self._extractor.features(samples.render(rows)).flatten(1)

    def _fingerprint(self, runtime: str) -> bytes:
        """All that features depend on besides the images: stages, weights, size and runtime."""
        about = f"{list(self._stages)} {self._image_shape} {runtime}"
        digest = blake2b(about.encode(), digest_size=16)
        for name, stage in self._stages.items():
            for key, tensor in tensors(stage).items():
                digest.update(f"{name}.{key}".encode())
                digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.digest()
