"""The layout of the repository: what may import what, and where things live."""

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Packages and modules of autopar, bottom to top: one imports only from those in lines above its own.
LAYERS = (
    "errors _torch_compat _former_paths",
    "costs",
    "ir",
    "rules pipeline",
    "memory",
    "strategies sharding",
    "capture simulate passes",
    "search runtime",
    "compiler",
    "specialize",
    "verify",
    "explain",
    "module",
    "parallelize checkpoint",
    "integrations",
    "autopar",  # autopar/__init__.py
    "cli",
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names.split()}

MOST_FILES, MOST_PACKAGES, MOST_IN_A_FOLDER = 7, 19, 12
"""At the top of `autopar`, and in any folder below (beside its ``__init__.py``)."""

# What plans must run where there is no process group, and hardware is described without any framework.
FORBIDDEN = {
    "autopar.costs.cluster": ("torch",),
    "autopar.costs.collectives": ("torch",),
    "autopar.costs.device": ("torch",),
    "autopar.costs.flops": ("torch",),
    "autopar.costs.host_copies": ("torch",),
    "autopar.costs.kernels": ("torch",),
    "autopar.costs.memory": ("torch",),
    "autopar.sharding": ("torch.distributed",),
    "autopar.search": ("torch.distributed",),
}

TORCH_META = {
    "val", "tensor_meta", "partitioner_tag", "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "custom",
    "seq_nr", "desc",
}  # fmt: skip
"""Torch's own entries of ``node.meta``; ours is one, which `autopar.ir.node_info` alone reads and writes."""

VAGUE_NAMES = {"utils.py", "util.py", "helpers.py", "helper.py", "misc.py", "common.py"}


def sources(*folders: str) -> list[Path]:
    """Python files under these folders, links not followed."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            linked = any((ROOT / parent).is_symlink() for parent in relative.parents)
            if "__pycache__" not in relative.parts and not linked:
                found.append(relative)
    return found


def module_name(path: Path) -> str:
    """The name a file is imported under: passes/cut.py is autopar.passes.cut."""
    parts = path.with_suffix("").parts
    parts = parts if parts[0] == "autopar" else ("autopar", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit(module: str) -> str:
    """The module or subpackage of autopar that a module belongs to: autopar.costs.flops -> cost."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imports(tree: ast.AST, module: str, package: bool) -> Iterator[tuple[str, str]]:
    """Each import as (module, name), relative ones resolved; the name is empty for a plain `import`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = module.split(".")
            base = base[: len(base) - node.level + package] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((origin, alias.name) for alias in node.names)


def imported_modules(tree: ast.AST, module: str, package: bool) -> set[str]:
    """Dotted names of what is imported; `from autopar import plan` counts as autopar.plan."""
    found = set()
    for origin, name in imports(tree, module, package):
        path = ROOT / origin.replace(".", "/") / name
        is_module = bool(name) and (path.is_dir() or path.with_name(f"{name}.py").exists())
        found.add(f"{origin}.{name}" if is_module or (origin == "autopar" and name in LAYER) else origin)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_torch_uses(tree: ast.AST) -> list[str]:
    """Private torch modules and names that a file imports or reaches by attribute; `torch.ops.*` is public."""
    used = []
    for origin, name in imports(tree, "", False):
        if origin.split(".")[0] == "torch" and any(is_private(part) for part in [*origin.split("."), name]):
            used.append(f"{origin}.{name}" if name else origin)
    for node in ast.walk(tree):
        chain: list[str] = []
        root: ast.AST = node
        while isinstance(root, ast.Attribute):
            chain.insert(0, root.attr)
            root = root.value
        from_torch = isinstance(root, ast.Name) and root.id == "torch"
        if from_torch and chain and chain[0] != "ops" and is_private(chain[-1]):
            used.append(".".join(["torch", *chain]))
    return used


def own_meta_keys(tree: ast.AST) -> list[str]:
    """Strings that a file takes as keys of some ``meta``, and which are none of torch's."""
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Attribute(attr="meta"), slice=ast.Constant(value=str(key))):
                found.append(key)
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(attr="meta"), attr="get" | "pop" | "setdefault"),
                args=[ast.Constant(value=str(key)), *_],
            ):
                found.append(key)
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="meta"), attr="update"), keywords=keywords):
                found += [keyword.arg for keyword in keywords if keyword.arg]
            case ast.Compare(
                left=ast.Constant(value=str(key)),
                ops=[ast.In() | ast.NotIn()],
                comparators=[ast.Attribute(attr="meta")],
            ):
                found.append(key)
            case ast.Assign(targets=[ast.Attribute(attr="meta")], value=ast.Dict(keys=keys)):
                found += [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return [key for key in found if key not in TORCH_META]


def direction_errors(module: str, imported: set[str]) -> list[str]:
    """Imports of a module that go against the layers."""
    own = unit(module)
    errors = []
    for target in sorted(name for name in imported if name.split(".")[0] == "autopar"):
        if unit(target) not in LAYER:
            errors.append(f"{module} imports {target}, which has no layer: add it to LAYERS")
        elif LAYER[unit(target)] > LAYER[own]:
            errors.append(f"{module} ({own}) imports {target}, which is built on top of it")
        elif LAYER[unit(target)] == LAYER[own] and unit(target) != own:
            errors.append(f"{module} ({own}) imports {target}, which stands beside it")
    return errors


def stray_imports(imported: set[str], allowed: tuple[str, ...]) -> list[str]:
    """Imports that are neither in the standard library nor in an allowed package or module."""
    return sorted(
        name
        for name in imported
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)
    )


