"""DeepSeek V4's residual streams, with kernels and in torch, and the model in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from support import sweep
from support.layer_batches import outputs
from support.toys import make_toy, random_ids, scores_of
from verbatim import LLM, kernels
from verbatim.model.decoder import Decoder
from verbatim.model.streams import collapse, expand


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.skipif(kernels.library() is None, reason="there are no compiled kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "mixed"), [*((n, True) for n in (1, 2, 3, 4, 7, 8)), (4, False)])
def test_residual_stream_kernels_are_bit_identical_to_torch(
    count: int, mixed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, width, columns = 37, 100, (2 + count * mixed) * count
    streams, made = noise(rows, count, width).to(dtype), noise(rows, width, seed=1).to(dtype)
    mixes, scale, base = (
        3 * noise(rows, columns, seed=2),
        noise(2 + mixed, seed=3),
        noise(columns, seed=4),
    )
    numbers: dict[str, Any] = dict(iterations=20, eps=1e-6)
    if not mixed:
        numbers |= dict(after_scale=1.5, after_eps=1e-6)
    with monkeypatch.context() as without:
        without.setattr("verbatim.model.streams._MAX_STREAMS", 0)
        expected = collapse(mixes, scale, base, streams, **numbers)
        sums = expand(streams, made, *expected[:2])
    if mixed:
        assert expected[1] is not None
        totals = expected[1].sum(-1), expected[1].sum(-2)
        assert all(torch.allclose(total, torch.ones(()), atol=0.1) for total in totals)
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        actual = collapse(mixes, scale, base, streams, **numbers)
        assert all(a is b or torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        assert torch.equal(expand(streams, made, *actual[:2]), sums)
    torch.set_num_threads(1)
    for few in (1, 5):
        actual = collapse(mixes[-few:], scale, base, streams[-few:], **numbers)
        pairs = zip(actual, expected, strict=True)
        assert all(a is b or torch.equal(a, b[-few:]) for a, b in pairs)
        assert torch.equal(expand(streams[-few:], made[-few:], *actual[:2]), sums[-few:])
    operands = (streams, made, *expected[:2])
    every_layout = (x if x is None else torch.stack([x, x], -1)[..., 0] for x in operands)
    assert torch.equal(expand(*every_layout), sums)
    none = expand(
        streams[:0], made[:0], *collapse(mixes[:0], scale, base, streams[:0], **numbers)[:2]
    )
    assert none.shape == (0, count, width)


@pytest.mark.skipif("hy_v4" not in sweep.cases(), reason="a newer transformers has it")
def test_hy_v4_works_with_subclassed_layer_and_connection() -> None:
    model = sweep.build("hy_v4")
    expected = outputs(Decoder(model))
    layer = model.model.layers[1]
    layer.__class__ = type("Layer", (type(layer),), {})
    assert outputs(Decoder(model)) == expected
    connection = layer.attn_hc
    connection.__class__ = type("Connection", (type(connection),), {})
    ours, theirs = outputs(Decoder(model))[2], expected[2]  # logits of the batch of seven rows
    numbers = (torch.frombuffer(bytearray(x), dtype=torch.float32) for x in (ours, theirs))
    torch.testing.assert_close(*numbers, rtol=1e-3, atol=1e-3)


def test_bfloat16_error_is_comparable_to_transformers(tmp_path: Path) -> None:
    make_toy("deepseek_v4").save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).float().eval()
    rows = [random_ids(120, seed=1), random_ids(33, seed=2)]

    try:
        scores_of(theirs, [1, 2])
    except RuntimeError:
        pytest.skip("this version of transformers can't run its own DeepSeek V4 in bfloat16")
    with LLM(tmp_path, dtype="bfloat16") as llm:
        ours = [torch.tensor(score[1:]) for score in llm.score(rows)]
    truth, plain = (torch.cat([scores_of(m, ids) for ids in rows]) for m in (exact, theirs))
    errors = [(torch.cat(ours) - truth).abs().mean(), (plain - truth).abs().mean()]
    assert 0 < errors[0] < 1.5 * errors[1]
