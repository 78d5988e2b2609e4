"""Options of an engine that are common to all placements."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from verbatim.common.checks import (
    budget,
    check_fields,
    integer,
    memory_bytes,
    optional_integer,
    path,
)
from verbatim.errors import InvalidRequest, OutOfBlocks
from verbatim.kv.store import LayerShape, bytes_per_token
from verbatim.model.device import CPU, Device
from verbatim.model.draft_layers import DraftLayers
from verbatim.model.early_exit import EarlyExit
from verbatim.model.loader import LoadedModel
from verbatim.model.mtp_source import Mtp
from verbatim.model.spec import ModelSpec
from verbatim.options import thread_count
from verbatim.protocols import Runner
from verbatim.quantization.formats import (
    KVDtype,
    Quantization,
    resolve_kv_dtype,
    resolve_quantization,
)

_MAX_BATCH_TOKENS = 2048
_MAX_FREE_BLOCKS = 1 << 20  # blocks of a model without K and V, and without a length limit
_SNAPSHOTS = 64  # slots of recurrent states for cached prefixes, in addition to running sequences
DEFAULT_FOLDER_BYTES = "10GB"  # limit for prefixes in files
DEFAULT_KV_SHARE = 0.4  # fraction of the memory available when the model is opened
_NUMBERS: dict[str, tuple[Any, ...]] = {  # of `EngineOptions`
    **dict.fromkeys(("block_size", "max_batch_tokens", "max_sequences"), (integer,)),
    **dict.fromkeys(("max_waiting", "max_length"), (optional_integer,)),
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The validated engine options of `LLM`; its docstring describes them."""

    kv_dtype: KVDtype | None = None  # None: the dtype of the model's keys
    kv_bytes: int | None = None  # None: `DEFAULT_KV_SHARE` of the available memory
    block_size: int = 16
    max_batch_tokens: int = _MAX_BATCH_TOKENS
    max_sequences: int = 256
    max_waiting: int | None = None
    max_length: int | None = None
    prefix_cache: bool = True
    num_threads: int | None = None
    quantization: Quantization | None = None  # of the weights
    plan_sets_batch_tokens: bool = False  # whether a plan may choose max_batch_tokens
    fused: bool = True
    prefix_folder: Path | None = None
    prefix_folder_bytes: int = 0
    # Maximum rows of logits for prompt log-probs and drafts; None: as many as 256 MB hold.
    prompt_rows: int | None = None
    device: Device = CPU
    # Numbers of KV blocks and of state slots, if they are fixed; `kv_bytes` then has no effect on a plan.
    cache_sizes: tuple[int, int] | None = None

    @property
    def kv_budget(self) -> int:
        """The bytes for K, V and recurrent states."""
        return self.kv_bytes or int(self.device.available_memory * DEFAULT_KV_SHARE)

    def token_bytes(
        self, spec: ModelSpec, drafts: DraftLayers, layers: list[LayerShape] | None = None
    ) -> int:
        """Return the bytes of a token in blocks: K and V, including draft layers, and routing records.

        Args:
            layers: the layers held in this process; None: all layers of `spec`.
        """
        dtype = self.kv_dtype or spec.dtype
        kv_bytes = bytes_per_token(spec.layers if layers is None else layers, dtype)
        return kv_bytes + drafts.bytes_per_token(dtype) + spec.choices["routing"].bytes_per_token

    def num_states(self, state_bytes: int) -> int:
        """Return the number of slots of recurrent states, including the zero state.

        A running sequence needs two slots, a session or a cached prefix one. At most half of the KV budget is
        used. Raises OutOfBlocks if that doesn't hold the slots of one sequence.

        Args:
            state_bytes: bytes of one slot; 0 for a model without recurrent layers.
        """
        if not state_bytes:
            return 0
        if self.cache_sizes is not None:
            return self.cache_sizes[1]
        slots = self.kv_budget // 2 // state_bytes
        if slots < 3:
            raise OutOfBlocks(
                f"kv_memory of {self.kv_budget} bytes is too small: half of it is for the recurrent states, "
                f"and a sequence needs 3 slots of {state_bytes} bytes"
            )
        return min(slots, 3 * self.max_sequences + (_SNAPSHOTS if self.prefix_cache else 1))

    def num_blocks(self, bytes_per_token: int, max_length: int | None, state_bytes: int = 0) -> int:
        """Return the number of blocks that fit and can be in use together, including the scratch block.

        Args:
            state_bytes: bytes of all slots of recurrent states, which share the budget.

        Raises:
            OutOfBlocks: the memory doesn't hold one block.
        """
        block_bytes = self.block_size * max(1, bytes_per_token)  # 0 for a model without attention
        blocks = (self.kv_budget - state_bytes) // block_bytes - 1
        if blocks < 1:
            states = f", recurrent states {state_bytes} bytes" if state_bytes else ""
            raise OutOfBlocks(
                f"kv_memory of {self.kv_budget} bytes is too small: one block of {self.block_size} tokens "
                f"and the scratch block take {2 * block_bytes} bytes{states}"
            )
        if max_length is not None:
            blocks = min(blocks, self.max_sequences * -(-max_length // self.block_size))
        elif not bytes_per_token:
            blocks = min(blocks, _MAX_FREE_BLOCKS)
        return blocks + 1


class OpenRequest(NamedTuple):
    """The arguments with which a placement opens a model."""

    loaded: LoadedModel  # without its weights, unless it is placed in this process's memory
    source: Any  # the `ModelSource` for other processes; None for a live module
    options: EngineOptions
    limit: int | None  # maximum tokens of one sequence; None: no limit
    draft: Mtp | EarlyExit | None  # the draft layers of the model; None: no drafts


@dataclass(frozen=True, slots=True)
class Placed:
    """A model opened by its placement."""

    runner: Runner
    options: EngineOptions  # adjusted to the limits of the placement
    # The connection to processes that make the same calls; None: there are none.
    collective: Any = None


def engine_options(
    *,
    kv_dtype: Any = "auto",
    kv_memory: int | str | None = None,
    max_batch_tokens: int | None = None,
    num_threads: int | None = None,
    quantization: Any = None,
    prefix_folder: Any = None,
    prefix_folder_bytes: int | str = DEFAULT_FOLDER_BYTES,
    device: Device = CPU,
    **others: Any,
) -> EngineOptions:
    """Validate the options of `LLM` with the names of its arguments.

    Raises:
        InvalidRequest, NotSupported: an option is out of range or not supported.
    """
    options = EngineOptions(
        kv_dtype=None if kv_dtype == "auto" else resolve_kv_dtype(kv_dtype),
        kv_bytes=None if kv_memory is None else memory_bytes(kv_memory, device.total_memory),
        max_batch_tokens=_MAX_BATCH_TOKENS if max_batch_tokens is None else max_batch_tokens,
        num_threads=thread_count(num_threads),
        quantization=resolve_quantization(quantization),
        plan_sets_batch_tokens=max_batch_tokens is None,
        prefix_folder=None if prefix_folder is None else path("prefix_folder", prefix_folder),
        prefix_folder_bytes=budget("prefix_folder_bytes", prefix_folder_bytes),
        device=device,
        **others,
    )
    check_fields(options, _NUMBERS)
    if prefix_folder is not None and not options.prefix_cache:
        raise InvalidRequest(
            f"prefix_folder={prefix_folder!r}: not supported with prefix_cache=False"
        )
    return options
