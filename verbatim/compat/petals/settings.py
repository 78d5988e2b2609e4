"""The generation parameters of a call, with the defaults of the model and of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from verbatim.api.llm import LLM
from verbatim.common.checks import integer
from verbatim.compat.shared import by_name, check_search, declared_pad_id, flag
from verbatim.errors import InvalidRequest, NotSupported

# Supported parameters, with transformers' defaults.
SUPPORTED: dict[str, Any] = dict.fromkeys(
    "max_length max_new_tokens min_length min_new_tokens min_p top_h bad_words_ids sequence_bias "
    "forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens watermarking_config max_time stop_strings pad_token_id bos_token_id "
    "eos_token_id".split()
)
_SWITCHES = (
    "do_sample remove_invalid_values renormalize_logits return_dict_in_generate output_scores "
    "output_logits".split()
)
SUPPORTED |= dict.fromkeys((*_SWITCHES, "early_stopping"), False)
SUPPORTED |= dict.fromkeys(("num_beams", "num_return_sequences"), 1)
SUPPORTED |= dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0)
SUPPORTED |= dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0.0) | {"top_k": 50}
SUPPORTED |= dict.fromkeys(
    "temperature top_p typical_p repetition_penalty encoder_repetition_penalty length_penalty".split(),
    1.0,
)
_COUNTS = {"num_beams": 1, "num_return_sequences": 1, "max_length": 1, "max_new_tokens": 1}
_COUNTS |= {"min_length": 0, "min_new_tokens": 0, "top_k": 0, "no_repeat_ngram_size": 0}
_COUNTS |= {"encoder_no_repeat_ngram_size": 0, "pad_token_id": 0, "bos_token_id": 0}
_LENGTHS = frozenset({"max_length", "max_new_tokens"})  # None means not given
_NEVER_NONE = frozenset(
    {"do_sample", "num_beams", "num_return_sequences", "temperature", "length_penalty"}
)

# Parameters that change tokens or output and are not supported by the engine, with the reason. Those of the
# first table are not supported by transformers' own `generate` either: it runs code from the hub for them, or
# they are specific to Petals.
UNSUPPORTED_BY_TRANSFORMERS = by_name(
    {
        "the engine runs the loop over tokens": "custom_generate",
        "K and V stay where they were computed; to continue, use a session": "past_key_values",
        "contrastive search is not implemented": "penalty_alpha",
        "decoding by contrasting layers is not implemented": "dola_layers",
        "only plain beam search is supported; use num_beams": (
            "diversity_penalty num_beam_groups constraints force_words_ids"
        ),
    }
)
REFUSED = UNSUPPORTED_BY_TRANSFORMERS | by_name(
    {
        "running a second, unconditional prompt is not supported": (
            "guidance_scale negative_prompt_ids negative_prompt_attention_mask"
        ),
        'drafts belong to the model: open it with draft=, a folder or "ngram"': "assistant_model",
        "only token ids are accepted; the first stage embeds them": "inputs_embeds",
        "positions count the tokens of a row, without padding": "position_ids",
        "there is only one segment, 0": "token_type_ids",
        "prompts are used unchanged": "token_healing",
        "attention is computed block by block and not stored": "output_attentions",
        "use LLM.generate with SamplingParams(hidden_states=True)": "output_hidden_states",
        'use draft="mtp" when the model is opened': "use_mtp",
    }
)
_OFF_VALUES: dict[str, tuple[Any, ...]] = {"guidance_scale": (1, 1.0), "num_beam_groups": (1,)}
_OFF_VALUES |= {"diversity_penalty": (0.0,), "penalty_alpha": (0.0,)}
# Options of transformers' implementation: ignored in a config, rejected as an argument of the call.
_IMPLEMENTATION = by_name(
    {
        "the engine has its own KV cache; open a folder with kv_dtype= and kv_memory=": (
            "cache_implementation cache_config max_cache_len"
        ),
        "max_batch_tokens= of the model sets the chunk size": "prefill_chunk_size",
        "nothing is compiled": "compile_config",
        "only plain beam search is supported; use num_beams": "low_memory",
        'drafts belong to the model: open it with draft=, such as draft="ngram"': (
            "is_assistant num_assistant_tokens num_assistant_tokens_schedule "
            "assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size "
            "assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight "
            "speculation_type"
        ),
        "all rows and calls are batched continuously": "continuous_batching_config",
        "only for encoder-decoder models": "decoder_start_token_id",
    }
)
# Accepted; no token depends on them.
_IGNORED = {"use_cache", "disable_compile", "transformers_version", "return_legacy_cache"}
_KNOWN = SUPPORTED.keys() | REFUSED.keys() | _IMPLEMENTATION.keys() | _IGNORED
_SHOWN = (bool, int, float, str, list, tuple, dict)  # types of values that error messages show


class Settings(dict[str, Any]):
    """The checked parameters of a call, by the names of `SUPPORTED`.

    A value comes from the call (where None means off), else from the call's `generation_config`, else from
    the model's, else from transformers' defaults.

    Attributes:
        num_beams: number of beams per row.
        num_copies: number of result rows per input row.
        eos_ids: ids that end a row.
        pad_id: the pad id; None if unspecified.
        fill_id: the id that fills an ended row: the pad id, else the first of `eos_ids`, else 0.
    """

    def __init__(self, llm: LLM, arguments: Mapping[str, Any], config: Any) -> None:
        """`config` is the call's `generation_config`, or None. Errors name the parameter."""
        model_config = llm.engine.generation_config
        arguments = {
            name: v for name, v in arguments.items() if v is not None or name not in _LENGTHS
        }
        _refuse(arguments, config, model_config)
        super().__init__(SUPPORTED)
        for source in (model_config, config):
            # The model's generation_config does not set the lengths of a call.
            names = SUPPORTED.keys() - _LENGTHS if source is model_config else SUPPORTED
            values = {name: getattr(source, name, None) for name in names}
            self.update({name: value for name, value in values.items() if value is not None})
        if _LENGTHS & arguments.keys():  # a length of the call overrides both lengths of its config
            self.update(dict.fromkeys(_LENGTHS))
        self.update({name: value for name, value in arguments.items() if name in SUPPORTED})
        if all(self[name] is not None for name in _LENGTHS):
            raise InvalidRequest(
                f"max_length={self['max_length']} and max_new_tokens={self['max_new_tokens']}: give one of "
                "them"
            )
        self._check()
        eos_ids = self["eos_token_id"]
        if "eos_token_id" not in arguments and eos_ids is None:
            eos_ids = sorted(llm.engine.admission.eos_ids)
        self.eos_ids = _ids("eos_token_id", eos_ids)
        self.pad_id: int | None = self["pad_token_id"]
        if self.pad_id is None:
            self.pad_id = declared_pad_id(llm.engine.config, getattr(llm.tokenizer, "hf", None))
        self.fill_id = next(iter(self.eos_ids), 0) if self.pad_id is None else self.pad_id

    def is_on(self, name: str) -> bool:
        """Return whether a parameter is neither None nor transformers' default."""
        value = self[name]
        return value is not None and value != SUPPORTED[name]

    def new_tokens(self, num_given: int) -> int:
        """Return the maximum number of new tokens after `num_given` columns.

        Raises:
            InvalidRequest: neither `max_length` nor `max_new_tokens` is given, or no token is left.
        """
        length, new = self["max_length"], self["max_new_tokens"]
        if new is not None:
            return int(new)
        if length is None:
            raise InvalidRequest(
                "max_length and max_new_tokens are both None: give one of them, to know how much room "
                "to reserve"
            )
        if length <= num_given:
            raise InvalidRequest(
                f"max_length={length} leaves no room for a token: there are {num_given} already, those of "
                "the session included"
            )
        return int(length - num_given)

    def min_tokens(self, num_given: int) -> int:
        """Return the number of new tokens before which no EOS id can be drawn."""
        least = self["min_new_tokens"]
        return max(0, (self["min_length"] or 0) - num_given) if least is None else int(least)

    def _check(self) -> None:
        for name in _NEVER_NONE:
            self[name] = SUPPORTED[name] if self[name] is None else self[name]
        for name in _SWITCHES:
            self[name] = flag(name, False if self[name] is None else self[name])
        for name, low in _COUNTS.items():
            if self[name] is not None:
                high = 2**63 - 1 if name.endswith("_id") else None
                self[name] = integer(name, self[name], low, high)
        beams, copies = self["num_beams"], self["num_return_sequences"]
        self.num_beams: int = beams
        self.num_copies: int = copies
        check_search(beams, self["do_sample"], self["temperature"])
        if beams > 1 and copies > beams:
            raise InvalidRequest(
                f"num_return_sequences={copies}: must be at most num_beams={beams}"
            )
        if beams == 1 and copies > 1 and not self["do_sample"]:
            raise InvalidRequest(
                f"num_return_sequences={copies}: greedy decoding returns the same sequence "
                f"{copies} times; set do_sample=True or num_beams"
            )
        for name in ("output_scores", "output_logits"):
            if self[name] and not self["return_dict_in_generate"]:
                raise InvalidRequest(f"{name}=True: needs return_dict_in_generate=True")
            if self[name] and beams > 1:
                raise NotSupported(
                    f"{name}=True with num_beams={beams}: scores of dropped beams are not kept; "
                    "sequences_scores is always returned"
                )


