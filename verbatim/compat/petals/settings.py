"""The generation parameters of a call: the caller's, else the model's, else transformers' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from verbatim.checks import integer
from verbatim.compat.batches import by_name, check_search, flag, pad_id_of
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.llm import LLM

# Supported parameters, with transformers' defaults.
DONE: dict[str, Any] = dict.fromkeys(
    "max_length max_new_tokens min_length min_new_tokens min_p top_h bad_words_ids sequence_bias "
    "forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens watermarking_config max_time stop_strings pad_token_id bos_token_id "
    "eos_token_id".split()
)
_SWITCHES = (
    "do_sample remove_invalid_values renormalize_logits return_dict_in_generate output_scores "
    "output_logits".split()
)
DONE |= dict.fromkeys((*_SWITCHES, "early_stopping"), False)
DONE |= dict.fromkeys(("num_beams", "num_return_sequences"), 1)
DONE |= dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0)
DONE |= dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), 0.0) | {"top_k": 50}
DONE |= dict.fromkeys(
    "temperature top_p typical_p repetition_penalty encoder_repetition_penalty length_penalty".split(),
    1.0,
)
_COUNTS = {"num_beams": 1, "num_return_sequences": 1, "max_length": 1, "max_new_tokens": 1}
_COUNTS |= {"min_length": 0, "min_new_tokens": 0, "top_k": 0, "no_repeat_ngram_size": 0}
_COUNTS |= {"encoder_no_repeat_ngram_size": 0, "pad_token_id": 0, "bos_token_id": 0}
_LENGTHS = frozenset({"max_length", "max_new_tokens"})  # None means not named
_NEVER_NONE = frozenset(
    {"do_sample", "num_beams", "num_return_sequences", "temperature", "length_penalty"}
)

# Parameters that would change tokens or output and that the engine does not run, with the reason.
REFUSED = by_name(
    {
        "a second, unconditional prompt is not run beside the first": (
            "guidance_scale negative_prompt_ids negative_prompt_attention_mask"
        ),
        'drafts belong to the model: open it with draft=, a folder or "ngram"': "assistant_model",
        "the loop over tokens is the engine's": "custom_generate",
        "ids go in; embeddings are the first stage's own": "inputs_embeds",
        "K and V stay where they were computed; to go on, use a session": "past_key_values",
        "positions are those of a row's tokens, without its pads": "position_ids",
        "there is one segment, 0": "token_type_ids",
        "prompts are taken as they are": "token_healing",
        "contrastive search is not built": "penalty_alpha",
        "decoding from the difference of layers is not built": "dola_layers",
        "beams are searched for in one way here; use num_beams": (
            "diversity_penalty num_beam_groups constraints force_words_ids"
        ),
        "attention is computed block by block and not kept": "output_attentions",
        "use LLM.generate with SamplingParams(hidden_states=True)": "output_hidden_states",
        'use draft="mtp" when the model is opened': "use_mtp",
    }
)
_OFF: dict[str, tuple[Any, ...]] = {"guidance_scale": (1, 1.0), "num_beam_groups": (1,)}
_OFF |= {"diversity_penalty": (0.0,), "penalty_alpha": (0.0,)}
# What transformers' own `generate` does not do: for these it runs code of the hub, or they are of Petals.
NOT_OWN = (
    "penalty_alpha dola_layers diversity_penalty num_beam_groups constraints force_words_ids "
    "custom_generate past_key_values"
).split()
# How transformers would compute it: ignored in a model's or a caller's config, but refused
# when named in the call.
_HOW = by_name(
    {
        "K and V lie in the engine's own blocks; a folder is opened with kv_dtype= and kv_memory=": (
            "cache_implementation cache_config max_cache_len"
        ),
        "chunks are max_batch_tokens= of the model": "prefill_chunk_size",
        "nothing is compiled": "compile_config",
        "beams are searched for in one way here; use num_beams": "low_memory",
        'drafts belong to the model: open it with draft=, such as draft="ngram"': (
            "is_assistant num_assistant_tokens num_assistant_tokens_schedule "
            "assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size "
            "assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight "
            "speculation_type"
        ),
        "all rows and calls are batched continuously": "continuous_batching_config",
        "it is for encoder-decoder models": "decoder_start_token_id",
    }
)
# Accepted; no token depends on them.
_HARMLESS = {"use_cache", "disable_compile", "transformers_version", "return_legacy_cache"}
_KNOWN = DONE.keys() | REFUSED.keys() | _HOW.keys() | _HARMLESS
_SHOWN = (bool, int, float, str, list, tuple, dict)  # values that messages show


class Settings(dict[str, Any]):
    """The checked parameters of a call, by the names of `DONE`.

    The caller's value applies, also None (off); then that of the caller's `generation_config`, of the
    model's, and transformers' default.

    Attributes:
        num_beams: of each row.
        num_copies: number of result rows per input row.
        eos_ids: ids that end a row.
        pad_id: fills a row after its end; None if unspecified.
        fill_id: the id after a row's end: the pad id, else the first end of sequence, else 0.
    """

    def __init__(self, llm: LLM, given: Mapping[str, Any], config: Any) -> None:
        """
        Args:
            given: names and values of the call.
            config: the call's `generation_config`, or None.

        Raises:
            InvalidRequest, NotSupported: the message names the parameter.
        """
        model_config = llm.engine.generation_config
        given = {name: v for name, v in given.items() if v is not None or name not in _LENGTHS}
        _refuse(given, config, model_config)
        super().__init__(DONE)
        for source in (model_config, config):
            # The model's generation_config does not set the lengths of a call.
            names = DONE.keys() - _LENGTHS if source is model_config else DONE
            values = {name: getattr(source, name, None) for name in names}
            self.update({name: value for name, value in values.items() if value is not None})
        if _LENGTHS & given.keys():  # a length of the call replaces the other one of its config
            self.update(dict.fromkeys(_LENGTHS))
        self.update({name: value for name, value in given.items() if name in DONE})
        if all(self[name] is not None for name in _LENGTHS):
            raise InvalidRequest(
                f"max_length={self['max_length']} and max_new_tokens={self['max_new_tokens']}: give one of "
                "them"
            )
        self._check()
        eos_ids = self["eos_token_id"]
        if "eos_token_id" not in given and eos_ids is None:
            eos_ids = sorted(llm.engine.admission.eos_ids)
        self.eos_ids = _ids("eos_token_id", eos_ids)
        self.pad_id: int | None = self["pad_token_id"]
        if self.pad_id is None:
            self.pad_id = pad_id_of(llm.engine.config, getattr(llm.tokenizer, "hf", None))
        self.fill_id = next(iter(self.eos_ids), 0) if self.pad_id is None else self.pad_id

    def is_on(self, name: str) -> bool:
        """Return whether a parameter is neither None nor transformers' default."""
        value = self[name]
        return value is not None and value != DONE[name]

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
        """Return the number of new tokens before which no end of sequence can be drawn."""
        least = self["min_new_tokens"]
        return max(0, (self["min_length"] or 0) - num_given) if least is None else int(least)

    def _check(self) -> None:
        for name in _NEVER_NONE:
            self[name] = DONE[name] if self[name] is None else self[name]
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
                f"num_return_sequences={copies}: at most num_beams={beams} are found"
            )
        if beams == 1 and copies > 1 and not self["do_sample"]:
            raise InvalidRequest(
                f"num_return_sequences={copies}: the likeliest tokens are {copies} times the same; set "
                "do_sample=True or num_beams"
            )
        for name in ("output_scores", "output_logits"):
            if self[name] and not self["return_dict_in_generate"]:
                raise InvalidRequest(f"{name}=True: needs return_dict_in_generate=True")
            if self[name] and beams > 1:
                raise NotSupported(
                    f"{name}=True with num_beams={beams}: beams that are dropped leave nothing behind; "
                    "sequences_scores is there without it"
                )


