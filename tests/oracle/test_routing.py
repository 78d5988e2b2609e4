"""Mixture-of-experts routing: the record is what the routers chose, and a replay is bit-identical."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from support import toys
from support.pairwise import slow_but
from support.routing_cases import (
    IDS,
    LENGTHS,
    ROUTED,
    TABLES,
    WHOLE,
    batch,
    build,
    expert_layers,
    opened,
    other_experts,
    records,
)
from verbatim.batch import Choices
from verbatim.errors import ModelChanged, NotSupported
from verbatim.model.flat import FlatContext
from verbatim.model.routing import ChoiceStore, Routing
from verbatim.placement.resident import Resident

# How each architecture turns its router's logits into the weights of the experts that were chosen.
AFTER, BEFORE, SIGMOID = "softmax of the chosen", "softmax of all", "sigmoid"
WEIGHTS = {
    "qwen3_moe": BEFORE,
    "mixtral": BEFORE,
    "olmoe": BEFORE,
    "deepseek_v2": BEFORE,  # choice and weights come from scores masked by groups
    "hunyuan_v1_moe": BEFORE,
    "ernie4_5_moe": BEFORE,
    "gpt_oss": AFTER,
    "granitemoe": AFTER,
    "deepseek_v3": SIGMOID,
    "glm4_moe": SIGMOID,
    "dots1": SIGMOID,
    "minimax_m2": SIGMOID,
    "lfm2_moe": SIGMOID,
}


@contextmanager
def before_experts(model: Any, change: Callable[..., Any]) -> Iterator[None]:
    """Call `change(layer, block, args)` before the experts of each layer in a plain forward."""
    handles = [
        experts.register_forward_pre_hook(lambda _, args, n=n, block=block: change(n, block, args))
        for n, (block, experts) in enumerate(expert_layers(model))
    ]
    yield
    for handle in handles:
        handle.remove()


def plain(model: Any, s: int) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS[s]]), use_cache=False).logits[0]


OWN_CODE = ("dbrx", "longcat_flash")  # these pass the chosen experts in another order


@pytest.mark.parametrize("case", slow_but([*[*ROUTED][1::3], *OWN_CODE], [*ROUTED, *OWN_CODE]))
def test_recorded_routing_matches_transformers_routers(case: str) -> None:
    model = build(case)
    runner = opened(model)
    choices = runner.choices["routing"]
    runner.forward(batch([0, 1, 2], WHOLE))
    named = (m for m in model.modules() if type(m).__name__.endswith("Experts"))
    experts = named if case in OWN_CODE else (experts for _, experts in expert_layers(model))
    ordered: Any = (lambda ids: ids.sort(-1)[0]) if case in OWN_CODE else (lambda ids: ids)
    chosen: list[Tensor] = []
    for module in experts:
        module.register_forward_pre_hook(lambda _, args: chosen.append(ordered(args[1])))
    for s, record in enumerate(records(runner)):
        chosen.clear()
        plain(model, s)
        assert record.dtype == torch.int16
        assert record.shape == (LENGTHS[s], choices.layers, choices.k)
        assert torch.equal(ordered(record).long(), torch.stack(chosen, dim=1))
    assert choices.reason is None
    assert runner.info()["routing_bytes"] == 17 * 4 * record[0].numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", WEIGHTS)
def test_replay_of_recorded_routing_gives_same_bits(case: str, dtype: torch.dtype) -> None:
    runner = opened(build(case).to(dtype))
    runner.choices["routing"].check_replay("routing")
    free = runner.forward(batch([0, 1, 2], WHOLE)).logits
    own = torch.cat(records(runner))
    replayed = batch([0, 1, 2], WHOLE, forced_experts=own)
    assert torch.equal(runner.forward(replayed).logits, free)
    assert torch.equal(torch.cat(records(runner)), own)


def weights_by_hand(kind: str, config: Any, block: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    named = dict(getattr(block, "gate" if hasattr(block, "gate") else "router").named_parameters())
    matrix = next(p for p in named.values() if p.ndim == 2)
    logits = torch.nn.functional.linear(hidden, matrix, named.get("bias"))
    if kind == AFTER:
        return logits.gather(1, ids).softmax(-1)
    weights = (logits.sigmoid() if kind == SIGMOID else logits.softmax(-1)).gather(1, ids)
    if getattr(config, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(config, "routed_scaling_factor", 1.0)


@pytest.mark.parametrize("case", WEIGHTS)
def test_forced_experts_are_used_with_router_weights(case: str) -> None:
    model = build(case)
    runner = opened(model)
    forced = other_experts(runner)
    logits = runner.forward(batch([0, 1, 2], WHOLE, forced_experts=torch.cat(forced))).logits
    assert all(torch.equal(a, b) for a, b in zip(records(runner), forced, strict=True))
    for s, ours in enumerate(logits.split(LENGTHS)):

        def force(n: int, block: Any, args: Any) -> Any:
            ids = forced[s][:, n].long()  # noqa: B023
            weights = weights_by_hand(WEIGHTS[case], model.config, block, args[0], ids)
            return args[0], ids, weights.to(args[2].dtype)

        with before_experts(model, force):
            theirs = plain(model, s)
        assert float((ours - theirs).abs().max()) < 1e-5 * max(1.0, float(theirs.abs().max()))
        assert float((ours - plain(model, s)).abs().max()) > 1e-2  # logits have changed


def weights_of(runner: Resident, forced: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the experts and float64 weights of the first sequence in the first routed layer."""
    decoder, work = runner.decoder, batch([0], WHOLE[:1], forced_experts=forced)
    spec = decoder.spec
    routing = Routing(spec.routed, spec.routed_modules, LENGTHS[0], forced)
    seen: list[Tensor] = []
    context = FlatContext(spec.slots, work, runner.store, routing)
    with before_experts(decoder.module, lambda n, block, args: seen.append(args[2])):
        decoder._forward(decoder.module, [context])
    assert context.routing is not None
    return context.routing.record()[:, 0].long(), seen[0].double()