def _refuse(arguments: Mapping[str, Any], config: Any, model_config: Any) -> None:
    """Raise for unsupported and unknown parameters."""
    if config is not None and not hasattr(config, "to_diff_dict"):
        raise InvalidRequest(f"generation_config={config!r}: must be a GenerationConfig or None")
    fields = {} if config is None else vars(config)
    labels = {n: "generation_config: " for n, v in fields.items() if v is not None and n[0] != "_"}
    for name, label in {**labels, **dict.fromkeys(arguments, "")}.items():
        if name not in _KNOWN:
            raise InvalidRequest(f"{label}{name} is not a parameter of generate")
    for label, values, refused in (
        ("", arguments, REFUSED | _IMPLEMENTATION),
        ("generation_config: ", fields, REFUSED),
        ("the model's generation_config: ", getattr(model_config, "__dict__", {}), REFUSED),
    ):
        for name, value in values.items():
            if name in refused and not (label and name in arguments) and not is_off(name, value):
                shown = f"={value!r}" if isinstance(value, _SHOWN) else ""
                raise NotSupported(f"{label}{name}{shown}: {refused[name]}")


def is_off(name: str, value: Any) -> bool:
    """Return whether the value of an unsupported parameter means that it is not used."""
    if name == "token_type_ids" and isinstance(value, Tensor):
        return not value.any()  # tokenizers return them for models without segments, too
    return value is None or value is False or value in _OFF_VALUES.get(name, ())


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    value = value.tolist() if hasattr(value, "tolist") else value
    entries = value if isinstance(value, list | tuple) else [value]
    ids = [integer(name, entry, -1, 2**63 - 1) for entry in entries]
    return tuple(dict.fromkeys(i for i in ids if i >= 0))  # -1 means none
