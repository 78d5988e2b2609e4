"""Decoding speed of every supported architecture, as a share of the limit.

    python benchmarks/architectures.py [--only llama gemma3] [--rows 1 8] [--rounds 3] [--markdown FILE]

Each model has the layers of its toy in the tests, with the widths of a small real model, and random weights
in bf16. The limit of a step is the time to move the bytes that it needs, at the bandwidth measured around it:
weights are read each time their layer runs, and as many experts as random routing chooses; the states of
recurrent layers are read and written for each row. Qwen3 is measured every few models; the last columns
compare with it.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decode import Times, run_verbatim

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import sweep, wrappers
from verbatim import LLM
from verbatim.bench.machine import LimitMeter
from verbatim.weights.load import store_by_rows

VOCAB = 8192
# Factors by which a toy's settings grow, by a pattern of the name; the first that matches counts.
SCALES: list[tuple[str, int]] = [
    (r"index_topk", 32),
    (r"d_rel", 2),
    (r"layers|_ids|groups|n_group|topk_group|experts|top_?k|vocab|indexer_kv", 0),
    (r"window|local_attention|chunk|budget|rel_extent", 32),
    (r"state|linear_(key|value)_head_dim", 16),
    (r"head_dim|dim_head|d_head|rotary_dim|mrope_section|mamba_head_dim|head_size", 8),
    (r"heads?$|heads_per_layer|n_head", 4),
    (
        r"hidden_size|d_model|n_embd|intermediate|ffn|n_inner|^dff$|dim_ff|d_inner|rank|d_ssm|"
        r"embed_dim|embedding_dim|proj_dim|lowrank",
        32,
    ),
]
REFERENCE, REFERENCE_EVERY = "qwen3", 8


@dataclass
class Row:
    """One architecture's measurement; `shares` by number of rows."""

    name: str
    fused: str
    megabytes: float
    shares: dict[int, float]


