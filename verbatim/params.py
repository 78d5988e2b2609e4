"""`SamplingParams`: the parameters of a request, validated at construction."""

from __future__ import annotations

import dataclasses
import json
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from verbatim.common.checks import (
    as_index,
    check_fields,
    integer,
    number,
    optional_integer,
    optional_seconds,
)
from verbatim.common.spelling import suggests_names
from verbatim.errors import InvalidRequest, NotSupported

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_LOGPROBS = 1024
MAX_N = 4096

MAX_BEAMS = 64
MAX_PRIORITY = 1_000_000
MAX_PROCESSORS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 4096
MAX_STRUCTURE_CHARS = 131_072  # of a schema, a regex, a grammar, or all choices together
_FLOAT32_MAX = 3.4028235e38

# Choices of layers for each token that a request can record and replay: experts, keys.
CHOICES = ("routing", "indices")
STRUCTURES = ("json_schema", "regex", "grammar", "choice")  # at most one of them in a request

_NOT_HASHED = frozenset({"logit_bias", "replay_routing", "replay_indices"})


@suggests_names
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingParams:
    """Sampling parameters, stop conditions and requested outputs of one request.

    The order of processing is: `logits_processors`, penalties and `logit_bias`, bans (`bad_words`,
    `allowed_token_ids`, `min_tokens`), structured output, temperature, top-k, top-p, min-p, typical.
    Filters receive float32 logits.

    Attributes:
        n: completions per prompt, 1 to 4096; completion `i` draws with sample index `i`.
        temperature: divisor of the logits; 0 is greedy (ties: the lowest id).
        top_k: keep the k largest logits (ties at the k-th are kept); 0 keeps all.
        top_p: keep the smallest set of the likeliest tokens with a total probability of at least `top_p`,
            in (0, 1].
        min_p: drop tokens less likely than `min_p` times the likeliest, in [0, 1].
        typical_p: keep the tokens with a surprisal nearest to the entropy, up to this total probability,
            in (0, 1] (Meister et al. 2022).
        repetition_penalty: positive logits of ids in the prompt or completion are divided by it,
            negative ones multiplied (Keskar et al. 2019); above 0.
        presence_penalty: subtracted once from the logit of every id in the completion, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the completion, in [-2, 2].
        logit_bias: number to add to the logit, by token id.
        bad_words: strings, or lists of ids, that are never generated; at most 4096.
        allowed_token_ids: the only ids that may be drawn; None allows all.
        min_tokens: number of tokens before which end-of-sequence ids and stop ids are banned, and stop
            strings do not end the completion.
        max_tokens: maximum number of new tokens; None: up to the length limit.
        stop: strings that end the completion; the text is cut before the string.
        stop_token_ids: ids, or lists of ids, that end the completion; they stay in `token_ids`.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: continue after the model's end-of-sequence ids.
        seed: 64-bit seed of the noise, in [0, 2**64); None: a random one, which the result reports.
        logprobs: None: log-probs of the drawn tokens; N: also those of the top N tokens of each step.
        prompt_logprobs: None: none; N: log-probs of the prompt tokens, and of the top N at each position.
        json_schema: a JSON schema as a dictionary, a bool or JSON text; the completion is a document that
            conforms to it. True (or {}) allows any JSON. The document is compact: the only whitespace is one
            space after a colon or comma.
        any_whitespace: allow the document of `json_schema` to be indented; a model may then fill it with
            line breaks.
        regex: regular expression that the whole completion matches.
        grammar: context-free grammar in llguidance's variant of Lark syntax.
        choice: strings of which one is the completion.
        num_beams: above 1: beam search as in transformers; the `n` best beams are returned. Beam search
            does not sample: the filters must be off and the temperature 1 or 0.
        length_penalty: exponent p of a beam's score, which is its summed log-probs divided by length**p.
        early_stopping: False, True or "never": when beam search stops (as in transformers).
        skip_special_tokens: leave special tokens out of the text.
        logits_processors: callables `f(ids, logits) -> logits`, applied in order: ids `[L]` int64, prompt
            and completion; logits `[V]` float32, a copy. They must be pure: a row may be drawn again
            after an eviction. An exception in one ends only this request.
        priority: lower values run earlier, as in vLLM; a difference of 1 counts like a minute of waiting,
            so no request starves.
        timeout_s: seconds from arrival after which the request ends with finish reason "timeout"; None: no
            limit.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        adapter: name of a loaded LoRA adapter; None: no adapter.
        draft: use drafts for this request, if the engine has a proposer. Outputs do not depend on it.
        record_routing: report the experts of each token (mixture-of-experts models).
        replay_routing: `[tokens, layers, k]` recorded expert ids, used for the first positions of prompt and
            completion; -1 in all k of a layer leaves that token to the router.
        record_indices: report the keys that indexers select for each token (sparse attention). Such a request
            uses no cached prefix.
        replay_indices: `[tokens, layers, k]` recorded positions, used for the first positions of prompt and
            completion, in any order, -1 where there are fewer than k; -1 in all k leaves that token to the
            indexer.
        hidden_states: report the input of the LM head for each token, `[tokens, H]`.
        support: report the ids that the filters kept for each token, and their probability mass.

    Raises:
        InvalidRequest: a value out of its range; the message names the field, the value and the range.
        NotSupported: an unsupported combination; the message names both fields.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int | Sequence[int]] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: Any = None
    any_whitespace: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    skip_special_tokens: bool = True
    logits_processors: Sequence[Callable[..., Any]] = ()
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    draft: bool = True
    record_routing: bool = False
    replay_routing: Any = None
    record_indices: bool = False
    replay_indices: Any = None
    hidden_states: bool = False
    support: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._resolve_lists()
        self._check_structure()
        self._check_beams()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingParams):
            return NotImplemented
        return all(_same(getattr(self, f), getattr(other, f)) for f in self.__slots__)

    def __hash__(self) -> int:
        # Tensors and mappings are compared, but not hashed.
        values = (getattr(self, f) for f in self.__slots__ if f not in _NOT_HASHED)
        return hash(tuple(values))

    @property
    def structure(self) -> str | None:
        """The field of structured output that is set, one of `STRUCTURES`; None if there is none."""
        return next((name for name in STRUCTURES if getattr(self, name) is not None), None)

    @property
    def records(self) -> list[str]:
        """The names in `CHOICES` that are recorded."""
        return [name for name in CHOICES if getattr(self, f"record_{name}")]

    @property
    def forces_choices(self) -> bool:
        """True if experts or keys are replayed: then K and V depend on more than the ids."""
        return any(getattr(self, f"replay_{name}") is not None for name in CHOICES)

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a validated copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        pairs = ((name, getattr(self, name), getattr(_DEFAULTS, name)) for name in self.__slots__)
        return {name: value for name, value, default in pairs if not _same(value, default)}

    def _check_numbers(self) -> None:
        check_fields(self, NUMBERS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            )

    def _resolve_lists(self) -> None:
        """Validate the list fields, and replace them by immutable copies."""

        def assign(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        assign("stop", _stop_strings(self.stop))
        assign("stop_token_ids", _id_sequences("stop_token_ids", self.stop_token_ids))
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "entries")
        assign("bad_words", _bad_words(self.bad_words))
        if self.allowed_token_ids is not None:
            name = "allowed_token_ids"
            allowed = tuple(_id(name, i) for i in _entries(name, self.allowed_token_ids))
            if not allowed:
                raise InvalidRequest("allowed_token_ids is empty: no token could be drawn")
            assign(name, allowed)
        if self.logit_bias is not None:
            assign("logit_bias", _biases(self.logit_bias))
        assign("logits_processors", _callables(self.logits_processors))
        for name, check in (("replay_routing", _routing), ("replay_indices", _indices)):
            if getattr(self, name) is not None:
                assign(name, check(_as_choices(name, getattr(self, name))))

    def _check_structure(self) -> None:
        """Validate the fields of structured output: at most one of them, and supported combinations."""
        structures = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(structures) > 1:
            raise InvalidRequest(
                f"{' and '.join(structures)}: at most one kind of structured output per request"
            )
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidRequest(f"{name}={value!r}: must be a non-empty string")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema(self.json_schema))
        if structures and self.min_tokens:
            raise NotSupported(
                f"min_tokens={self.min_tokens} with {structures[0]}: structured output decides where the "
                "completion ends"
            )
        if self.cache_salt is not None and not _is_text(self.cache_salt):
            raise InvalidRequest(f"cache_salt={self.cache_salt!r}: must be Unicode text or None")
        if self.adapter is not None and not _is_text(self.adapter):
            raise InvalidRequest(f"adapter={self.adapter!r}: must be Unicode text or None")
        for name in structures:
            text = "".join(getattr(self, name))  # a string, or a tuple of choices
            _check_count(name, len(text), MAX_STRUCTURE_CHARS, "characters")
            if not _is_text(text):
                raise InvalidRequest(f"{name}: not Unicode text: it has half a surrogate pair")

    def _check_beams(self) -> None:
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequest(
                f"early_stopping={self.early_stopping!r}: must be True, False or 'never'"
            )
        if self.num_beams == 1:
            for name, off in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != off:
                    raise NotSupported(
                        f"{name}={getattr(self, name)!r}: requires num_beams above 1"
                    )
            return
        if self.n > self.num_beams:
            raise InvalidRequest(f"n={self.n}: must be at most num_beams={self.num_beams}")
        if self.support:
            raise NotSupported(f"support with num_beams={self.num_beams}: beams are not drawn")
        filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
        for name, off in filters.items():
            if getattr(self, name) != off:
                raise NotSupported(
                    f"{name}={getattr(self, name)} with num_beams={self.num_beams}: beam search does "
                    f"not sample; leave it at {off}"
                )
        if self.temperature not in (0.0, 1.0):
            raise NotSupported(
                f"temperature={self.temperature} with num_beams={self.num_beams}: beams are ranked by the "
                "model's own log-probs; leave it at 1 (or 0)"
            )


def _same(a: Any, b: Any) -> bool:
    if hasattr(a, "equal") and hasattr(b, "equal"):  # tensors
        return bool(a.equal(b))
    return bool(a is b or (type(a) is type(b) and a == b))


def _is_text(value: Any) -> bool:
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        return False
    return isinstance(value, str)


def _check_count(what: str, count: int, most: int, unit: str) -> None:
    if count > most:
        raise InvalidRequest(f"{what} has {count} {unit}; at most {most}")


def _entries(name: str, value: Any) -> list[Any]:
    """Return the entries of a list, a tuple or an array; an empty list for None."""
    if value is None:
        return []
    if hasattr(value, "tolist") and getattr(value, "ndim", 0) > 0:
        value = value.tolist()
    if not isinstance(value, list | tuple | range):
        raise InvalidRequest(f"{name}={value!r}: must be a list")
    return list(value)


def _id(name: str, value: Any) -> int:
    index = as_index(value)
    if index is None or index < 0:
        raise InvalidRequest(f"{name}: {value!r} is not a token id (an integer, 0 or more)")
    return index


def _id_sequences(name: str, values: Any) -> tuple[tuple[int, ...], ...]:
    """Return every entry as a tuple of ids; a single id becomes a tuple of one."""
    sequences = []
    for value in _entries(name, values):
        is_list = isinstance(value, list | tuple | range) or getattr(value, "ndim", 0) > 0
        entry = _entries(name, value) if is_list else [value]
        if not entry or isinstance(value, str):
            raise InvalidRequest(f"{name}: {value!r} is neither an id nor a list of ids")
        sequences.append(tuple(_id(name, i) for i in entry))
    return tuple(sequences)


def _stop_strings(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(_entries("stop", value))
    _check_count("stop", len(stops), MAX_STOP_STRINGS, "strings")
    for text in stops:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"stop={text!r}: each stop must be a non-empty string")
        _check_count("a stop string", len(text), MAX_STOP_STRING_CHARS, "characters")
    return stops


def _bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        raise InvalidRequest(f"bad_words={value!r}: must be a list of strings")
    words: list[str | tuple[int, ...]] = []
    entries = _entries("bad_words", value)
    _check_count("bad_words", len(entries), MAX_BAD_WORDS, "entries")
    for word in entries:
        if word == "":
            raise InvalidRequest("bad_words: an empty string can't be banned")
        if isinstance(word, str):
            _check_count("a string of bad_words", len(word), MAX_STOP_STRING_CHARS, "characters")
        words += [word] if isinstance(word, str) else _id_sequences("bad_words", [word])
    return tuple(words)


def _callables(value: Any) -> tuple[Callable[..., Any], ...]:
    functions = (value,) if callable(value) else tuple(_entries("logits_processors", value))
    for function in functions:
        if not callable(function):
            raise InvalidRequest(f"logits_processors: {function!r} is not callable")
    _check_count("logits_processors", len(functions), MAX_PROCESSORS, "functions")
    return functions


def _choices(value: Any) -> tuple[str, ...]:
    choices = tuple(_entries("choice", value))
    if not choices or not all(isinstance(text, str) and text for text in choices):
        raise InvalidRequest(f"choice={value!r}: must be a list of non-empty strings")
    return choices


def _schema(value: Any) -> str:
    """Return the schema as JSON text, an immutable copy."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        if not isinstance(parsed, dict | bool):
            raise ValueError(
                "a schema must be an object, true or false; for a pydantic model, pass "
                "model_json_schema()"
            )
        return json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"json_schema is not a JSON schema: {error}") from None


