"""`find_check`: whether the value that code is looking at decides nothing but whether an error or a warning comes.

``if (labels >= words).any(): raise ValueError(...)`` and ``assert mask.any()`` are such statements: a trace goes on as
if the values were as they should be, and they are looked at after the step. The source and the position of the
instruction that runs say which statement it is.
"""

from __future__ import annotations

import ast
import dis
import linecache
import logging
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

from autopar.capture.checks.failures import Names, evaluate, failure_of, value_of
from autopar.capture.origins import is_users_file

_NESTED = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
"""Names of code that runs within an expression of the function that it is in."""

_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Try)
"""What may end a block of statements before its error is raised."""

_DECIDING = ast.BoolOp | ast.Not | ast.IfExp | ast.GeneratorExp
"""In which more is asked than whether a test is true."""

_HOOKS = "autopar.capture.state.hooks"

_PLAIN = (
    ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Subscript, ast.Slice,
    ast.Tuple, ast.List, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop,
)  # fmt: skip
"""Of expressions: computing them twice, or where eager mode does not, changes nothing."""

_OPERATORS = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}

Span = tuple[int, int, int, int]


@dataclass(frozen=True)
class FoundCheck:
    """The check that a value is looked at for.

    Attributes:
        fail: raises, warns or logs, as the code does where the check fails.
        failing: what the value is where it fails.
        answer: what Python is told of the value, so that the check passes.
        beside: other values that have to be as given, too, or the check passes; computed when they are asked for.
        compared: of a number that Python asks for, with what it is compared, and how: ``("ge", 16)``.
    """

    fail: Callable[[], None]
    failing: bool
    answer: bool | float
    beside: tuple[tuple[Callable[[], Any], bool], ...]
    compared: tuple[str, float] | None = None


def find_check(frame: FrameType) -> FoundCheck | None:
    """The check whose test asks in ``frame`` whether a value is true; None: it is none, or more depends on it."""
    found = _located(frame)
    if found is None:
        return None
    calls = _calls(frame)
    if not calls and (frame.f_code.co_name in _NESTED or not _is_test(frame)):
        return None
    frame, path = found
    statement, compared = path[0], None
    kind: type[int] | type[float] = float
    if calls and not any(_is_call(path[-1], name) for name in ("bool", "any", "all")):
        compared = _compared(path, Names(frame))
        if compared is None:
            return None
        calls, kind, path = False, int if _is_call(path[-1], "int") else float, path[:-1]
    last = path[-1]
    fails = _fails(statement, Names(frame))
    if fails is None or _is_caught(frame):
        return None
    failing, told = fails
    beside: list[tuple[Callable[[], Any], bool]] = []
    # From the test to the value: of each, what it has to be for the check to fail.
    for parent, child in zip(path[1:], [*path[2:], None], strict=False):
        if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not):
            failing = not failing
        elif child is None and not calls:
            pass  # the value itself
        elif isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.And) == failing:
            later = parent.values[parent.values.index(child) + 1 :]  # type: ignore[arg-type]
            if not all(map(_is_plain, later)):
                return None
            beside += ((_evaluation(frame, other), failing) for other in later)
        elif isinstance(parent, ast.BoolOp):
            pass  # each alone decides
        elif not (_is_call(parent, "bool") or _is_call(parent, "any" if failing else "all")):
            return None
    if isinstance(last, ast.Compare) and len(last.ops) > 1 and failing:
        return None  # all of a chain have to hold, and the next one is not known here
    fail = failure_of(frame, statement, told)
    if compared is None:
        return FoundCheck(fail, failing, not failing, tuple(beside))
    name, other = compared
    numbers = map(kind, (0, 1, other, other - 1, other + 1))
    fine = next((n for n in numbers if bool(getattr(operator, name)(n, other)) != failing), None)
    return None if fine is None else FoundCheck(fail, failing, fine, tuple(beside), compared)


def is_number_of_check(frame: FrameType) -> bool:
    """Whether the number that ``frame`` takes out of a tensor is for tests of checks alone, and what they tell."""
    found = _located(frame, anywhere=True)
    if found is None or not _calls(frame) or _is_caught(found[0]):
        return False
    frame, path = found
    statement, last = path[0], path[-1]
    if not (isinstance(last, ast.Call) and isinstance(last.func, ast.Attribute) and last.func.attr == "item"):
        return False
    names = Names(frame)
    if _fails(statement, names) is not None:
        return all(map(_keeps_numbers, path[1:-1]))
    function = _function(frame)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or function is None:
        return False
    target = statement.targets[0]
    # A global would be read elsewhere.
    if not isinstance(target, ast.Name) or last is not statement.value or target.id not in frame.f_code.co_varnames:
        return False
    checks = [s for s in ast.walk(function) if isinstance(s, ast.If | ast.Assert) and _fails(s, names) is not None]
    within = {id(n) for s in checks for part in _parts(s, names) for n in part}
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == target.id and n is not target]
    return all(id(n) in within and isinstance(n.ctx, ast.Load) for n in uses) and bool(uses)


