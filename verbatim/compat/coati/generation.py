"""`generate` and `generate_streaming`, with Coati's signatures."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor

from verbatim.compat.coati.arguments import GenerateArguments
from verbatim.compat.coati.call import GenerateCall
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.placement.hooked import Hooks


def generate(
    model: Any,
    input_ids: Tensor,
    tokenizer: Any,
    max_length: int,
    num_beams: int = 1,
    do_sample: bool = True,
    early_stopping: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float | None = None,
    prepare_inputs_fn: Callable[..., dict[str, Any]] | None = None,
    update_model_kwargs_fn: Callable[..., dict[str, Any]] | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Continue each row of `input_ids`.

    Args:
        model: an open `LLM`; a live transformers module, also inside of PEFT or DistributedDataParallel; a
            module called as `model(tokens, kv_caches=...)`; or anything that is called as
            `model(input_ids=..., attention_mask=...)` and returns an object or a dict with `logits`
            `[B, T, V]`.
        input_ids: `[B, P]` integers, padded on the left.
        tokenizer: its `padding_side` must be "left"; its `eos_token_id` ends a row, its `pad_token_id` is
            masked in front of a row and fills it after its end.
        max_length: columns of the result at most, prompt included. One above the model's limit is clamped,
            with a warning.
        num_beams: above 1, return the best beam of each row; needs `do_sample=False`.
        do_sample: False takes the likeliest token.
        early_stopping: False fills all rows up to the full length; True ends with the last row.
        top_k, top_p, temperature: None is off, and so is `top_k=-1`.
        prepare_inputs_fn: `f(input_ids, past=past, **model_kwargs)` returns the inputs of each forward.
        update_model_kwargs_fn: `f(outputs, model_kwargs)` returns the `model_kwargs` of the next step.
        model_kwargs: `max_new_tokens`; `stop_token_ids`: sequences of ids that end a row, `[[20, 21], [10]]`,
            or a single one, `[20, 21]` or `20`; `attention_mask` `[B, P]`, without which leading pads are
            masked; `seed`: without one, a number is drawn from torch's default generator; `pad_token_id`;
            `stream_interval`, which is for `generate_streaming`; `process_group`, of torch.distributed,
            for a model that communicates between ranks: all then run equally many forwards;
            `use_cache` and `cache_position`, for hooks, and `apply_loss_mask`, which is ignored: they
            change no token. Others are
            the model's own, for hooks and actors.

    Returns:
        `[B, P + N]` int64 on the device of `input_ids`, an ordinary tensor.

    Raises:
        InvalidRequest, NotSupported, PromptTooLong, UnsupportedModel: before any token is generated.
        RequestFailed: no token can be drawn for a row.

    Exceptions of the model and of hooks are passed on.
    """
    group = model_kwargs.pop("process_group", None)

    def begin() -> GenerateCall:
        args = GenerateArguments.of(
            input_ids,
            tokenizer,
            max_length,
            num_beams,
            do_sample,
            early_stopping,
            top_k,
            top_p,
            temperature,
            model_kwargs,
        )
        return GenerateCall(model, args, _hooks(prepare_inputs_fn, update_model_kwargs_fn))

    return begin().whole() if group is None else GenerateCall.run_in_lockstep(begin, group)


def generate_streaming(
    model: Any,
    input_ids: Tensor,
    tokenizer: Any,
    max_length: int,
    num_beams: int = 1,
    do_sample: bool = True,
    early_stopping: bool = False,
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float | None = None,
    prepare_inputs_fn: Callable[..., dict[str, Any]] | None = None,
    update_model_kwargs_fn: Callable[..., dict[str, Any]] | None = None,
    **model_kwargs: Any,
) -> Generator[Tensor, None, None]:
    """Stream `generate`: yield the whole tensor, prompt included, at 1, 1 + k, 1 + 2k, ... new tokens.

    k is `stream_interval`, 2 by default; the last tensor is complete, whatever its length. Arguments are
    checked when this is called; the first forward runs when the first tensor is requested. Leaving early,
    or closing the generator, ends the rows.

    Raises:
        NotSupported: `num_beams` above 1, as the best beam is only known at the end.
    """
    if model_kwargs.pop("process_group", None) is not None:
        raise NotSupported(
            "process_group in a stream: its reader decides when the next forward is made, and ranks must "
            "make theirs together; use generate"
        )
    args = GenerateArguments.of(
        input_ids,
        tokenizer,
        max_length,
        num_beams,
        do_sample,
        early_stopping,
        top_k,
        top_p,
        temperature,
        model_kwargs,
    )
    if args.num_beams > 1:
        raise NotSupported(
            f"num_beams={num_beams} in a stream: which beam is the best is known in the end alone; use "
            "generate"
        )
    return GenerateCall(model, args, _hooks(prepare_inputs_fn, update_model_kwargs_fn)).pieces()


def _hooks(prepare: Any, update: Any) -> Hooks | None:
    for name, hook in (("prepare_inputs_fn", prepare), ("update_model_kwargs_fn", update)):
        if hook is not None and not callable(hook):
            raise InvalidRequest(f"{name}={hook!r}: must be a function or None")
    return None if prepare is None and update is None else Hooks(prepare, update)