@cache
def parse(path: Path) -> tuple[ast.Module, str, set[str]]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))
    name = module_name(path)
    return tree, name, imported_modules(tree, name, path.name == "__init__.py")


def faults(check: Callable[[Path], list[str]], *folders: str) -> dict[str, list[str]]:
    """What a check says of each file under these folders; of all in one test, since a test takes longer than a file."""
    return {path.as_posix(): found for path in sources(*folders) if (found := check(path))}


def test_dependencies_point_one_way() -> None:
    def check(path: Path) -> list[str]:
        _, module, imported = parse(path)
        if unit(module) not in LAYER:
            return [f"it has no layer: add {unit(module)!r} to LAYERS in {Path(__file__).name}"]
        return direction_errors(module, imported)

    assert faults(check, "autopar", "passes", "strategies") == {}


def test_planning_needs_no_process_group() -> None:
    def check(path: Path) -> list[str]:
        _, module, imported = parse(path)
        return [
            f"it imports {name}: {owner} must do without {forbidden}"
            for owner, names in FORBIDDEN.items()
            for forbidden in (names if f"{module}.".startswith(f"{owner}.") else ())
            for name in sorted(imported)
            if f"{name}.".startswith(f"{forbidden}.")
        ]

    assert faults(check, "autopar", "passes", "strategies") == {}


RULE_LANGUAGE = (
    "autopar.rules.rule",
    "autopar.ir.layout",
    "autopar.ir.ops.attention",
    "autopar.ir.ops.balanced_attention",
    "autopar.ir.ops.random",
    "autopar.ir.ops.accumulate",
    "autopar.ir.ops.formula",
    "autopar.ir.ops.cross_entropy",
    "autopar.ir.ops.float8",
    "autopar.ir.ops.routing",
    "autopar.ir.ops.sequence",
    "torch",
)
"""What files in ``strategies/`` import."""


def test_strategies_import_only_the_rule_language() -> None:
    def check(path: Path) -> list[str]:
        _, module, imported = parse(path)
        own = ".".join(module.split(".")[:3])  # a family of several files is a package
        every = ("autopar.strategies",) if path.name == "__init__.py" else (own,)
        return stray_imports(imported, (*RULE_LANGUAGE, *every))

    assert faults(check, "strategies") == {}


def test_a_pass_never_imports_another_pass() -> None:
    def check(path: Path) -> list[str]:
        _, module, imported = parse(path)
        own = ".".join(module.split(".")[:4])  # a pass of several files is a package
        others = [name for name in imported if name.startswith("autopar.passes") and not name.startswith(f"{own}.")]
        return [] if path.name == "__init__.py" else others

    assert faults(check, "passes") == {}


def test_private_torch_is_used_in_one_place_only() -> None:
    def check(path: Path) -> list[str]:
        tree, module, _ = parse(path)
        return [] if f"{module}.".startswith("autopar._torch_compat.") else private_torch_uses(tree)

    assert faults(check, "autopar", "passes", "strategies", "benchmarks") == {}


