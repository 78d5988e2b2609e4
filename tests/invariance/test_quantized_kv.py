"""K and V in 8 or 4 bits: quantization error, bit-identical attention in any pieces, and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.attention_cases import (
    BF16,
    F32,
    SHAPES,
    Shape,
    Story,
    assert_same_bits,
    attend,
    excess,
    hard_rows,
    options,
    story,
)
from support.backends import by
from support.pairwise import slow_but
from support.poison import poison
from support.toys import make_toy, random_ids
from verbatim import LLM, NotSupported, SamplingParams, kernels
from verbatim.batch import AttentionBatch
from verbatim.kernels.options import AttentionOptions
from verbatim.kernels.packing import Packing
from verbatim.kv import attention
from verbatim.kv.store import KVStore, LayerShape, bytes_per_token
from verbatim.quantization.formats import KV_PACKINGS, resolve_kv_dtype
from verbatim.quantization.rows import pack_rows, unpack_rows

KINDS = list(KV_PACKINGS.values())
LIBRARIES = kernels.available()


@pytest.fixture(params=KINDS, ids=[p.name for p in KINDS])
def packing(request: pytest.FixtureRequest) -> Packing:
    return request.param


# ---- Rows ----


@settings(max_examples=60)
@given(st.integers(1, 200), st.sampled_from(KINDS), st.sampled_from([F32, BF16]))
def test_kv_quantization_error_is_at_most_half_a_step(
    width: int, packing: Packing, dtype: torch.dtype
) -> None:
    x = hard_rows(width, seed=width).to(dtype)
    rows = pack_rows(x, packing)
    assert rows.shape == (16, 2, packing.row_bytes(width))
    error = (unpack_rows(rows, width, packing).double() - x.double()).abs()
    first = packing.code_bytes(width)
    scales = rows[..., first:].contiguous().view(BF16)[..., ::2].double()
    steps = scales.repeat_interleave(packing.group, -1)[..., :width]
    rounding = x.double().abs() * 2**-23 + 2.0**-126  # of float32, and of subnormal ends
    assert (error <= steps / 2 * (1 + 1e-4) + rounding).all()
    # The step is the group's range over its levels, but for the rounding of its ends to bf16.
    for group, scale in zip(x.double().split(packing.group, -1), scales.unbind(-1), strict=True):
        low, high = group.amin(-1), group.amax(-1)
        most = (high - low + low.abs() * 2**-7) / (2**packing.bits - 1) * (1 + 2**-6) + 2.0**-117
        assert (scale <= most).all()


def test_non_finite_value_makes_only_its_group_nan(packing: Packing) -> None:
    x = hard_rows(150)[6:10]
    x[0, 0, 0], x[1, 1, 149], x[2, 0, 70] = torch.nan, torch.inf, -torch.inf
    back = unpack_rows(pack_rows(x, packing), 150, packing)
    for group, read in zip(x.split(packing.group, -1), back.split(packing.group, -1), strict=True):
        bad = ~group.isfinite().all(-1)
        assert read[bad].isnan().all()
        assert read[~bad].isfinite().all()


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_kernel_packs_the_same_bytes_as_the_reference(
    name: str, dtype: torch.dtype, packing: Packing
) -> None:
    for key_size, value_size in ((12, 15), (1, 33), (128, 64), (65, 100)):
        fused = torch.cat([hard_rows(key_size), hard_rows(value_size, seed=1)], -1).to(dtype)
        fused[7, 0, 0], fused[8, 1, -1] = torch.nan, -torch.inf
        k, v = fused[..., :key_size], fused[..., key_size:]  # strided rows
        slots = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:16]
        stores = [
            torch.full((4, 2, 5, packing.row_bytes(n)), 7, dtype=torch.uint8)
            for n in (key_size, value_size)
        ]
        for threads in (1, 3):
            torch.set_num_threads(threads)
            by(name, attention.write_kv)(k, v, *stores, slots, packing)
            for rows, store in ((k, stores[0]), (v, stores[1])):
                by_slot = store.transpose(1, 2).flatten(0, 1)
                assert torch.equal(by_slot[slots], pack_rows(rows, packing))
                untouched = torch.ones(20, dtype=torch.bool).index_fill(0, slots, False)
                assert (by_slot[untouched] == 7).all()


# ---- Attention ----


def read_back(what: Story, packing: Packing) -> Story:
    """`what`, with its keys and values packed and unpacked."""
    rows = (unpack_rows(pack_rows(x, packing), x.shape[2], packing) for x in (what.k, what.v))
    k, v = (x.to(what.q.dtype) for x in rows)
    return replace(what, k=k, v=v)


@pytest.mark.parametrize(
    ("backend", "shape"),
    slow_but(
        [(backend, shape) for backend in LIBRARIES for shape in SHAPES[1:9:2]]
        + [("none", SHAPES[3])],
        [(backend, shape) for backend in LIBRARIES for shape in (*SHAPES[:4], *SHAPES[5:9])]
        + [("none", SHAPES[0]), ("none", SHAPES[3])],
    ),
    ids=str,
)
def test_attention_over_packed_kv_matches_attention_over_unpacked_kv(
    backend: str, shape: Shape, packing: Packing
) -> None:
    for dtype, kind in ((F32, "all"), (BF16, "plain")):
        what = story(shape, 99, q_dtype=dtype, kv_dtype=dtype)
        held = read_back(what, packing)
        opts = options(kind, shape)
        (out,) = attend(backend, opts, shape.block_size, (what, 0, 99), packing=packing)
        (want,) = attend(backend, opts, shape.block_size, (held, 0, 99))
        assert_same_bits(out, want)
        assert excess(out, held, opts, backend) < 3e-6
        for start, stop in ((98, 99), (60, 90)):
            (piece,) = attend(
                backend, opts, shape.block_size, (what, start, stop), seed=start, packing=packing
            )
            assert_same_bits(piece, out[start:stop])


# ---- The store ----


def test_packed_store_copies_poisons_and_releases_blocks(packing: Packing) -> None:
    shapes = [LayerShape(2, 12, 20), LayerShape(1, 70, 33)]
    store = KVStore(shapes, 5, 4, packing, torch.device("cpu"))
    assert store.dtype_name == packing.name
    assert store.nbytes == 5 * 4 * bytes_per_token(shapes, packing)
    opts = AttentionOptions(0.3)
    facts = (torch.tensor([0, 1]).int(), torch.tensor([4]).int())
    for layer, shape in enumerate(shapes):
        k, v = (
            torch.randn(4, shape.kv_heads, shape.key_dim),
            torch.randn(4, shape.kv_heads, shape.value_dim),
        )
        q = torch.randn(1, 2, shape.key_dim)

        def read(block: int, layer: int = layer, q: Tensor = q) -> Tensor:
            batch = AttentionBatch(*facts, torch.tensor([[block]]).int())
            return store.attend(layer, q, batch, opts)

        poison(store, range(5))
        store.write(layer, k, v, torch.arange(8, 12))
        answer = read(2)
        assert answer.shape == (1, 2, shape.value_dim)
        assert answer.isfinite().all()
        assert read(3).isnan().all()
        store.copy_blocks([(2, 3)])
        assert torch.equal(read(3), answer)
        poison(store, [2])
        assert read(2).isnan().all()
        assert torch.equal(read(3), answer)
    store.release()
    assert store.nbytes == 0
    store.allocate()
    assert store.nbytes == 5 * 4 * bytes_per_token(shapes, packing)


@pytest.mark.parametrize(
    ("kv_dtype", "per_token"),
    [
        ("int8", 3 * 2 * 2 * (20 + 4)),  # layers, K and V, heads; codes and one group's two ends
        ("int4", 3 * 2 * 2 * (10 + 4)),
    ],
)
def test_reported_kv_bytes_are_exact(kv_dtype: str, per_token: int) -> None:
    with LLM(make_toy("qwen3"), kv_dtype=kv_dtype, kv_memory=100_000, max_sequences=999) as llm:
        info = llm.info()
        held = llm.engine.runner.store.nbytes
    assert info["kv_dtype"] == kv_dtype
    assert info["kv_bytes_per_token"] == per_token
    assert info["num_blocks"] == 100_000 // (16 * per_token)
    assert info["kv_bytes"] == held == info["num_blocks"] * 16 * per_token
    assert f"kv-{kv_dtype}" in info["numerics_key"]


def test_packed_row_sizes() -> None:
    sizes = {"int8": {1: 5, 64: 68, 65: 73, 128: 136}, "int4": {1: 5, 32: 20, 33: 25, 128: 80}}
    for name, by_width in sizes.items():
        for width, size in by_width.items():
            assert KV_PACKINGS[name].row_bytes(width) == size, (name, width)
            assert pack_rows(torch.zeros(1, width), KV_PACKINGS[name]).shape[1] == size


def test_position_bias_in_keys_of_falcon_does_not_share_a_group_with_them() -> None:
    module = make_toy("falcon_alibi", max_position_embeddings=1024, initializer_range=0.4)
    ids = random_ids(1000, 1)
    with LLM(module) as exact, LLM(module, kv_dtype="int8") as quantized:
        scores = [torch.tensor(llm.score(ids)[1:]) for llm in (exact, quantized)]
    assert float((scores[0] - scores[1]).abs().mean()) < 0.1


def test_unknown_kv_dtype_is_rejected_with_list_of_supported_ones() -> None:
    assert resolve_kv_dtype("torch.int8") is resolve_kv_dtype(torch.int8) is KV_PACKINGS["int8"]
    assert resolve_kv_dtype(torch.bfloat16) is torch.bfloat16
    for name in ("int3", torch.float16, "fp8", 8):
        with pytest.raises(NotSupported, match=r"kv_dtype=.*bfloat16.*float32.*int4.*int8"):
            LLM(make_toy("llama"), kv_dtype=name)


def test_logprobs_stay_close_with_quantized_kv_on_trained_model() -> None:
    """The limits are about four times what benchmarks/kv.py measured, so that only a defect exceeds them."""
    text = "Once upon a time there was an old lighthouse keeper who lived alone by the sea."
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=150, ignore_eos=True)
    with LLM(max_sequences=4) as llm:
        (result,) = llm.generate(text, params)
        ids = result.prompt_token_ids + result.outputs[0].token_ids
        want = torch.tensor(llm.score(ids)[1:])
    for kv_dtype, most in (("int8", 0.02), ("int4", 0.08)):
        with LLM(max_sequences=4, kv_dtype=kv_dtype) as llm:
            error = (torch.tensor(llm.score(ids)[1:]) - want).abs().mean().item()
        assert 0 < error < most, kv_dtype
