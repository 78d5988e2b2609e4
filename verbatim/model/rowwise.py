"""Running an external forward so that its rows can't see each other.

A module that is called on whole rows `[B, T]` computes what it likes. `Rowwise` stands between it and torch:
functions that change bits with the rows beside them are swapped (`invariant.py`), attention goes to our
kernel, and whatever is not known to treat each row by itself is reported.

Known are (measured, and held by a test at odd widths, layouts and thread counts): elementwise functions,
whatever only moves elements, products with a matrix, and sums over the last dimension of contiguous rows.
Products and sums are over a width, and code may ask how many rows there are. So the steps of a trial are
kept, with their widths and numbers, and every later forward must take the same ones: then nothing depends
on the number of rows, of sequences, or of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from verbatim.batch import AttentionBatch
from verbatim.errors import UnsupportedModel
from verbatim.kernels.options import AttentionOptions
from verbatim.kv.attention import paged_attention
from verbatim.model.invariant import functions, replacement

_MAX_WIDTH = 32_768  # torch splits longer sums over its threads when there is a single row


_PLAIN = (
    int,
    float,
    Number,
    str,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.memory_format,
)


class NotRowwise(Exception):
    """A module called something that is not known to treat each row by itself."""


_SIZED = functions(  # of which shapes are told, that differ with the number of rows
    """view view_as reshape reshape_as expand expand_as broadcast_to unflatten repeat tile zeros ones
    new_zeros new_ones"""
)
_MOVES = _SIZED | functions(
    """transpose permute movedim swapaxes unsqueeze squeeze flatten chunk split tensor_split unbind narrow
    select t __getitem__ repeat_interleave cat concat stack to type type_as float double bfloat16 half
    copy_ fill_ zero_ embedding arange zeros_like ones_like full_like"""
)
_LOOKS = functions(  # which change nothing; hooks like to call them, too
    """size dim numel nelement stride is_contiguous is_floating_point element_size get_device __len__
    detach clone contiguous cpu"""
) | {
    getattr(Tensor, name).__get__
    for name in "shape dtype device layout ndim data requires_grad is_cuda itemsize".split()
}
_MOVES |= {Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
_BY_INDEX = functions("__getitem__ repeat_interleave")
_RANGE = functions("arange")
_ELEMENTWISE = functions(
    """add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __rsub__ __isub__ rsub mul mul_ __mul__ __rmul__
    __imul__ multiply subtract div div_ __truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__
    true_divide divide neg __neg__ negative abs __abs__ square sqrt rsqrt reciprocal pow __pow__ exp expm1
    log1p tanh erf cos sin relu relu_ clamp clamp_min clamp_max clip where masked_fill masked_fill_ maximum
    minimum eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ logical_and logical_or logical_not
    bitwise_and bitwise_or bitwise_not __and__ __or__ __invert__ leaky_relu"""
)
_OVER_LAST = functions("mean sum amax amin")  # of which dimension must be looked at
_NORMS = functions("layer_norm rms_norm")
_WHERE = functions("where")
_SWITCHES = {torch._C._set_grad_enabled}  # entering and leaving torch.no_grad()
_PRODUCTS = functions("linear mm bmm matmul __matmul__ addmm")
_OPERANDS = frozenset({"input", "self", "other", "exponent", "mat1", "mat2", "out"})
_ATTENTION = F.scaled_dot_product_attention  # torch's own, whatever is put in its place later
_REFUSED_ON_FLAT_BATCHES = functions("einsum conv1d")
_RANDOM = functions(
    """rand rand_like randn randn_like randint randint_like randperm bernoulli bernoulli_ multinomial
    normal normal_ uniform_ exponential_ random_ poisson"""
)
_DROPOUTS = functions("dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d")


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A function that a forward called.

    Attributes:
        given: everything it was given that is no tensor, and the widths of a sum or product.
        by_position: the same, where the range of the forward's own positions is told as such: a table of
            angles is cut by it.
    """

    func: Any
    given: list[Any]
    by_position: list[Any]


class Steps:
    """A forward's steps.

    Args:
        positions: whose rows it computes, in every sequence alike.
        expected: another forward's, which this one must take, too. None: any will do.
    """

    def __init__(
        self, positions: range | None = None, expected: Sequence[RecordedCall] | None = None
    ) -> None:
        self.taken: list[RecordedCall] = []
        self.positions = positions
        self._expected = expected

    def take(self, func: Any, given: Any) -> bool:
        """Record a call; return whether it is the expected one."""
        expected, at = self._expected, len(self.taken)
        same_func = expected is not None and at < len(expected) and expected[at].func == func
        leaves = _leaves(given, None)
        if expected is not None and same_func and expected[at].given == leaves:
            self.taken.append(expected[at])
            return True
        step = RecordedCall(func, leaves, _leaves(given, self.positions))
        self.taken.append(step)
        return expected is None or (same_func and expected[at].by_position == step.by_position)

    def missing(self) -> Any:
        """Return the first expected function that was not called; None if all were."""
        left = (self._expected or ())[len(self.taken) :]
        return left[0].func if left else None