@pytest.mark.parametrize("case", slow_but([*ROUTED][::3], [c for c in ROUTED if c != "phimoe"]))
def test_weights_of_forced_and_chosen_experts_are_consistent(case: str) -> None:
    """For any router: the weight ratios a/c and b/c of forced experts give the ratio a/b of chosen ones."""
    runner = opened(build(case))
    runner.choices["routing"].check_replay("routing")
    own, weights = weights_of(runner, None)
    third = torch.stack(
        [row[~torch.isin(row, ids)] for ids, row in zip(own, _all(runner), strict=True)]
    )
    for c in (third[:, :1], third[:, -1:]):
        ratios = []
        for ids in (torch.cat([own[:, :1], c], dim=1), torch.cat([own[:, 1:], c], dim=1)):
            forced = ids[:, None].repeat(1, runner.choices["routing"].layers, 1).to(torch.int16)
            taken, got = weights_of(runner, forced)
            assert torch.equal(taken, ids)
            ratios.append(got[:, 0] / got[:, 1])
        torch.testing.assert_close(
            ratios[0] / ratios[1], weights[:, 0] / weights[:, 1], rtol=1e-4, atol=0.0
        )


def _all(runner: Resident) -> Tensor:
    return torch.arange(runner.choices["routing"].count).repeat(LENGTHS[0], 1)


@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_rows_without_forced_experts_keep_their_bits(case: str) -> None:
    """In other sequences, and in positions and layers of the same one."""
    runner = opened(build(case))
    free = runner.forward(batch([0, 1, 2], WHOLE)).logits.split(LENGTHS)
    before = records(runner)
    forced = other_experts(runner)
    forced[1].fill_(-1)
    forced[2][:4] = -1
    forced[2][4:, 0] = before[2][4:, 0]
    forced[2][4:, 1:] = -1
    work = batch([0, 1, 2], WHOLE, forced_experts=torch.cat(forced))
    mixed = runner.forward(work).logits.split(LENGTHS)
    assert not torch.equal(mixed[0], free[0])
    assert torch.equal(mixed[1], free[1])
    assert torch.equal(mixed[2], free[2])
    now = records(runner)
    assert torch.equal(now[0], forced[0])
    assert torch.equal(now[1], before[1]) and torch.equal(now[2], before[2])
    # The forced sequence has the same bits in prompt chunks.
    pieces = [
        runner.forward(batch([0], [span], forced_experts=forced[0][slice(*span)])).logits
        for span in ((0, 5), (5, 6), (6, 13))
    ]
    assert torch.equal(torch.cat(pieces), mixed[0])


def test_model_with_forward_hook_replays_same_bits() -> None:
    model = build("hunyuan_v1_moe")  # needs no function override of its own
    runner = opened(model)
    assert not runner.decoder.spec.needs_override
    forced = torch.cat(other_experts(runner))
    work = batch([0, 1, 2], WHOLE, forced_experts=forced)
    expected = runner.forward(work).logits
    calls: list[Any] = []
    handle = model.model.layers[1].register_forward_hook(lambda *call: calls.append(call))
    runner.choices["routing"].check_replay("routing")
    assert not calls
    assert torch.equal(runner.forward(work).logits, expected)
    assert len(calls) == 1
    handle.remove()