def is_argument_of(frame: FrameType, name: str) -> bool:
    """Whether what ``frame`` assigns to a name, or passes on, is only given to functions called ``name``."""
    found = _located(frame, anywhere=True)
    function = None if found is None else _function(found[0])
    if found is None or function is None or not isinstance(found[1][0], ast.Assign) or len(found[1]) != 2:
        return False
    (target,) = found[1][0].targets
    if not isinstance(target, ast.Name) or target.id not in found[0].f_code.co_varnames:
        return False
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and ast.unparse(n.func).split(".")[-1] == name]
    given = {id(a) for c in calls for a in (*c.args, *(k.value for k in c.keywords))}
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == target.id and n is not target]
    return bool(uses) and all(id(n) in given for n in uses)


def _located(frame: FrameType, anywhere: bool = False) -> tuple[FrameType, list[ast.AST]] | None:
    """The function's frame, and the way from its statement, by the test, to the expression that runs.

    Args:
        frame: the one that asks.
        anywhere: the statement may be any, and then its expressions follow.
    """
    span = _span(frame)
    while frame.f_code.co_name in _NESTED and frame.f_back is not None:
        frame = frame.f_back
        span = _span(frame)
    function = _function(frame)
    if span is None or function is None:
        return None
    statement = None
    for node in ast.walk(function):
        if isinstance(node, ast.stmt) and _covers(node, span):
            statement = node  # the innermost comes last
    if statement is None:
        return None
    if isinstance(statement, ast.If | ast.Assert):
        first: ast.AST = statement.test
    elif anywhere and isinstance(statement, ast.Assign):
        first = statement.value
    else:
        return None
    path: list[ast.AST] = [statement]
    if isinstance(statement, ast.Assert) and not _covers(first, span):
        # As pytest writes assertions of tests anew, whose every part has the position of the statement.
        more = _calls(frame) or any(isinstance(n, _DECIDING) for n in ast.walk(first))
        return None if more else (frame, [*path, first])
    following: ast.AST | None = first
    while following is not None and _covers(following, span):
        path.append(following)
        following = next((c for c in ast.iter_child_nodes(following) if _covers(c, span)), None)
    return (frame, path) if len(path) > 1 else None


def _span(frame: FrameType) -> Span | None:
    """Lines and columns of the expression that is called, or whose value is asked for."""
    code, at = frame.f_code, frame.f_lasti
    # A jump may have the position of the whole statement: what it asks for has been computed right before.
    while _is_test(frame) and (at := at - 2) > 0 and dis.opname[code.co_code[at]] == "CACHE":
        pass
    line, last, column, end = list(code.co_positions())[at // 2]
    return None if line is None or last is None or column is None or end is None else (line, last, column, end)


def _covers(node: ast.AST, span: Span) -> bool:
    line, last, column, end = span
    begins = getattr(node, "lineno", None)
    if begins is None:
        return False
    return (begins, node.col_offset) <= (line, column) and (node.end_lineno, node.end_col_offset) >= (last, end)  # type: ignore[attr-defined]


def _function(frame: FrameType) -> ast.AST | None:
    """The function of a frame, as it was written; None: its source is not there."""
    code = frame.f_code
    tree = _tree(code.co_filename, "".join(linecache.getlines(code.co_filename, frame.f_globals)))
    if tree is None:
        return None
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, kinds) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


@lru_cache(maxsize=64)
def _tree(name: str, source: str) -> ast.Module | None:
    try:
        return ast.parse(source, name) if source else None
    except SyntaxError:
        return None


def _fails(statement: ast.AST, names: Mapping[str, Any]) -> tuple[bool, ast.AST | None] | None:
    """What the test of a check is where it fails, and the statement that raises or tells then; None: it is no check."""
    if isinstance(statement, ast.Assert):
        return False, None
    if not isinstance(statement, ast.If):
        return None
    if (told := _told(statement.body, names)) is not None:
        return True, told
    told = _told(statement.orelse, names)
    return None if told is None else (False, told)


