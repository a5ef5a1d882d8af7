"""Counts of what a reader has to hold: how many files, arguments, circles and leaning sentences.

    python -m tests.tools.house
    python -m tests.tools.house --show leaning
    python -m tests.tools.house --json
    python -m tests.tools.house --root ../older-checkout

Every counter but one reads the syntax trees of a checkout, so that it also counts an older one
whose files lie elsewhere (``--root``). The counter of a decode step runs that step, and is left out
for another checkout.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
SHIPPED: Final = ("specs", "builders", "attn")
PACKAGES: Final = (*SHIPPED, "tests")
MOST_FILES: Final = 18
"""Python files of a folder, ``__init__.py`` among them, that a reader can scan."""
MOST_PARAMETERS: Final = 8
"""Parameters of a host function, ``self`` and ``cls`` not counted."""

DOORS: Final = {
    r"attn/backends/base\.py:AttentionBackend\.(supports_combination|validate_configuration)": (
        "vLLM calls backends with these names"
    ),
    r"attn/selector\.py:get_attn_backend": "vLLM's function has this name and these parameters",
    r"attn/impls/(base|\w+/\w+)\.py:\w+Impl(Base)?\."
    r"(__init__|forward|do_rope(_quantize)?_and_kv_cache_update)": (
        "vLLM makes impls and calls them with these names"
    ),
    r"attn/integrations/vllm/adapter\.py:\w+\.(forward|use_cascade_attention)": (
        "vLLM calls the adapter with these names"
    ),
    r"attn/ops/mla\.py:mla_attention": (
        "the parameters are those of vLLM's MLAAttention.forward_impl, behind impl and layer"
    ),
    r"attn/cli/app\.py:(run|warm|bench_kernels_command)": "typer makes a flag of each parameter",
}
"""Host functions whose signature somebody else decides, and why; they may have more than
:data:`MOST_PARAMETERS` parameters. A key is a pattern of ``path:qualified name``."""

LAUNCHES: Final = (
    r"builders/launch/\w+\.py",
    r"builders/(fast_launch|prepared_launch|driver_launch)\.py",
    r"attn/kernels/(launch|again)\.py",
    r"attn/kernels/dense/again\.py",
)
"""Files of launch machinery, where they lie now and where they lay before they were moved."""

LEANING: Final = {
    "likewise": r"(?i)\blikewise\b",
    "ditto": r"(?i)\bditto\b",
    "as above": r"(?i)\b(as|see) above\b",
    "Of ...": r"\AOf\b",
    "The same ...": r"\AThe same\b",
    "As in ...": r"\AAs (in|of)\b|\b[Aa]s (in|of) :",
}
"""Patterns of docstrings and comments that a reader cannot understand without another one. The
last three are about how a text starts: "Of a step." has no subject, "The same for keys." has no
verb, and "As in ``f``." sends the reader away."""


@dataclass(frozen=True)
class Count:
    """One number, and what was counted."""

    name: str
    meaning: str
    value: int
    found: list[str]
    """One entry per line of ``--show``."""


@dataclass(frozen=True)
class Module:
    """One Python file of a checkout."""

    path: str
    """Below the root, with forward slashes."""
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.source)

    @property
    def name(self) -> str:
        """Dotted; a package's own file has the package's name."""
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def lines(self) -> int:
        """Lines of the file."""
        return len(self.source.splitlines())


def modules_of(root: Path, *packages: str) -> list[Module]:
    """The Python files of a checkout's packages.

    Args:
        root: the checkout.
        packages: folders at its top; all that the project has where none is named.
    """
    paths = [path for name in packages or PACKAGES for path in sorted((root / name).rglob("*.py"))]
    return [
        Module(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for path in paths
    ]


# -- Device code.


def is_device_function(node: ast.AST) -> bool:
    """True for a function that ``triton.jit`` or ``gluon.jit`` decorates."""
    if not isinstance(node, ast.FunctionDef):
        return False
    decorators = [
        ast.unparse(item.func if isinstance(item, ast.Call) else item)
        for item in node.decorator_list
    ]
    return any(name.split(".")[-1] == "jit" for name in decorators)


def device_functions(modules: list[Module]) -> list[tuple[Module, ast.FunctionDef]]:
    """Every device function of some modules."""
    return [
        (module, node)
        for module in modules
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef) and is_device_function(node)
    ]


def launched_kernels(modules: list[Module]) -> dict[str, str]:
    """Device functions that no other device function calls, each with the path of its file."""
    functions = device_functions(modules)
    # By any use of its name: partitions and constexprs hold functions that they call later.
    used = {
        item.id
        for _, node in functions
        for item in ast.walk(node)
        if isinstance(item, ast.Name) and item.id != node.name
    }
    return {node.name: module.path for module, node in functions if node.name not in used}


def widest_call(modules: list[Module]) -> Count:
    """The most arguments of a call from device code to a device function.

    Partitions of ``warp_specialize`` are calls too: each is a function and a tuple of arguments.
    """
    names = {node.name for _, node in device_functions(modules)}
    calls = [
        (width, f"{module.path}:{line} {node.name} calls {name}: {width}")
        for module, node in device_functions(modules)
        for name, line, width in _device_calls(module, node, names)
    ]
    calls.sort(key=lambda call: -call[0])
    meaning = "most arguments of a call between device functions"
    return Count("widest", meaning, calls[0][0] if calls else 0, [text for _, text in calls])


def widest_function(modules: list[Module]) -> Count:
    """The most parameters of a device function, kernels included."""
    functions = [
        (_parameters(node), f"{module.path}:{node.lineno} {node.name}: {_parameters(node)}")
        for module, node in device_functions(modules)
    ]
    functions.sort(key=lambda item: -item[0])
    meaning, most = "most parameters of a device function", functions[0][0] if functions else 0
    return Count("signature", meaning, most, [text for _, text in functions])


def _device_calls(
    module: Module, function: ast.FunctionDef, names: set[str]
) -> Iterator[tuple[str, int, int]]:
    """Calls in a device function of those named: name, line and number of arguments."""
    aliases = {
        alias.asname: alias.name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    tuples = {
        target.id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def called(node: ast.expr) -> str | None:
        name = ast.unparse(node).split(".")[-1]
        name = aliases.get(name, name)
        return name if name in names else None

    def width(items: list[ast.expr]) -> int:
        total = 0
        for item in items:
            inner = item.value if isinstance(item, ast.Starred) else None
            if isinstance(inner, ast.Name):
                inner = tuples.get(inner.id)
            total += width(inner.elts) if isinstance(inner, ast.Tuple) else 1
        return total

    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            name = called(node.func)
            if name is not None:
                yield name, node.lineno, width(node.args) + len(node.keywords)
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
            first, given = node.elts
            if isinstance(given, ast.Name):
                given = tuples.get(given.id, given)
            is_name = isinstance(first, ast.Name | ast.Attribute)
            name = called(first) if is_name else None
            if name is not None and isinstance(given, ast.Tuple):
                yield name, node.lineno, width(given.elts)


# -- Folders, names, imports.


def full_folders(modules: list[Module]) -> Count:
    """Folders with more than :data:`MOST_FILES` Python files."""
    files = Counter(module.path.rpartition("/")[0] for module in modules)
    found = [f"{name}: {n}" for name, n in files.most_common() if n > MOST_FILES]
    return Count("folders", f"folders of more than {MOST_FILES} files", len(found), found)


def private_imports(modules: list[Module]) -> Count:
    """Names that start with one underscore and are imported from another module of the project."""
    packages = {module.name.split(".")[0] for module in modules}
    found = [
        f"{module.path}:{node.lineno} {node.module}.{alias.name}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom)
        and (node.level or (node.module or "").split(".")[0] in packages)
        for alias in node.names
        if re.match(r"_(?!_)", alias.name)
    ]
    return Count("private", "private names imported across modules", len(found), found)


def imported_modules(module: Module, known: set[str]) -> set[str]:
    """Modules that a module imports to run, wherever the import stands.

    Args:
        module: whose imports.
        known: dotted names of the project's modules; others are left out.
    """
    found: set[str] = set()
    is_package = module.path.endswith("/__init__.py")

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = module.name.split(".")
                    up = child.level - is_package
                    base = ".".join([*parents[: len(parents) - up], *filter(None, [base])])
                for alias in child.names:
                    submodule = f"{base}.{alias.name}"
                    found.add(submodule if submodule in known else base)
            elif not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
                visit(child)

    visit(module.tree)
    return found & known


def circles(modules: list[Module]) -> Count:
    """Pairs of modules that import each other. Imports for type checkers alone do not count."""
    known = {module.name for module in modules}
    imports = {module.name: imported_modules(module, known) for module in modules}
    found = sorted(
        f"{name} <-> {other}"
        for name, others in imports.items()
        for other in others
        if name < other and name in imports[other]
    )
    return Count("circles", "pairs of files that import each other", len(found), found)


# -- Texts.


def texts_of(source: str) -> list[tuple[int, str]]:
    """Docstrings and comments of a file, each with the line where it starts.

    Strings under an assignment are docstrings; comments on consecutive lines are one.
    """
    found = [
        (node.lineno, inspect.cleandoc(node.value.value))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    end, start, lines = -1, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        stands_alone = not token.line[:column].strip()
        if lines and not (stands_alone and line == end + 1):
            found.append((start, " ".join(lines)))
            lines = []
        start = line if not lines else start
        lines.append(token.string.lstrip("#").strip())
        end = line if stands_alone else -1
    if lines:
        found.append((start, " ".join(lines)))
    return sorted(found)


def leans(text: str) -> str | None:
    """Which entry of :data:`LEANING` a docstring or comment matches first; None where none does."""
    return next((name for name, pattern in LEANING.items() if re.search(pattern, text)), None)


def leaning_texts(modules: list[Module]) -> Count:
    """Docstrings and comments that cannot be read on their own: see :data:`LEANING`."""
    found = []
    for module in modules:
        for line, text in texts_of(module.source):
            kind = leans(text)
            if kind is not None:
                found.append(f"{module.path}:{line} [{kind}] {' '.join(text.split())[:72]}")
    return Count("leaning", "docstrings and comments that lean on another", len(found), found)


# -- Sizes.


def launch_machinery(modules: list[Module]) -> Count:
    """Lines of the files that :data:`LAUNCHES` names."""
    files = [
        module
        for module in modules
        if any(re.fullmatch(pattern, module.path) for pattern in LAUNCHES)
    ]
    found = [f"{module.path}: {module.lines}" for module in files]
    return Count(
        "launch", "lines of launch machinery", sum(module.lines for module in files), found
    )


def wide_functions(modules: list[Module]) -> Count:
    """Host functions with more than :data:`MOST_PARAMETERS` parameters that are not in ``DOORS``.

    Device functions are left out, and functions inside them.
    """
    found = [
        (count, f"{module.path}:{line} {name.split('.')[-1]}: {count}")
        for module in modules
        for line, name, count in _wide_functions_of(module)
        if door_of(module.path, name) is None
    ]
    found.sort(key=lambda item: -item[0])
    meaning = f"host functions of more than {MOST_PARAMETERS} parameters, doors left out"
    return Count("parameters", meaning, len(found), [text for _, text in found])


def door_of(path: str, name: str) -> str | None:
    """The pattern of ``DOORS`` that knows a function, or None.

    Args:
        path: the file of the function, relative to the checkout.
        name: the function's name, behind the names of its classes: ``AttentionImpl.forward``.
    """
    return next((door for door in DOORS if re.fullmatch(door, f"{path}:{name}")), None)


def used_doors(modules: list[Module]) -> set[str]:
    """The patterns of ``DOORS`` that know a function with many parameters."""
    wide = {
        door_of(module.path, name)
        for module in modules
        for _, name, _ in _wide_functions_of(module)
    }
    return {door for door in wide if door is not None}


@cache
def _wide_functions_of(module: Module) -> tuple[tuple[int, str, int], ...]:
    """Line, qualified name and number of parameters of a module's wide host functions."""

    def visit(node: ast.AST, outer: str) -> Iterator[tuple[int, str, int]]:
        for child in ast.iter_child_nodes(node):
            if is_device_function(child):
                continue
            name = outer
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{child.name}".strip(".")
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                count = _parameters(child)
                if count > MOST_PARAMETERS:
                    yield child.lineno, name, count
            yield from visit(child, name)

    return tuple(visit(module.tree, ""))


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = node.args
    named = [item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    own = named[:1] in (["self"], ["cls"])
    return len(named) - own + (given.vararg is not None) + (given.kwarg is not None)


# -- A decode step.


def decode_step() -> list[Count]:
    """Modules and lines that one decode step of TRITON_ATTN on Hopper passes through.

    The step is run on CPU tensors that builder and impl believe to be on an H100: two requests of
    one new token, 32 query heads, 8 KV heads, head size 128, bfloat16. Launches are collected in
    place of being made, so what runs only behind a launch on a GPU is not seen. To the modules
    whose code ran come those of the launched kernels' device functions, whichever branch is taken.
    """
    ran, kernels = _traced_step()
    device = set[Path]()
    for kernel in kernels:
        device |= device_files(kernel)
    paths = sorted(ran | device)
    sizes = {
        path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines())
        for path in paths
    }
    found = [f"{name}: {lines}" for name, lines in sizes.items()]
    return [
        Count("step modules", "modules of a decode step on Hopper", len(sizes), found),
        Count("step lines", "their lines", sum(sizes.values()), found),
    ]


