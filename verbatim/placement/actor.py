"""Actors: models that are called as `model(input_ids=..., attention_mask=...)` and return logits.

Only the forward of an actor is known. Every step calls it once per sequence, with all token ids, so padding,
masks and caches are not needed, and the logits of a row do not depend on other rows. A step costs as much as
a prefill. With hooks (`callbacks.py`), the model's own cache is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verbatim.errors import InvalidRequest, NotSupported, UnsupportedModel
from verbatim.model.limits import max_length_of
from verbatim.model.patching import exclusive
from verbatim.placement.external import Piece, RowsDecoder
from verbatim.placement.wrapped import device_of, modules_of

LAYER_LISTS = ("h", "layers", "blocks")  # names of the list of layers
CACHE_NAMES = ("cache", "past_key_values")  # the argument since transformers 5.24, and before that


@dataclass(frozen=True, slots=True)
class ForwardArguments:
    """The arguments of a model's forward.

    Attributes:
        names: names of the declared parameters.
        others: whether the forward accepts any other argument (`**kwargs`).
    """

    names: frozenset[str]
    others: bool

    @classmethod
    def of(cls, model: Any) -> ForwardArguments:
        """Return the arguments of a module's forward, or of another callable."""
        forward = model.forward if isinstance(model, nn.Module) else model
        try:
            parameters = inspect.signature(forward).parameters
        except (TypeError, ValueError):  # no signature: written in C, or not a function
            return cls(frozenset({"input_ids", "attention_mask"}), others=False)
        kinds = [p.kind for p in parameters.values()]
        return cls(frozenset(parameters), inspect.Parameter.VAR_KEYWORD in kinds)

    def __contains__(self, name: str) -> bool:
        return self.others or name in self.names


class ActorDecoder(RowsDecoder):
    """Runs an actor, one row at a time.

    Args:
        model: called with `input_ids` [1, L] int64, `attention_mask` of ones if its forward takes one, and
            `constants`. Returns an object or a dict with `logits` [1, T, V], of the last T positions.
        constants: further arguments, the same in every call.

    Raises:
        UnsupportedModel: the forward takes no `input_ids`, or the vocabulary size is unknown.
        InvalidRequest: the forward does not take one of `constants`.
        NotSupported: a tensor among `constants`, which can't be split into rows.
    """

    placement = "actor"

    def __init__(self, model: Any, constants: Mapping[str, Any]) -> None:
        self.arguments = check_takes_ids(model)
        for name, value in constants.items():
            if name not in self.arguments:
                raise InvalidRequest(
                    f"{name}: the forward of {type(model).__name__} takes no such argument; it takes "
                    f"{', '.join(sorted(self.arguments.names))}"
                )
            if isinstance(value, Tensor):
                raise NotSupported(
                    f"{name} is a tensor of shape {list(value.shape)}, but rows are run one by "
                    "one: pass a prepare_inputs_fn, which gets all rows together"
                )
        self._constants = dict(constants)
        if "use_cache" in self.arguments.names:  # the model need not return a cache
            self._constants.setdefault("use_cache", False)
        self._masked = "attention_mask" in self.arguments
        super().__init__(model, vocabulary_of(model, self.arguments, self._constants))

    def run_rows(self, pieces: list[Piece]) -> list[Tensor]:
        with evaluating(self.module):
            return [self._row(piece) for piece in pieces]

    def _row(self, piece: Piece) -> Tensor:
        width = self.spec.vocab_size
        if not len(piece.logit_positions):
            return torch.empty(0, width, device=self.device)
        inputs = {**self._constants, "input_ids": piece.ids[None]}
        if self._masked:
            inputs["attention_mask"] = torch.ones_like(piece.ids)[None]
        indices = piece.logit_positions - len(piece.ids)  # negative: relative to the last token
        outputs = self.raw_module(**inputs)
        logits = check_logits(
            self.raw_module, outputs, rows=1, tokens=-int(indices[0]), width=width
        )
        return logits[0, indices]