def _leaves(given: Any, positions: range | None) -> list[Any]:
    """Return everything inside of `given`, with a marker in place of each tensor."""
    found: list[Any] = []
    _collect(given, positions, found)
    return found


def _collect(given: Any, positions: range | None, found: list[Any]) -> None:
    if isinstance(given, Tensor):
        found.append(Tensor)
    elif isinstance(given, tuple | list):
        found.append((type(given), len(given)))
        for value in given:
            _collect(value, positions, found)
    elif isinstance(given, slice):
        ends = given.start or 0, given.stop
        mine = positions is not None and ends == (positions.start, positions.stop)
        found.append((slice, *(("positions",) if mine else ends), given.step or 1))
    else:
        found.append(given if isinstance(given, _PLAIN) else object())  # equal to nothing


class Unseen(TorchDispatchMode):
    """Records operations that reach torch without having been a step: torch.jit, extensions. Slow, for
    trials only.

    Attributes:
        looked_at: a function that was a step, or need not be one, is being called right now.
        found: the first operation that was none; None: there was none. (What is raised inside of
            torch.jit comes out as something else.)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.looked_at = False
        self.found: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self.looked_at:
            self.found = self.found or f"{func}, from where nothing can be looked at"
        return func(*args, **(kwargs or {}))


class Rowwise(TorchFunctionMode):
    """Replaces functions by batch-invariant ones, and refuses functions that are not known to be.

    Args:
        strict: raise NotRowwise at the first function that is not known. Without, it is called as it is:
            for a single row of a single sequence on one thread, which has nothing beside it.
        steps: where strict, what is called is noted there, and NotRowwise is raised at a step that was
            not expected. If they have positions, attention must be of all these to everything so far.
        unseen: is told what has been looked at.
    """

    def __init__(
        self, *, strict: bool, steps: Steps | None = None, unseen: Unseen | None = None
    ) -> None:
        super().__init__()
        self._strict = strict
        self._steps = Steps() if steps is None else steps
        self._unseen = unseen

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None and self._strict and (left_out := self._steps.missing()) is not None:
            raise _other_step(left_out)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS and self._unseen is None:
            return func(*args, **kwargs)
        if func in _RANDOM or (func in _DROPOUTS and _drops(args, kwargs)):
            raise UnsupportedModel(f"it draws random numbers while it generates ({_name(func)})")
        call = self._attention if func is _ATTENTION else self._call
        if self._unseen is None:
            return call(func, args, kwargs)
        self._unseen.looked_at = True
        try:
            return call(func, args, kwargs)
        finally:
            self._unseen.looked_at = False

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = None
        by_name = not args or not _OPERANDS.isdisjoint(kwargs)  # ours take them by place
        if not by_name and func not in _REFUSED_ON_FLAT_BATCHES:
            found = replacement(func, args)
        if self._strict and func not in _LOOKS:
            if by_name or not (_fits(func, args) if found else _known(func, args, kwargs)):
                raise NotRowwise(_name(func))
            self._take(func, _given(func, args, kwargs))
        if args and (func in _OVER_LAST or func in _NORMS):
            args = (args[0].contiguous(), *args[1:])  # the bits of a sum depend on the strides
        return (found or func)(*args, **kwargs)

    def _attention(self, func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
        if self._strict:
            _check_lengths(self._steps.positions, *args, **kwargs)
            self._take(func, (args[6:], kwargs.get("scale")))
        try:
            return causal_attention(*args, **kwargs)
        except NotRowwise:
            if self._strict:
                raise
            return func(*args, **kwargs)

    def _take(self, func: Any, given: Any) -> None:
        if not self._steps.take(func, given):
            raise _other_step(func)


def _name(func: Any) -> str:
    return str(resolve_name(func) or getattr(func, "__name__", func))


def _other_step(func: Any) -> NotRowwise:
    return NotRowwise(f"{_name(func)} is not called alike in all forwards")


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the operands that must be the same in every forward, for any number of rows."""
    if func in _SIZED:
        return ()
    width: tuple[int, ...] = ()  # what is summed over
    if func in _OVER_LAST or func in _NORMS:
        width = (args[0].shape[-1],)
    elif func in _PRODUCTS:
        width = tuple(_weight(func, args).shape)
    elif func in _RANGE and len(args) == 2:
        args = (slice(*args),)  # as a table would be cut
    return (*args, *kwargs.items(), *width)