def test_what_passes_know_of_a_node_is_one_value() -> None:
    """Add a field to `autopar.ir.node_info.NodeInfo`."""
    every = ("autopar", "passes", "strategies", "benchmarks", "tests")
    assert faults(lambda path: own_meta_keys(parse(path)[0]), *every) == {}


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {}
    for path in sources("autopar", "passes", "strategies"):
        tree, module, _ = parse(path)
        # Imports inside functions and for type checking run later or never: only those at the top can be circular.
        top = ast.Module([node for node in tree.body if not isinstance(node, ast.If)], [])
        top.body = [node for node in top.body if isinstance(node, ast.Import | ast.ImportFrom)]
        graph[module] = imported_modules(top, module, path.name == "__init__.py")
    edges = {module: sorted((graph.keys() & imported) - {module}) for module, imported in graph.items()}
    while leaves := {module for module, targets in edges.items() if not targets}:
        edges = {m: [t for t in targets if t not in leaves] for m, targets in edges.items() if m not in leaves}
    assert not edges, f"circular imports among {edges}"


@pytest.mark.parametrize("name", ["passes", "strategies"])
def test_the_package_links_are_links(name: str) -> None:
    link = ROOT / "autopar" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_levels_have_few_entries() -> None:
    top = [path for path in sources("autopar") if len(path.parts) == 2]
    packages = [path for path in (ROOT / "autopar").iterdir() if (path / "__init__.py").exists()]
    assert len(top) <= MOST_FILES, f"{len(top)} modules at the top: move one into a package"
    assert len(packages) <= MOST_PACKAGES, f"{len(packages)} packages at the top: group them"
    folders = Counter(path.parent for path in sources("autopar", "passes", "strategies") if path.name != "__init__.py")
    full = {str(folder): count for folder, count in folders.items() if count > MOST_IN_A_FOLDER}
    assert full == {}, f"more than {MOST_IN_A_FOLDER} modules in {full}: group them in a folder of their own"


def test_files_are_named_after_what_they_do() -> None:
    vague = [path for path in sources("autopar", "passes", "strategies", "tests") if path.name in VAGUE_NAMES]
    assert vague == []


# The checks above pass on a clean tree; these show that each of them can fail.


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("import torch._dynamo.config", ["torch._dynamo.config"]),
        ("from torch._inductor import config", ["torch._inductor.config"]),
        ("from torch.utils._pytree import tree_map", ["torch.utils._pytree.tree_map"]),
        ("from torch import _C", ["torch._C"]),
        ("def f():\n    from torch.fx._lazy import x", ["torch.fx._lazy.x"]),
        ("torch.utils._pytree", ["torch.utils._pytree"]),
        ("from torch.fx import GraphModule", []),
        ("torch.ops._c10d_functional.all_reduce", []),
        ("torch.__version__", []),
        ("from mytorch._x import y", []),
    ],
)
def test_private_torch_uses(source: str, used: list[str]) -> None:
    assert private_torch_uses(ast.parse(source)) == used


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ('node.meta["stage"] = 1', ["stage"]),
        ('f(x).meta.get("stage", 0)', ["stage"]),
        ('node.meta.pop("stage")', ["stage"]),
        ("node.meta.update(stage=1)", ["stage"]),
        ('"stage" in node.meta', ["stage"]),
        ('"stage" not in node.meta', ["stage"]),
        ('node.meta = {**other.meta, "stage": 1}', ["stage"]),
        ('node.meta["val"].meta.get("stack_trace")', []),
        ("copy.meta = dict(node.meta)", []),
    ],
)
def test_own_meta_keys(source: str, keys: list[str]) -> None:
    assert own_meta_keys(ast.parse(source)) == keys


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("autopar.ir.layout", "from autopar.search.solver.problem import Problem", 1),
        ("autopar.ir.layout", "from autopar import plan", 1),
        ("autopar.costs.flops", "from ..compiler import PASSES", 1),
        ("autopar.costs.flops", "from autopar.costs.cluster import Device\nfrom . import memory", 0),
        ("autopar.search.solver.eliminate", "import autopar.costs.flops", 0),
        ("autopar.search.solver.eliminate", "import autopar.unheard_of", 1),
        ("autopar.cli", "from autopar import parallelize", 0),
        ("autopar.sharding.dims", "from autopar import parallelize", 1),
    ],
)
def test_direction_errors(module: str, source: str, count: int) -> None:
    imported = imported_modules(ast.parse(source), module, package=False)
    assert len(direction_errors(module, imported)) == count


def test_stray_imports() -> None:
    imported = {"math", "torch.nn", "torchvision", "numpy", "autopar.rules.rule", "autopar.strategies.view"}
    assert stray_imports(imported, ("torch", "autopar.rules.rule")) == [
        "autopar.strategies.view",
        "numpy",
        "torchvision",
    ]
