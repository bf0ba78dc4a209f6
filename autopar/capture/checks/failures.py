"""`failure_of`: what comes where a check fails, with the user's words as far as they are known before the step."""

from __future__ import annotations

import ast
import builtins
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from autopar._torch_compat import tensors_in


class Names(Mapping[str, Any]):
    """The names that a frame knows."""

    def __init__(self, frame: FrameType) -> None:
        """Of ``frame``, as it is when they are asked for."""
        self._maps = frame.f_locals, frame.f_globals, vars(builtins)

    def __getitem__(self, name: str) -> Any:
        return next(names for names in self._maps if name in names)[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._maps[2], **self._maps[1], **self._maps[0]})

    def __len__(self) -> int:
        return sum(1 for _ in self)


def evaluate(expression: ast.AST, names: Mapping[str, Any]) -> Any:
    """What an expression gives, with ``and``, ``or`` and ``not`` of tensors as theirs."""
    if isinstance(expression, ast.BoolOp):
        is_and = isinstance(expression.op, ast.And)
        found: Any = is_and
        for value in expression.values:
            own = evaluate(value, names)
            if isinstance(own, torch.Tensor):
                own = own.bool()
            elif bool(own) != is_and:
                return own
            else:
                continue
            if isinstance(found, torch.Tensor):
                own = found & own if is_and else found | own
            found = own
        return found
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not):
        value = evaluate(expression.operand, names)
        return value.logical_not() if isinstance(value, torch.Tensor) else not value
    assert isinstance(expression, ast.expr)
    made = ast.fix_missing_locations(_Tensors().visit(copy.deepcopy(expression)))
    return eval(compile(ast.Expression(made), "<check>", "eval"), dict(names))


class _Tensors(ast.NodeTransformer):
    """With tensors in place of the numbers that ``item()`` would take out of them."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        inner: ast.AST = self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
            return node.func.value
        return inner


def failure_of(frame: FrameType, statement: ast.AST, told: ast.AST | None) -> Callable[[], None]:
    """What raises, warns, logs or prints.

    Args:
        frame: of the function that the check is in.
        statement: the check.
        told: its statement that raises, or the call that tells; None: it is an assertion.
    """
    names = Names(frame)
    test = ast.unparse(statement.test)  # type: ignore[attr-defined]
    place = f"{frame.f_code.co_filename}:{statement.lineno}"  # type: ignore[attr-defined]
    where = f"({test}, at {place}, looked at after the step; run the model without parallelize() to see the values)"
    if isinstance(told, ast.Call):
        function, arguments = value_of(told.func, names), [_word(a, names) for a in told.args]
        if function is warnings.warn:
            named = [value_of(k.value, names) for k in told.keywords if k.arg == "category"]
            return lambda: function(f"{arguments[0]} {where}", *(arguments[1:2] or named))
        text = " ".join(map(str, arguments))
        return lambda: function(f"{text} {where}")
    kind: Any = AssertionError
    words = [statement.msg] if isinstance(statement, ast.Assert) and statement.msg is not None else []
    if isinstance(told, ast.Raise):
        made = told.exc
        if isinstance(made, ast.Call):
            words, made = made.args, made.func
        kind = value_of(made, names)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = RuntimeError
    text = " ".join([*(str(_word(w, names)) for w in words), where])

    def fail() -> None:
        try:
            error = kind(text)
        except Exception:  # a class that is made of other arguments
            error = RuntimeError(f"{kind.__name__}: {text}")
        raise error

    return fail


def _word(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """An argument of an error or a warning; where it depends on values, its source stands for it."""
    if isinstance(expression, ast.JoinedStr):
        return "".join(str(_word(part, names)) for part in expression.values)
    source = expression.value if isinstance(expression, ast.FormattedValue) else expression
    value = value_of(source, names)
    return "{" + ast.unparse(source) + "}" if value is None or tensors_in([value]) else value


def value_of(expression: ast.AST | None, names: Mapping[str, Any]) -> Any:
    """Of an expression; None: it depends on values, or on names that are not there yet."""
    try:
        return None if expression is None else evaluate(expression, names)
    except Exception:
        return None
