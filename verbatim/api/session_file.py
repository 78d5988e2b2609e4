"""Session files: safetensors with ids, optional K and V, and metadata."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbatim.common.files import atomic_write
from verbatim.core import SessionCache
from verbatim.engine.handle import EngineHandle
from verbatim.errors import InvalidRequest, NotSupported, VerbatimError
from verbatim.params import SamplingParams
from verbatim.sampling.stopping import num_in_common

FORMAT, VERSION = "verbatim-session", 3
_CONFIG_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_NUM_PROBED = 32  # number of tokens that are scored to identify the weights


@dataclass(slots=True)
class SessionState:
    """The state of a session, in memory and in a file.

    Attributes:
        params: saved sampling parameters, for turns that pass none.
        completions: start and end of each completion in `token_ids`.
        text: text of the completion at the end of `token_ids`; "" if there is none.
        skips_special_tokens: whether `text` omits special tokens.
        kv: K and V of the first tokens, from loading until `put_kv`: their identity (`_identity_of_kv`), and
            rows of `Runner.read_cache` by kind: "blocks" and, for recurrent layers, "states", the state
            after these tokens. Unused positions of the last block are zero.
    """

    seed: int
    max_length: int
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    completions: list[tuple[int, int]] = field(default_factory=list)
    text: str = ""
    skips_special_tokens: bool = True
    kv: tuple[dict[str, Any], dict[str, Tensor]] | None = None

    def put_kv(self, engine: EngineHandle, cache: SessionCache) -> None:
        """Move loaded K and V, if any, to the session's blocks.

        If there are too few free blocks, or this engine would compute other values, they are dropped, and
        recomputed in the next turn.

        Raises:
            VerbatimError: the engine is paused or asleep.
        """
        kv, self.kv = self.kv, None
        if kv is None or kv[0] != kv[0] | _identity_of_kv(engine, self.token_ids):
            return
        runner, (identity, parts) = engine.runner, kv

        def put() -> None:
            pool, slots = engine.scheduler.pool, engine.scheduler.states
            count = -(-identity["num_tokens"] // engine.scheduler.block_size)
            try:
                empty = {kind: runner.read_cache(kind, []) for kind in parts}
            except NotSupported:
                return
            counts = {"blocks": count} | ({"states": 1} if slots.enabled else {})
            fits = counts == {kind: len(rows) for kind, rows in parts.items()}
            for kind, no_rows in empty.items():
                fits = fits and no_rows is not None and no_rows.shape[1:] == parts[kind].shape[1:]
            if not fits or pool.num_free < count or not slots.num_free(1) or cache.closed:
                return
            slots.reserve(cache, [identity["num_tokens"]])
            blocks = pool.take(count)
            numbers = {"blocks": blocks, "states": list(cache.states.values())}
            written = False
            try:
                written = all(
                    runner.write_cache(kind, numbers[kind], rows) for kind, rows in parts.items()
                )
            finally:
                if not written:
                    pool.release(blocks)
                    slots.keep_only(cache, -1)
            if written:
                engine.sessions.load(cache, self.token_ids[: identity["num_tokens"]], blocks)

        engine.call(put)


def write_session(
    path: str | os.PathLike[str],
    engine: EngineHandle,
    saved: SessionState,
    cache: SessionCache | None,
) -> None:
    """Write a session, with the K and V in `cache` unless it is None.

    Raises:
        NotSupported: K and V, or params, that can't be written.
        InvalidRequest: the file can't be written.
        VerbatimError: K and V of an engine that is paused.
    """
    from safetensors.torch import save

    target = _path("save", path)
    tensors = {"token_ids": torch.tensor(saved.token_ids, dtype=torch.int64, device="cpu")}
    plain: dict[str, Any] = {
        "completions": saved.completions,
        "text": saved.text,
        "seed": saved.seed,
        "max_length": saved.max_length,
        "params": _plain_params(saved.params),
        "skip_special_tokens": saved.skips_special_tokens,
        "model": _identity(engine),
        "numerics_key": engine.info()["numerics_key"],
    }
    kv = None if cache is None else _copy_kv(engine, saved.token_ids, cache)
    if kv is not None:
        plain["kv"] = kv[0] | {"rows": list(kv[1])}
        tensors |= kv[1]
    session = json.dumps(plain)
    metadata = {"format": FORMAT, "version": str(VERSION), "session": session}
    metadata["digest"] = _digest(session, tensors)
    data = save(tensors, metadata)
    try:
        with atomic_write(target, ".session-") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise InvalidRequest(f"save: {str(path)!r} can't be written: {error}") from error


def read_session(path: str | os.PathLike[str], engine: EngineHandle) -> SessionState:
    """Read a session that this engine can continue.

    Raises:
        InvalidRequest: not a session file, a damaged one, or one from another model.
    """
    from safetensors import SafetensorError, safe_open

    def refuse(why: object) -> InvalidRequest:
        return InvalidRequest(f"load={str(path)!r}: {why}")

    if not _path("load", path).is_file():
        raise refuse("no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise refuse("not a session; session.save writes them")
            if metadata.get("version") != str(VERSION):
                raise refuse(f"version {metadata.get('version')} is not known; this is {VERSION}")
            plain = json.loads(metadata["session"])
            tensors = {"token_ids": file.get_tensor("token_ids")}
            saved = _parse_session(plain, tensors["token_ids"])
            saved_key = plain["numerics_key"]
            if "kv" in plain:
                kv = plain["kv"]
                rows = {kind: file.get_tensor(kind) for kind in kv.pop("rows")}
                tensors |= rows
                if "blocks" not in rows or not rows.keys() <= {"blocks", "states"}:
                    raise ValueError(f"K and V as {list(rows)}")
                if any(x.dtype is not torch.uint8 or x.ndim != 2 for x in rows.values()):
                    raise ValueError("K and V are not rows of bytes")
                num_tokens = kv["num_tokens"]
                if type(num_tokens) is not int or not 0 < num_tokens <= len(saved.token_ids):
                    raise ValueError(f"K and V of {num_tokens} tokens")
                saved.kv = kv, rows
    except InvalidRequest:
        raise
    except SafetensorError:  # its message may quote the file
        raise refuse("a damaged file, or not a session") from None
    # For a damaged file, safetensors, JSON and the checks above raise many types of exceptions.
    except Exception as error:
        raise refuse(f"a damaged file, or not a session: {error}") from error
    if (reason := _model_mismatch(plain["model"], _identity(engine))) is not None:
        raise refuse(reason)
    invalid_ids = [i for i in saved.token_ids if not 0 <= i < engine.admission.vocab_size]
    if invalid_ids:
        raise refuse(f"id {invalid_ids[0]} is outside 0 to {engine.admission.vocab_size - 1}")
    if len(saved.token_ids) > engine.admission.max_length:
        raise refuse(
            f"{len(saved.token_ids)} tokens; this engine's limit is {engine.admission.max_length}"
        )
    if metadata.get("digest") != _digest(metadata["session"], tensors):
        raise refuse("a damaged file: its contents do not match their digest")
    if saved_key != (key := engine.info()["numerics_key"]):
        saved.kv = None
        warnings.warn(
            f"the session was saved with numerics key {saved_key} and continues with {key}: "
            "its next tokens may differ from those with the original key",
            RuntimeWarning,
            stacklevel=5,
        )
    return saved


def _parse_session(plain: dict[str, Any], token_ids: Tensor) -> SessionState:
    """Validate the parts of a file, and return the session."""
    ids = token_ids.tolist()
    if token_ids.ndim != 1 or token_ids.dtype is not torch.int64:
        raise ValueError(f"token_ids is {token_ids.dtype} of shape {list(token_ids.shape)}")
    last, completions = 0, []
    for begin, end in plain["completions"]:
        if not (type(begin) is type(end) is int and last <= begin <= end <= len(ids) and begin):
            raise ValueError(f"a completion from {begin} to {end} of {len(ids)} tokens")
        completions.append((begin, end))
        last = end
    if not isinstance(plain["text"], str) or not isinstance(plain["model"], dict):
        raise ValueError("no text, or no model")
    seed = SamplingParams(seed=plain["seed"]).seed
    if seed is None or type(plain["max_length"]) is not int or plain["max_length"] < len(ids):
        raise ValueError(f"seed={seed}, max_length={plain['max_length']}")
    params, skips = SamplingParams(**plain["params"]), plain["skip_special_tokens"]
    if not isinstance(skips, bool):
        raise ValueError(f"skip_special_tokens={skips}")
    return SessionState(seed, plain["max_length"], params, ids, completions, plain["text"], skips)


def _path(what: str, path: Any) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise InvalidRequest(f"{what}={path!r}: must be a path") from None


def _digest(session: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the file's contents, to detect damage."""
    digest = hashlib.blake2b(session.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _plain_params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from the defaults."""
    plain = params.changed()
    for name in ("logits_processors", "replay_routing", "replay_indices"):
        if len(plain.pop(name, ())):
            raise NotSupported(f"save: the session's params have {name}, which can't be saved")
    return plain


def _identity(engine: EngineHandle) -> dict[str, Any]:
    """Return the properties that identify a model, apart from its weights."""
    shape = {name: getattr(engine.config, name, None) for name in _CONFIG_FIELDS}
    plain = {name: value for name, value in shape.items() if isinstance(value, int | str)}
    vocabulary = None
    if engine.admission.tokenizer is not None:
        entries = sorted(
            engine.admission.tokenizer.hf.get_vocab().items(),
            key=lambda entry: (entry[1], entry[0]),
        )
        vocabulary = hashlib.blake2b(json.dumps(entries).encode(), digest_size=16).hexdigest()
    return {
        "name": engine.name,
        "vocab_size": engine.admission.vocab_size,
        "config": plain,
        "tokenizer": vocabulary,
    }


def _model_mismatch(saved: dict[str, Any], current: dict[str, Any]) -> str | None:
    """Return why the current model can't continue a session of the saved one; None if it can."""
    for name in ("vocab_size", "config"):
        if saved.get(name) != current[name]:
            return (
                f"a session of another model, {saved.get('name')!r}: its {name} is {saved.get(name)}, "
                f"the {name} of {current['name']!r} is {current[name]}"
            )
    both_known = saved.get("tokenizer") is not None and current["tokenizer"] is not None
    if both_known and saved["tokenizer"] != current["tokenizer"]:
        return f"a session of {saved.get('name')!r}, which has a different tokenizer"
    return None


def _identity_of_kv(engine: EngineHandle, token_ids: list[int]) -> dict[str, Any]:
    """Return properties that identify the K and V of a session, besides their number and the numerics key.

    A digest of the log-probs of some tokens identifies the weights.

    Raises:
        VerbatimError: the engine is paused or asleep.
    """
    info = engine.info()
    layout = info["kv_dtype"], info.get("attention", "exact"), info.get("ranks")
    probe_ids = token_ids[: min(_NUM_PROBED, engine.admission.max_length) - 1]
    # One more token after them: its log-prob depends on the last one's K and V.
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    request = engine.admission.admit([*probe_ids, token_ids[0]], params)
    engine.submit(request)
    try:
        while True:
            engine.check_running()  # in a loop, since `run` would wait for `resume`
            if request.finished:
                break
            engine.step_or_wait(lambda: request.finished)
    finally:
        engine.abort(request)
    if request.error is not None:
        raise request.error
    result = request.result
    assert result is not None and result.prompt_logprobs is not None
    if len(result.prompt_logprobs) <= len(probe_ids):
        raise VerbatimError(
            "the engine was paused in the meantime, which aborted the check of K and V"
        )
    scores = result.prompt_logprobs[1:]
    packed = struct.pack(f"<{len(scores)}d", *scores)
    return {
        "layout": [engine.scheduler.block_size, *layout],
        "probe": hashlib.blake2b(packed, digest_size=16).hexdigest(),
    }


def _copy_kv(
    engine: EngineHandle, token_ids: list[int], cache: SessionCache
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Return a copy of a session's K and V, in the format of `SessionState.kv`; None if there are none."""
    runner, size = engine.runner, engine.scheduler.block_size
    version = engine.stats()["weight_version"]

    def take() -> tuple[dict[str, Tensor | None], int]:
        num_tokens = num_in_common(cache.token_ids, token_ids)
        if cache.adapter:
            raise NotSupported("an adapter computed the session's K and V")
        if runner.num_states and num_tokens not in cache.states:
            num_tokens = 0
        blocks = cache.blocks[: -(-num_tokens // size)]
        used = num_tokens - (len(blocks) - 1) * size if blocks else None
        rows = {"blocks": runner.read_cache("blocks", blocks, used)}
        if runner.num_states and num_tokens:
            rows["states"] = runner.read_cache("states", [cache.states[num_tokens]])
        return rows, num_tokens

    try:
        rows_by_kind, num_tokens = engine.call(take)
    except NotSupported as error:
        raise NotSupported(
            f"save(kv=True): {error}; leave kv=False, they are computed again"
        ) from None
    rows = {kind: tensor for kind, tensor in rows_by_kind.items() if tensor is not None}
    if not num_tokens or len(rows) < len(rows_by_kind):  # a stage of the cluster is lost
        return None
    identity = _identity_of_kv(engine, token_ids)
    # The forward for it may have noticed that the weights are new.
    if engine.stats()["weight_version"] != version:
        return None
    return identity | {"num_tokens": num_tokens}, rows
