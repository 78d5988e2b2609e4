"""On a real GPU: same bits in every schedule, comparison with transformers, recorded steps, memory.

Run with `python -m pytest tests/gpu -m gpu`.

The kernels' own tests (`tests/kernels/test_triton_kernels.py`, `tests/kernels/test_triton_llm.py`) run on a
GPU where there is one, and under Triton's interpreter elsewhere.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from support import odd_toys
from support.backends import by
from support.odd_toys import DTYPES
from support.requests_mixed import all_facts, facts, mixed_requests
from support.toys import make_toy, random_ids
from verbatim import LLM, SamplingParams
from verbatim.batch import SamplePlan, SampleRow
from verbatim.kernels.packing import BLOCKS, Encoding, Packing, WeightPacking
from verbatim.model import products
from verbatim.model.quantizable import choose_packings
from verbatim.quantization.formats import resolve_quantization
from verbatim.quantization.matrix import QuantizedMatrix, pack, rounded, unpack
from verbatim.sampling.sampler import sample_rows

MODELS = {name: odd for name, odd in odd_toys.MODELS.items() if name != "falcon"}
MODELS["qwen3"] = dict(hidden_size=100, head_dim=20)
# On a GPU, transformers' own experts need rows of a multiple of 16 bytes.
MODELS["gpt_oss"] = dict(hidden_size=60, intermediate_size=52)
DENSE = [*MODELS]
MODELS["gemma3"] = dict(head_dim=320)
MODELS |= {name: {} for name in ("deepseek_v32", "minimax_m3", "deepseek_v4")}  # sparse attention


def toy(name: str, dtype: torch.dtype) -> Any:
    return make_toy(name, dtype=dtype, **MODELS[name]).cuda()


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype"),
    [
        *((name, dtype, "auto") for name in DENSE for dtype in DTYPES),
        *((name, "float16", "auto") for name in ("qwen3", "qwen3_next")),
        *((name, "bfloat16", "int8") for name in ("llama", "gemma3", "deepseek_v32")),
        *((name, "bfloat16", "int4") for name in ("deepseek_v3", "minimax_m3", "qwen3_next")),
        ("deepseek_v4", "bfloat16", "auto"),
    ],
)
def test_every_schedule_gives_same_bits(name: str, dtype: str, kv_dtype: str) -> None:
    prompts, params = mixed_requests()
    module = toy(name, getattr(torch, dtype))
    options = dict(deterministic=True, kv_dtype=kv_dtype)
    with LLM(module, **options) as llm:
        expected = all_facts(llm.generate(prompts, params))
        some = (0, 2, 4, 7, 8, 16)
        alone = [facts(llm.generate(prompts[i], params[i])[0]) for i in some]
        assert alone == [expected[i] for i in some], "alone"
        info = llm.info()
    with LLM(module, **options, max_batch_tokens=7, block_size=5) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected, "chunked"
    kv_memory = info["kv_bytes_per_token"] * 104
    if info["state_bytes"]:  # half is for states, and a sequence needs three slots
        kv_memory = 2 * max(kv_memory, 3 * info["state_bytes"])
    memory = dict(kv_memory=kv_memory, block_size=8)
    with LLM(module, **options, **memory) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected, "evicted"
        assert llm.stats()["preemptions"] > 0
    with LLM(module, **options, draft="ngram") as llm:
        assert all_facts(llm.generate(prompts, params)) == expected, "drafted"


@pytest.mark.parametrize("kv_dtype", ["auto", "int4"])
def test_long_contexts_give_same_bits_in_all_chunk_sizes(kv_dtype: str) -> None:
    """Contexts span several key splits, in decode and in prefill chunks."""
    module = make_toy("llama", dtype=torch.bfloat16, max_position_embeddings=4096).cuda()
    prompts = [random_ids(length, length) for length in (2100, 511, 512, 513, 1500)]
    params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    with LLM(module, deterministic=True, kv_dtype=kv_dtype) as llm:
        expected = [facts(llm.generate(prompt, params)[0]) for prompt in prompts]
    for rows in (2048, 300, 64):
        with LLM(module, deterministic=True, kv_dtype=kv_dtype, max_batch_tokens=rows) as llm:
            assert all_facts(llm.generate(prompts, params)) == expected, f"chunks of {rows}"


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [
        *itertools.product(DENSE, (True, False)),
        *((name, True) for name in MODELS if name not in DENSE),
    ],
)
def test_greedy_tokens_equal_transformers(name: str, deterministic: bool) -> None:
    module, prompt = toy(name, torch.float32), random_ids(19, 1)
    theirs = module.generate(
        torch.tensor([prompt], device="cuda"), max_new_tokens=24, min_new_tokens=24, do_sample=False
    )
    params = SamplingParams(max_tokens=24, min_tokens=24, temperature=0.0)
    with LLM(module, deterministic=deterministic) as llm:
        found = llm.generate(prompt, params)[0].outputs[0].token_ids
    assert found == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_storyteller_gives_same_bits_recorded_or_not_and_after_sleep(
    kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["Once upon a time", "The cat", "A long time ago there was"] * 4
    params = [SamplingParams(max_tokens=20 + i, seed=i, ignore_eos=True) for i in range(12)]
    options = dict(device="cuda", deterministic=True, kv_dtype=kv_dtype)
    with LLM(**options, prefix_folder=tmp_path, block_size=4) as llm:
        recorded = all_facts(llm.generate(prompts, params))
        gpu = llm.info()["gpu"]
        steps = llm.info()["recorded_steps"]
        assert isinstance(steps, int) and steps > 1, steps
        assert llm.info()["numerics_key"].startswith(gpu["name"].replace(" ", "-"))
        llm.sleep(weights=True)
        llm.wake()
        assert all_facts(llm.generate(prompts, params)) == recorded, "after a sleep"
    with LLM(**options, prefix_folder=tmp_path, block_size=4) as llm:
        assert all_facts(llm.generate(prompts, params)) == recorded, "with prefixes from files"
        assert llm.stats()["prefix_folder"]["hits"] > 0
    monkeypatch.setenv("VERBATIM_RECORDED_STEPS", "0")
    with LLM(**options) as llm:
        assert all_facts(llm.generate(prompts, params)) == recorded, "kernel by kernel"
        assert llm.info()["recorded_steps"] is None


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("qwen3", "int8"),
        ("qwen3", "w4a8"),
        ("qwen3_moe", "int4"),
        ("gpt_oss", "int8"),
        ("gpt2", "w8a8"),
    ],
)
def test_quantized_models_give_same_bits_in_every_schedule(
    name: str, quantization: str, tmp_path: Path
) -> None:
    prompts, params = mixed_requests()
    kind = resolve_quantization(quantization)
    assert kind is not None
    module = make_toy(name, dtype=torch.bfloat16, **MODELS[name])
    module.save_pretrained(tmp_path / "plain")
    original = {n: x.clone() for n, x in module.state_dict().items()}
    with torch.no_grad():
        for weight, packing in choose_packings(module, kind).items():
            weight.copy_(rounded(weight, packing))
    module.save_pretrained(tmp_path / "decoded")
    options: dict[str, Any] = dict(device="cuda", deterministic=True, tokenizer=False)
    with LLM(tmp_path / "decoded", **options) as llm:
        decoded = all_facts(llm.generate(prompts, params))
    options["quantization"] = quantization
    with LLM(tmp_path / "plain", **options) as llm:
        expected = all_facts(llm.generate(prompts, params))
        assert kind.activation_bits is not None or expected == decoded
        some = (0, 2, 4, 7, 8, 16)
        alone = [facts(llm.generate(prompts[i], params[i])[0]) for i in some]
        assert alone == [expected[i] for i in some], "alone"
        steps = llm.info()["recorded_steps"]
        assert "moe" in name or "oss" in name or (isinstance(steps, int) and steps > 1), steps
        assert f"/weights-{kind.name}/" in llm.info()["numerics_key"]
        llm.sleep(weights=True)
        llm.wake()
        assert all_facts(llm.generate(prompts, params)) == expected, "after a sleep"
        llm.update_weights({n: x.flip(0) for n, x in original.items()})
        assert all_facts(llm.generate(prompts, params)) != expected
        llm.update_weights(original)
        assert all_facts(llm.generate(prompts, params)) == expected, "updated"
    with LLM(tmp_path / "plain", **options, max_batch_tokens=7, block_size=5) as llm:
        assert all_facts(llm.generate(prompts, params)) == expected, "chunked"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_products_give_same_bits_for_any_number_of_rows(quantization: str) -> None:
    """Tiles of few rows use other tensor core instructions."""
    kind = resolve_quantization(quantization)
    assert kind is not None
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 4096, generator=generator) for n in (70, 512))
    x = (x * torch.exp2(torch.randint(-6, 7, x.shape, generator=generator))).cuda().bfloat16()
    packing = kind.packing((512, 4096), torch.bfloat16)
    data = pack(weight.bfloat16(), packing)
    expected = products.linear(x, unpack(data, packing).cuda(), float32=True)
    matrix = QuantizedMatrix(data.cuda(), packing)
    for rows in (1, 7, 16, 17, 64, 70):
        assert torch.equal(products.linear(x[:rows], matrix, float32=True), expected[:rows]), rows


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_recorded_moe_steps_give_same_outputs(name: str) -> None:
    module, prompts = toy(name, torch.bfloat16), [random_ids(5 + i, i) for i in range(5)]
    params = SamplingParams(max_tokens=9, seed=1, ignore_eos=True, record_routing=True)
    found = []
    with LLM(module, deterministic=True) as llm:
        for recorded in (False, True):
            if recorded:
                llm.engine.runner.record_steps()  # type: ignore[attr-defined]
            outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
            found.append([(o.token_ids, o.logprobs, o.routing.tolist()) for o in outputs])
        assert llm.info()["recorded_steps"] == 2
    assert found[0] == found[1]


@pytest.mark.parametrize("depth", [1024, 1000])
@pytest.mark.parametrize("encoding", list(Encoding), ids=lambda encoding: encoding.name)
def test_quantized_products_give_bits_of_decoded_weights_for_any_number_of_rows(
    encoding: Encoding, depth: int
) -> None:
    from verbatim.kernels.triton import linear, packed

    if encoding in BLOCKS:
        depth = 1024  # their rows are whole blocks of 256
    rows = Packing(8 if encoding is Encoding.FP8 else 4, 64, encoding)
    packing = WeightPacking((208, depth), torch.bfloat16, rows)
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(packing.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    data = pack(weight.cpu(), packing).cuda()
    whole = packed.unpack(data, packing, torch.arange(208, device="cuda"))
    x = torch.randn(500, depth, generator=generator, device="cuda").bfloat16()
    want = linear.linear(x, whole)
    for count in (1, 2, 16, 32, 33, 300, 500):
        tile = linear.tile_for(count, x.dtype, x.device, packing, data.data_ptr())
        got = linear.linear(x[:count], data, packing=packing)
        assert torch.equal(got, want[:count]), (count, tile)
    if encoding is Encoding.AFFINE:  # int8 and int4
        assert linear.tile_for(1, x.dtype, x.device, packing) == linear.LOW_PACKED_TILE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(512, 4096), (208, 12288), (77, 320), (1000, 75)], ids=str)
def test_products_give_same_bits_in_tiles_of_all_heights(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    from verbatim.kernels.triton import linear

    def numbers(*sizes: int) -> torch.Tensor:  # many magnitudes make rounding differences show
        exponents = torch.randint(-5, 6, sizes, generator=generator, device="cuda")
        return (torch.randn(sizes, generator=generator, device="cuda") * 2.0**exponents).to(dtype)

    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = numbers(4096, shape[1]), numbers(*shape)
    device = x.device
    assert linear.tile_for(1, dtype, device) == linear.TILES[0]
    assert linear.tile_for(4096, dtype, device) == linear.TILES[-1]
    want = linear.linear(x, weight, float32=True)
    for rows in (1, 2, 16, 64, 77, 300):
        assert torch.equal(linear.linear(x[:rows], weight, float32=True), want[:rows]), rows


def test_sampled_tokens_equal_those_of_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(128, 151_936, generator=generator)).bfloat16()
    rows = [
        SampleRow(SamplingParams(temperature=0.25 * (i % 6)), 2**63 + 977 * i, i, 31 * i)
        for i in range(128)
    ]
    found = sample_rows(logits.cuda(), SamplePlan(rows))
    assert repr(found) == repr(by("none", sample_rows)(logits, SamplePlan(rows)))


def test_closed_engine_frees_gpu_memory() -> None:
    with LLM(device="cuda", kv_memory="10MB") as llm:  # cuBLAS workspaces stay allocated
        llm.generate("Once", SamplingParams(max_tokens=3))
    del llm
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with LLM(device="cuda", kv_memory="200MB") as llm:
        llm.generate("Once", SamplingParams(max_tokens=3))
        assert torch.cuda.memory_allocated() - before > 150_000_000
    del llm
    assert torch.cuda.memory_allocated() - before < 50_000_000
