"""Weights in 8 or 4 bits: quantization error, kernels compared with torch, options, offloaded models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.backends import BACKENDS, by
from support.odd_toys import DTYPES
from support.products import random
from support.toys import Folders, make_toy
from verbatim import (
    LLM,
    InvalidRequest,
    ModelError,
    NotSupported,
    Offload,
    SamplingParams,
    TierFailed,
    kernels,
)
from verbatim.kernels.functions import addresses, kernel
from verbatim.kernels.packing import BLOCK, BLOCKS, Encoding, Packing, WeightPacking
from verbatim.model.differential import bit_equal
from verbatim.quantization.formats import GROUP_SIZES, Quantization, resolve_quantization
from verbatim.quantization.matrix import LARGEST, pack, pack_and_measure, unpack
from verbatim.quantization.rows import heads_of

KINDS = [Quantization(bits, size) for bits in (8, 4) for size in GROUP_SIZES]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=[k.name for k in KINDS])
LIBRARIES = kernels.available()
WEIGHTS = ((100, 0, 0), (0, 0, 100), (30, 40, 30))


def packing_of(weight: Tensor, kind: Quantization, columns: bool = False) -> WeightPacking:
    return kind.packing(weight.shape, weight.dtype, columns)


def there_and_back(weight: Tensor, kind: Quantization, columns: bool = False) -> Tensor:
    """Pack and unpack with torch alone."""
    packing = packing_of(weight, kind, columns)
    return by("none", unpack)(pack(weight, packing), packing)


# ---- Groups ----


def allowed(weight: Tensor, kind: Quantization) -> Tensor:
    """The largest error of each element: half a step, of groups whose ends are rounded outwards to bf16."""
    weight, most = weight.double(), []
    for group in weight.split(kind.group_size, -1):
        low, high = group.amin(-1, keepdim=True), group.amax(-1, keepdim=True)
        step = (high - low + low.abs() / 128) / (2**kind.bits - 1) * (1 + 1 / 128)
        most.append(0.5001 * step.expand_as(group) + group.abs().amax(-1, keepdim=True) * 1e-6)
    return torch.cat(most, -1) + 2.0**-117  # the smallest step


@EVERY_KIND
@pytest.mark.parametrize("width", [1, 2, 31, 33, 60, 64, 100, 128, 1000])
def test_quantization_error_is_at_most_half_a_step(width: int, kind: Quantization) -> None:
    weight = random(40, width)
    weight[:5] *= 1e30
    weight[5:10] *= 1e-30
    weight[10:15] += 50
    off = (there_and_back(weight, kind).double() - weight.double()).abs()
    assert (off <= allowed(weight, kind)).all()


@EVERY_KIND
def test_bf16_weights_unpack_to_rounded_float32_values(kind: Quantization) -> None:
    weight = random(8, 100, dtype=torch.bfloat16)
    exact = there_and_back(weight.float(), kind)
    assert bit_equal(there_and_back(weight, kind), exact.bfloat16())


@EVERY_KIND
@pytest.mark.parametrize("shape", [(60, 7), (64, 32), (1, 5), (3, 100, 40)], ids=str)
def test_packing_columns_equals_packing_transposed_rows(
    shape: tuple[int, ...], kind: Quantization
) -> None:
    weight = random(*shape)
    across = there_and_back(weight.transpose(-1, -2).contiguous(), kind)
    packing = packing_of(weight, kind, columns=True)
    assert bit_equal(
        there_and_back(weight, kind, columns=True), across.transpose(-1, -2).contiguous()
    )
    assert len(pack(weight, packing)) == packing.nbytes


@EVERY_KIND
def test_zeros_stay_zero_constants_stay_close_and_order_is_kept(kind: Quantization) -> None:
    weight = torch.zeros(4, 200)
    weight[1] = -0.0
    weight[2] = 0.3
    weight[3] = torch.linspace(-1, 1, 200)
    unpacked = there_and_back(weight, kind)
    assert bit_equal(unpacked[:2], torch.zeros(2, 200))
    assert (unpacked[2] - 0.3).abs().max() <= 0.3 / 128 / (2**kind.bits - 1)
    assert bit_equal(there_and_back(weight[2:3].bfloat16(), kind), weight[2:3].bfloat16())
    assert unpacked[3].diff().min() >= 0


@EVERY_KIND
def test_largest_and_smallest_weights_stay_finite_and_within_error(kind: Quantization) -> None:
    weight = torch.tensor([[LARGEST, -LARGEST, 0, 1], [1e-45, -1e-45, 3e-39, -1e-38]])
    unpacked = there_and_back(weight, kind)
    assert unpacked.isfinite().all()
    assert ((unpacked.double() - weight.double()).abs() <= allowed(weight, kind)).all()


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 1e38, -1e38], ids=str)
def test_nan_infinite_or_too_large_weight_is_rejected(wrong: float, columns: bool) -> None:
    weight = random(70, 70)
    weight[66, 69] = wrong
    for backend in BACKENDS:
        with pytest.raises(ModelError, match=r"the\.weight has NaN, an infinity or a number b"):
            by(backend, pack)(weight, packing_of(weight, KINDS[1], columns), "the.weight")


@pytest.mark.parametrize(
    ("kind", "width", "nbytes"),
    [
        (Quantization(8, 32), 64, 64 + 8),
        (Quantization(8, 64), 1, 1 + 4),
        (Quantization(8, 128), 129, 129 + 8),
        (Quantization(4, 64), 64, 32 + 4),
        (Quantization(4, 64), 65, 33 + 8),
        (Quantization(4, 32), 33, 17 + 8),
        (Quantization(4, 128), 0, 0),
    ],
    ids=str,
)
def test_packed_sizes_in_bytes(kind: Quantization, width: int, nbytes: int) -> None:
    for shape, columns in (((3, width), False), ((width, 3), True)):
        packing = kind.packing(shape, torch.float32, columns)
        assert packing.nbytes == 3 * nbytes == len(pack(random(*shape), packing))


@EVERY_KIND
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", [(0, 70), (70, 0), (2, 130, 70)], ids=str)
def test_squared_error_covers_all_elements(
    shape: tuple[int, ...], columns: bool, kind: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verbatim.quantization.matrix.PIECE", 1000)
    weight = random(*shape)
    packing = packing_of(weight, kind, columns)
    wrong, all_of_it = by("none", pack_and_measure)(weight, packing)[1]
    off = there_and_back(weight, kind, columns).double() - weight.double()
    assert wrong == pytest.approx(float(off.square().sum()), rel=1e-9)
    assert all_of_it == pytest.approx(float(weight.double().square().sum()), rel=1e-9)


def test_packing_in_pieces_equals_packing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(random(2, 150, 90), columns) for columns in (False, True)]
    whole = [pack(w, packing_of(w, KINDS[4], columns)) for w, columns in cases]
    monkeypatch.setattr("verbatim.quantization.matrix.PIECE", 700)
    for (weight, columns), packed in zip(cases, whole, strict=True):
        packing = packing_of(weight, KINDS[4], columns)
        assert torch.equal(pack(weight, packing), packed)
        unpacked = by("none", unpack)(packed, packing)
        assert bit_equal(unpacked, unpack(packed, packing))


# The largest error in a group, relative to the group's largest magnitude.
OFF = {
    (Encoding.ZERO_POINT, 8): 1 / 255,
    (Encoding.ZERO_POINT, 4): 1 / 15,
    (Encoding.SIGNED, 8): 1 / 254,
    (Encoding.SIGNED, 4): 1 / 14,
    (Encoding.FP8, 8): 1 / 28,
    (Encoding.NF4, 4): 0.16,
    (Encoding.FP4, 4): 0.17,
    (Encoding.MXFP4, 4): 0.25,
    (Encoding.CENTERED, 4): 1 / 10,  # the zero has 8 bits
}


@pytest.mark.parametrize(("encoding", "bits"), OFF, ids=lambda value: str(value))
def test_checkpoint_encodings_round_to_nearest(encoding: Encoding, bits: int) -> None:
    weight = random(40, 130)
    weight[:5] *= 1e20
    weight[5:10] *= 1e-20
    weight[10] = 0
    packing = WeightPacking((40, 130), weight.dtype, Packing(bits, 64, encoding))
    unpacked = by("none", unpack)(pack(weight, packing), packing)
    for group, off in zip(weight.split(64, 1), (unpacked - weight).split(64, 1), strict=True):
        wide = encoding in (Encoding.ZERO_POINT, Encoding.CENTERED)
        peak = group.abs().amax(1) * (2 if wide else 1)
        assert (off.abs().amax(1) <= OFF[encoding, bits] * 1.001 * peak).all()


@pytest.mark.parametrize(
    ("encoding", "bits", "off"),
    [
        (Encoding.HALF, 8, 1 / 250),
        (Encoding.HALF, 4, 1 / 13),
        (Encoding.Q6_K, 8, 1 / 58),
        (Encoding.Q5_K, 8, 1 / 16),
        (Encoding.Q4_K, 4, 1 / 8),
        (Encoding.Q3_K, 4, 1 / 5),
        (Encoding.Q2_K, 4, 1 / 2),
        (Encoding.NVFP4, 4, 1 / 4),
    ],
)
def test_encodings_with_small_scales_round_to_nearest(
    encoding: Encoding, bits: int, off: float
) -> None:
    weight = random(40, 512)
    weight[10], weight[11] = 0, 5.0
    packing = WeightPacking((40, 512), weight.dtype, Packing(bits, 32, encoding))
    unpacked = by("none", unpack)(pack(weight, packing), packing)
    error = (unpacked - weight).unflatten(1, (-1, 256)).abs().amax(-1)
    peak = weight.unflatten(1, (-1, 256)).abs().amax(-1)
    assert (error <= off * peak).all()
    with pytest.raises(ModelError, match="can't be quantized"):
        pack(weight * (torch.inf if encoding is Encoding.NVFP4 else 1e9), packing)


# ---- The kernel ----


@pytest.mark.skipif(not LIBRARIES, reason="no kernels were built")
@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    encoding=st.sampled_from(Encoding),
    dtype=st.sampled_from(list(DTYPES.values())),
    columns=st.booleans(),
    shape=st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(0, 300)),
    seed=st.integers(0, 99),
)
def test_kernels_unpack_bit_identical_to_torch(
    kind: Quantization,
    encoding: Encoding,
    dtype: torch.dtype,
    columns: bool,
    shape: tuple[int, int, int],
    seed: int,
) -> None:
    weight = random(*shape, dtype=dtype, seed=seed)
    either = encoding < Encoding.FP8 or encoding is Encoding.HALF or encoding in BLOCKS
    bits = kind.bits if either else 8 if encoding is Encoding.FP8 else 4
    if encoding in BLOCKS:  # whole blocks, by rows
        weight = random(*shape[:2], shape[2] // 60 * BLOCK, dtype=dtype, seed=seed)
        columns = False
    rows = Packing(bits, kind.group_size, encoding)
    packing = WeightPacking(tuple(weight.shape), dtype, rows, columns)
    packed = pack(weight, packing)
    expected = by("none", unpack)(packed, packing)
    for name in LIBRARIES:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            unpacked = by(name, unpack)(packed, packing)
            assert bit_equal(unpacked, expected), (name, threads)


@pytest.mark.skipif(not LIBRARIES, reason="no kernels were built")
@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(list(DTYPES.values())),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 60), st.integers(1, 300)),
    size=st.sampled_from([1e-44, 1e-38, 1e-3, 1.0, 1e30]),
    seed=st.integers(0, 99),
)
def test_kernels_pack_bit_identical_to_torch(
    kind: Quantization, dtype: torch.dtype, shape: tuple[int, int, int], size: float, seed: int
) -> None:
    weight = random(*shape, seed=seed) * size
    weight[0, 0] = 0.25
    weight[0, -1] = -0.0
    weight.flatten()[::7] = weight.flatten()[0]
    weight = weight.to(dtype)
    packing = packing_of(weight, kind)
    expected = by("none", pack)(weight, packing)
    for name in LIBRARIES:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(by(name, pack)(weight, packing), expected), (name, threads)
            torch.set_num_threads(2)


@pytest.mark.parametrize("kind", [Quantization(8, 32), Quantization(4, 128)], ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_measure_the_squared_error_of_torch(dtype: str, kind: Quantization) -> None:
    weight = random(50, 333, dtype=DTYPES[dtype])
    packing = packing_of(weight, kind)
    packed, squares = pack_and_measure(weight, packing)
    expected, expected_squares = by("none", pack_and_measure)(weight, packing)
    assert torch.equal(packed, expected)
    assert squares == pytest.approx(expected_squares, rel=1e-6)


@pytest.mark.skipif(not LIBRARIES, reason="no kernels were built")
@EVERY_KIND
def test_unpack_kernels_do_not_write_outside_output(kind: Quantization) -> None:
    shape = (259, 1030)
    packing = kind.packing(shape, torch.bfloat16)
    packed = pack(random(*shape, dtype=torch.bfloat16), packing)
    expected = by("none", unpack)(packed, packing)
    room = torch.full((259 * 1030 + 64,), 7.0, dtype=torch.bfloat16)
    for name in LIBRARIES:
        room[32:-32] = 7.0
        out = room[32:-32].view(shape)
        with kernels.using(name):
            function = kernel("vb_unpack_rows")
            assert function is not None
            function(*addresses(out, packed), *shape, packing.format, packing.rows.group, True)
        assert bit_equal(out, expected)
        assert (room[:32] == 7).all() and (room[-32:] == 7).all()


# ---- Options ----


@pytest.mark.parametrize(
    "options",
    [
        *[dict(group_size=size) for size in (0, 7, -1, True, 64.0, "64", None)],
        *[dict(bits=bits) for bits in (0, 3, 5, 16, True, 4.0, "4", None)],
        *[dict(head_bits=bits) for bits in (0, 16, True, 8.0, "8", False)],
        *[dict(activation_bits=bits) for bits in (4, 16, True, "8")],
    ],
    ids=str,
)
def test_unsupported_quantization_values_are_rejected(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(InvalidRequest, match=re.escape(f"{name}={value!r}")):
        Quantization(**options)


@pytest.mark.parametrize(
    "value", ["int5", "INT8", "a8", "", 8, True, torch.int8, ["int8"]], ids=str
)
def test_unknown_quantization_names_are_rejected(value: Any) -> None:
    allowed = "'int8', 'int4', 'w8a8', 'w4a8' or a Quantization"
    with pytest.raises(NotSupported, match=rf"{re.escape(f'quantization={value!r}')}.*{allowed}"):
        LLM(make_toy("llama"), quantization=value)


def test_quantization_names_and_defaults() -> None:
    assert resolve_quantization(None) is None
    assert resolve_quantization("int8") == Quantization(bits=8, group_size=64, head_bits=8)
    assert resolve_quantization("int4") == Quantization() == Quantization(4, 64, 8)
    assert resolve_quantization("w8a8") == Quantization(8, activation_bits=8)
    assert resolve_quantization("w4a8") == Quantization(4, activation_bits=8)
    assert Quantization(8, activation_bits=8).of_weights == Quantization(8)
    kinds = [Quantization(8), Quantization(4), Quantization(4, 32, 4), Quantization(8, 128, None)]
    kinds.append(Quantization(4, activation_bits=8))
    names = ["int8-g64", "int4-g64-head8", "int4-g32", "int8-g128-head-exact", "int4-g64-head8-a8"]
    assert [kind.name for kind in kinds] == names
    assert resolve_quantization(KINDS[2]) is KINDS[2]


# ---- Models ----


def quantized(folder: Path, quantization: Any, dtype: str = "float32", **settings: Any) -> LLM:
    placed: dict[str, Any] = {"gpu": "300MB", "weights": (0, 0, 100), "policy": None}
    placed |= {"batch_size": 3, "micro_batches": 2}
    return LLM(
        folder,
        dtype=dtype,
        max_length=200,
        quantization=quantization,
        placement=Offload(**(placed | settings)),
    )


@pytest.mark.parametrize("weights", [(0, 100, 0), (0, 0, 100)], ids=["memory", "disk"])
def test_offloaded_layers_hold_packed_bytes_while_in_use(weights: Any, folders: Folders) -> None:
    in_memory = weights[1] > 0
    with quantized(folders("llama"), "int8", weights=weights) as llm:
        weights = llm.engine.runner.weights
        for unit in weights.units.order:
            packed = [slot for slot in unit.slots if slot.packing is not None and not unit.gathers]
            with weights.patched(unit):
                for slot in packed:
                    ((layer, name),) = slot.holders
                    held = slot.lazy.tensor.data_ptr() if in_memory else None
                    assert held in (None, layer._buffers[f"{name}_packed"].data_ptr())
                    assert not layer.weight.isnan().any()
                    assert slot.parameter.isnan().all()  # never dequantized
            for slot in packed:
                assert all(layer.weight.isnan().any() != in_memory for layer, _ in slot.holders)


def test_close_releases_packed_weights_and_disk_files(folders: Folders, tmp_path: Path) -> None:
    for weights in WEIGHTS:
        llm = quantized(folders("llama"), "int4", weights=weights, disk=tmp_path)
        slots = llm.engine.runner.weights.units.slots
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5))
        llm.close()
        assert list(tmp_path.iterdir()) == []
        held = [getattr(slot.lazy, "tensor", torch.empty(0)) for slot in slots]
        assert sum(tensor.nbytes for tensor in held) == 0


def test_full_disk_tier_raises_tier_failed(folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(TierFailed, match="disk_limit is 20000"):
        quantized(folders("llama"), "int4", disk=tmp_path, disk_limit=20_000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", [Encoding.ZERO_POINT, Encoding.SIGNED, Encoding.HALF])
@pytest.mark.parametrize("scale", [0.0, -1.5])
def test_unpacked_zeros_are_positive_with_every_backend(encoding: Encoding, scale: float) -> None:
    packing = WeightPacking((1, 32), torch.float32, Packing(4, 32, encoding))
    heads = heads_of(torch.tensor([[scale]]), torch.tensor([[8]]), encoding)
    codes = torch.arange(32, dtype=torch.uint8)[None, :16]
    packed = torch.cat([codes.flatten(), heads.view(torch.uint8).flatten()])
    first, *others = (by(b, unpack)(packed, packing) for b in BACKENDS)
    assert not first[first == 0].signbit().any()
    assert all(torch.equal(first.view(torch.int32), x.view(torch.int32)) for x in others)