def _known(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a torch function treats each row of its last dimension separately."""
    if func in _OVER_LAST:
        x = args[0]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(dim, tuple | list) and len(dim) == 1:
            dim = dim[0]
        return isinstance(x, Tensor) and dim in (-1, x.dim() - 1) and _short(x)
    if func in _NORMS:
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return len(shape) == 1 and _short(args[0])
    if func in _DROPOUTS:
        return True  # it is off
    if func in _WHERE and len(args) + len(kwargs) == 1:
        return False  # a search, whose answer has as many rows as it finds
    if func in _BY_INDEX and not all(_basic(value) for value in (*args[1:], *kwargs.values())):
        return False
    return func in _MOVES or func in _ELEMENTWISE or func in _SWITCHES


def _basic(index: Any) -> bool:
    """Return whether an index is basic; tensors and lists may take rows from anywhere."""
    if isinstance(index, tuple):
        return all(map(_basic, index))
    return index is None or index is ... or isinstance(index, int | slice)


def _weight(func: Any, args: tuple[Any, ...]) -> Any:
    return args[1] if func is F.linear and len(args) > 1 else args[-1]


def _fits(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the replacement of `func` works for rows of any sequence.

    A product of two activations may be attention by hand, which sums over as many keys as there are.
    """
    if func not in _PRODUCTS:
        return True
    weight = _weight(func, args)
    return len(args) > 1 and isinstance(weight, Tensor) and weight.dim() == 2


def _short(x: Tensor) -> bool:
    return x.dim() > 0 and x.shape[-1] < _MAX_WIDTH


def _drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(training) and p > 0


def _check_lengths(positions: range | None, query: Tensor, key: Tensor, *_: Any, **__: Any) -> None:
    """A window on the keys that a shape decides on would not show in the steps."""
    if positions is not None and query.dim() == key.dim() == 4:
        if (query.shape[2], key.shape[2]) != (len(positions), positions.stop):
            raise NotRowwise("scaled_dot_product_attention of other than all keys so far")


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `scaled_dot_product_attention` of the last T of L positions, by the batch-invariant kernel.

    Where T is less than L, `is_causal` means what a module with a cache means by it: the last query sees
    all keys. (torch lets the first query see the first key.)

    Args:
        query: `[B, H, T, Dk]`. key, value: `[B, Hkv, L, Dk]` and `[B, Hkv, L, Dv]`.

    Returns:
        `[B, H, T, Dv]`.

    Raises:
        NotRowwise: a mask, queries that see later keys, or shapes and dtypes that the kernel does not take.
        UnsupportedModel: attention weights are dropped out; or a single query is told to be causal, which
            in torch hides all keys from it but the first.
    """
    if dropout_p > 0:
        raise UnsupportedModel(f"it generates with dropout_p={dropout_p} in its attention")
    tensors = (query, key, value)
    if attn_mask is not None or any(x.dim() != 4 or x.dtype != query.dtype for x in tensors):
        raise NotRowwise("scaled_dot_product_attention with a mask, or of unusual shapes")
    (batch, heads, rows, key_size), length = query.shape, key.shape[2]
    if key.shape[:3] != value.shape[:3] or heads % key.shape[1] or key.shape[3] != key_size:
        raise NotRowwise("scaled_dot_product_attention of shapes that do not fit")
    if (heads != key.shape[1] and not enable_gqa) or batch != key.shape[0] or rows > length:
        raise NotRowwise("scaled_dot_product_attention of shapes that do not fit")
    if rows == 1 and is_causal and length > 1:
        raise UnsupportedModel(
            f"it calls scaled_dot_product_attention with is_causal=True for one query and {length} "
            "keys, of which torch lets it see the first alone"
        )
    if rows > 1 and not is_causal:
        raise NotRowwise("scaled_dot_product_attention in which queries see later keys")
    out = paged_attention(
        query.transpose(1, 2).reshape(batch * rows, heads, key_size),
        key.contiguous(),  # a store of one block a sequence
        value.contiguous(),
        AttentionBatch(
            torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32),
            torch.full((batch,), length, dtype=torch.int32),
            torch.arange(batch, dtype=torch.int32)[:, None].contiguous(),
        ),
        AttentionOptions(scale=key_size**-0.5 if scale is None else float(scale)),
    )
    return out.view(batch, rows, heads, value.shape[3]).transpose(1, 2)