def scaled(case: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a toy's settings with the widths of a small real model."""
    mamba1 = case in ("jamba", "zamba")  # states of 16 numbers for each channel

    def change(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: change(key, entry) for key, entry in value.items()}
        if name in ("initializer_range", "init_std"):
            return 0.02
        if "vocab_size" in name:
            return VOCAB
        factor = next((factor for part, factor in SCALES if re.search(part, name)), 0)
        factor = 2 if mamba1 and name == "mamba_d_state" else factor
        if factor and isinstance(value, int) and not isinstance(value, bool):
            return value * factor
        if factor and isinstance(value, list) and all(isinstance(entry, int) for entry in value):
            return [entry * factor for entry in value]
        return value

    return {name: change(name, value) for name, value in settings.items()}


def scale_part(case: str, name: str, part: Any) -> Any:
    """Scale a wrapper's text config, and the widths of what its encoders return."""
    if "text" in name or "thinker" in name:
        return scaled(case, {name: part})[name]
    if isinstance(part, dict):
        return {key: scale_part(case, key, value) for key, value in part.items()}
    return scaled(case, {name: part})[name] if "out_hidden" in name else part


def build(case: str) -> Any:
    """Return the model of an architecture, in bf16, with its weights laid out as those of a folder."""
    import transformers

    if case in wrappers.SUPPORTED:
        (cls, settings), model_cls = wrappers.settings_of(case), wrappers.class_of(case)
        if any("text" in name or "thinker" in name for name in settings):
            settings = {name: scale_part(case, name, part) for name, part in settings.items()}
        else:
            settings = scaled(case, settings)
    else:
        cls, settings = sweep.settings_of(case)
        settings = scaled(case, settings)
        model_cls = getattr(transformers, sweep.names()[case.partition(":")[0]])
    config = cls(**settings)
    config._attn_implementation = "eager"
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = sweep.cast(model_cls(config), torch.bfloat16).eval()
    finally:
        torch.set_default_dtype(before)
    store_by_rows(model)
    return model


def calls_of(model: Any) -> Counter[torch.nn.Module]:
    """Return how often each module runs in a forward: some layers run several times."""
    calls: Counter[torch.nn.Module] = Counter()
    handles = [
        module.register_forward_pre_hook(lambda module, _: calls.update([module]))
        for module in model.modules()
    ]
    with torch.no_grad():
        model(input_ids=torch.arange(3, 11)[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return calls


def step_bytes(model: Any, num_rows: int, calls: Counter[torch.nn.Module]) -> float:
    """Return the bytes of the weights that a step of `num_rows` rows uses."""
    config = model.config.get_text_config(decoder=True)
    names = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
    top_k = next((n for name in names if (n := getattr(config, name, None))), 2)
    tables = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    head = model.get_output_embeddings()
    if head is not None:
        tables.discard(id(head.weight))
    unused = r"vision|audio|image|tower|encoder_attn"
    if any("decoder." in name for name, _ in model.named_modules()):
        unused += r"|encoder\."
    total = 0.0
    for name, weight in model.named_parameters():
        if id(weight) in tables or re.search(unused, name):
            continue
        times = float(max(1, calls[model.get_submodule(name.rpartition(".")[0])]))
        stacked = weight.ndim == 3 and weight.shape[1] > 1  # not a convolution
        if stacked or (re.search(r"experts?\.", name) and "shared" not in name):
            numbered = re.search(r"experts\.(\d+)\.", name)
            count = 8 if numbered or weight.ndim < 3 else weight.shape[0]
            if not stacked:  # DBRX calls the module of all experts once for each
                times = 1.0
            times *= 1 - (1 - min(1.0, top_k / count)) ** num_rows
        total += times * weight.nbytes
    return total


def decode_s(llm: LLM, num_rows: int, num_steps: int) -> float:
    """Return the median time of a decode step."""
    ids = torch.randint(3, VOCAB, (num_rows, 32), generator=torch.Generator().manual_seed(1))
    times = Times()
    run_verbatim(llm, ids.tolist(), num_steps, times)
    return statistics.median(times.decode)


def measure(case: str, meter: LimitMeter, rows: list[int], num_steps: int, num_rounds: int) -> Row:
    """Measure one architecture."""
    model = build(case)
    calls = calls_of(model)
    with LLM(model, kv_memory="1GB", max_sequences=max(rows)) as llm:
        runner: Any = llm.engine.runner
        runner.record_steps()  # as for a model from a folder, which is not edited
        info = llm.info()
        report, state_bytes = info["fused"], info["state_bytes"]
        shares: dict[int, list[float]] = {count: [] for count in rows}
        for count in rows:
            decode_s(llm, count, 6)  # steps are recorded by then
        for _ in range(num_rounds):
            for count in rows:
                read = meter.measure().bandwidth
                seconds = decode_s(llm, count, num_steps)
                nbytes = step_bytes(model, count, calls) + 2 * count * state_bytes
                limit = nbytes / max(read, meter.measure().bandwidth)
                shares[count].append(limit / seconds)
    fused, total = "all", report["layers"] + report["plain"]
    if report["whole"] != "yes":
        fused = f"{report['layers']} of {total}"
        print(f"{case}: {report}"[:600])
    medians = {count: statistics.median(values) for count, values in shares.items()}
    return Row(case, fused, step_bytes(model, 1, calls) / 1e6, medians)


def markdown(rows: list[Row], counts: list[int], reference: dict[int, float]) -> Iterator[str]:
    """Yield the lines of the table, slowest first."""
    heads = [f"of the limit, {n} row{'s' * (n > 1)}" for n in counts]
    heads += [f"of Qwen3's share, {n} row{'s' * (n > 1)}" for n in counts]
    yield "| architecture | fused layers | MB a step | " + " | ".join(heads) + " |"
    yield "| --- " * (3 + len(heads)) + "|"
    for row in sorted(rows, key=lambda row: row.shares[counts[0]] / reference[counts[0]]):
        cells = [f"{row.shares[n]:.0%}" for n in counts]
        cells += [f"{row.shares[n] / reference[n]:.2f}" for n in counts]
        yield f"| `{row.name}` | {row.fused} | {row.megabytes:.0f} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="architectures; default: all that are supported")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()
    known = [n for n in sweep.names() if n not in sweep.REFUSED and n not in sweep.UNBUILDABLE]
    meter, measured, reference = LimitMeter(torch.bfloat16), [], []
    for number, case in enumerate(options.only or known):
        if number % REFERENCE_EVERY == 0:
            reference.append(
                measure(REFERENCE, meter, options.rows, options.steps, options.rounds).shares
            )
        try:
            row = measure(case, meter, options.rows, options.steps, options.rounds)
        except Exception as error:  # go on with the other architectures
            print(f"{case}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        measured.append(row)
        shares = ", ".join(f"{n}: {share:.0%}" for n, share in row.shares.items())
        print(f"{case}: {row.megabytes:.0f} MB, fused {row.fused}, {shares}", flush=True)
        gc.collect()
    middle = {n: statistics.median(shares[n] for shares in reference) for n in options.rows}
    lines = list(markdown(measured, options.rows, middle))
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
