"""`failing_node`: which node of a graph an error came from, read off its traceback."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable

from torch import fx

from autopar.ir.graph import module_path, user_line
from autopar.ir.ops.collectives import c10d


def failing_node(error: BaseException, graphs: Iterable[fx.GraphModule | None]) -> str:
    """`` at all_reduce_2, of module 'up' (model.py:12)``; nothing if the error is from none of the graphs."""
    name = _name(error)
    for graph in graphs if name else ():
        for node in graph.graph.nodes if graph is not None else ():
            if node.name == name:
                return _described(node)
    return ""


def _name(error: BaseException) -> str:
    """Name of the value that the line of generated code computes in which the error was raised."""
    name, frame = "", error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        # fx gives the code of each graph a file name of this form, and has registered its text with linecache.
        if file.startswith("<eval_with_key>"):
            line = linecache.getline(file, frame.tb_lineno)
            # `mul_2: "f32[8]" = torch.ops...`, with a type annotation or without.
            match = re.match(r"\s*(\w+)[^=\n]*=", line)
            name = match[1] if match else name
        frame = frame.tb_next
    return name


def _described(node: fx.Node) -> str:
    # A collective fails where it is waited for. Inserted nodes have no module: that of what they communicate.
    waited = node.all_input_nodes[0] if node.target is c10d.wait_tensor.default and node.all_input_nodes else node
    origin = next((n for n in (node, waited, *waited.all_input_nodes) if module_path(n)), node)
    return f" at {waited.name}, of module {module_path(origin)!r} ({user_line(origin)})"