class StepForward:
    """Runs a wrapper with Megatron's `run_one_forward_step` on one whole row.

    Calls the wrapper's `prep_model_for_inference`, `prep_inference_input` and `get_batch_for_context_window`,
    if it has them, with the `inference_context` that it had when this object was created.

    Args:
        wrapper: the wrapper. Its step takes a dict of `tokens` and `position_ids` [1, L] and a causal
            `attention_mask` [1, 1, L, L], True at masked positions, and returns logits [1, T, V].
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.model = getattr(wrapper, "model", None)
        self._context = getattr(wrapper, "inference_context", None)

    def __call__(self, input_ids: Tensor) -> dict[str, Any]:
        wrapper, length = self.wrapper, input_ids.shape[1]
        before = getattr(wrapper, "inference_context", None)
        wrapper.inference_context = self._context
        try:
            prepare = getattr(wrapper, "prep_model_for_inference", None)
            if prepare is not None:
                prepare(*[input_ids] * bool(ForwardArguments.of(prepare).names))
            if hasattr(wrapper, "prep_inference_input"):
                inputs = wrapper.prep_inference_input(input_ids)
            else:
                device = input_ids.device
                hidden = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
                positions = torch.arange(length, device=device)[None]
                inputs = {"tokens": input_ids, "position_ids": positions, "attention_mask": hidden}
            if hasattr(wrapper, "get_batch_for_context_window"):
                inputs = wrapper.get_batch_for_context_window(inputs, 0, length)
            return {"logits": wrapper.run_one_forward_step(inputs)}
        finally:
            wrapper.inference_context = before


def check_takes_ids(model: Any) -> ForwardArguments:
    """Return the arguments of the model's forward, which must take `input_ids`.

    Raises:
        UnsupportedModel: the model is not callable, or takes no `input_ids`.
    """
    name = type(model).__name__
    if not callable(model):
        raise UnsupportedModel(f"{name} can't be called; an actor is called with input_ids")
    arguments = ForwardArguments.of(model)
    if "input_ids" not in arguments:
        raise UnsupportedModel(
            f"the forward of {name} takes {', '.join(sorted(arguments.names)) or 'nothing'} and no input_ids"
        )
    return arguments


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Run the block in eval mode and without autocast; restore the mode of every layer."""
    layers = [layer for module in modules_of(model) for layer in module.modules() if layer.training]
    try:
        for layer in layers:
            layer.training = False
        with torch.autocast(device_of(model).type, enabled=False):
            yield
    finally:
        for layer in layers:
            layer.training = True


def run_alone(
    module: Any, call: Callable[..., Any], *args: Any, seed: int | None = None, **kwargs: Any
) -> Any:
    """Call a function that runs a whole module, excluding the forwards of all engines in this process.

    Args:
        seed: seed of torch's generator during the call, which is restored afterwards; None: not seeded.
    """
    with exclusive, evaluating(module), torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        return call(*args, **kwargs)