def _is_ours(file: str) -> bool:
    path = Path(file)
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in SHIPPED


def _traced_step() -> tuple[set[Path], list[Any]]:
    """Files whose code runs in ``build`` and ``forward``, and the kernels that these launch."""
    from unittest import mock

    import torch

    import builders.dense.triton_attn
    import builders.splitkv.planner
    from builders.batch import CommonAttentionMetadata
    from builders.launch.call import collected_calls
    from specs.engine import PrefillKernel
    from tests.compile.variants import Layer, pretending

    layer = Layer()
    heads, kv_heads, size = layer.heads
    spec = layer.spec()
    table = torch.ones(2, 64, dtype=torch.int32)
    batch = CommonAttentionMetadata.from_lengths([1, 1], [41, 41], table, layer.block_size)
    query = torch.zeros(2, heads, size, dtype=layer.dtype.torch)
    key = torch.zeros(2, kv_heads, size, dtype=layer.dtype.torch)
    cache = spec.layout(order=layer.order).allocate(10)
    files: set[Path] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        # A module's own code runs where it is imported, not where a step comes by.
        if event == "call" and frame.f_code.co_name != "<module>":
            files.add(Path(frame.f_code.co_filename))

    def run(profile: Callable[[FrameType, str, object], None] | None) -> list[Any]:
        engine = layer.engine(PrefillKernel.AUTO)
        kind = builders.dense.triton_attn.TritonAttentionMetadataBuilder
        builder, impl = kind(spec, ["layer"], engine, "cpu"), layer.impl()
        with collected_calls() as calls:
            sys.setprofile(profile)
            try:
                step = builder.build(0, batch)
                impl.forward(layer.scales(), query, key, key, cache, step, torch.zeros_like(query))
            finally:
                sys.setprofile(None)
        return [call.kernel for call in calls]

    with (
        pretending(90),
        mock.patch.object(builders.dense.triton_attn, "runs_gluon", return_value=True),
        mock.patch.object(builders.splitkv.planner, "interprets", return_value=True),
    ):
        # The first step imports what is imported late.
        run(None)
        kernels = run(record)
    return {path for path in files if _is_ours(str(path))}, kernels


