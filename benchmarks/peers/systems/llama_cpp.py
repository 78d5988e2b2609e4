"""llama.cpp, through llama-cpp-python's low-level calls: all rows in one batch of one decode call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp

from benchmarks.peers.checkpoint import Checkpoint
from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.protocol import PeerSystem, serve
from verbatim.bench import converted


class LlamaCpp(PeerSystem):
    """One KV stream per sequence, as in llama.cpp's server; the next id is that of the largest logit."""

    def about(self) -> dict[str, Any]:
        info = llama_cpp.llama_print_system_info().decode().strip(" |")
        return {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "settings": "bf16, Q8_0, Q4_0; flash attention in prefill, and in decode after fewer than "
            f"{converted.LlamaCpp.FLASH_BELOW} tokens; {info}",
        }

    def load(
        self, folder: str, fmt: str, kv: str, head_bits: int, threads: int, **_: Any
    ) -> dict[str, Any]:
        checkpoint = Checkpoint(folder)
        file = Path(folder) / f"{fmt}-head{head_bits}.gguf"
        if not file.exists():
            write_gguf(checkpoint, fmt, head_bits, file)
        kind, kv_dtype = converted.LlamaCpp, "q8_0" if kv == "int8" else "f16"
        self.peer = kind(str(file), threads, kv_type=kind.Q8_0 if kv == "int8" else kind.F16)
        self.vocab = checkpoint.shape.vocab
        return {"weight_bytes": file.stat().st_size, "kv_dtype": kv_dtype}

    def unload(self) -> None:
        llama_cpp.llama_model_free(self.peer.model)


if __name__ == "__main__":
    serve(LlamaCpp())
