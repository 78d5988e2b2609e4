"""Quantized checkpoints of random numbers: memory at opening, and decode speed, by format.

    python benchmarks/checkpoints.py memory [FORMAT ...]
    python benchmarks/checkpoints.py speed [--threads 2] [--rounds 5] [FORMAT ...]

`memory`: for each format, a process opens a toy of it, then the checkpoint. The figure is the rise of its
peak resident memory, divided by the size of the file. K and V have 8 MB.

`speed`: all formats, and bf16 weights of the same shapes quantized by Verbatim, take turns in one process.
One row decodes, and the bytes of the weights count once per token. The figures are medians of the rounds, and
"of ours" is the median of their ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.gguf_files import gguf_name, gguf_writer, save_gguf
from verbatim import LLM, SamplingParams
from verbatim.kernels.packing import TABLES, Encoding
from verbatim.weights.formats.gguf import HALVES

Tensors = dict[str, Tensor]
GROUP = 128
LLAMA = dict(
    hidden_size=2048,
    intermediate_size=5632,
    num_attention_heads=16,
    num_key_value_heads=16,
    vocab_size=4096,
    num_hidden_layers=12,
)
# A token goes to all experts, so it reads all weights.
MOE = dict(hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, head_dim=64)
MOE |= dict(num_experts_per_tok=32, vocab_size=4096, num_hidden_layers=8)
QWEN = MOE | dict(num_experts=32, moe_intermediate_size=768)
OSS = MOE | dict(num_local_experts=32, intermediate_size=1024)


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def scales(*shape: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(shape) * 0.002 + 0.001).to(dtype)


def awq(n: int, k: int) -> Tensors:
    zeros = torch.full((k // GROUP, n // 8), 0x77777777, dtype=torch.int32)
    scale = scales(k // GROUP, n, dtype=torch.half)
    return {"qweight": words(k, n // 8), "qzeros": zeros, "scales": scale}


def gptq(n: int, k: int) -> Tensors:
    return awq(n, k) | {"qweight": words(k // 8, n)}


def int4(n: int, k: int) -> Tensors:
    scale = scales(n, k // GROUP, dtype=torch.bfloat16)
    packed = {"weight_packed": words(n, k // 8), "weight_scale": scale}
    return packed | {"weight_shape": torch.tensor([n, k])}


def int8(n: int, k: int) -> Tensors:
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return {"weight": weight, "weight_scale": scales(n, 1, dtype=torch.bfloat16) / 10}


def fp8(n: int, k: int) -> Tensors:
    codes = torch.randint(0, 127, (n, k), dtype=torch.uint8)
    codes |= torch.randint(0, 2, (n, k), dtype=torch.uint8) << 7
    scale = scales(-(-n // 128), -(-k // 128), dtype=torch.float32) / 100
    return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scale}


def nf4(n: int, k: int) -> Tensors:
    """Return NF4 with quantized scales, as in QLoRA."""
    state = dict(quant_type="nf4", blocksize=64, dtype="bfloat16", shape=[n, k])
    state |= dict(nested_blocksize=256, nested_dtype="float32", nested_offset=0.03)
    blocks = n * k // 64
    return {
        "weight": torch.randint(0, 256, (n * k // 2, 1), dtype=torch.uint8),
        "weight.absmax": torch.randint(0, 256, (blocks,), dtype=torch.uint8),
        "weight.quant_map": TABLES[Encoding.NF4].clone(),
        "weight.nested_absmax": torch.full((-(-blocks // 256),), 0.01),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


def mxfp4(experts: int, n: int, k: int) -> Tensors:
    blocks = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
    return {"blocks": blocks, "scales": torch.randint(118, 122, (experts, n, k // 32)).byte()}


def nvfp4(n: int, k: int) -> Tensors:
    """Return NVFP4 as ModelOpt writes it."""
    scale = (torch.rand(n, k // 16) * 200 + 100).to(torch.float8_e4m3fn)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": torch.tensor(1e-5)}


def torchao_int8(n: int, k: int) -> Tensors:
    scale = scales(n, 1, dtype=torch.bfloat16) / 10
    return {
        "_weight_qdata": torch.randint(-127, 128, (n, k), dtype=torch.int8),
        "_weight_scale": scale,
    }


def torchao_int4(n: int, k: int) -> Tensors:
    codes = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8)
    scale = scales(k // GROUP, n, dtype=torch.bfloat16)
    return {"_weight_qdata": codes, "_weight_scale": scale, "_weight_zero_point": scale / 8}


def torchao_fp8(n: int, k: int) -> Tensors:
    scale = scales(n, 1, dtype=torch.float32) / 100
    return {"_weight_qdata": fp8(n, k)["weight"], "_weight_scale": scale}


def blocks(kind: str) -> Callable[..., Tensors]:
    """Return the writer of a GGUF type: random bits, with small numbers as the float16 scales."""
    halves = HALVES[Encoding[kind]] if kind.endswith("K") else slice(0, 2)

    def writer(n: int, k: int) -> Tensors:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        size, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        blocks = torch.randint(0, 256, (n, k // size, nbytes), dtype=torch.uint8)
        scale = scales(n, k // size, (halves.stop - halves.start) // 2, dtype=torch.half) / 10
        blocks[..., halves] = scale.view(torch.uint8)
        return {"weight": blocks.flatten(1)}

    return writer


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return dict(quant_method="compressed-tensors", format=kind, config_groups={"group_0": group})


_FOUR = dict(bits=4, group_size=GROUP)
_FP8 = dict(quant_method="fp8", weight_block_size=[128, 128])
_TORCHAO = {  # the kind of tensor, and how many columns share a scale (0: all)
    "torchao-int8": ("Int8Tensor", 0),
    "torchao-int4": ("Int4Tensor", GROUP),
    "torchao-fp8": ("Float8Tensor", 0),
}
# Name: config class, sizes, writer of a matrix, quantization_config, bits that are compared in speed.
FORMATS: dict[str, tuple[str, dict[str, Any], Callable[..., Tensors], dict[str, Any], int]] = {
    "awq": ("Llama", LLAMA, awq, dict(quant_method="awq", version="gemm", **_FOUR), 4),
    "gptq": ("Llama", LLAMA, gptq, dict(quant_method="gptq", desc_act=False, **_FOUR), 4),
    "compressed-int4": (
        *("Llama", LLAMA, int4),
        *(_compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP), 4),
    ),
    "nf4": ("Llama", LLAMA, nf4, dict(quant_method="bitsandbytes", load_in_4bit=True), 4),
    "nvfp4": ("Llama", LLAMA, nvfp4, dict(quant_method="modelopt", quant_algo="NVFP4"), 4),
    "compressed-int8": (
        *("Llama", LLAMA, int8),
        *(_compressed("int-quantized", num_bits=8, strategy="channel"), 8),
    ),
    "fp8": ("Llama", LLAMA, fp8, _FP8, 8),
    "fp8-experts": ("Qwen3Moe", QWEN, fp8, _FP8, 8),
    "torchao-int8": ("Llama", LLAMA, torchao_int8, dict(quant_method="torchao"), 8),
    "torchao-int4": ("Llama", LLAMA, torchao_int4, dict(quant_method="torchao"), 4),
    "torchao-fp8": ("Llama", LLAMA, torchao_fp8, dict(quant_method="torchao"), 8),
    **{
        f"gguf-{kind}": ("Llama", LLAMA, blocks(kind), {}, 8 if kind[1] > "4" else 4)
        for kind in ("Q8_0", "Q4_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K")
    },
    "mxfp4-experts": ("GptOss", OSS, mxfp4, dict(quant_method="mxfp4"), 4),
}


def write(folder: Path, name: str, **sizes: Any) -> None:
    """Write a checkpoint of random numbers."""
    import transformers

    family, base, writer, quantization, _ = FORMATS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**base, **sizes})
    with torch.device("meta"):
        module = getattr(transformers, f"{family}ForCausalLM")(config)
    tensors: Tensors = {}
    metadata = {"format": "pt"}
    in_gguf = name.startswith("gguf-")  # embeddings are quantized, too
    for path, parameter in module.named_parameters():
        owner, _, leaf = path.rpartition(".")
        shape = tuple(parameter.shape)
        if "experts." in path and "bias" not in path and len(shape) == 3:
            if family == "GptOss":
                encoded = mxfp4(shape[0], shape[2], shape[1])
                tensors |= {f"{path}_{end}": tensor for end, tensor in encoded.items()}
                continue
            parts = {"gate_proj": shape[1] // 2, "up_proj": shape[1] // 2}
            parts = parts if leaf == "gate_up_proj" else {leaf: shape[1]}
            for expert in range(shape[0]):
                for part, width in parts.items():
                    encoded = writer(width, shape[2])
                    tensors |= {f"{owner}.{expert}.{part}.{e}": t for e, t in encoded.items()}
        elif (path.endswith("proj.weight") and writer is not mxfp4) or (
            in_gguf and len(shape) == 2
        ):
            tensors |= {f"{owner}.{end}": tensor for end, tensor in writer(*shape).items()}
            if name in _TORCHAO:
                kind, group = _TORCHAO[name]
                fields = {"_type": kind, "_data": {"block_size": [1, group or shape[1]]}}
                metadata[path] = json.dumps(fields)
        else:
            tensors[path] = (torch.randn(shape) * 0.02).to(torch.bfloat16)
    folder.mkdir(parents=True)
    if in_gguf:
        write_gguf(folder / "model.gguf", config, name.removeprefix("gguf-"), tensors)
        return
    values = config.to_dict() | {"quantization_config": quantization, "dtype": "bfloat16"}
    values["architectures"] = [f"{family}ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(values, default=str))
    save_file(tensors, folder / "model.safetensors", metadata)


def write_gguf(path: Path, config: Any, kind: str, tensors: Tensors) -> None:
    """Write the tensors of a Llama as a GGUF file: bytes are blocks of `kind`, numbers bf16 or float32."""
    from gguf import GGMLQuantizationType

    writer = gguf_writer(path, config, "llama")
    for name, tensor in tensors.items():
        raw_type = GGMLQuantizationType[kind]
        if tensor.ndim == 1:
            tensor, raw_type = tensor.float(), GGMLQuantizationType.F32
        elif tensor.dtype is torch.bfloat16:
            tensor, raw_type = tensor.view(torch.uint8), GGMLQuantizationType.BF16
        writer.add_tensor(gguf_name(name), tensor.numpy(), raw_dtype=raw_type)
    save_gguf(writer)


def write_plain(folder: Path, name: str, **sizes: Any) -> None:
    """Write a bf16 checkpoint of the same shape as a format's."""
    import transformers

    family, base = FORMATS[name][:2]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    config = getattr(transformers, f"{family}Config")(**{**base, **sizes})
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    torch.set_default_dtype(before)