def _refuse(given: Mapping[str, Any], config: Any, model_config: Any) -> None:
    """Raise for unsupported and unknown parameters."""
    if config is not None and not hasattr(config, "to_diff_dict"):
        raise InvalidRequest(f"generation_config={config!r}: must be a GenerationConfig or None")
    own = {} if config is None else vars(config)
    labels = {n: "generation_config: " for n, v in own.items() if v is not None and n[0] != "_"}
    for name, label in {**labels, **dict.fromkeys(given, "")}.items():
        if name not in _KNOWN:
            raise InvalidRequest(f"{label}{name} is not known: it is no parameter of generate")
    for label, values, refused in (
        ("", given, REFUSED | _HOW),
        ("generation_config: ", own, REFUSED),
        ("the model's generation_config: ", getattr(model_config, "__dict__", {}), REFUSED),
    ):
        for name, value in values.items():
            if name in refused and not (label and name in given) and not is_off(name, value):
                shown = f"={value!r}" if isinstance(value, _SHOWN) else ""
                raise NotSupported(f"{label}{name}{shown}: {refused[name]}")


def is_off(name: str, value: Any) -> bool:
    """Return whether the value of an unsupported parameter means that it is not used."""
    if name == "token_type_ids" and isinstance(value, Tensor):
        return not value.any()  # tokenizers return them for models without segments, too
    return value is None or value is False or value in _OFF.get(name, ())


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    value = value.tolist() if hasattr(value, "tolist") else value
    many = value if isinstance(value, list | tuple) else [value]
    ids = [integer(name, entry, -1, 2**63 - 1) for entry in many]
    return tuple(dict.fromkeys(i for i in ids if i >= 0))  # -1 ends nothing
