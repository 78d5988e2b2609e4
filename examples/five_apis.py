"""One model through six APIs: each gives the same tokens, in as many steps, with as many bytes of K and V.

    python examples/five_apis.py [--tokens 24] [--stages 2] [--draft ngram] [--quantization int8]

The storyteller continues three prompts, first greedily and then with one seed: through
`verbatim.generate`, and through the documented calls of Coati, KempnerForge, Megatron Core, FlexLLMGen and
Petals. All of them run on one engine, so the ids are equal, also with stages, drafts or quantized weights.
The exit status is 1 if they differ. Ids of two machines can be compared if their numerics keys, which are
printed first, are equal.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

import verbatim.compat.coati
import verbatim.compat.flexllmgen
import verbatim.compat.kempnerforge
import verbatim.compat.megatron
import verbatim.compat.petals
from verbatim import LLM, PipelineParallel, compat

OPENINGS = [
    "Once upon a time, in a quiet forest, there lived",
    "One night, a wild storm came. The wind howled, and",
    "Winter came early that year, and there was little",
]
APIS: dict[str, Callable[[LLM, Tensor, int, bool], Tensor]] = {}


def api(through: Callable[[LLM, Tensor, int, bool], Tensor]) -> None:
    APIS[through.__name__] = through


@api
def llm(engine: LLM, rows: Tensor, new: int, sampled: bool) -> Tensor:
    temperature = 1.0 if sampled else 0.0
    return verbatim.generate(
        engine, rows, max_new_tokens=new, temperature=temperature, ignore_eos=True
    )


@api
def coati(engine: LLM, rows: Tensor, new: int, sampled: bool) -> Tensor:
    tokenizer = SimpleNamespace(padding_side="left", eos_token_id=None, pad_token_id=None)
    return compat.coati.generate(
        engine, rows, tokenizer, rows.shape[1] + new, do_sample=sampled, early_stopping=False
    )


@api
def kempnerforge(engine: LLM, rows: Tensor, new: int, sampled: bool) -> Tensor:
    return compat.kempnerforge.generate(engine, rows, new, temperature=1.0 if sampled else 0.0)


@api
def megatron(engine: LLM, rows: Tensor, new: int, sampled: bool) -> Tensor:
    params = compat.megatron.SamplingParams(
        num_tokens_to_generate=new, top_k=0 if sampled else 1, termination_id=-1
    )
    requests = {
        i: compat.megatron.InferenceRequest(request_id=i, prompt_tokens=row, sampling_params=params)
        for i, row in enumerate(rows)
    }
    controller = compat.megatron.TextGenerationController(engine)
    controller.generate_all_output_tokens_static_batch(requests)
    return torch.cat([rows, torch.stack([r.generated_tokens for r in requests.values()])], dim=1)


@api
def flexllmgen(engine: LLM, rows: Tensor, new: int, sampled: bool) -> Tensor:
    output = compat.flexllmgen.OptLM(engine).generate(rows, new, do_sample=sampled)
    return torch.from_numpy(output).long()


@api
def petals(engine: LLM, rows: Tensor, new: int, sampled: bool) -> Tensor:
    model = compat.petals.AutoDistributedModelForCausalLM.from_pretrained(engine)
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None}
    return model.generate(rows, max_new_tokens=new, do_sample=sampled, **plain)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=24, help="new ones of each row (default 24)")
    parser.add_argument("--stages", type=int, default=1, help="processes that share the layers")
    parser.add_argument("--draft", help='how tokens are drafted, such as "ngram"')
    parser.add_argument("--quantization", help='of the weights, such as "int8"')
    args = parser.parse_args()
    new, same = args.tokens, True
    options = {"draft": args.draft, "quantization": args.quantization}
    if args.draft:  # adaptive lengths depend on measured times, so the number of steps would vary
        options["num_draft_tokens"] = 2
    if args.stages > 1:
        options["placement"] = PipelineParallel(args.stages)
    with LLM(**options) as engine:
        print(engine.info()["numerics_key"])
    for sampled in (False, True):
        print("with one seed" if sampled else "the likeliest")
        outcomes = []
        for name, generate in APIS.items():
            # With blocks of one token, the cached blocks count the tokens.
            with LLM(block_size=1, kv_memory="16MB", **options) as engine:
                tok = engine.tokenizer.hf
                ids = [tok(text).input_ids for text in OPENINGS]
                rows = torch.tensor([row[: min(map(len, ids))] for row in ids])
                torch.manual_seed(7)  # each API draws its seed from torch's generator
                output = generate(engine, rows, new, sampled)
                stats, size = engine.stats(), engine.info()["kv_bytes_per_token"]
            digest = hashlib.sha256(str(output.tolist()).encode()).hexdigest()[:12]
            kv = stats["blocks_cached"] * size
            print(f"  {name:<13} ids {digest}  {stats['forwards']} steps  {kv} bytes of K and V")
            outcomes.append((digest, stats["forwards"], kv))
        print(f"  {tok.decode(output[0])!r}")
        same &= len(set(outcomes)) == 1
    print("the same tokens through every API" if same else "THE APIS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
