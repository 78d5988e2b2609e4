"""Adapter folders in every form that PEFT writes: our log-probs, compared with PEFT's own forward.

    pip install peft
    python benchmarks/clients/peft_folders.py [--only dora] [--models llama gpt2]

PEFT creates an adapter of a toy model, random numbers replace the training of its parameters, and
`save_pretrained` writes the folder. The reference is `PeftModel.from_pretrained(base, folder)`. The folder is
opened as a model (merged) and used per request. Either must give the same log-probs, or be refused by name.
The exit status is 1 if an outcome is wrong: other log-probs, or an answer where PEFT raises an error.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from peft.tuners.lora import corda
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from verbatim import LLM, VerbatimError

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.toys import make_toy, random_ids

IDS = random_ids(40, seed=5)
TOLERANCE = 2e-5  # of a log-prob in float32; a wrong one is off by more than 0.01


class Model(NamedTuple):
    """A toy and its layers' names."""

    settings: dict[str, Any]
    attention: list[str]
    mlp: list[str]
    embedding: str = "embed_tokens"
    norm: str = "norm"
    layer_list: str = "layers"


GATED = ["gate_proj", "up_proj", "down_proj"]
MODELS = {
    "llama": Model({}, ["q_proj", "v_proj", "o_proj"], GATED),
    "qwen2": Model({"tie_word_embeddings": True}, ["q_proj", "k_proj", "v_proj"], GATED),
    "gemma3": Model({"tie_word_embeddings": True}, ["q_proj", "o_proj"], GATED),
    "gpt2": Model({}, ["c_attn", "attn.c_proj"], ["c_fc", "mlp.c_proj"], "wte", "ln_f", "h"),
    "qwen3_moe": Model({}, ["q_proj", "k_proj", "o_proj"], []),
}
Make = Callable[[Model], dict[str, Any]]


def lora(**fields: Any) -> Make:
    """Return the LoraConfig fields of a configuration; the default targets are all linear layers."""
    return lambda model: {"target_modules": model.attention + model.mlp} | fields


