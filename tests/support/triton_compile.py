"""Compiles the Triton kernels for H100 and H200 without such a GPU, and prints a line for each.

`test_triton_compiled.py` runs it in a separate process: Triton's interpreter and compiler don't go together.
A line has the label, the kernel's name, the number of its binary and the multiply instructions in its PTX.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from verbatim.batch import AttentionBatch
from verbatim.kernels.options import Activation, AttentionOptions, NormKind
from verbatim.kernels.packing import Encoding, Packing, WeightPacking
from verbatim.kernels.triton import (
    attention,
    elementwise,
    integers,
    linear,
    norm,
    packed,
    recurrence,
    rope,
    sampling,
)
from verbatim.quantization.formats import KV_PACKINGS, Quantization


class NoDevice:
    """A driver with the methods that the compiler calls."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


driver.set_active(NoDevice())
launch = JITFunction.run
binaries: list[Any] = []


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    binary = launch(self, *args, grid=grid, warmup=True, **options)
    if not any(binary is known for known in binaries):
        binaries.append(binary)
    number = next(i for i, known in enumerate(binaries) if known is binary)
    ptx = binary.asm["ptx"]
    words = [w for w in ("wgmma", "mma.sync", "fma.rn.f64", "tf32") if w in ptx]
    assert binary.metadata.shared <= 227 * 1024, binary.metadata.shared
    print(label, self.__name__, number, *words)
    return binary


JITFunction.run = compile_only  # type: ignore[method-assign]


def stored(
    blocks: int, head: int, dtype: torch.dtype, packing: Packing | None = None
) -> torch.Tensor:
    if packing is not None:
        head, dtype = packing.row_bytes(head), torch.uint8
    return torch.empty(blocks, 8, 16, head, dtype=dtype)


def attend(
    tokens: int,
    sequences: int,
    dtype: torch.dtype,
    *,
    head: int = 128,
    packing: Packing | None = None,
) -> None:
    q, store = torch.empty(tokens, 16, head, dtype=dtype), stored(10, head, dtype, packing)
    tables = torch.zeros(sequences, 64, dtype=torch.int32)
    numbers = torch.zeros(sequences + 1, dtype=torch.int32)
    heads, bias = torch.zeros(16), torch.zeros(tokens, 16, 30, dtype=dtype)
    options = AttentionOptions(0.1, softcap=2.0, sinks=heads, alibi=heads, bias=bias)
    batch = AttentionBatch(numbers, numbers[1:], tables)
    attention.paged_attention(q, store, store, batch, options, packing=packing, value_size=head)


def recur(tokens: int, sequences: int, dtype: torch.dtype) -> None:
    """Run a convolution in `dtype`, and the delta rule (in float32) or a recurrence of Mamba's shape."""
    starts = torch.zeros(sequences + 1, dtype=torch.int32)
    rows = starts[1:].clone()
    at = starts, rows, rows, rows
    x, weight = torch.empty(tokens, 300, dtype=dtype), torch.empty(300, 4, dtype=dtype)
    recurrence.causal_conv(x, weight, None, torch.empty(9, 3, 300, dtype=dtype), at)
    delta = dtype is torch.float32
    key_heads, heads, depth, width = (16, 32, 128, 128) if delta else (1, 300, 16, 1)
    # Unaligned, like a slice of a single row may be.
    k = torch.empty(tokens * key_heads * depth + tokens)[tokens:].view(tokens, key_heads, depth)
    v, rate = torch.empty(tokens, heads, width), torch.empty(tokens, heads)
    decay = rate if delta else torch.empty(tokens, heads, depth)
    state = torch.empty(9, heads, depth, width)
    recurrence.linear_recurrence(k, k, v, decay, rate if delta else None, state, at)


def decode(tokens: int, dtype: torch.dtype, encoding: Encoding, bits: int) -> None:
    packing = WeightPacking((512, 256), dtype, Packing(bits, 64, encoding))
    data = torch.empty(packing.nbytes, dtype=torch.uint8)
    x, out = torch.empty(tokens, 256, dtype=dtype), torch.empty(tokens, 512, dtype=dtype)
    tiles = (linear.LOW_PACKED_TILE, *linear.TILES[1:])
    for tile in tiles if dtype is torch.bfloat16 else [linear.FLOAT32_TILE]:
        linear.multiply(x, data, None, out, tile, packing=packing)
    packed.unpack(data, packing, torch.arange(3))


def multiply_codes(tokens: int, dtype: torch.dtype, bits: int) -> None:
    packing = Quantization(bits, activation_bits=8).packing((512, 256), dtype)
    data = torch.empty(packing.nbytes, dtype=torch.uint8)
    integers.linear(torch.empty(tokens, 256, dtype=dtype), data, packing)


for dtype in (torch.bfloat16, torch.float32):
    weight, z = torch.empty(512, 256, dtype=dtype), torch.zeros(5, dtype=torch.int64)
    for tokens, sequences in ((1, 1), (4, 4), (77, 3)):
        label = f"{tokens}x{sequences}"
        for packing in (None, *KV_PACKINGS.values()):
            attend(tokens, sequences, dtype, packing=packing)
        x, out = torch.empty(tokens, 256, dtype=dtype), torch.empty(tokens, 512, dtype=dtype)
        for tile in linear.TILES if dtype is torch.bfloat16 else [linear.FLOAT32_TILE]:
            linear.multiply(x, weight, None, out, tile)
            starts = torch.zeros(8, dtype=torch.int64)
            linear.multiply(x, weight.view(-1, 512, 256).expand(7, -1, -1), None, out, tile, starts)
        recur(tokens, sequences, dtype)
        multiply_codes(tokens, dtype, 4)
        label = f"packed-{label}"
        decode(tokens, dtype, Encoding.AFFINE, 4)
    label = "wide"
    for head in (256, 512):
        attend(7, 1, dtype, head=head)
    label = "once"
    norm.rms_norm(weight, weight[0], 1e-6, NormKind.ROUNDED, residual=weight)
    heads, angles = torch.empty(5, 8, 64, dtype=dtype), torch.empty(5, 64, dtype=dtype)
    for packing in (None, *KV_PACKINGS.values()):
        store = stored(4, 64, dtype, packing)
        rope.rope_and_write(heads, heads, heads, angles, angles, store, store, z, packing)
    elementwise.activate(weight, Activation.SILU, weight)
    with suppress(ValueError):  # nothing ran, so the result is uninitialized memory
        sampling.draw(torch.zeros(5, 1000, dtype=dtype), z, z, z, z, torch.ones(5), z)
