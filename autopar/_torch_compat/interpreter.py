"""Torch's interpreter in C++, for graphs of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen

_CONSTANTS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "SymInt": (int,),
    "float": (int, float),
    "bool": (bool,),
    "number": (int, float, complex),
    "ScalarType": (torch.dtype, int),
    "Layout": (torch.layout, int),
    "MemoryFormat": (torch.memory_format, int),
    "Device": (torch.device,),
    "str": (str,),
}
"""Types of constant arguments, as schemas call them, and what they are in Python; numbers of formats in defaults."""


def _argument(schema_type: str, value: Any) -> Any:
    """An argument as torch's interpreter takes it: nodes as they are, constants of the type of the schema.

    Raises:
        TypeError: it has no such constants.
    """
    optional = schema_type.startswith("Optional[")
    kind = schema_type.removeprefix("Optional[").removesuffix("]") if optional else schema_type
    if value is None and optional:
        return None
    if kind.startswith("List[") and isinstance(value, list | tuple):
        return [_argument(kind.removeprefix("List[").removesuffix("]"), v) for v in value]
    if isinstance(value, torch.fx.Node):
        if kind == "Tensor":
            return value
    elif kind in _CONSTANTS and isinstance(value, _CONSTANTS[kind]) and (kind == "bool" or not isinstance(value, bool)):
        constant: Any = value
        return float(constant) if kind == "float" else constant
    raise TypeError(f"{value!r} is no constant of type {schema_type}")


def _on_numbers(operator: OpOverload, positions: set[int]) -> OpOverload:
    """The overload that differs only in taking numbers at these positions, in place of tensors.

    Not just any overload on numbers: ``div.Tensor_mode`` has a rounding mode, and ``div.Scalar`` has none.

    Raises:
        TypeError: there is none.
    """

    def types(candidate: OpOverload) -> list[tuple[str, str]]:
        return [(a.name, str(a.real_type)) for a in candidate._schema.arguments]

    asked = [(name, "number" if i in positions else kind) for i, (name, kind) in enumerate(types(operator))]
    packet = operator.overloadpacket
    for candidate in (getattr(packet, name) for name in packet.overloads()):
        if types(candidate) == asked:
            return candidate  # type: ignore[no-any-return]
    raise TypeError(f"{operator} has no overload with numbers at {sorted(positions)}")


def _call(node: Any) -> tuple[OpOverload, list[tuple[str, Any]]]:
    """The operator that a node calls, and type and value of each argument, defaults included.

    Raises:
        TypeError: torch's interpreter cannot be given one of them.
    """
    operator = node.target
    numbers = {i for i, (a, s) in enumerate(zip(node.args, operator._schema.arguments, strict=False))
               if str(s.real_type) == "Tensor" and isinstance(a, int | float | complex)}  # fmt: skip
    if numbers:  # Python wraps them in a tensor of its own kind; the same operator on numbers does that, too
        operator = _on_numbers(operator, numbers)
    positions = dict(enumerate(node.args))
    found = []
    for number, argument in enumerate(operator._schema.arguments):
        if argument.default_value is None and not (number in positions or argument.name in node.kwargs):
            value = None
        else:
            value = positions.get(number, node.kwargs.get(argument.name, argument.default_value))
        kind = str(argument.real_type)
        found.append((kind, _argument(kind, value)))
    return operator, found


def interpreter_takes(node: Any) -> bool:
    """Whether torch's interpreter can run the operator of an `fx.Node` with its constants."""
    try:
        _call(node)
    except TypeError:
        return False
    return True


def interpreted(graph: Any, boxed: int) -> Callable[..., tuple[Any, ...]]:
    """What an `fx.Graph` computes, run by torch's interpreter in C++: the same kernels in the same order.

    Args:
        graph: of operators that the interpreter takes, and of `operator.getitem` of their results; its placeholders
            are tensors, and it returns a tuple of tensors.
        boxed: how many placeholders, the first ones, come in a list, which is emptied: each of these is freed after
            its last use, as values of the graph are. Others are passed one by one, which takes less time.

    Returns:
        A function of the list (if ``boxed``) and of the other tensors, to be called while `interpreting`.

    Raises:
        TypeError: the interpreter has no such operator, or would run another one in its place.
    """
    try:
        run: Callable[..., tuple[Any, ...]] = torch._C._create_function_from_graph(
            "run", _Interpreted(graph, boxed).made
        )
    except RuntimeError as e:
        raise TypeError(f"the interpreter refuses the graph: {e}") from e
    one = [torch.empty(0)]

    def from_list(values: list[torch.Tensor], *others: torch.Tensor) -> tuple[Any, ...]:
        # Of one tensor, and then of all: it looks at the type of each that it is made of, which takes long.
        given = torch._C.ScriptList(one)
        given.clear()
        given.extend(values)
        values.clear()
        return run(given, *others)

    return from_list if boxed else run


