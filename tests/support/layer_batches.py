"""Batches of 1 to 33 rows, and all bits of a decoder's outputs for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from support.stores import Sequences
from verbatim.model.decoder import Decoder
from verbatim.model.flat import contents_of
from verbatim.model.products import threads
from verbatim.model.whole import WholeModel

SEQUENCES = Sequences(5, 25, 13, block_size=4)
# 1, 2, 7 and 33 rows.
BATCHES = [
    SEQUENCES.batch([0], [(0, 1)]),
    SEQUENCES.batch([0, 1], [(1, 2), (0, 1)]),
    SEQUENCES.batch([0, 1, 2], [(2, 3), (1, 5), (0, 2)]),
    SEQUENCES.batch([0, 1, 2], [(3, 5), (5, 25), (2, 13)]),
]


def outputs(decoder: Decoder, num_threads: int = 2) -> list[bytes]:
    """Return the bytes of the logits of each of `BATCHES`, and of all K, V and states after the last."""
    store = SEQUENCES.store(decoder)
    with threads(num_threads):
        found = [decoder.run(batch, store).logits for batch in BATCHES]
        return [*map(as_bytes, [*found, *contents_of(store)])]


def whole_runs(monkeypatch: Any) -> list[Any]:
    """Return a list that collects the contexts of models that ran in one call; None for failed attempts."""
    runs, run = list[Any](), WholeModel.run

    def noted(self: WholeModel, context: Any, *args: Any, **kwargs: Any) -> Any:
        made = run(self, context, *args, **kwargs)
        runs.append(None if made is None else context)
        return made

    monkeypatch.setattr(WholeModel, "run", noted)
    return runs


def as_bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def reclass(modules: Sequence[Any], forward: Callable[..., Any]) -> None:
    """Give modules a class like one of transformers, with `forward(original_forward, module, ...)`."""
    base = type(modules[0])

    def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(partial(base.forward, self), self, *args, **kwargs)

    fields = {"forward": ours, "__module__": base.__module__}
    changed = type(base.__name__, (base,), fields)
    for module in modules:
        module.__class__ = changed


def wrong(model: Any, place: str, formula: Callable[[Any, Any], Any]) -> Any:
    """Return `model`, with one module changed to compute `formula(its original output, its input)`."""

    def forward(own: Any, self: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        x = kwargs.pop("hidden_states", x)
        return formula(own(x, *args, **kwargs), x)

    reclass([model.get_submodule(place)], forward)
    return model