def _memory(field: str) -> int:
    """Return VmRSS, or its peak VmHWM, of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def opened(toy: Path, folder: Path) -> None:
    """Print the rise of peak memory when a process that has opened a toy opens a checkpoint."""
    settings: dict[str, Any] = dict(kv_memory="8MB", max_length=256)
    with LLM(toy, **settings) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    with LLM(folder, **settings) as llm:
        at_opening = _memory("VmHWM") - before
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
        weights = llm.info()["weight_bytes"]
    print(json.dumps([at_opening, _memory("VmHWM") - before, weights]))


def memory(names: list[str]) -> None:
    print("| format | file | weights in memory | peak at opening | peak / file |")
    print("| --- | --- | --- | --- | --- |")
    for name in names:
        with tempfile.TemporaryDirectory() as root:
            toy, folder = Path(root, "toy"), Path(root, "model")
            write(toy, name, num_hidden_layers=1, hidden_size=256, intermediate_size=256)
            write(folder, name)
            size = max(file.stat().st_size for file in folder.iterdir())
            call = [sys.executable, __file__, "opened", str(toy), str(folder)]
            out = subprocess.run(call, check=True, capture_output=True, text=True).stdout
            peak, _, weights = json.loads(out.splitlines()[-1])
        cells = (f"{n / 1e6:.0f} MB" for n in (size, weights, peak))
        print(f"| {name} | {' | '.join(cells)} | {peak / size:.2f} |", flush=True)


def speed(names: list[str], threads: int, rounds: int, layers: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    settings: dict[str, Any] = dict(kv_memory="64MB", max_length=256, num_threads=threads)
    models: dict[str, LLM] = {}
    ours = {name: f"int{4 if FORMATS[name][4] == 4 else 8} {FORMATS[name][0]}" for name in names}
    for name in names:
        with tempfile.TemporaryDirectory() as root:
            if ours[name] not in models:
                write_plain(Path(root, "plain"), name, num_hidden_layers=layers)
                kind = ours[name].split()[0]
                models[ours[name]] = LLM(Path(root, "plain"), quantization=kind, **settings)
            write(Path(root, name), name, num_hidden_layers=layers)
            models[name] = LLM(Path(root, name), **settings)
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, llm in models.items():
            request = llm.engine.admission.admit([1, 2, 3], params)
            llm.engine.submit(request)
            while not request.sequences[0].output_ids:
                llm.engine.step()
            start = time.perf_counter()
            while not request.finished:
                llm.engine.step()
            if turn:  # the first one warms up
                times[name].append((time.perf_counter() - start) / 24)
    print("| weights | bytes a token | ms a token | GB/s | of ours |")
    print("| --- | --- | --- | --- | --- |")
    rates: dict[str, list[float]] = {}
    for name, llm in models.items():
        # A step reads only a row of the embedding.
        runner: Any = llm.engine.runner
        table = runner.decoder.module.get_input_embeddings()
        stored = table.packed if hasattr(table, "packed") else table.weight
        nbytes = llm.info()["weight_bytes"] - stored.nbytes
        rates[name] = [nbytes / seconds for seconds in times[name]]
        of_ours = ""
        if name in ours:
            pairs = zip(rates[name], rates[ours[name]], strict=True)
            of_ours = f"{statistics.median(rate / other for rate, other in pairs):.2f}"
        milliseconds = statistics.median(times[name]) * 1e3
        cells = f"{nbytes / 1e6:.0f} MB | {milliseconds:.1f} | {nbytes / milliseconds / 1e6:.1f}"
        print(f"| {name} | {cells} | {of_ours} |")
        llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("memory", "speed", "opened"))
    parser.add_argument("names", nargs="*", metavar="FORMAT")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4, help="of the models of `speed`")
    args = parser.parse_intermixed_args()
    if args.what == "opened":
        opened(*map(Path, args.names))
    elif args.what == "memory":
        memory(args.names or list(FORMATS))
    else:
        speed(args.names or list(FORMATS), args.threads, args.rounds, args.layers)


if __name__ == "__main__":
    main()