def test_dense_model_has_no_routed_layers() -> None:
    runner = opened(toys.make_toy("llama"))
    assert runner.choices["routing"].layers == 0
    assert runner.info()["routing_bytes"] == 0
    for refused in (
        lambda: runner.record("routing", [1], 1),
        lambda: runner.choices["routing"].check_replay("routing"),
        lambda: runner.forward(batch([0], WHOLE[:1], forced_experts=torch.zeros(13, 1, 2))),
    ):
        with pytest.raises(NotSupported, match="none of its layers sends tokens to experts"):
            refused()


def test_experts_of_jetmoe_attention_are_recorded_and_replayed() -> None:
    """Each layer has two mixtures: of query and output projections, and of MLPs."""
    model = build("jetmoe")
    runner = opened(model)
    choices, work = runner.choices["routing"], batch([0, 1, 2], WHOLE)
    assert choices.layers == 2 * len(model.model.layers)
    free = runner.forward(work).logits
    own, other = torch.cat(records(runner)), torch.cat(other_experts(runner))
    logits: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__ == "JetMoeTopKGating":
            module.register_forward_hook(lambda _, __, output: logits.append(output[4]))
    for s, record in enumerate(records(runner)):
        logits.clear()
        plain(model, s)
        expected = torch.stack([values.topk(choices.k)[1] for values in logits], dim=1)
        assert torch.equal(record.long(), expected)
    for forced in (own, other):
        replayed = runner.forward(batch([0, 1, 2], WHOLE, forced_experts=forced)).logits
        assert torch.equal(torch.cat(records(runner)), forced)
        assert torch.equal(replayed, free) == (forced is own)


@pytest.mark.parametrize("case", ["phimoe", "dbrx"])
def test_unknown_router_is_recorded_but_not_replayed(case: str) -> None:
    runner = opened(build(case))
    runner.forward(batch([0], WHOLE[:1]))
    with pytest.raises(NotSupported, match="routing: its router has an unknown form"):
        runner.choices["routing"].check_replay("routing")
    forced = other_experts(runner)[0]
    with pytest.raises(NotSupported, match="has an unknown form"):
        runner.forward(batch([0], WHOLE[:1], forced_experts=forced))


def test_layers_with_different_top_k_are_not_recorded() -> None:
    model = build("qwen3_moe")
    model.model.layers[1].mlp.gate.top_k = 3
    runner = opened(model)
    choices = runner.choices["routing"]
    assert choices.layers == 0
    assert choices.reason is not None and "(2 of 8, 3 of 8)" in choices.reason
    runner.forward(batch([0], WHOLE[:1]))


def test_routing_of_300_experts_is_stored_in_two_bytes() -> None:
    store = ChoiceStore(Choices(2, 3, 300), num_blocks=4, block_size=2)
    ids = torch.arange(18).view(3, 2, 3) + 280
    store.write(torch.tensor([7, 2, 3]), ids)
    assert torch.equal(store.read([1, 3], 2), ids[1:].to(torch.int16))
    assert store.nbytes == 4 * 2 * 2 * 3 * 2


def test_changed_routed_layers_of_live_model_raise_model_changed() -> None:
    model = build("qwen3_moe")
    runner = opened(model)
    layer = model.model.layers[1]
    layer.mlp = torch.nn.Linear(64, 64)
    with pytest.raises(ModelChanged, match="routed layers"):
        runner.forward(batch([0], WHOLE[:1]))


def test_hook_that_calls_layer_again_does_not_change_record() -> None:
    model = build("qwen3_moe")
    runner = opened(model)
    runner.forward(batch([0], WHOLE[:1]))
    expected = runner.record("routing", TABLES[0], 13)
    first = model.model.layers[0].mlp

    def again(module: Any, args: Any, output: Any) -> None:
        first.forward(torch.zeros(1, 5, 64))

    handle = first.register_forward_hook(again)
    runner.forward(batch([0], WHOLE[:1]))
    handle.remove()
    assert torch.equal(runner.record("routing", TABLES[0], 13), expected)


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3"])  # in one call, and module by module
def test_failed_replay_leaves_no_state_behind(case: str) -> None:
    model = build(case)
    runner = opened(model)
    state = [dict(m.__dict__) for m in model.modules()]
    forced = other_experts(runner)[0]

    def fail(*_: Any) -> None:
        raise RuntimeError("a hook that fails")

    handle = model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a hook that fails"):
        runner.forward(batch([0], WHOLE[:1], forced_experts=forced))
    handle.remove()
    assert [dict(m.__dict__) for m in model.modules()] == state
    assert torch.tensor([[3.0, 1.0] + [0.0] * 6]).topk(2)[1].tolist() == [[0, 1]]
    with torch.inference_mode():  # the caller's modes change nothing
        logits = runner.forward(batch([0], WHOLE[:1], forced_experts=forced)).logits
        assert not runner.record("routing", TABLES[0], 13).is_inference()
    assert torch.equal(runner.forward(batch([0], WHOLE[:1], forced_experts=forced)).logits, logits)
