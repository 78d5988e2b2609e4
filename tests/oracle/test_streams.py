"""DeepSeek V4's residual streams by the kernels and in torch, and the model in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.toys import make_toy, random_ids
from verbatim import LLM, kernels
from verbatim.model.streams import collapse, expand


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.skipif(kernels.library() is None, reason="there are no compiled kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_one_call_has_the_bits_of_torch(count: int, dtype: torch.dtype) -> None:
    rows, width = 37, 100
    streams, made = noise(rows, count, width).to(dtype), noise(rows, width, seed=1).to(dtype)
    mixes, scale, base = (
        3 * noise(rows, (2 + count) * count, seed=2),
        noise(3, seed=3),
        noise((2 + count) * count, seed=4),
    )
    numbers: dict[str, Any] = dict(iterations=20, eps=1e-6)
    expected = collapse(mixes, scale, base, streams, **numbers, backend="torch")
    mixed = expand(streams, made, *expected[:2], backend="torch")
    totals = expected[1].sum(-1), expected[1].sum(-2)
    assert all(torch.allclose(total, torch.ones(()), atol=0.1) for total in totals)
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        actual = collapse(mixes, scale, base, streams, **numbers)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        assert torch.equal(expand(streams, made, *actual[:2]), mixed)
    torch.set_num_threads(1)
    for few in (1, 5):
        actual = collapse(mixes[-few:], scale, base, streams[-few:], **numbers)
        assert all(torch.equal(a, b[-few:]) for a, b in zip(actual, expected, strict=True))
        assert torch.equal(expand(streams[-few:], made[-few:], *actual[:2]), mixed[-few:])
    every_layout = (torch.stack([x, x], -1)[..., 0] for x in (streams, made, *expected[:2]))
    assert torch.equal(expand(*every_layout), mixed)
    none = expand(
        streams[:0], made[:0], *collapse(mixes[:0], scale, base, streams[:0], **numbers)[:2]
    )
    assert none.shape == (0, count, width)


def test_bfloat16_is_as_close_to_the_exact_log_probs_as_transformers_is(tmp_path: Path) -> None:
    make_toy("deepseek_v4").save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).float().eval()
    rows = [random_ids(120, seed=1), random_ids(33, seed=2)]

    def scores(model: Any, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    try:
        scores(theirs, [1, 2])
    except RuntimeError:
        pytest.skip("this version of transformers can't run its own DeepSeek V4 in bfloat16")
    with LLM(tmp_path, dtype="bfloat16") as llm:
        ours = [torch.tensor(score[1:]) for score in llm.score(rows)]
    truth, plain = (torch.cat([scores(m, ids) for ids in rows]) for m in (exact, theirs))
    errors = [(torch.cat(ours) - truth).abs().mean(), (plain - truth).abs().mean()]
    assert 0 < errors[0] < 1.5 * errors[1]
