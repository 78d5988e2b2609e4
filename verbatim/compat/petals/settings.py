"""The generation parameters of a call: what the caller says, else the model, else transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.compat.integers import integer
from verbatim.errors import InvalidRequest, NotSupported
from verbatim.llm import LLM

# What is done, with transformers' defaults.
DONE: dict[str, Any] = {
    "max_length": None,
    "max_new_tokens": None,
    "min_length": None,
    "min_new_tokens": None,
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "watermarking_config": None,
    "renormalize_logits": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "max_time": None,
    "stop_strings": None,
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SWITCHES = (
    "do_sample",
    "remove_invalid_values",
    "renormalize_logits",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
)
_COUNTS = {"num_beams": 1, "num_return_sequences": 1, "max_length": 1, "max_new_tokens": 1}
_COUNTS |= {"min_length": 0, "min_new_tokens": 0, "top_k": 0, "no_repeat_ngram_size": 0}
_COUNTS |= {"encoder_no_repeat_ngram_size": 0, "pad_token_id": 0, "bos_token_id": 0}
_NEVER_NONE = frozenset(
    {"do_sample", "num_beams", "num_return_sequences", "temperature", "length_penalty"}
)

_BEAMS = "beams are searched for in one way here; use num_beams"
_DRAFTS = 'drafts belong to the model: open it with draft=, such as draft="ngram"'
_KV = "K and V lie in the engine's own blocks; a folder is opened with kv_dtype= and kv_memory="
# What would change the tokens or the output and is not done, whoever asks for it: why.
REFUSED: dict[str, str] = {
    "guidance_scale": "a second, unconditional prompt is not run beside the first",
    "token_healing": "prompts are taken as they are",
    "penalty_alpha": "contrastive search is not built",
    "dola_layers": "decoding from the difference of layers is not built",
    "diversity_penalty": _BEAMS,
    "num_beam_groups": _BEAMS,
    "constraints": _BEAMS,
    "force_words_ids": _BEAMS,
    "output_attentions": "attention is computed block by block and not kept",
    "output_hidden_states": "use LLM.generate with SamplingParams(hidden_states=True)",
    "use_mtp": 'use draft="mtp" when the model is opened',
}
_OFF: dict[str, tuple[Any, ...]] = {"guidance_scale": (1, 1.0), "num_beam_groups": (1,)}
_OFF |= {"diversity_penalty": (0.0,), "penalty_alpha": (0.0,)}
# How transformers would compute it: in a model's or a caller's config they mean nothing here. A caller who
# names them in the call is told so.
_HOW: dict[str, str] = {
    "cache_implementation": _KV,
    "cache_config": _KV,
    "max_cache_len": _KV,
    "prefill_chunk_size": "chunks are max_batch_tokens= of the model",
    "compile_config": "nothing is compiled",
    "low_memory": _BEAMS,
    "is_assistant": _DRAFTS,
    "num_assistant_tokens": _DRAFTS,
    "num_assistant_tokens_schedule": _DRAFTS,
    "assistant_confidence_threshold": _DRAFTS,
    "prompt_lookup_num_tokens": _DRAFTS,
    "max_matching_ngram_size": _DRAFTS,
    "assistant_early_exit": _DRAFTS,
    "assistant_lookbehind": _DRAFTS,
    "target_lookbehind": _DRAFTS,
    "assistant_ensemble_weight": _DRAFTS,
    "speculation_type": _DRAFTS,
    "continuous_batching_config": "all rows and calls are batched continuously",
    "decoder_start_token_id": "it is for encoder-decoder models",
}
# Taken, and no token depends on them.
_HARMLESS = frozenset({"use_cache", "disable_compile"})
_META = frozenset({"transformers_version", "return_legacy_cache"})


class Settings(Mapping[str, Any]):
    """What a call asks for: the names of `DONE`, checked.

    A value that the caller gives counts, None (off) too; then that of the caller's `generation_config`, the
    model's, and transformers' default.

    Attributes:
        eos_ids: what ends a row.
        pad_id: what fills a row after its end, None where nobody names one.
    """

    def __init__(self, llm: LLM, given: Mapping[str, Any], config: Any) -> None:
        """
        Args:
            given: names and values of the call.
            config: the call's `generation_config`, or None.

        Raises:
            InvalidRequest, NotSupported: the message names the parameter.
        """
        own = llm.engine.generation_config
        lengths = ("max_length", "max_new_tokens")  # None is as if they were not named
        given = {name: v for name, v in given.items() if v is not None or name not in lengths}
        _refuse(given, config, own)
        self._values = dict(DONE)
        for name in DONE:
            # What some earlier prompt was to come to is no wish of this call.
            sources = (config,) if name in lengths else (config, own)
            found = [getattr(source, name, None) for source in sources]
            found = [value for value in found if value is not None]
            if name in given:
                self._values[name] = given[name]
            elif found:
                self._values[name] = found[0]
        self._lengths_of_one_source(given)
        self._check()
        named = given.get("eos_token_id", self["eos_token_id"])
        if "eos_token_id" not in given and named is None:
            named = sorted(llm.engine.admission.eos_ids)
        self.eos_ids = _ids("eos_token_id", named)
        self.pad_id: int | None = self["pad_token_id"]
        tokenizer = None if llm.tokenizer is None else llm.tokenizer.hf
        for source in (llm.engine.config, tokenizer):
            known = getattr(source, "pad_token_id", None)
            if self.pad_id is None and isinstance(known, int) and known >= 0:
                self.pad_id = known

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_beams(self) -> int:
        return int(self["num_beams"])

    @property
    def num_copies(self) -> int:
        """Rows of the result for each row given."""
        return int(self["num_return_sequences"])

    @property
    def fill_id(self) -> int:
        """What stands behind the end of a row: the pad id, else the first end of sequence, else 0."""
        return self.pad_id if self.pad_id is not None else next(iter(self.eos_ids), 0)

    def new_tokens(self, num_given: int) -> int:
        """How many tokens a row may get behind `num_given` columns.

        Raises:
            InvalidRequest: neither `max_length` nor `max_new_tokens` is given, or `max_length` leaves none.
        """
        length, new = self["max_length"], self["max_new_tokens"]
        if new is not None:
            return int(new)
        if length is None:
            raise InvalidRequest(
                "max_length and max_new_tokens are both None: give one of them, or nobody knows how much "
                "room to reserve"
            )
        if length <= num_given:
            raise InvalidRequest(
                f"max_length={length} leaves no room for a token: there are {num_given} already, those of "
                "the session included"
            )
        return int(length - num_given)

    def min_tokens(self, num_given: int) -> int:
        """Before so many new tokens no end of sequence can be drawn."""
        least = self["min_new_tokens"]
        return max(0, (self["min_length"] or 0) - num_given) if least is None else int(least)

    def _lengths_of_one_source(self, given: Mapping[str, Any]) -> None:
        """A length in the call replaces the other one in its `generation_config`."""
        names = ("max_length", "max_new_tokens")
        said = [name for name in names if given.get(name) is not None]
        if said:
            for name in names:
                self._values[name] = given.get(name)
        if all(self[name] is not None for name in names):
            raise InvalidRequest(
                f"max_length={self['max_length']} and max_new_tokens={self['max_new_tokens']}: give one of "
                "them"
            )

    def _check(self) -> None:
        values = self._values
        if isinstance(values["do_sample"], int):  # 0 and 1, as in the first versions of Petals
            values["do_sample"] = bool(values["do_sample"])
        for name in _NEVER_NONE:
            values[name] = DONE[name] if values[name] is None else values[name]
        for name in _SWITCHES:
            if not isinstance(values[name], bool | None):
                raise InvalidRequest(f"{name}={values[name]!r}: must be True or False")
            values[name] = bool(values[name])
        for name, low in _COUNTS.items():
            if values[name] is not None:
                values[name] = integer(name, values[name], low)
        beams, copies = self.num_beams, self.num_copies
        if beams > 1 and values["do_sample"]:
            raise NotSupported(
                f"num_beams={beams} with do_sample=True: beams search and do not sample; set do_sample=False"
            )
        if beams > 1 and copies > beams:
            raise InvalidRequest(
                f"num_return_sequences={copies}: at most num_beams={beams} are found"
            )
        if beams == 1 and copies > 1 and not values["do_sample"]:
            raise InvalidRequest(
                f"num_return_sequences={copies}: the likeliest tokens are {copies} times the same; set "
                "do_sample=True or num_beams"
            )
        for name in ("output_scores", "output_logits"):
            if values[name] and not values["return_dict_in_generate"]:
                raise InvalidRequest(f"{name}=True: needs return_dict_in_generate=True")
            if values[name] and beams > 1:
                raise NotSupported(
                    f"{name}=True with num_beams={beams}: beams that are dropped leave nothing behind; "
                    "sequences_scores is there without it"
                )
        if values["do_sample"] and values["temperature"] == 0:
            raise InvalidRequest(
                "temperature=0: must be above 0; the likeliest token is do_sample=False"
            )


def _refuse(given: Mapping[str, Any], config: Any, own: Any) -> None:
    """Name what is not done or not known."""
    for name, value in given.items():
        if name in REFUSED or name in _HOW:
            if not _is_off(name, value):
                raise NotSupported(f"{name}={value!r}: {REFUSED.get(name) or _HOW[name]}")
        elif name not in DONE and name not in _HARMLESS:
            raise InvalidRequest(f"{name} is not known: it is no parameter of generate")
    if config is not None and not hasattr(config, "to_diff_dict"):
        raise InvalidRequest(f"generation_config={config!r}: must be a GenerationConfig or None")
    for name, value in [] if config is None else list(vars(config).items()):
        known = name in DONE or name in REFUSED or name in _HOW or name in _HARMLESS | _META
        if not known and not name.startswith("_") and value is not None:
            raise InvalidRequest(f"generation_config: {name} is not known")
    for source, whose in ((config, "generation_config"), (own, "the model's generation_config")):
        for name, why in REFUSED.items():
            value = getattr(source, name, None)
            if name not in given and not _is_off(name, value):
                raise NotSupported(f"{whose}: {name}={value!r}: {why}")


def _is_off(name: str, value: Any) -> bool:
    return value is None or value is False or value in _OFF.get(name, ())


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    value = value.tolist() if hasattr(value, "tolist") else value
    many = value if isinstance(value, list | tuple) else [value]
    found = [integer(name, entry, -1) for entry in many]
    return tuple(dict.fromkeys(i for i in found if i >= 0))  # -1 ends nothing
