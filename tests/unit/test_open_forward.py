"""`verbatim.open_forward`, which opens any callable that returns logits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import verbatim
from verbatim import InvalidRequest, NotSupported, PromptTooLong, SamplingParams, UnsupportedModel
from verbatim.compat.flexllmgen import policy
from verbatim.quantization.formats import KV_PACKINGS

TABLE = torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
PROMPTS = [[5], [7, 1, 3], [2, 2]]


def bigram(input_ids: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
    """Logits that depend on the last token only."""
    return {"logits": scale * TABLE[input_ids]}


@pytest.fixture
def opened() -> Iterator[verbatim.LLM]:
    with verbatim.open_forward(bigram, max_length=20, max_sequences=2) as llm:
        yield llm


def test_greedy_tokens_follow_the_callables_logits(opened: verbatim.LLM) -> None:
    results = opened.generate(PROMPTS, SamplingParams(max_tokens=9, temperature=0.0))
    for prompt, result in zip(PROMPTS, results, strict=True):
        ids = list(prompt)
        for _ in range(9):
            ids.append(int(TABLE[ids[-1]].argmax()))
        assert result.outputs[0].token_ids == ids[len(prompt) :]


def test_seeded_generation_gives_the_same_tokens_as_a_loop_over_sample(
    opened: verbatim.LLM,
) -> None:
    (result,) = opened.generate([PROMPTS[1]], SamplingParams(max_tokens=9, seed=4))
    ids = torch.tensor([PROMPTS[1]])
    for _ in range(9):
        logits = bigram(ids)["logits"][:, -1]
        drawn = verbatim.sample(logits, seed=4, position=ids.shape[1])
        ids = torch.cat([ids, drawn[:, None]], dim=1)
    assert result.outputs[0].token_ids == ids[0, 3:].tolist()


def test_arguments_are_passed_to_the_forward_or_rejected() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    with verbatim.open_forward(bigram, max_length=9, arguments={"scale": -1.0}) as llm:
        assert llm.generate([[5]], params)[0].outputs[0].token_ids == [int(TABLE[5].argmin())]
    with pytest.raises(InvalidRequest, match="speed: the forward of function takes no such"):
        verbatim.open_forward(bigram, max_length=9, arguments={"speed": 1})
    with pytest.raises(NotSupported, match=r"scale is a tensor of shape \[4, 1\]"):
        verbatim.open_forward(bigram, max_length=9, arguments={"scale": torch.ones(4, 1)})


def test_prompts_beyond_max_length_and_too_large_max_length_are_rejected(
    opened: verbatim.LLM,
) -> None:
    assert opened.max_length == 20
    with pytest.raises(PromptTooLong, match=r"limit .* is 20"):
        opened.generate([[5]], SamplingParams(max_tokens=20))
    with pytest.raises(PromptTooLong, match="1048576"):
        verbatim.open_forward(bigram, max_length=2**21)


def test_pad_token_id_is_taken_from_the_config() -> None:
    class Configured(nn.Module):
        def __init__(self, **ids: Any) -> None:
            super().__init__()
            self.config = SimpleNamespace(vocab_size=32, **ids)

        def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
            return bigram(input_ids)

    for ids, pad in (
        ({"pad_token_id": 3, "eos_token_id": 2}, 3),
        ({"pad_token_id": None, "eos_token_id": [9, 2]}, 2),
        ({"eos_token_id": -1}, 0),
    ):
        with verbatim.open_forward(Configured(**ids), max_length=9) as llm:
            assert llm.pad_token_id == pad


def test_invalid_options_hooks_and_batches_are_rejected() -> None:
    for name, value in (
        ("max_length", 0),
        ("max_length", "5"),
        ("max_sequences", None),
        ("pad_token_id", "x"),
        ("arguments", None),
    ):
        sizes: dict[str, Any] = {"max_length": 9, name: value}
        with pytest.raises(InvalidRequest, match=name):
            verbatim.open_forward(bigram, **sizes)
    ids, mask = torch.tensor([[1, 2]]), torch.tensor([[1, 1]])
    hooks = (None, None)
    wrong: list[tuple[Any, Any]] = [
        ((None,), (ids, mask)),
        ((3, None), (ids, mask)),
        (hooks, None),
        (hooks, ids),
        (hooks, (ids, mask[:, :1])),
        (hooks, (ids, torch.tensor([[1, 0]]))),
    ]
    for given, batch in wrong:
        with pytest.raises(InvalidRequest, match=r"hooks|batch"):
            verbatim.open_forward(bigram, max_length=9, hooks=given, batch=batch)
    with (
        verbatim.open_forward(bigram, max_length=9, hooks=hooks, batch=(ids, mask)) as llm,
        pytest.raises(InvalidRequest, match="does not match any row"),
    ):
        llm.generate([[3, 4]], SamplingParams(max_tokens=2))


def test_kv_capacity_for_a_large_max_length_is_limited() -> None:
    with verbatim.open_forward(bigram, max_length=2**20) as llm:
        runner = llm.engine.runner
        assert 2**20 < runner.num_blocks * runner.block_size < 2**23
        assert len(llm.generate([[5]], SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3


def test_errors_name_the_class_of_a_wrapper() -> None:
    class Wrapper:
        def run_one_forward_step(self, inputs: dict[str, Tensor]) -> Tensor:
            return torch.zeros(3)

    with pytest.raises(UnsupportedModel, match="Wrapper returned logits of shape"):
        verbatim.open_forward(Wrapper(), max_length=9)


def test_default_device_of_torch_is_ignored(opened: verbatim.LLM) -> None:
    ids, logits = torch.tensor([[5, 6]]), TABLE[:2]
    expected = verbatim.generate(opened, ids, max_new_tokens=4, seed=1)
    drawn = verbatim.sample(logits, seed=1, position=2)
    torch.manual_seed(1)
    fresh = verbatim.sample(logits)
    with torch.device("meta"):
        assert torch.equal(verbatim.generate(opened, ids, max_new_tokens=4, seed=1), expected)
        assert torch.equal(verbatim.sample(logits, seed=1, position=2), drawn)
        torch.manual_seed(1)
        assert torch.equal(verbatim.sample(logits), fresh)


def test_group_sizes_of_flexllmgen_policy_equal_the_kv_caches() -> None:
    _, sizes, _ = policy._SUPPORTED_GROUPS["comp_cache_config"]
    assert all(p.group == sizes[p.bits][0] for p in KV_PACKINGS.values()) and len(sizes) == 2