CONFIGURATIONS: dict[str, Make] = {
    "plain": lora(lora_dropout=0.1),
    "rank_pattern": lambda m: lora(rank_pattern={m.attention[0]: 2, m.attention[1]: 6})(m),
    "rank_pattern with *": lambda m: lora(rank_pattern={f".*{m.attention[0]}": 2})(m),
    "alpha_pattern": lambda m: lora(alpha_pattern={m.attention[0]: 3, m.attention[1]: 20})(m),
    "use_rslora": lora(use_rslora=True),
    "use_dora": lora(use_dora=True),
    "bias=all": lora(bias="all"),
    "bias=lora_only": lora(bias="lora_only"),
    "layers_to_transform": lambda m: lora(layers_to_transform=[1], layers_pattern=m.layer_list)(m),
    "exclude_modules": lambda m: lora(exclude_modules=[m.attention[0]])(m),
    "all-linear": lora(target_modules="all-linear"),
    "embedding": lambda m: lora(target_modules=[*m.attention, m.embedding])(m),
    "embedding, use_dora": lambda m: lora(
        target_modules=[*m.attention, m.embedding], use_dora=True
    )(m),
    "head": lambda m: lora(target_modules=[*m.attention, "lm_head"])(m),
    "modules_to_save=head": lora(modules_to_save=["lm_head"]),
    "modules_to_save=embedding": lambda m: lora(modules_to_save=[m.embedding])(m),
    "modules_to_save=norm": lambda m: lora(modules_to_save=[m.norm])(m),
    "trainable_token_indices": lora(trainable_token_indices=[3, 5, 7]),
    "ensure_weight_tying": lambda m: lora(modules_to_save=[m.embedding], ensure_weight_tying=True)(
        m
    ),
    "lora_bias": lora(lora_bias=True),
    "target_parameters": lambda m: {"target_modules": [], "target_parameters": _parameters(m)},
    "fan_in_fan_out": lora(fan_in_fan_out=True),
    "init=gaussian": lora(init_lora_weights="gaussian"),
    "init=eva": lora(init_lora_weights="eva"),
    "init=orthogonal": lora(init_lora_weights="orthogonal"),
    "init=mica": lora(init_lora_weights="mica"),
    "init=pissa": lora(init_lora_weights="pissa"),
    "init=pissa, converted": lora(init_lora_weights="pissa"),
    "init=pissa, converted, use_rslora": lora(init_lora_weights="pissa", use_rslora=True),
    "init=olora": lora(init_lora_weights="olora"),
    "init=olora, converted": lora(init_lora_weights="olora"),
    "init=corda": lora(init_lora_weights="corda"),
    "init=lora_ga": lora(init_lora_weights="lora_ga"),
    "alora": lora(alora_invocation_tokens=IDS[4:7], task_type="CAUSAL_LM"),
    "velora": lora(velora_config=VeloraConfig()),
    "bdlora": lambda m: lora(
        use_bdlora=BdLoraConfig(target_modules_bd_a=m.attention[:1], nblocks=2, match_strict=False)
    )(m),
    "kasa": lora(kasa_config=KasaConfig()),
    "monteclora": lora(monteclora_config=MontecloraConfig()),
    "layer_replication": lora(layer_replication=[(0, 2), (1, 3)]),
    "bfloat16": lora(),
    "second adapter": lora(),
    "single experts": lora(),
    "bin": lora(),
    "infinity": lora(),
}
OTHERS = {
    "AdaLoRA": lambda m: peft.AdaLoraConfig(target_modules=m.attention, total_step=10),
    "IA3": lambda m: peft.IA3Config(
        target_modules=m.attention + m.mlp[-1:], feedforward_modules=m.mlp[-1:]
    ),
    "LoHa": lambda m: peft.LoHaConfig(target_modules=m.attention),
    "LoKr": lambda m: peft.LoKrConfig(target_modules=m.attention),
    "OFT": lambda m: peft.OFTConfig(target_modules=m.attention, oft_block_size=4),
    "VeRA": lambda m: peft.VeraConfig(target_modules=m.attention[:1]),
    "prompt tuning": lambda m: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def _parameters(model: Model) -> list[str]:
    return [f"{(model.mlp or ['experts.down_proj'])[-1]}{'.weight' if model.mlp else ''}"]


def make_folder(name: str, model: Model, base: Path, folder: Path) -> Path:
    """Write an adapter with PEFT, and return its folder."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_pretrained(base)
    if name in OTHERS:
        config: Any = OTHERS[name](model)
    else:
        config = peft.LoraConfig(r=4, lora_alpha=6, **CONFIGURATIONS[name](model))
        if name == "init=corda":
            corda.preprocess_corda(module, config, run_model=lambda: module(torch.tensor([IDS])))
    tuned = peft.get_peft_model(module, config, autocast_adapter_dtype=False)
    converted = {}
    if "converted" in name:
        init = tuned.peft_config["default"].init_lora_weights
        tuned.peft_config["default"].init_lora_weights = True
        tuned.save_pretrained(folder / "initial")
        tuned.peft_config["default"].init_lora_weights = init
        converted["path_initial_model_for_weight_conversion"] = str(folder / "initial")
    if name == "second adapter":
        tuned.add_adapter("other", config)
        tuned.set_adapter("other")
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    tuned.save_pretrained(folder, **converted)
    return edit(name, folder, module)


def edit(name: str, folder: Path, module: Any) -> Path:
    """Change a folder to a form that PEFT's `save_pretrained` does not write."""
    if name == "second adapter":
        return folder / "other"
    file = folder / "adapter_model.safetensors"
    if name == "bfloat16":
        save_file({k: t.bfloat16() for k, t in load_file(file).items()}, file)
    if name == "bin":
        torch.save(load_file(file), folder / "adapter_model.bin")
        file.unlink()
    if name == "infinity":
        tensors = load_file(file)
        next(iter(tensors.values()))[0, 0] = torch.inf
        save_file(tensors, file)
    if name == "single experts":  # with the names of transformers 4
        config = json.loads((folder / "adapter_config.json").read_text())
        config["target_modules"] += GATED
        (folder / "adapter_config.json").write_text(json.dumps(config))
        hidden, inner = module.config.hidden_size, module.config.moe_intermediate_size
        tensors = load_file(file)
        for layer, expert, part in itertools.product(
            range(module.config.num_hidden_layers), range(module.config.num_experts), GATED
        ):
            shape = (hidden, inner) if part == "down_proj" else (inner, hidden)
            key = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{part}"
            tensors[f"{key}.lora_A.weight"] = 0.2 * torch.randn(4, shape[1])
            tensors[f"{key}.lora_B.weight"] = 0.2 * torch.randn(shape[0], 4)
        save_file(tensors, file)
    return folder


def scores_of(module: Any) -> torch.Tensor:
    """Return the log-prob of each id after the first."""
    with torch.no_grad():
        logprobs = module(input_ids=torch.tensor([IDS])).logits[0, -len(IDS) :].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


def outcome(open_: Callable[[], LLM], adapter: str | None, expected: Any) -> tuple[str, str]:
    """Compare our log-probs with PEFT's, or with the error that it raised."""
    try:
        with open_() as llm:
            scores = torch.tensor(llm.score(IDS, adapter=adapter)[1:])
    except VerbatimError as error:
        return "refused", str(error)
    if isinstance(expected, Exception):
        return "wrong", f"PEFT raises {expected!r}"
    difference = (scores - expected).abs().max().item()
    return ("equal" if difference < TOLERANCE else "wrong"), f"{difference:.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--only", default="", help="part of a configuration's name")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts, worst, reasons = Counter[str](), 0.0, dict[str, str]()
    for name in filter(lambda name: options.only in name, [*CONFIGURATIONS, *OTHERS]):
        cells = []
        for model_name in options.models:
            model = MODELS[model_name]
            if name == "single experts" and model_name != "qwen3_moe":
                continue
            with tempfile.TemporaryDirectory() as root:
                base = Path(root) / "base"
                make_toy(model_name, **copy.deepcopy(model.settings)).save_pretrained(base)
                try:
                    folder = make_folder(name, model, base, Path(root) / "adapter")
                except Exception as error:
                    cells.append(f"not made: {str(error).splitlines()[0][:60]}")
                    continue
                expected: Any
                try:
                    module = AutoModelForCausalLM.from_pretrained(base)
                    expected = scores_of(peft.PeftModel.from_pretrained(module, folder).eval())
                except Exception as error:
                    expected = error
                for adapter, open_ in (
                    (None, partial(LLM, folder)),
                    ("a", partial(LLM, base, adapters={"a": folder})),
                ):
                    word, detail = outcome(open_, adapter, expected)
                    counts[word] += 1
                    worst = max(worst, float(detail)) if word == "equal" else worst
                    cells.append(word if word != "wrong" else f"WRONG ({detail})")
                    reasons.setdefault(f"{name}: {word}", detail.replace(f"{root}/", ""))
        print(f"{name:34} {' '.join(f'{cell:8}' for cell in cells)}", flush=True)
    for key, detail in reasons.items():
        if not key.endswith("equal"):
            print(f"{key}: {detail}")
    print(f"{dict(counts)}, the largest difference of equal ones {worst:.1e}")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