def device_files(kernel: object) -> set[Path]:
    """Files of the project that hold a kernel, or any function or class that it can reach.

    Args:
        kernel: what ``triton.jit`` or ``gluon.jit`` made of a function, or a function.
    """
    files: set[Path] = set()
    seen: set[int] = set()
    waiting = [kernel]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, type):
            waiting += vars(found).values()
            continue
        function: Any = getattr(found, "fn", found)
        function = inspect.unwrap(function)
        code = getattr(function, "__code__", None)
        if not isinstance(function, FunctionType) or code is None:
            continue
        if _is_ours(code.co_filename):
            files.add(Path(code.co_filename))
            names = {name for each in _codes(code) for name in each.co_names}
            waiting += [function.__globals__[name] for name in names & function.__globals__.keys()]
    return files


def _codes(code: Any) -> Iterator[Any]:
    """The code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _codes(constant)


# -- The command.


def counts(root: Path) -> list[Count]:
    """Every count of a checkout; those of a decode step where it is the one that this is part of.

    Args:
        root: the checkout.
    """
    everything = modules_of(root)
    shipped = [module for module in everything if module.path.split("/")[0] in SHIPPED]
    step = decode_step() if root.resolve() == ROOT else []
    return [
        *step,
        widest_call(shipped),
        widest_function(shipped),
        full_folders(everything),
        private_imports(shipped),
        leaning_texts(everything),
        launch_machinery(shipped),
        wide_functions(shipped),
        circles(shipped),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Print the table, one list, or JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.house", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to count")
    parser.add_argument("--json", action="store_true", help="all counts and what was counted")
    parser.add_argument("--show", metavar="NAME", help="what one counter counted, line by line")
    asked = parser.parse_args(arguments)
    found = counts(asked.root)
    if asked.json:
        print(json.dumps([asdict(count) for count in found], indent=1))
        return
    if asked.show is not None:
        named = [count for count in found if count.name == asked.show]
        if not named:
            parser.error(f"--show {asked.show!r}: one of {', '.join(c.name for c in found)}")
        print("\n".join(named[0].found))
        return
    for count in found:
        print(f"{count.name:12} {count.value:6}  {count.meaning}")


if __name__ == "__main__":
    main()
