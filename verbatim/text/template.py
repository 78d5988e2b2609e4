"""Chat templates with bounded cost.

A template comes with a checkpoint, and jinja's sandbox lets it compute without limit: `'a' * 10**9`, loops
within loops, a list of twice itself forty times over. Here every operation is charged with the size of
its operands, and operations with larger results (products, widths, replacements) with the size of
the result, before it is computed. The charge depends only on the template and its variables, so all
machines accept the same conversations.

The environment is transformers', with its filters, globals and extensions.
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

MOST_WORK = 4_000_000  # operations: seconds at most
_CHARACTERS = 64  # characters processed per operation
_WRITTEN = 4  # characters written per operation: a tokenizer takes about 100 bytes for each
_LONGEST_SEPARATOR = 64  # for joins, as the number of parts may be unknown
# Methods and filters with results that grow with a numeric or text argument.
_WIDENING = frozenset(
    "batch center expandtabs indent ljust rjust slice to_bytes tojson wordwrap zfill".split()
)
# Filters with costs that don't follow from their arguments; no known template uses them.
_REMOVED = ("lipsum", "striptags", "urlize")
_COLLECTIONS = (list, tuple, set, frozenset, KeysView, ItemsView, ValuesView)
_COMPUTED_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{[^{]")

_work: ContextVar[list[int] | None] = ContextVar("_work", default=None)


class TemplateTooCostly(TemplateError):
    """A template takes more than `MOST_WORK` operations."""


@contextmanager
def bounded() -> Iterator[None]:
    """Bound the chat templates that transformers renders in this block, in this thread or task."""
    token = _work.set([MOST_WORK])
    try:
        yield
    finally:
        _work.reset(token)


def _charge(work: int) -> None:
    left = _work.get()
    if left is None:
        return
    left[0] -= work
    if left[0] < 0:
        raise TemplateTooCostly(f"it takes more than {MOST_WORK} operations")


def _size(*values: Any) -> int:
    """Return the size of values as text, in operations; repeated values count each time.

    Raises:
        TemplateTooCostly: more than the remaining work.
    """
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
        if size > MOST_WORK:
            _charge(size)
    return size


def _charged(value: Any) -> Any:
    _charge(_size(value))
    return value


def _charge_call(
    name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, method: bool = False
) -> None:
    """Charge for the method `value.name(*args, **kwargs)`, or the filter or test of this name."""
    size, rest = _size(value), [*args, *kwargs.values()]
    _charge(size + _size(*rest))
    if name in _WIDENING:
        width = sum(
            abs(a) if isinstance(a, int) else len(a) for a in rest if isinstance(a, int | str)
        )
        _charge(size * width * (16 if name == "tojson" else 1))  # each level is indented once more
    elif name == "replace" and len(rest) >= 2 and isinstance(value, str):
        _charge(value.count(str(rest[0])) * len(str(rest[1])) // _CHARACTERS)
    elif name == "join":
        separator = value if method else rest[0] if rest else ""
        if isinstance(separator, str) and len(separator) > _LONGEST_SEPARATOR:
            raise TemplateTooCostly(
                f"join() with a separator of {len(separator)} characters: at most {_LONGEST_SEPARATOR}"
            )
    elif name in ("format", "format_map") and isinstance(value, str):
        _charge_format(value, rest)
    elif name == "translate":
        raise TemplateTooCostly("translate() is not for chat templates")


def _charge_format(text: str, values: Any) -> None:
    """Charge for the result of formatting: a value may be used repeatedly, and be padded."""
    if _COMPUTED_WIDTH.search(text):
        raise TemplateTooCostly("a width that is computed is not for chat templates")
    widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", text))
    _charge((text.count("%") + text.count("{")) * _size(values) + widths // _CHARACTERS)


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment, with a charge for every operation."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    @classmethod
    def of(cls, environment: Any) -> _Environment:
        # Constant folding would run before anything is charged.
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
        """Insert charges for what compiles to plain Python: loop iterations, comparisons, concatenations."""
        cost = 1 + sum(len(n.data) for n in source.find_all(nodes.TemplateData)) // _WRITTEN
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
            for one, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(one, str | bytes | list | tuple):
                    size = len(one) // _CHARACTERS if isinstance(one, str | bytes) else len(one)
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
    # As it takes the context, jinja does not evaluate constants at compile time.
    _charge(_size(value) * (_CHARACTERS // _WRITTEN))
    return value


def _filtered(node: nodes.Expr, name: str = "_charged") -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or test with a charge, and with jinja's attributes."""
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
    """Compile a template, inside of `bounded` with charges."""
    return _transformers_compile(template) if _work.get() is None else _compiled(template)


chat_template_utils._compile_jinja_template = _compile  # type: ignore[assignment]
