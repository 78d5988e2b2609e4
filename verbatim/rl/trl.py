"""`rollout_func`: completions for TRL's `GRPOTrainer`, from the module that it trains."""

from __future__ import annotations

from typing import Any

from verbatim.api.llm import LLM
from verbatim.errors import NotSupported
from verbatim.params import SamplingParams
from verbatim.rl.rollout import rollout

# Fields of both GRPOConfig and SamplingParams.
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def rollout_func(
    prompts: list[Any],
    trainer: Any,
    *,
    llm: LLM | None = None,
    params: SamplingParams | None = None,
) -> dict[str, Any]:
    """Return a completion of each prompt, in the format of TRL's rollout functions.

    Pass it directly, `GRPOTrainer(..., rollout_func=rl.rollout_func)`, or with keyword arguments through
    `functools.partial`. Each completion has its own noise, from torch's default generator. The trainer seeds
    the generator with its `seed`, differently on each rank, so a run is repeatable.

    Args:
        prompts: texts or conversations, repeated for each completion, as the trainer passes them.
        trainer: the trainer. Its module is used in place, and its config has the sampling parameters.
        llm: an open LLM to sample from. None: one engine over the trainer's module, without a copy of its
            weights, kept for all calls.
        params: sampling parameters in place of those of the trainer's config.

    Returns:
        `prompt_ids`, `completion_ids` and `logprobs`, one list per prompt. Log-probs are those of the
        distribution that was sampled, after the temperature and the filters.

    Raises:
        NotSupported: images; a trainer with tools, which generates the turns after a tool call itself.
        InvalidRequest: an invalid parameter, or a prompt that is too long.
    """
    if getattr(trainer, "tools", None) or getattr(trainer, "environment_factories", None):
        raise NotSupported(
            "tools or environments with rollout_func: the trainer itself would generate the turns after a "
            "tool call"
        )
    r = rollout(
        trainer.model if llm is None else llm,
        _prompt_ids(prompts, trainer),
        _params(trainer) if params is None else params,
        record_routing=False,
    )
    completions = [result.outputs[0] for result in r.results]
    return {
        "prompt_ids": [result.prompt_token_ids for result in r.results],
        "completion_ids": [completion.token_ids for completion in completions],
        "logprobs": [completion.sampled_logprobs for completion in completions],
    }


def _prompt_ids(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Tokenize prompts as the trainer does."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return list(tokenizer(text=prompts)["input_ids"])
    parts = [part for prompt in prompts for m in prompt for part in m.get("content") or ()]
    if any(isinstance(part, dict) and part.get("type") != "text" for part in parts):
        raise NotSupported("rollout_func: images and other media in prompts are not supported")
    rendered = tokenizer.apply_chat_template(
        conversation=prompts,
        chat_template=getattr(trainer, "chat_template", None),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **(getattr(trainer, "chat_template_kwargs", None) or {}),
    )
    return list(rendered["input_ids"])


def _params(trainer: Any) -> SamplingParams:
    """Return the sampling parameters of the trainer's config."""
    config = trainer.args
    fields = {name: getattr(config, name) for name in _FIELDS}
    fields["max_tokens"] = config.max_completion_length
    fields["stop_token_ids"] = getattr(trainer, "eos_token_ids", ())
    fields |= config.generation_kwargs or {}
    return SamplingParams(**{name: value for name, value in fields.items() if value is not None})
