"""Inspection of a model, and a trial run for classes that are not in the list of verified ones.

Two short sequences go through the flat path, in one piece and in two, and must give what the model's
own forward gives for each of them alone; and bit for bit what the flat path gives for each alone. What the
inspection cannot see shows here: scores changed in ways of the model's own, positions that start
elsewhere, keyword arguments that mean something, a scale taken over all rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from verbatim.errors import UnsupportedModel
from verbatim.kv.store import KVStore
from verbatim.model.differential import differential_check, largest_error, tolerance
from verbatim.model.flat import FlatContext, noise_store, span_batch, trial_logits
from verbatim.model.patching import Forwards, patched, quiet, replaced_forwards
from verbatim.model.refusals import reason_to_refuse
from verbatim.model.spec import ModelSpec, OwnModel, inner_model, inspect_once
from verbatim.model.verified import is_verified

_LENGTHS = (9, 6)
_CUT = (4, 1)
Spans = dict[int, tuple[int, int]]  # positions in a forward, by sequence


def inspect_model(module: nn.Module) -> ModelSpec:
    """Run one small forward of `module`, and return its spec.

    Raises:
        UnsupportedModel: the reason why it can't be run on flat batches.
    """
    inner = inner_model(module)
    try:
        reason = reason_to_refuse(inner)
        if reason is not None:
            raise UnsupportedModel(reason)
        spec = inspect_once(module, inner)
        if not (isinstance(inner, OwnModel) or is_verified(module, inner)):
            try_out(module, replaced_forwards(module), spec)
    except UnsupportedModel as reason:
        name = type(inner).__name__
        raise UnsupportedModel(
            f"{name} can't be run on flat batches: {reason}"
        ) from reason.__cause__
    return spec


def try_out(module: nn.Module, forwards: Forwards, spec: ModelSpec) -> None:
    """Compare the flat path with the model's own forward.

    Args:
        forwards: of this module, as for `patched`.
        spec: of it.

    Raises:
        UnsupportedModel: they differ.
    """
    device = next(module.parameters()).device
    high = max(2, min(spec.vocab_size, 1000) - 3)  # special ids stand at either end
    whole = [(torch.arange(n) * 37 + 5 * n) % high + 2 for n in _LENGTHS]
    plain = [_plain(module, ids.to(device)) for ids in whole]
    scale = max(float(logits.abs().max()) for logits in plain)
    if not math.isfinite(scale):  # a matter of weights
        return

    def memory() -> KVStore:
        return noise_store(spec.layers, spec.states, spec.dtype, device)

    def flat(store: KVStore, spans: Spans) -> dict[int, Tensor]:
        """Return the logits of each sequence, in one flat forward."""
        ids = torch.cat([whole[s][slice(*at)] for s, at in spans.items()])
        context = FlatContext(spec.slots, span_batch(spans, ids), store)
        logits = trial_logits(module, spec, forwards, context)
        lengths = [stop - start for start, stop in spans.values()]
        return dict(zip(spans, logits.split(lengths), strict=True))

    every: Spans = {s: (0, length) for s, length in enumerate(_LENGTHS)}
    cut: Spans = {s: (0, length) for s, length in enumerate(_CUT)}
    rest: Spans = {s: (cut[s][1], every[s][1]) for s in every}
    together, in_two = flat(memory(), every), memory()
    first, second = flat(in_two, cut), flat(in_two, rest)

    def otherwise(s: int) -> list[Tensor]:
        """Return the logits of one sequence alone, and in two pieces."""
        alone = flat(memory(), {s: every[s]})[s]
        return [alone, torch.cat([first[s], second[s]])]

    if differential_check(otherwise, lambda s: [together[s]] * 2, every):
        raise UnsupportedModel("in a trial its logits changed with the rows beside them")
    found = differential_check(
        lambda s: [together[s]],
        lambda s: [plain[s]],
        every,
        lambda ours, theirs: largest_error(ours, theirs) <= tolerance(ours, scale),
    )
    if found is not None:
        raise UnsupportedModel(
            "in a trial its logits on a flat batch were off by "
            f"{largest_error(found.ours, found.theirs):.2g} (largest logit: {scale:.2g}) from its own forward"
        )


def _plain(module: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits `[T, V]` of the module's own forward, with eager attention."""
    with quiet(progress=True), patched(module, [], hooks=False, attention="eager"):
        return module(input_ids=ids[None], use_cache=False).logits[0]  # type: ignore[no-any-return]
