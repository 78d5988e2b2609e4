"""Chat templates with bounded cost.

A template comes with a checkpoint, and jinja's sandbox does not limit its computations: `'a' * 10**9`,
nested loops, a list that is doubled forty times. Here every operation costs the size of its operands, and
operations with larger results (products, widths, replacements) cost the size of the result. The cost is
charged before the operation is computed. It depends only on the template and its variables, so all machines
accept the same conversations.

The environment is transformers' own, with its filters, globals and extensions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers.utils import chat_template_utils

MAX_OPERATIONS = 4_000_000  # maximum operations of a template, which take at most seconds
_CHARACTERS = 64  # characters processed per operation
_CHARACTERS_WRITTEN = 4  # written per operation; a tokenizer needs about 100 bytes for each
_LONGEST_SEPARATOR = 64  # maximum for `join`, as the number of its parts may be unknown
# Methods and filters with results that grow with a numeric or text argument.
_WIDENING = frozenset(
    "batch center expandtabs indent ljust rjust slice to_bytes tojson wordwrap zfill".split()
)
# Filters with costs that can't be derived from their arguments; no known template uses them.
_REMOVED = ("lipsum", "striptags", "urlize")
_COLLECTIONS = (list, tuple, set, frozenset, KeysView, ItemsView, ValuesView)
_COMPUTED_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{[^{]")

_work: ContextVar[list[int] | None] = ContextVar("_work", default=None)


class TemplateTooCostly(TemplateError):
    """A template takes more than `MAX_OPERATIONS` operations, or uses one that can't be bounded."""


@contextmanager
def bounded() -> Iterator[None]:
    """Bound the chat templates that transformers renders in this block, in this thread or task."""
    token = _work.set([MAX_OPERATIONS])
    try:
        yield
    finally:
        _work.reset(token)


def _charge(work: int) -> None:
    remaining = _work.get()
    if remaining is None:
        return
    remaining[0] -= work
    if remaining[0] < 0:
        raise TemplateTooCostly(f"it takes more than {MAX_OPERATIONS} operations")


def _size(*values: Any) -> int:
    """Return the size of values as text, in operations; a repeated value counts each time."""
    stack, size = list(values), 0
    while stack:
        value = stack.pop()
        size += 1
        if isinstance(value, str | bytes):
            size += len(value) // _CHARACTERS
        elif isinstance(value, int):
            size += value.bit_length() // _CHARACTERS
        elif isinstance(value, range):
            size += len(value)
        elif isinstance(value, Mapping):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, _COLLECTIONS):
            stack += value
        elif isinstance(value, Namespace):
            stack += object.__getattribute__(value, "_Namespace__attrs").values()
        if size > MAX_OPERATIONS:
            _charge(size)
    return size


def _charged(value: Any) -> Any:
    _charge(_size(value))
    return value


def _charge_call(
    name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, method: bool = False
) -> None:
    """Charge for the method `value.name(*args, **kwargs)`, or the filter or test of this name."""
    size, arguments = _size(value), [*args, *kwargs.values()]
    _charge(size + _size(*arguments))
    if name in _WIDENING:
        width = sum(
            abs(a) if isinstance(a, int) else len(a) for a in arguments if isinstance(a, int | str)
        )
        _charge(size * width * (16 if name == "tojson" else 1))  # nested levels are indented more
    elif name == "replace" and len(arguments) >= 2 and isinstance(value, str):
        _charge(value.count(str(arguments[0])) * len(str(arguments[1])) // _CHARACTERS)
    elif name == "join":
        separator = value if method else arguments[0] if arguments else ""
        if isinstance(separator, str) and len(separator) > _LONGEST_SEPARATOR:
            raise TemplateTooCostly(
                f"join() with a separator of {len(separator)} characters: at most {_LONGEST_SEPARATOR}"
            )
    elif name in ("format", "format_map") and isinstance(value, str):
        _charge_format(value, arguments)
    elif name == "translate":
        raise TemplateTooCostly("translate() is not supported in chat templates")


def _charge_format(text: str, values: Any) -> None:
    """Charge for the result of formatting, in which values may be repeated and padded."""
    if _COMPUTED_WIDTH.search(text):
        raise TemplateTooCostly("computed widths are not supported in chat templates")
    widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", text))
    _charge((text.count("%") + text.count("{")) * _size(values) + widths // _CHARACTERS)


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment, with a charge for every operation."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    @classmethod
    def of(cls, environment: Any) -> _Environment:
        # Not optimized: constant folding would compute before anything is charged.
        charged: Any = environment.overlay(optimized=False, finalize=_finalize)
        charged.__class__ = cls
        charged.filters = {
            n: _wrapped(n, f) for n, f in environment.filters.items() if n not in _REMOVED
        }
        charged.filters |= {"_charged": _charged, "_charge": _charge}
        charged.tests = {n: _wrapped(n, f) for n, f in environment.tests.items()}
        charged.globals = {n: g for n, g in environment.globals.items() if n not in _REMOVED}
        assert isinstance(charged, cls)
        return charged

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Insert charges for nodes that compile to plain Python: loops, comparisons, concatenations."""
        cost = (
            1 + sum(len(n.data) for n in source.find_all(nodes.TemplateData)) // _CHARACTERS_WRITTEN
        )
        for node in list(source.find_all(nodes.Node)):
            if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
                charge = _filtered(nodes.Const(cost, lineno=node.lineno), "_charge")
                node.body.insert(0, nodes.ExprStmt(charge, lineno=node.lineno))
            elif isinstance(node, nodes.Compare | nodes.Operand):
                node.expr = _filtered(node.expr)
            elif isinstance(node, nodes.Concat):
                node.nodes = [_filtered(part) for part in node.nodes]
            elif isinstance(node, nodes.Pair):
                node.key = _filtered(node.key)
            elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
                node.node = _filtered(node.node)
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _charge(_size(argument))
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _charge_format(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1)
            _charge((1 + bits // _CHARACTERS) * (1 + max(right.bit_length(), bits) // _CHARACTERS))
        elif operator == "*":
            for item, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(item, str | bytes | list | tuple):
                    size = len(item) // _CHARACTERS if isinstance(item, str | bytes) else len(item)
                    _charge((1 + size) * times if times > 0 else 1)
        else:
            _charge(1 + sum(len(x) for x in (left, right) if hasattr(x, "__len__")) // _CHARACTERS)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        _charge_call(getattr(__obj, "__name__", ""), owner, args, kwargs, method=True)
        return super().call(__context, __obj, *args, **kwargs)


@pass_context
def _finalize(_: Any, value: Any) -> Any:
    # The context parameter keeps jinja from evaluating constants at compile time.
    _charge(_size(value) * (_CHARACTERS // _CHARACTERS_WRITTEN))
    return value


def _filtered(node: nodes.Expr, name: str = "_charged") -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter or test with a charge; the wrapper keeps jinja's attributes."""
    skipped = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        _charge_call(name, args[skipped], args[skipped + 1 :], kwargs)
        return function(*args, **kwargs)

    return charged


_transformers_compile = chat_template_utils._compile_jinja_template


@functools.lru_cache
def _environment() -> _Environment:
    return _Environment.of(_transformers_compile("").environment)


@functools.lru_cache
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


def _compile(template: str) -> Any:
    """Compile a template; inside `bounded`, with charges."""
    return _transformers_compile(template) if _work.get() is None else _compiled(template)


chat_template_utils._compile_jinja_template = _compile  # type: ignore[assignment]