def _as_choices(name: str, value: Any) -> Any:
    """Return recorded choices `[tokens, layers, k]` as int64; they may share memory with `value`."""
    import torch

    try:
        choices = torch.as_tensor(value, device="cpu").detach().to_dense()
        is_integer = choices.dtype is not torch.bool and torch.can_cast(choices.dtype, torch.int64)
        if choices.ndim == 3 and is_integer:
            return choices.long()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"{name}: {error}") from None
    raise InvalidRequest(
        f"{name} is {choices.dtype} of shape {list(choices.shape)}: must be integers of "
        "shape [tokens, layers, k]"
    )


def _routing(routing: Any) -> Any:
    """Check recorded experts, and return a copy as int16."""
    import torch

    free = (routing == -1).all(dim=-1)
    selected = routing[~free]
    if selected.numel() and not 0 <= int(selected.min()) <= int(selected.max()) < 2**15:
        raise InvalidRequest(
            "replay_routing names experts below 0 or above 32767; -1 in all k leaves it to the router"
        )
    if _repeats(selected.sort(dim=-1).values):
        raise InvalidRequest("replay_routing sends a token to the same expert twice in one layer")
    return routing.to(torch.int16, copy=True)


def _indices(indices: Any) -> Any:
    """Return a copy as int32, each row in ascending order and padded with -1."""
    import torch

    positions = torch.arange(len(indices), device="cpu")[:, None, None]  # of the tokens
    if indices.numel() and (int(indices.min()) < -1 or bool((indices > positions).any())):
        raise InvalidRequest(
            "replay_indices names positions below 0 or after the token's own; -1 fills rows with fewer than k"
        )
    last = len(indices)  # above all positions
    ordered = torch.where(indices < 0, last, indices).sort(dim=-1).values
    padding = -1 - torch.arange(indices.shape[2], device="cpu")
    if _repeats(torch.where(ordered == last, padding, ordered)):
        raise InvalidRequest("replay_indices names a position twice in one layer")
    count = (indices >= 0).sum(dim=-1, keepdim=True)
    if bool(((count > 0) & (positions < indices.shape[2]) & (count <= positions)).any()):
        raise InvalidRequest("replay_indices leaves out keys of a token that has no more than k")
    return torch.where(ordered == last, -1, ordered).to(torch.int32)