def _told(block: list[ast.stmt], names: Mapping[str, Any]) -> ast.AST | None:
    """The statement at the end of a block that raises, or the only one, which warns, logs or prints."""
    if not block:
        return None
    last = block[-1]
    if isinstance(last, ast.Raise) and last.exc is not None:
        return None if any(isinstance(n, _LEAVES) for s in block for n in ast.walk(s)) else last
    if len(block) == 1 and isinstance(last, ast.Expr) and isinstance(call := last.value, ast.Call):
        function = value_of(call.func, names)
        logs = isinstance(getattr(function, "__self__", None), logging.Logger)
        return call if logs or function in (print, warnings.warn) else None
    return None


def _parts(statement: ast.stmt, names: Mapping[str, Any]) -> Iterator[Iterator[ast.AST]]:
    """What of a check the number that it looks at may be in: its test, as a number, and what it tells."""
    if isinstance(statement, ast.Assert):
        yield _numbers(statement.test)
        yield from () if statement.msg is None else (ast.walk(statement.msg),)
    elif isinstance(statement, ast.If):
        yield _numbers(statement.test)
        yield from map(ast.walk, statement.body if _told(statement.body, names) is not None else statement.orelse)


def _numbers(test: ast.AST) -> Iterator[ast.AST]:
    """The parts of a test that may be tensors in place of numbers."""
    yield test
    if _keeps_numbers(test):
        for child in ast.iter_child_nodes(test):
            yield from _numbers(child)


def _keeps_numbers(node: ast.AST) -> bool:
    """Whether an expression does with tensors what it does with their numbers; sets and functions ask what they are."""
    if isinstance(node, ast.Compare):
        return all(type(o) in _OPERATORS for o in node.ops)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv | ast.Mod)
    return isinstance(node, ast.BoolOp | ast.UnaryOp)


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _is_test(frame: FrameType) -> bool:
    """Whether ``if``, ``not``, ``and`` or ``or`` runs; a comparison of lists, or ``in``, asks of their entries."""
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return "JUMP" in name or name in ("UNARY_NOT", "TO_BOOL")


def _compared(path: list[ast.AST], names: Mapping[str, Any]) -> tuple[str, float] | None:
    """How the number of ``int(value)`` or ``float(value)`` is compared, and with which; None: otherwise."""
    call, compare = path[-1], path[-2]
    if not (_is_call(call, "int") or _is_call(call, "float")) or not isinstance(compare, ast.Compare):
        return None
    name = _OPERATORS.get(type(compare.ops[0]))
    is_left = compare.left is call
    sides = [compare.left, *compare.comparators]
    if name is None or len(sides) != 2 or call not in sides or not _is_plain(other := sides[is_left]):
        return None
    value = value_of(other, names)
    known = isinstance(value, int | float) and math.isfinite(value)
    return (name if is_left else _MIRRORED[name], value) if known else None


def _calls(frame: FrameType) -> bool:
    """Whether a frame calls a function, and does not ask by itself whether a value is true."""
    return "CALL" in dis.opname[frame.f_code.co_code[frame.f_lasti]]


def _is_plain(expression: ast.AST) -> bool:
    """Whether it may be computed where eager mode does not: of its functions, all are methods or torch's."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Call):
            named = isinstance(node.func, ast.Name) and node.func.id in ("len", "isinstance", "hasattr")
            if not (named or isinstance(node.func, ast.Attribute)) or node.keywords:
                return False
        elif not isinstance(node, _PLAIN):
            return False
    return True


def _evaluation(frame: FrameType, expression: ast.AST) -> Callable[[], Any]:
    """What computes an expression of a function that runs, with ``and``, ``or`` and ``not`` of tensors as theirs."""
    names = Names(frame)
    return lambda: evaluate(expression, names)


def _is_caught(frame: FrameType) -> bool:
    """Whether what is raised there is caught before the model's call ends, or what it tells has values.

    Hooks that look at values are called with them after the step.
    """
    at: FrameType | None = frame
    while at is not None and not (module := str(at.f_globals.get("__name__", ""))).startswith("autopar."):
        if at.f_code.co_exceptiontable and is_users_file(at.f_code.co_filename):
            function = _function(at)
            if function is None or any(_catches(n, at.f_lineno) for n in ast.walk(function)):
                return True
        at = at.f_back
    return module == _HOOKS


def _catches(node: ast.AST, line: int) -> bool:
    def within(block: list[ast.stmt]) -> bool:
        return bool(block) and block[0].lineno <= line <= (block[-1].end_lineno or line)

    if isinstance(node, ast.Try):
        return within(node.body) and any(not _raises_again(h.body[-1]) for h in node.handlers)
    return isinstance(node, ast.With) and within(node.body) and any("suppress" in ast.unparse(i) for i in node.items)


def _raises_again(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Raise) and statement.exc is None
