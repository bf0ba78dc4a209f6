"""Where traced operators come from: the modules they run in and the user's line, on forward and backward nodes.

A model is traced by calling it, so nothing but Python's own stack knows who calls what. While a trace is recorded,
`nn.Module.__call__` notes the module and every torch function the line of the user's code. Torch's annotations of
nodes bring both from a forward operator to its backward operators.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

from autopar.capture.state.tracked import is_tracked, plain

STACK, LINE = "autopar_stack", "autopar_line"
"""Annotations of a traced node: (path, call) of each module that it runs in, outermost first; (file, line)."""

_GENERATED = ("<frozen", "<string>", "<eval_with_key>", "<__array_function__", "<attrs", "<lambdifygenerated")
"""Code without a file of its own; a notebook's cells, and what is typed, have such names, too, and are the user's."""

_STANDARD = str(Path(contextlib.__file__).parent)

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), *_GENERATED)


class Origins(TorchFunctionMode):
    """Annotates what is traced while it is entered."""

    def __init__(self, root: nn.Module) -> None:
        """``root`` has the model whose modules are recorded as ``model``.

        Attributes:
            lines: where an attribute of a module was assigned last, by the module's path in the model and its name.
        """
        super().__init__()
        self._paths: dict[int, str] = {}
        for path, module in root.named_modules():
            self._paths.setdefault(id(module), path)
        self._open: tuple[tuple[str, str], ...] = ()
        self.lines: dict[tuple[str, str], str] = {}
        self._calls: dict[str, int] = defaultdict(int)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """While it lasts, calls of modules and of torch functions are noted."""
        before = nn.Module.__call__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(id(module))
            if path is None:  # made in forward: what it does belongs to its caller
                return before(module, *args, **kwargs)
            number, outer = self._calls[path], self._open
            self._calls[path] += 1
            # The number tells calls of one module apart: each has module outputs of its own.
            self._open = (*outer, (path, f"{path}@{number}" if number else path))
            try:
                with annotate({STACK: self._open}):
                    return before(module, *args, **kwargs)
            finally:
                self._open = outer

        assign = nn.Module.__setattr__

        def assigned(module: nn.Module, name: str, value: Any) -> None:
            if (path := self._paths.get(id(module))) is not None:
                file, line = user_frame()
                self.lines[path.removeprefix("model").removeprefix("."), name] = f"{file}:{line}"
            assign(module, name, value)

        # On the class: modules made in forward, and subclasses with their own forward, all call it.
        nn.Module.__call__ = called  # type: ignore[method-assign]
        nn.Module.__setattr__ = assigned  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            nn.Module.__call__ = before  # type: ignore[method-assign]
            nn.Module.__setattr__ = assign  # type: ignore[method-assign]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function with the user's line noted."""
        kwargs = kwargs or {}
        # A tracked number that meets a tensor is read: torch functions take plain numbers only.
        if any(is_tracked(a) for a in (*args, *kwargs.values())):
            args, kwargs = tuple(map(plain, args)), {k: plain(v) for k, v in kwargs.items()}
        with annotate({LINE: user_frame()}):
            return func(*args, **kwargs)


def user_frame() -> tuple[str, int]:
    """File and line of the innermost frame that is neither Python's, torch's nor autopar's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users_file(name):
            return name, frame.f_lineno
        frame = frame.f_back
    return "", 0


def is_users_file(name: str) -> bool:
    """Whether code is neither Python's, torch's nor autopar's, nor made by a program."""
    return not is_standard(name) and not name.startswith(_NOT_THE_USERS)


def is_standard(name: str) -> bool:
    """Whether a file is of Python's own library."""
    return name.startswith((_STANDARD, "<frozen")) and not is_installed(name)


def is_installed(name: str) -> bool:
    """Whether a file is of a package that is installed."""
    return "site-packages" in name or "dist-packages" in name


def record_origins(graph: fx.Graph) -> None:
    """Turn the annotations of a traced graph into the meta entries that torch's exporter leaves."""
    for node in graph.nodes:
        # Where `annotate` leaves its notes; torch copies them from a forward operator to its backward operators.
        noted = node.meta.get("custom") or {}
        backward = node.meta.get("partitioner_tag") == "is_backward"
        if STACK in noted:
            stack = {call: (path, "") for path, call in noted[STACK]}
            node.meta["fwd_nn_module_stack" if backward else "nn_module_stack"] = stack
        if noted.get(LINE, ("", 0))[1]:
            file, line = noted[LINE]
            node.meta["stack_trace"] = f'File "{file}", line {line}'