def _repeats(ordered: Any) -> bool:
    return bool((ordered[..., 1:] == ordered[..., :-1]).any())


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"logit_bias={value!r}: must map token ids to numbers")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        is_text = isinstance(key, str) and key.isascii() and key.isdigit()  # as in JSON objects
        token_id = _id("logit_bias", int(key.lstrip("0")[:20] or "0") if is_text else key)
        real = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
        if not real or not abs(bias) <= _FLOAT32_MAX:
            raise InvalidRequest(
                f"logit_bias[{token_id}]={bias!r}: must be a number in float32's range"
            )
        biases[token_id] = float(bias)
    return biases


above = partial(number, above=True)
NUMBERS: dict[str, tuple[Any, ...]] = {
    "n": (integer, 1, MAX_N),
    "temperature": (number, 0.0),
    "top_k": (integer, 0),
    "top_p": (above, 0.0, 1.0),
    "min_p": (number, 0.0, 1.0),
    "typical_p": (above, 0.0, 1.0),
    "repetition_penalty": (number, 1e-30, 1e30),  # range in which float32 can multiply and divide
    "presence_penalty": (number, -2.0, 2.0),
    "frequency_penalty": (number, -2.0, 2.0),
    "min_tokens": (integer, 0),
    "max_tokens": (optional_integer, 0),
    "seed": (optional_integer, 0, 2**64 - 1),
    "num_beams": (integer, 1, MAX_BEAMS),
    "length_penalty": (number, -100.0, 100.0),
    "priority": (integer, -MAX_PRIORITY, MAX_PRIORITY),
    "timeout_s": (partial(optional_seconds, above=True),),
    "logprobs": (optional_integer, 0, MAX_LOGPROBS),
    "prompt_logprobs": (optional_integer, 0, MAX_LOGPROBS),
}
_DEFAULTS = SamplingParams()