class _Interpreted:
    """A graph of torch's interpreter, made from an `fx.Graph` as for `interpreted`."""

    def __init__(self, graph: Any, boxed: int) -> None:
        self.made: Any = torch._C.Graph()
        self.known: dict[Any, Any] = {}
        self.tensor, number = torch._C.TensorType.get(), torch._C.IntType.get()
        self.numbers = {"int": number, "SymInt": number, "float": torch._C.FloatType.get(),
                        "bool": torch._C.BoolType.get()}  # fmt: skip
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        given = [self._input(torch._C.ListType(self.tensor))] if boxed else []
        self.known |= {n: self._input(self.tensor) for n in inputs[boxed:]}
        for node in reversed(inputs[:boxed]):
            (self.known[node],) = self._insert("aten::pop", [*given, self._argument("int", -1)], [self.tensor])
        for node in graph.nodes:
            if node.op == "output":
                values = [self.known[v] for v in node.args[0]]
                kind = torch._C.TupleType([v.type() for v in values])
                self.made.registerOutput(self._insert("prim::TupleConstruct", values, [kind])[0])
            elif node.op == "call_function":
                self.known[node] = self._called(node) if isinstance(node.target, OpOverload) else self._item(node)

    def _input(self, kind: Any) -> Any:
        found = self.made.addInput("")
        found.setType(kind)
        return found

    def _insert(self, name: str, values: list[Any], results: list[Any]) -> list[Any]:
        node = self.made.insertNode(self.made.create(name, values, len(results)))
        for output, kind in zip(node.outputs(), results, strict=True):
            output.setType(kind)
        return list(node.outputs())

    def _called(self, node: Any) -> Any:
        """The result of an operator, or the list of its results."""
        operator, arguments = _call(node)
        returns = [r.type for r in operator._schema.returns]
        outputs = self._insert(operator._schema.name, [self._argument(*a) for a in arguments], returns)
        # It chooses among overloads by the types of the arguments.
        chosen = outputs[0].node().schema()
        if chosen != str(operator._schema):
            raise TypeError(f"for {operator} the interpreter takes {chosen}")
        return outputs[0] if len(outputs) == 1 else outputs

    def _item(self, node: Any) -> Any:
        """One of several results, or an element of a list of tensors."""
        source, position = self.known[node.args[0]], node.args[1]
        if isinstance(source, list):
            return source[position]
        return self._insert("aten::__getitem__", [source, self._argument("int", position)], [self.tensor])[0]

    def _argument(self, kind: str, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return self.known[argument]
        if not isinstance(argument, list) or (argument and "Tensor" not in kind):
            return self.made.insertConstant(argument)
        inner = kind.removeprefix("Optional[").removeprefix("List[").removesuffix("]")
        optional = torch._C.OptionalType(self.tensor)
        element = optional if inner.startswith("Optional") else self.numbers.get(inner, self.tensor)
        parts = [self._argument("Tensor", a) for a in argument]
        return self._insert("prim::ListConstruct", parts, [torch._C.ListType(element)])[0]


def said_by_kernel(error: RuntimeError) -> str:
    """What a kernel said that failed while torch's interpreter ran it, without what the interpreter says around it."""
    return str(error).rsplit("RuntimeError: ", 1)[-1].strip()


@contextmanager
def interpreting() -> Iterator[None]:
    """While it lasts, torch's interpreter runs what it is given as it is: it would profile calls, and compile."""
    before = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(before)


def is_boxed(graph: Any) -> bool:
    """Whether the code of an `fx.Graph` takes one list, which it empties."""
    return isinstance(graph._codegen, BoxedCodeGen)
