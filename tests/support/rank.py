"""One rank of a process group, started by test_lockstep.py.

Returns its results. The model communicates with the other ranks in every forward, so it would hang if any
rank ran one forward less.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from support.toys import make_toy, random_ids
from verbatim import LLM, InvalidRequest, RequestFailed, SamplingParams, rl


def main(rank: int, world: int) -> dict[str, Any]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=240))
    module = make_toy("llama")
    met = torch.zeros(1)

    def meet(*_: object) -> None:
        dist.all_reduce(met.add_(1), group=group)

    module.model.layers[1].register_forward_hook(meet)
    told = {}
    with LLM(module, max_batch_tokens=8) as llm:
        # Rank r has r prompts of very different lengths.
        prompts = [random_ids(5 + 9 * rank + 2 * b, seed=b) for b in range(rank)]
        params = SamplingParams(max_tokens=3 + 5 * rank, ignore_eos=True)
        found = rl.rollout(llm, prompts, params, group_size=2, seed=5, process_group=group)
        told["shape"] = list(found.sequences.shape)
        told["rows"] = found.responses.tolist()
        told["seeds"] = found.seeds.tolist()
        told["forwards"] = llm.stats()["forwards"]
        # Once more: all ranks are still in step.
        again = rl.rollout(llm, prompts, params, group_size=2, seed=5, process_group=group)
        told["again"] = torch.equal(again.sequences, found.sequences)
        # Coati's `generate` on a module wrapped for training, with other row lengths on each rank.
        from types import SimpleNamespace

        from torch.nn.parallel import DistributedDataParallel

        from verbatim.compat.coati import generate

        tokenizer = SimpleNamespace(padding_side="left", eos_token_id=2, pad_token_id=0)
        wrapped = DistributedDataParallel(module)
        rows = torch.tensor([random_ids(4 + rank, seed=9), random_ids(4 + rank, seed=10)])
        length = 12 + 6 * rank
        out = generate(wrapped, rows, tokenizer, length, seed=3, process_group=group)
        told["coati"] = out.tolist()
        # One rank's prompts are refused: no other rank waits for it.
        bad = [[10**6]] if rank == world - 1 else prompts
        try:
            rl.rollout(llm, bad, params, process_group=group)
        except (InvalidRequest, RequestFailed) as error:
            told["refused"] = f"{type(error).__name__}: {error}"
        # A request that fails on one rank affects only that rank. Ctrl-C there, before or after the model
        # has communicated, ends the call on all ranks.
        first, last = module.model.embed_tokens, module.lm_head
        for name, layer, act in (
            ("failed", last, _raises(OSError("the disk is gone"))),
            ("stopped", last, _raises(KeyboardInterrupt())),
            ("pressed", first, lambda: os.kill(os.getpid(), signal.SIGINT)),
        ):
            hook = layer.register_forward_hook(_once(act, after=4)) if rank == 1 else None
            try:
                params = SamplingParams(max_tokens=10, ignore_eos=True)
                found = rl.rollout(llm, [[5, 6, 7]], params, process_group=group)
                told[name] = f"{int(found.response_lengths)} tokens"
            except (Exception, KeyboardInterrupt) as raised:
                told[name] = f"{type(raised).__name__}: {raised}"
            if hook is not None:
                hook.remove()
            rest = torch.ones(3)
            dist.all_reduce(rest, group=group)  # all ranks are in step
            assert rest.tolist() == [world] * 3
        # An engine that sleeps on one rank is detected before any forward.
        if rank == 1:
            llm.sleep()
        try:
            rl.rollout(llm, [[5, 6, 7]], params, process_group=group)
        except Exception as raised:
            told["asleep"] = f"{type(raised).__name__}: {raised}"
        llm.wake()
        # Scoring keeps the ranks in step as well.
        rows = torch.full((2, 2, 5 + rank), 7)[:rank]
        told["scored"] = list(rl.score(llm, rows, process_group=group).shape)
        told["blocks"] = llm.stats()["blocks_used"]
    return told


def _raises(error: BaseException):
    def act() -> None:
        raise error

    return act


def _once(act, *, after: int):
    count = iter(range(100))

    def hook(*_: object) -> None:
        if next(count) == after:
            act()

    return hook
