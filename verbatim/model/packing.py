"""The choice of weights to quantize, the same in every placement."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from verbatim.errors import NotSupported
from verbatim.model.experts import is_stacked, is_transposed, stacked_parameters
from verbatim.model.hidden import head_of
from verbatim.model.quantization import Quantization
from verbatim.model.spec import inner_model
from verbatim.model.weight_packing import WeightPacking

_ROUTER = re.compile(
    r"(^|\.)(gate|\w+_gate|\w*router\w*)(\.|$)"
)  # chooses experts: small, and kept exact
_WIDTH = 16  # a stack of narrower ones is no stack of matrices: a convolution, say
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def choose_packings(
    module: nn.Module, quantization: Quantization
) -> dict[nn.Parameter, WeightPacking]:
    """Return the layout of every weight to quantize, without reading data.

    These are the matrices that multiply hidden states, of linear layers (GPT-2's kind, too) and of stacked
    experts, and, in `head_bits`, the embedding of tokens and the head. Other embeddings, norms, biases and
    what routes tokens to experts stay exact, and so does a matrix that would not become smaller.

    With `activation_bits`, those have it that linear layers and `flat_experts` multiply with.

    Args:
        module: a transformers model, whose parameters need not have any memory.

    Raises:
        NotSupported: there are none.
    """
    found: dict[nn.Parameter, WeightPacking] = {}
    multiplied = (
        {  # whose products are ours alone: a class of its own may do anything with its weight
            m.weight for m in module.modules() if type(m) is nn.Linear
        }
        | {p for m in module.modules() if is_stacked(m) for p in stacked_parameters(m)}
    )

    def add(parameter: Any, kind: Quantization, columns: bool) -> None:
        kind = kind if parameter in multiplied else kind.of_weights
        packing = WeightPacking(tuple(parameter.shape), parameter.dtype, kind, columns)
        if packing.plain.nbytes < parameter.numel() * parameter.element_size():
            found[parameter] = packing

    tables = dict.fromkeys(_tables(inner_model(module)))  # `in` a list would compare numbers
    exact = {m.weight for m in module.modules() if isinstance(m, nn.Embedding)}
    for parameter, columns in matrices_of(module).items():
        if parameter not in tables and parameter not in exact:
            add(parameter, quantization, columns)
    if quantization.of_head is not None:
        for table in tables:
            add(table, quantization.of_head, False)
    if not found:
        raise NotSupported(
            f"quantization={quantization.name!r}: the model has no linear layers or stacked experts that "
            "would be smaller for it"
        )
    if quantization.activation_bits and not any(p.interleaved for p in found.values()):
        raise NotSupported(
            f"quantization={quantization.name!r}: nothing that the model multiplies is an nn.Linear, which "
            f"activations in 8 bits need; {quantization.of_weights.name} leaves them as they are"
        )
    return found


def matrices_of(module: nn.Module) -> dict[nn.Parameter, bool]:
    """Return the matrices that multiply hidden states, and whether by columns (`[K, N]`), or by rows.

    The matrices that choose experts are not among them.
    """
    return {
        parameter: columns
        for path, layer in module.named_modules()
        for name, parameter in layer.named_parameters(recurse=False)
        if (columns := _columns(path, layer, name, parameter)) is not None
    }


def holdable_of(module: nn.Module) -> dict[nn.Parameter, bool]:
    """Return `matrices_of`, and the tables of embeddings: what may be held as it is stored."""
    embeddings = (m for m in module.modules() if isinstance(m, nn.Embedding))
    tables: list[Any] = [layer.weight for layer in embeddings if layer.max_norm is None]
    return dict.fromkeys(tables, False) | matrices_of(module)


def _tables(inner: Any) -> list[nn.Parameter]:
    """Return the token embedding and the head, if they are of the usual kinds; once if they are tied."""
    try:
        embedding = inner.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embedding = None
    found: list[Any] = []
    if isinstance(embedding, nn.Embedding) and embedding.max_norm is None:
        found.append(embedding.weight)
    head = head_of(inner)
    if isinstance(head, nn.Linear):
        found.append(head.weight)
    return [w for w in dict.fromkeys(found) if w.is_floating_point() and w.ndim == 2]


def _columns(path: str, layer: nn.Module, name: str, parameter: nn.Parameter) -> bool | None:
    """Return whether it multiplies by columns (`[K, N]`), or by rows (`[N, K]`); None if it stays exact."""
    if not parameter.is_floating_point() or _ROUTER.search(path):
        return None
    if isinstance(layer, nn.Linear):
        return False if name == "weight" else None
    if type(layer).__name__ == "Conv1D":  # transformers', which GPT-2 has
        return True if name == "weight" else None
    stacked = parameter.ndim == 3 and min(parameter.shape[1:]) >= _WIDTH
    return is_transposed(layer) if stacked else None


def owners(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield each use of a parameter: path, layer, its name in the layer, parameter. Tied ones come several
    times.
    """
    for path, layer in module.named_modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                yield path, layer, name, parameter


@dataclass(slots=True)
class PackingReport:
    """The quantized weights of a model, and their errors.

    Attributes:
        quantization: the user's; None: all are held as the checkpoint has them.
        packed: names, and how each lies.
        exact: names of matrices that stayed as they are.
        squares: of each packed one: the sums of its squared errors and of its squares.
        rounded: names of those that lie as they are, and are read as if they were packed.
    """

    quantization: Quantization | None
    packed: dict[str, WeightPacking]
    exact: list[str]
    squares: dict[str, tuple[float, float]] = field(default_factory=dict)
    rounded: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the format; those of all weights, if they are the checkpoint's."""
        if self.quantization is not None:
            return self.quantization.name
        return "+".join(sorted({packing.name for packing in self.packed.values()}))

    def info(self) -> dict[str, Any]:
        """Return plain values, for `LLM.info`."""
        kept = self.packed.values()
        numbers = [math.prod(packing.shape) for packing in kept]
        after = sum(packing.nbytes for packing in kept)
        error = {name: _ratio(*pair) for name, pair in self.squares.items()}
        errors: dict[str, Any] = {}
        if error:  # of those that were not stored like this
            worst = max(error, key=lambda name: error[name])
            every = [sum(sums) for sums in zip(*self.squares.values(), strict=True)]
            errors = {"relative_error": _ratio(*every), "worst": f"{worst}: {error[worst]:.2g}"}
        return {
            "format": self.name,
            "requested": None if self.quantization is None else self.quantization.name,
            "packed": _patterns(self.packed),
            **({"rounded": _patterns(self.rounded)} if self.rounded else {}),
            "exact": _patterns(self.exact),
            **self._of_activations(),
            "bytes_before": sum(n * p.dtype.itemsize for n, p in zip(numbers, kept, strict=True)),
            "bytes_after": after,
            "bits_per_weight": round(8 * after / sum(numbers), 3),
            **errors,
        }

    def _of_activations(self) -> dict[str, Any]:
        """Return the weights that are multiplied with quantized activations."""
        bits = None if self.quantization is None else self.quantization.activation_bits
        if bits is None:
            return {}
        names = [name for name, packing in self.packed.items() if packing.interleaved]
        return {"activation_bits": bits, "activations_packed": _patterns(names)}


def _patterns(names: Iterable[str]) -> list[str]:
    """Names with a star for each number, once each."""
    return list(dict.fromkeys(_NUMBER.sub("*", name) for name in names))


def _ratio(wrong: float, all_of_it: float) -> float:
    """Root mean square error over root mean square, of two sums of squares."""
    return float((wrong / all_of_it) ** 0.5) if all_of_it else 0.0
