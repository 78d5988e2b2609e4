"""Every instruction set gives the same bits, with bf16 multiplied in pairs or as floats."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from support import toys
from support.attention_cases import BF16, SHAPES, Shape, Story, attend, options, story
from support.pairwise import slow_but
from support.programs import run_program
from verbatim import LLM, kernels
from verbatim.kernels.functions import run
from verbatim.kernels.packing import BLOCKS, Encoding, Packing, WeightPacking
from verbatim.model.products import linear, matmul
from verbatim.quantization.formats import GROUP_SIZES, KV_PACKINGS
from verbatim.quantization.matrix import QuantizedMatrix, pack

PAIRS, FLOATS, FASTEST = 0, 1, -1
SETS = kernels.available()
OF_4_BITS = [Encoding.NF4, Encoding.FP4, Encoding.MXFP4, Encoding.CENTERED]
OF_8_BITS = [Encoding.FP8, *BLOCKS]
HASHES = Path(__file__).with_name("hashes.cpp")
BITS = Path(__file__).parents[1] / "support" / "bits.py"
pytestmark = pytest.mark.skipif(kernels.library() is None, reason="there are no compiled kernels")


@pytest.fixture(autouse=True)
def chooses() -> Iterator[None]:
    yield
    for name in SETS:
        with kernels.using(name):
            run("vb_choose_width", None, FASTEST)


def assert_same_everywhere(compute: Callable[[], Tensor]) -> None:
    """Compare results of all instruction sets, bf16 both ways; NaNs may differ in sign and payload."""
    results = {}
    for name in SETS:
        for choice in (PAIRS, FLOATS) if name == "avx512_bf16" else (FASTEST,):
            with kernels.using(name):
                run("vb_choose_width", None, choice)
                results[name, choice] = compute()
    first = next(iter(results.values()))
    for which, result in results.items():
        assert torch.equal(result.isnan(), first.isnan()), which
        a, b = (x.masked_fill(x.isnan(), 0) for x in (result, first))
        assert torch.equal(a, b) and torch.equal(a.signbit(), b.signbit()), which


def numbers(kind: str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return random numbers: normal, near the smallest or largest, half of them subnormal, or any bits."""
    noise = torch.Generator().manual_seed(sum(shape))
    if kind == "bits":
        whole_numbers = torch.int16 if dtype == BF16 else torch.int32
        limits = torch.iinfo(whole_numbers)
        bits = torch.randint(limits.min, limits.max + 1, shape, generator=noise)
        return bits.to(whole_numbers).view(dtype)
    if kind == "subnormal":
        normal = torch.rand(shape, generator=noise) < 0.5
        scales = torch.where(normal, 1.0, 2.0**-128).double()
        return (torch.randn(shape, generator=noise).double() * scales).to(dtype)
    exponent = {"plain": 0, "tiny": -66, "huge": 60}[kind]
    spread = torch.randint(-6, 7, shape, generator=noise)
    return (torch.randn(shape, generator=noise).double() * 2.0 ** (exponent + spread)).to(dtype)


