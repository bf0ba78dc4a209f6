"""`Names`: what a code object refers to by name, read from its bytecode."""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Iterable
from dataclasses import dataclass

BY_STRING = frozenset(
    ("getattr", "setattr", "hasattr", "attrgetter", "vars", "globals", "__dict__", "__getattribute__")
)
"""Code that names one of these may name attributes and globals by strings."""

IMPORTING = frozenset(("__import__", "import_module", "modules"))
"""Code that names one of these may name modules by strings."""

EVALUATING = frozenset(("eval", "exec"))
"""Code that names one of these may have code in strings."""

REMEMBERED = 1000
"""Code objects whose names are kept."""


@dataclass(frozen=True)
class Names:
    """What code refers to by name, that of functions within included.

    Attributes:
        globals: also builtins.
        attributes: apart from globals: ``self.step`` has nothing to do with a loop's variable ``step``.
        imports: modules that it imports, as an import statement says them, each with the names taken from it.
        assigned: globals and attributes that it assigns.
        modules: what may be names of modules.
        strings: what may be names in strings, as `getattr` and `hasattr` take them.
    """

    globals: tuple[str, ...]
    attributes: tuple[str, ...]
    imports: tuple[tuple[str, tuple[str, ...]], ...]
    assigned: frozenset[str]
    modules: tuple[str, ...] = ()
    strings: tuple[str, ...] = ()

    @classmethod
    @functools.lru_cache(REMEMBERED)
    def of(cls, code: types.CodeType) -> Names:
        """Read the bytecode."""
        found: tuple[dict[str, None], dict[str, None]] = ({}, {})
        texts: dict[str, None] = {}
        imports: dict[str, tuple[str, ...]] = {}
        assigned: set[str] = set()
        pending, evaluated = [code], False
        while pending:
            part = pending.pop()
            pending += [c for c in part.co_consts if isinstance(c, types.CodeType)]
            texts.update({c: None for c in part.co_consts if isinstance(c, str)})
            level, names = 0, ()
            for instruction in dis.get_instructions(part):
                operation, argument = instruction.opname, instruction.argval
                if operation in ("STORE_GLOBAL", "STORE_ATTR"):
                    assigned.add(argument)
                # By suffix: the opcodes' full names differ between versions of Python.
                if operation.endswith(("_GLOBAL", "_NAME")) and operation != "IMPORT_NAME":
                    found[0][argument] = None
                elif operation.endswith(("_ATTR", "_METHOD")):
                    found[1][argument] = None
                elif operation == "IMPORT_NAME":  # behind its level and the names taken
                    module = "." * level + argument
                    imports[module] = (*imports.get(module, ()), *(names or ()))
                elif operation.startswith("LOAD_"):
                    level, names = (names if isinstance(names, int) else 0), argument
            if not pending and not evaluated and EVALUATING & found[0].keys():
                pending, evaluated = _code_in_texts(texts), True
        named = {*found[0], *found[1]}
        strings = {t: None for t in texts if t.isidentifier()} if BY_STRING & named else {}
        found[0].update(strings)
        found[1].update(strings)
        modules = [t for t in texts if all(map(str.isidentifier, t.split(".")))] if IMPORTING & named else []
        named_globals, attributes = map(tuple, found)
        imported = tuple(imports.items())
        return cls(named_globals, attributes, imported, frozenset(assigned), tuple(modules), tuple(strings))


def _code_in_texts(texts: Iterable[str]) -> list[types.CodeType]:
    """Of those that are code."""
    found = []
    for text in texts:
        with contextlib.suppress(SyntaxError, ValueError):
            found.append(compile(text, "<text>", "exec"))
    return found
