"""What shapes an engine, whatever runs its batches."""

from __future__ import annotations

from dataclasses import dataclass

from verbatim.errors import OutOfBlocks
from verbatim.kv.quantized import KVDtype
from verbatim.options import available_memory

_DEFAULT_KV_SHARE = 0.4  # of the memory that is available when the model is opened


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`LLM`'s options that shape the engine, checked; its docstring says what they mean."""

    kv_dtype: KVDtype | None  # None: that of the model's keys
    kv_bytes: int | None  # None: a share of what is available
    block_size: int
    max_batch_tokens: int
    max_sequences: int
    max_waiting: int | None
    max_length: int | None
    prefix_cache: bool
    num_threads: int | None

    def num_blocks(self, bytes_per_token: int, max_length: int | None) -> int:
        """As many blocks as the memory holds, and no more than can ever be used at once; scratch included.

        Raises:
            OutOfBlocks: the memory doesn't hold one block.
        """
        block_bytes = self.block_size * bytes_per_token
        budget = self.kv_bytes or int(available_memory() * _DEFAULT_KV_SHARE)
        blocks = budget // block_bytes - 1
        if blocks < 1:
            raise OutOfBlocks(
                f"kv_memory of {budget} bytes is too small: one block of {self.block_size} tokens and "
                f"the scratch block take {2 * block_bytes} bytes"
            )
        if max_length is not None:
            blocks = min(blocks, self.max_sequences * -(-max_length // self.block_size))
        return blocks + 1