@pytest.mark.parametrize("kind", ["plain", "tiny", "huge", "subnormal", "bits"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_products(kind: str, dtype: torch.dtype) -> None:
    some = partial(numbers, kind, dtype=dtype)
    shapes = [(1, 200, 7), (2, 33, 3), (8, 64, 20), (24, 1, 3), (25, 31, 70), (300, 33, 129)]
    for rows, depth, cols in [*shapes, (64, 5000, 40)]:
        x, weight = some(rows, depth), some(cols, depth)
        for stored in weight, weight.t().contiguous().t():
            assert_same_everywhere(partial(linear, x, stored, weight[:, 0]))
    x, weight = some(3, 30, 50), some(3, 50, 20)
    assert_same_everywhere(partial(matmul, x, weight))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["plain", "tiny"])
def test_products_with_quantized_weights(kind: str, bits: int) -> None:
    for depth in 320, 350:
        weight = numbers(kind, 90, depth)
        packing = WeightPacking((90, depth), BF16, Packing(bits, 64))
        quantized = QuantizedMatrix(pack(weight, packing), packing)
        for rows in 1, 6, 60:
            assert_same_everywhere(partial(linear, numbers("plain", rows, depth), quantized))


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("encoding", [*Encoding], ids=lambda encoding: encoding.name)
def test_products_with_any_bits_in_quantized_weights(
    encoding: Encoding, dtype: torch.dtype
) -> None:
    widths = (4,) if encoding in OF_4_BITS else (8,) if encoding in OF_8_BITS else (4, 8)
    noise = torch.Generator().manual_seed(encoding.value)
    for bits, group in product(widths, GROUP_SIZES):
        for depth in (256,) if encoding in BLOCKS else (group - 9, 2 * group + 5):
            packing = WeightPacking((150, depth), dtype, Packing(bits, group, encoding))
            data = torch.randint(256, (packing.nbytes,), dtype=torch.uint8, generator=noise)
            for rows, kind in product((1, 3, 8), ("plain", "tiny")):
                x = numbers(kind, rows, depth, dtype=dtype)
                assert_same_everywhere(partial(linear, x, QuantizedMatrix(data, packing)))


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("shape", slow_but(SHAPES[:5:2], SHAPES), ids=str)
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_attention(kind: str, shape: Shape, dtype: torch.dtype) -> None:
    opts, what = options(kind, shape), story(shape, 147, q_dtype=dtype, kv_dtype=dtype)

    def result(some: Story, packing: Packing | None = None) -> Tensor:
        backend = kernels.instruction_set() or "none"
        pieces = [(some, 0, 147), (some, 141, 147), (some, 146, 147)]
        outs = attend(backend, opts, shape.block_size, *pieces, packing=packing)
        for out in outs[1:]:  # few lines are computed directly from the rows
            assert torch.equal(out.nan_to_num(), outs[0][-len(out) :].nan_to_num())
        return torch.cat(outs)

    for name in "plain", "tiny", "subnormal", "bits":
        fields = {f: numbers(name, *getattr(what, f).shape, dtype=dtype) for f in ("k", "v")}
        for packing in (None, *KV_PACKINGS.values()):
            assert_same_everywhere(partial(result, replace(what, **fields), packing))


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_other_kernels(tmp_path: Path) -> None:
    program = tmp_path / "hashes"
    compiler = ["c++", "-std=c++17", "-O1", "-Wno-psabi", str(HASHES), "-ldl", "-o", str(program)]
    subprocess.run(compiler, check=True)
    folder = Path(kernels.__file__).parent
    results = {
        name: subprocess.check_output([program, folder / f"verbatim_{name}.so"], text=True)
        for name in SETS
    }
    assert all(result.count("\n") > 40 for result in results.values())
    assert len(set(results.values())) == 1


def key_of(model: object) -> str:
    with LLM(model) as llm:  # type: ignore[arg-type]
        key: str = llm.info()["numerics_key"]
    return key


def test_key_names_torch_if_the_model_calls_functions_that_round_by_processor() -> None:
    plain = key_of(toys.make_toy("llama"))
    assert plain.startswith(f"cpu/kernels{kernels.VERSION}-") and "torch" not in plain
    with kernels.using(SETS[-1]):
        assert key_of(toys.make_toy("llama")) == plain
    assert "torch" in key_of(toys.make_toy("gemma2"))  # tanh
    functions: list[Callable[[Tensor], Tensor]] = [
        F.mish, torch.tan, lambda x: x.abs() ** 0.5, lambda x: F.softplus(x, 2.0)
    ]  # fmt: skip
    for function in functions:
        model = toys.make_toy("llama")
        model.model.layers[0].mlp.__dict__["act_fn"] = function
        del model.model.layers[0].mlp._modules["act_fn"]
        assert "torch" in key_of(model), function


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif(
    "avx512" not in SETS or torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="the processor has no AVX-512",
)
def test_models_have_the_same_bits_as_on_a_processor_with_avx2(dtype: str) -> None:
    """Equal numerics keys, equal bits: keys differ where a model calls functions that torch computes."""
    older = {
        "VERBATIM_KERNELS": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
    newest, avx2 = (
        json.loads(run_program(BITS, dtype, **environment).splitlines()[-1])
        for environment in ({}, older)
    )
    assert len(newest) > 150 and newest.keys() == avx2.keys()
    same_key = [name for name in newest if newest[name][0] == avx2[name][0]]
    assert [name for name in same_key if newest[name] != avx2[name]] == []
    assert len(same_key) > 0.8 * len(newest)