def run_layers(module: Any, hidden: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Run hidden states `[B, T, H]` through all layers of a transformers model, using its own code.

    Args:
        cache: the transformers cache of earlier calls, extended in place; None in the first call.

    Returns:
        The output of the last layer, before the final norm, and the cache.

    Raises:
        UnsupportedModel: the model has no known list of layers.
    """
    body = module.get_decoder() if hasattr(module, "get_decoder") else module.base_model
    lists = (getattr(body, name, None) for name in LAYER_LISTS)
    layers = next((each for each in lists if isinstance(each, nn.ModuleList)), None)
    if layers is None:
        raise UnsupportedModel(f"{type(body).__name__} has no list of layers")
    seen: list[Tensor] = []

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    def end(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    hooks = [
        layers[0].register_forward_pre_hook(begin, with_kwargs=True),
        layers[-1].register_forward_hook(end),
    ]
    inputs = {"inputs_embeds": hidden, "use_cache": True, "past_key_values": cache}
    try:
        outputs = body(**rename_cache(inputs, ForwardArguments.of(body).names))
    finally:
        for hook in hooks:
            hook.remove()
    return seen[0], cache_of(outputs)


def check_logits(model: Any, outputs: Any, *, rows: int, tokens: int, width: int | None) -> Tensor:
    """Return the logits `[rows, T, V]` from the output of a forward.

    Args:
        tokens: minimum T.
        width: expected V; None: any.

    Raises:
        UnsupportedModel: there are no logits, or they are not floating point `[rows, T, V]` on the model's
            device.
    """
    name, logits = type(model).__name__, field_of(outputs, "logits")
    if not isinstance(logits, Tensor):
        raise UnsupportedModel(
            f"{name} returned {type(outputs).__name__}; an object or a dict with logits [B, T, V] is needed"
        )
    device = device_of(model)
    if logits.device != device or logits.layout != torch.strided:
        raise UnsupportedModel(
            f"{name} returned logits on {logits.device} in {logits.layout}; they must be on {device} in "
            "torch.strided"
        )
    fits = logits.dim() == 3 and logits.shape[0] == rows and logits.shape[1] >= tokens
    fits = fits and logits.shape[2] > 0 and width in (None, logits.shape[2])
    if not fits or not logits.is_floating_point():
        raise UnsupportedModel(
            f"{name} returned logits of shape {list(logits.shape)} in {logits.dtype}; they must be numbers "
            f"of shape [{rows}, {tokens} or more, {'V' if width is None else width}]"
        )
    return logits


def field_of(outputs: Any, name: str) -> Any:
    """Return an entry of a dict or an attribute of an object, or None."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def rename_cache(inputs: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    """Return `inputs` with the cache, if any, renamed to the first of `CACHE_NAMES` that is in `names`."""
    target = next((name for name in CACHE_NAMES if name in names), None)
    if target is None or inputs.keys().isdisjoint(CACHE_NAMES):
        return dict(inputs)
    others = {name: value for name, value in inputs.items() if name not in CACHE_NAMES}
    return others | {target: cache_of(inputs)}


def cache_of(values: Any) -> Any:
    """Return the cache among a model's inputs or outputs, or None."""
    caches = (field_of(values, name) for name in CACHE_NAMES)
    return next((cache for cache in caches if cache is not None), None)


def vocabulary_of(model: Any, arguments: ForwardArguments, inputs: Mapping[str, Any]) -> int:
    """Return the vocabulary size from the model's config, else from a forward of one token.

    Args:
        inputs: further arguments of that forward.

    Raises:
        UnsupportedModel: the config has no size, and the forward fails.
    """
    config: Any = getattr(model, "config", None)
    if callable(nested := getattr(config, "get_text_config", None)):
        config = nested(decoder=True)
    size = getattr(config, "vocab_size", None)
    if isinstance(size, int) and size > 0:
        return size
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device_of(model))
    inputs = {**inputs, "input_ids": ids}
    if "attention_mask" in arguments:
        inputs["attention_mask"] = torch.ones_like(ids)
    try:
        with exclusive, torch.inference_mode(False), torch.no_grad(), evaluating(model):
            return check_logits(model, model(**inputs), rows=1, tokens=1, width=None).shape[2]
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} has no config.vocab_size, and a forward of one token, which would "
            f"tell, raised {type(error).__name__}: {error}"
        ) from error


def limit_of(model: Any) -> tuple[int | None, str]:
    """Return the length limit of the transformers model inside `model` (None: unlimited), and its source."""
    from transformers import PreTrainedModel

    for module in modules_of(model):
        for layer in module.modules():
            if isinstance(layer, PreTrainedModel):
                return max_length_of(layer.config)
    return None, "no limit in the config"
