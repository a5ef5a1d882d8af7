"""The shape of the tree: who imports whom, what importing loads, what stands where."""

import ast
import fnmatch
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from attn.registry import ROWS, AttentionBackendEnum, BackendRow
from tests.tools import house
from tests.tools.weights import HEAVIEST

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("specs", "builders", "attn", "tests")

# Higher may import lower. Equal ranks of different names may not import each other.
PACKAGE_RANK = {"specs": 0, "builders": 1, "attn": 2, "tests": 3}
ATTN_RANK = {
    "errors": 0,
    "neighbours": 0,
    "outside": 1,
    "device": 1,
    "kernels": 2,
    "reference": 2,
    "ops": 3,
    "impls": 4,
    "ahead": 5,
    "backends": 5,
    "registry": 6,
    "selector": 7,
    # The package itself, which re-exports what is below.
    "": 8,
    # On top of everything: nobody imports them, but the command runs the benchmarks. Not even the
    # command imports attn.testing, which a test of its own says.
    "integrations": 9,
    "bench": 9,
    "testing": 9,
    "cli": 10,
}

# Families of attention, in order. A family's folder in builders, attn/impls and attn/kernels may
# import from families after it in this order, and never from families before it.
FAMILIES = ("sparse", "vendor", "latent", "dense")
FAMILY_ORDER = (*FAMILIES, "cache", "lang")

MOST_FILES = 18
"""Python files of one folder, at most: more is a list that nobody reads to its end."""

# Third-party packages that a module of the package may load by being imported.
AT_MODULE_LEVEL = {"specs": {"pydantic"}, "builders": {"torch"}}
# Device code of builders, and what launches it: builders, impls and backends import these modules
# inside a function, so that builders are importable with torch alone.
KERNELS_OF_BUILDERS = re.compile(
    r"builders\.\w+\.device(\..+)?|builders\.launch\.(ahead|launcher|compiled)"
)

TOP_LEVEL_FOLDERS = {".ci", "attn", "builders", "docs", "specs", "tests"}
TOP_LEVEL_FILES = {
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "mkdocs.yml",
    "pyproject.toml",
}
# What test tools leave behind, beside what git ignores.
LEFTOVERS = [".coverage", ".coverage.*"]


@dataclass(frozen=True)
class Import:
    """One imported module."""

    module: str
    line: int
    at_module_level: bool
    for_types_only: bool


def module_files(*packages: str) -> dict[str, Path]:
    """Every module of the packages, by dotted name; a package's file has the package's name."""
    found = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = module_files(*PACKAGES)
SHIPPED = {name: path for name, path in MODULES.items() if not name.startswith("tests")}


@cache
def imports_of(module: str, source: str, *, is_package: bool = False) -> list[Import]:
    """Every import in a module, wherever it stands."""
    found: list[Import] = []

    def add(node: ast.stmt, names: list[str], inside: bool, types_only: bool) -> None:
        found.extend(Import(name, node.lineno, not inside, types_only) for name in names)

    def visit(node: ast.AST, inside: bool, types_only: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                add(child, [alias.name for alias in child.names], inside, types_only)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = module.split(".")
                    up = child.level - is_package
                    base = ".".join([*parents[: len(parents) - up], *filter(None, [base])])
                # "from attn import registry" imports a module, "from attn import select" a name.
                submodules = [f"{base}.{alias.name}" for alias in child.names]
                is_module = [name in MODULES for name in submodules]
                names = [name for name, known in zip(submodules, is_module, strict=True) if known]
                add(child, names if all(is_module) else [base, *names], inside, types_only)
            else:
                is_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                visit(child, inside or is_function, types_only or is_types)

    visit(ast.parse(source), inside=False, types_only=False)
    return found


def part_of_attn(module: str) -> str:
    """``kernels`` of ``attn.kernels.dense.decode``; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def against_the_direction(importer: str, imported: str) -> bool:
    """True when the layers forbid the import."""
    ours, theirs = importer.split(".")[0], imported.split(".")[0]
    if theirs not in PACKAGE_RANK:
        return False
    if ours != theirs or ours != "attn":
        return PACKAGE_RANK[theirs] > PACKAGE_RANK[ours]
    our_part, their_part = part_of_attn(importer), part_of_attn(imported)
    our_rank, their_rank = ATTN_RANK[our_part], ATTN_RANK[their_part]
    return their_rank > our_rank or (their_rank == our_rank and their_part != our_part)


def source_imports(module: str) -> list[Import]:
    """The imports of a module of this tree."""
    path = MODULES[module]
    source = path.read_text(encoding="utf-8")
    return imports_of(module, source, is_package=path.name == "__init__.py")


# -- Direction.


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_in_one_direction(module: str) -> None:
    wrong = [
        f"line {item.line} imports {item.module}"
        for item in source_imports(module)
        if not item.for_types_only and against_the_direction(module, item.module)
    ]
    assert wrong == []


def test_every_part_of_attn_has_a_layer() -> None:
    parts = {part_of_attn(name) for name in SHIPPED if name.split(".")[0] == "attn"}
    assert parts <= set(ATTN_RANK)


@pytest.mark.parametrize(
    ("importer", "imported", "wrong"),
    [
        ("specs.rows", "builders.batch", True),
        ("specs.rows", "attn", True),
        ("builders.base", "attn.errors", True),
        ("builders.base", "specs.rows", False),
        ("attn.impls.base", "attn.testing.oracle", True),
        ("attn.kernels.dense.decode", "attn.reference.dense", True),
        ("attn.reference.dense", "attn.kernels.dense.decode", True),
        ("attn.reference.dense", "attn.reference.merge", False),
        ("attn.ops.merge", "attn.kernels.dense.decode", False),
        ("attn.ops.merge", "attn.impls.base", True),
        ("attn.backends.base", "attn.impls.base", False),
        ("attn.backends.base", "attn.registry", True),
        ("attn.registry", "attn.selector", True),
        ("attn.selector", "attn.cli.app", True),
        ("attn", "attn.bench", True),
        ("attn.impls.base", "attn", True),
        ("attn.cli.app", "attn.bench.build", False),
        ("attn.bench.build", "attn.cli.app", True),
        ("attn.bench.build", "attn.testing.oracle", True),
        ("attn.testing.trial", "attn.backends.base", False),
        ("attn.testing.trial", "attn.integrations.vllm", True),
        ("attn.testing.trial", "tests.conformance.ranks", True),
        ("attn.integrations.vllm", "attn", False),
        ("attn.selector", "torch", False),
    ],
)
def test_the_direction_check_knows_right_from_wrong(
    importer: str, imported: str, wrong: bool
) -> None:
    assert against_the_direction(importer, imported) == wrong


def test_the_import_walk_finds_every_kind_of_import() -> None:
    source = "\n".join(
        [
            "import torch",
            "from attn import registry",
            "from attn import select, registry",
            "from .base import AttentionBackend",
            "from ..registry import ROWS",
            "if TYPE_CHECKING:",
            "    import numpy",
            "class A:",
            "    import triton",
            "    def f(self):",
            "        from specs import rows",
        ]
    )
    found = [
        (item.module, item.line, item.at_module_level, item.for_types_only)
        for item in imports_of("attn.backends.x", source)
    ]
    assert found == [
        ("torch", 1, True, False),
        ("attn.registry", 2, True, False),
        ("attn", 3, True, False),
        ("attn.registry", 3, True, False),
        ("attn.backends.base", 4, True, False),
        ("attn.registry", 5, True, False),
        ("numpy", 7, True, True),
        ("triton", 9, True, False),
        ("specs.rows", 11, False, False),
    ]


def family_of(module: str) -> str | None:
    """``dense`` of ``attn.kernels.dense.decode``; None of what belongs to no family."""
    parts = module.split(".")
    at = 2 if parts[:2] in (["attn", "impls"], ["attn", "kernels"]) else 1
    is_inside = parts[0] == "builders" or at == 2
    return parts[at] if is_inside and parts[at : at + 1] and parts[at] in FAMILY_ORDER else None


def climbs(importer: str, imported: str) -> bool:
    """True when a module of one family imports a module of a family before it."""
    ours, theirs = family_of(importer), family_of(imported)
    if ours is None or theirs is None:
        return False
    return FAMILY_ORDER.index(theirs) < FAMILY_ORDER.index(ours)


@pytest.mark.parametrize("module", [name for name in SHIPPED if family_of(name)])
def test_no_family_imports_upward(module: str) -> None:
    wrong = [
        f"line {item.line} imports {item.module}"
        for item in source_imports(module)
        if climbs(module, item.module)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("importer", "imported", "wrong"),
    [
        ("builders.dense.record", "builders.sparse.record", True),
        ("builders.latent.tiles", "builders.vendor.trtllm_mha", True),
        ("builders.sparse.choice", "builders.vendor.trtllm_parts.mha_choice", False),
        ("builders.sparse.choice", "builders.sparse.tiles", False),
        ("builders.pages.lists", "builders.dense.record", False),
        ("attn.impls.vendor.base", "attn.impls.dense.base", False),
        ("attn.impls.dense.base", "attn.impls.vendor.base", True),
        ("attn.impls.vendor.base", "attn.impls.base", False),
        ("attn.kernels.cache.write", "builders.dense.record", True),
        ("attn.kernels.cache.write", "attn.kernels.lang.stored", False),
        ("attn.kernels.lang.masks", "attn.kernels.cache.clear", True),
        ("attn.kernels.sparse.attend", "attn.kernels.dense.tile", False),
        ("attn.reference.dense", "attn.kernels.sparse.attend", False),
        ("attn.kernels", "attn.kernels.sparse.attend", False),
    ],
)
def test_the_family_check_knows_right_from_wrong(importer: str, imported: str, wrong: bool) -> None:
    assert climbs(importer, imported) == wrong


def circle_in(imports: Mapping[str, Set[str]]) -> list[str]:
    """Modules that import each other, the first one again at the end; empty if there are none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def test_no_modules_import_each_other() -> None:
    """Neither inside a function nor for types alone, and not by way of others."""
    imports = {
        module: {item.module for item in source_imports(module)} & (SHIPPED.keys() - {module})
        for module in SHIPPED
    }
    assert circle_in(imports) == []


@pytest.mark.parametrize(
    ("imports", "circle"),
    [
        ({"a": {"b"}, "b": {"c"}}, set()),
        ({"a": {"b", "c"}, "b": {"c"}}, set()),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, {"a", "b"}),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}, {"a", "b", "c"}),
    ],
)
def test_the_circle_check_knows_right_from_wrong(
    imports: dict[str, set[str]], circle: set[str]
) -> None:
    found = circle_in(imports)
    assert set(found) == circle
    assert len(found) == len(circle) + bool(circle)


def private_imports(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Private names of other modules of the tree that a module imports, or reads as attributes."""
    found: list[tuple[int, str]] = []
    modules: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = {(alias.asname or alias.name): alias.name for alias in node.names}
        text = ast.unparse(node)
        targets = [item.module for item in imports_of(module, text, is_package=is_package)]
        if not any(name in MODULES and name != module for name in targets):
            continue
        if isinstance(node, ast.ImportFrom):
            found += [(node.lineno, name) for name in names.values() if is_private(name)]
        # A name that is no module has no attribute that is private to a module.
        ends = {name.split(".")[-1] for name in targets if name in MODULES}
        modules |= {own for own, name in names.items() if name.split(".")[-1] in ends}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of = ast.unparse(node.value)
            if of in modules:
                found.append((node.lineno, f"{of}.{node.attr}"))
    return [f"line {line}: {name}" for line, name in sorted(found)]


def is_private(name: str) -> bool:
    """One leading underscore or more, but none of Python's own names."""
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


@pytest.mark.parametrize("module", SHIPPED)
def test_no_private_name_is_imported_from_another_module(module: str) -> None:
    path = SHIPPED[module]
    source = path.read_text(encoding="utf-8")
    assert private_imports(module, source, is_package=path.name == "__init__.py") == []


def test_the_check_of_private_names_knows_right_from_wrong() -> None:
    source = "\n".join(
        [
            "from __future__ import annotations",
            "from torch._C import _cuda",
            "from specs.base import cdiv, _own_errors",
            "from specs.base import __doc__",
            "from .masks import biased as _biased",
            "from attn.kernels.lang import masks as m, numerics",
            "def f(self):",
            "    from builders.batch import _check_lengths as check",
            "    return m._LOG2E + self._x + numerics.__name__ + cdiv._wrapped",
            "import specs.rows",
            "specs.rows._x",
        ]
    )
    assert private_imports("attn.kernels.lang.x", source) == [
        "line 3: _own_errors",
        "line 8: _check_lengths",
        "line 9: m._LOG2E",
        "line 11: specs.rows._x",
    ]


@pytest.mark.parametrize(
    "module", [name for name in SHIPPED if name.split(".")[0] in AT_MODULE_LEVEL]
)
def test_specs_and_builders_load_little(module: str) -> None:
    allowed = {*AT_MODULE_LEVEL[module.split(".")[0]], *PACKAGES, *sys.stdlib_module_names}
    if KERNELS_OF_BUILDERS.fullmatch(module):
        allowed |= {"triton"}
    loaded = {
        item.module.split(".")[0]
        for item in source_imports(module)
        if item.at_module_level and not item.for_types_only
    }
    assert loaded - allowed == set()


@pytest.mark.parametrize("package", ["specs", "builders", "attn.impls", "attn.backends"])
def test_kernels_of_builders_are_imported_lazily(package: str) -> None:
    eager = [
        f"{module}, line {item.line}"
        for module in SHIPPED
        if module.startswith(package) and not KERNELS_OF_BUILDERS.fullmatch(module)
        for item in source_imports(module)
        if KERNELS_OF_BUILDERS.fullmatch(item.module) and item.at_module_level
    ]
    assert eager == []


@pytest.mark.parametrize("module", [name for name in SHIPPED if "attn.integrations" not in name])
def test_only_the_integrations_know_vllm_and_transformers(module: str) -> None:
    imported = {item.module.split(".")[0] for item in source_imports(module)}
    assert imported & {"vllm", "transformers", "sglang"} == set()


@pytest.mark.parametrize("module", [name for name in SHIPPED if name.startswith("attn.backends")])
def test_backends_load_no_kernel(module: str) -> None:
    loaded = [item.module for item in source_imports(module) if item.at_module_level]
    kernels = ("attn.kernels", "triton", "flashinfer")
    assert [name for name in loaded if name.startswith(kernels)] == []


def loaded_by(code: str) -> list[str]:
    """What a fresh interpreter prints for ``code``, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout)
    return names


def test_importing_attn_loads_no_optional_package_beyond_what_torch_loads() -> None:
    code = (
        "import json, sys, torch\n"
        "before = set(sys.modules)\n"
        "import attn\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    loaded = set(loaded_by(code))
    assert {"attn", "specs"} <= loaded
    optional = {"triton", "flashinfer", "vllm", "transformers", "matplotlib", "typer", "rich"}
    assert loaded & optional == set()


def test_importing_every_spec_loads_no_torch() -> None:
    names = [name for name in SHIPPED if name.split(".")[0] == "specs"]
    code = (
        f"import importlib, json, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print(json.dumps(sorted(sys.modules)))"
    )
    loaded = set(loaded_by(code))
    assert set(names) <= loaded
    assert loaded & {"torch", "numpy", "triton"} == set()


# -- What tests need, inside and outside the package.


def imports_of_testing(module: str, source: str) -> list[int]:
    """Lines that import ``attn.testing``, including imports for types and inside functions."""
    return [
        item.line
        for item in imports_of(module, source)
        if item.module.split(".")[:2] == ["attn", "testing"]
    ]


def test_only_tests_import_attn_testing() -> None:
    wrong = [
        f"{module}, line {line}"
        for module, path in SHIPPED.items()
        if part_of_attn(module) != "testing"
        for line in imports_of_testing(module, path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_the_check_of_attn_testing_knows_right_from_wrong() -> None:
    source = "\n".join(
        [
            "import torch.testing",
            "import attn.testing.oracle",
            "from attn import registry, testing",
            "from attn.testing.cases import Case",
            "from ..testing import budget",
            "if TYPE_CHECKING:",
            "    from attn.testing.trial import Trial",
            "def f():",
            "    from attn.testing import conformance",
            "from attn.bench import testing",
        ]
    )
    assert imports_of_testing("attn.cli.app", source) == [2, 3, 4, 5, 7, 9]


def test_attn_testing_needs_no_test_framework_but_for_its_plugin() -> None:
    allowed = {"torch", "attn", "builders", "specs", *sys.stdlib_module_names}
    modules = [module for module in SHIPPED if module.startswith("attn.testing")]
    assert "attn.testing.conformance" in modules
    needed = {
        (module, item.module.split(".")[0])
        for module in modules
        for item in source_imports(module)
        if item.module.split(".")[0] not in allowed
    }
    assert needed == {("attn.testing.plugin", "pytest")}


# -- Triples.


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_backend_is_a_triple_of_three_files_under_one_stem(row: BackendRow) -> None:
    module = row.path.split(":")[0]
    stem = module.removeprefix("attn.backends.")
    assert module == f"attn.backends.{stem}"
    (family,) = [one for one in FAMILIES if f"builders.{one}.{stem}" in SHIPPED]
    assert {module, f"attn.impls.{family}.{stem}"} <= set(SHIPPED)
    member = AttentionBackendEnum[row.name]
    if member.missing():
        pytest.skip(f"{row.name} needs {', '.join(member.missing())}")
    backend = member.get_class()
    assert backend.get_name() == row.name
    assert backend.get_impl_cls().__module__ == f"attn.impls.{family}.{stem}"
    assert backend.get_builder_cls().__module__ == f"builders.{family}.{stem}"


def test_every_backend_file_is_in_the_registry() -> None:
    named = {row.path.split(":")[0] for row in ROWS}
    files = {name for name in SHIPPED if name.startswith("attn.backends.")}
    assert files - {"attn.backends.base", "attn.backends.mixed"} == named


# -- Code.


def aliasable_enums(source: str) -> list[str]:
    """Enums of a module that lack ``@unique``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).split(".")[-1] for base in node.bases]
            decorators = [ast.unparse(item).split(".")[-1] for item in node.decorator_list]
            if any(base.endswith(("Enum", "Flag")) for base in bases) and (
                "unique" not in decorators
            ):
                found.append(node.name)
    return found


def idle_comparisons(source: str) -> list[int]:
    """Lines that compare tensors and drop the answer."""
    tree = ast.parse(source)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).split(".")[-1] in ("allclose", "equal", "isclose")
    ]


@pytest.mark.parametrize("module", SHIPPED)
def test_no_enum_can_have_aliases(module: str) -> None:
    assert aliasable_enums(SHIPPED[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("module", [name for name in MODULES if name not in SHIPPED])
def test_no_test_compares_tensors_without_asserting(module: str) -> None:
    assert idle_comparisons(MODULES[module].read_text(encoding="utf-8")) == []


def test_the_code_checks_know_right_from_wrong() -> None:
    enums = "@unique\nclass A(StrEnum): ...\nclass B(enum.IntEnum): ...\nclass C(Spec): ...\n"
    assert aliasable_enums(enums) == ["B"]
    idle = "assert torch.allclose(a, b)\ntorch.allclose(a, b)\nif torch.equal(a, b): pass\n"
    assert idle_comparisons(idle) == [2]


def test_host_functions_take_few_parameters_unless_somebody_else_decides() -> None:
    shipped = house.modules_of(ROOT, *house.SHIPPED)
    assert house.wide_functions(shipped).found == []
    assert house.used_doors(shipped) == house.DOORS.keys()


# -- Launching.

# What of Triton's launcher only builders/launch may use.
OF_TRITONS_LAUNCHER = {"knobs", "CompiledKernel", "driver"}


def uses_of_tritons_launcher(source: str) -> list[int]:
    """Lines that import or read what Triton launches with."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triton":
            used = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            used = {part for name in names if name[0] == "triton" for part in name}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("triton."):
            used = {*ast.unparse(node).split(".")}
        else:
            continue
        if used & OF_TRITONS_LAUNCHER:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "module", [name for name in SHIPPED if not name.startswith("builders.launch")]
)
def test_only_builders_launch_knows_how_triton_launches(module: str) -> None:
    assert uses_of_tritons_launcher(SHIPPED[module].read_text(encoding="utf-8")) == []


def test_the_launching_check_knows_right_from_wrong() -> None:
    wrong = (
        "from triton import knobs\n"
        "from triton.runtime import driver\n"
        "import triton.backends.nvidia.driver\n"
        "from triton.compiler import CompiledKernel\n"
        "triton.runtime.driver.active\n"
    )
    assert {*uses_of_tritons_launcher(wrong)} == {1, 2, 3, 4, 5}
    right = "import triton\nimport triton.language as tl\ntriton.cdiv(1, 2)\ndriver.active\n"
    assert uses_of_tritons_launcher(right) == []
    assert uses_of_tritons_launcher(SHIPPED["builders.launch.compiled"].read_text()) != []


# -- Folder.


def test_the_test_files_that_are_started_first_are_there() -> None:
    assert [name for name in HEAVIEST if not (ROOT / name).is_file()] == []


def top_level_names() -> set[str]:
    """Names at the top level, as git sees them, or of the folder itself where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        return {name.split("/")[0] for name in listed.stdout.split("\0") if name}
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    ignored = [line.strip().strip("/") for line in lines if line.strip()]
    return {
        path.name
        for path in ROOT.iterdir()
        if not any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored)
    }


def test_the_top_level_folder_holds_nothing_unexpected() -> None:
    found = {
        name
        for name in top_level_names()
        if not any(fnmatch.fnmatch(name, pattern) for pattern in LEFTOVERS)
    }
    assert found - TOP_LEVEL_FOLDERS - TOP_LEVEL_FILES == set()
    assert {"attn", "builders", "specs", "tests", "pyproject.toml", "README.md"} <= found


def crowded(paths: Iterable[Path]) -> dict[Path, int]:
    """Folders with more than :data:`MOST_FILES` of these files, and how many they have."""
    counts = Counter(path.parent for path in paths)
    return {folder: count for folder, count in counts.items() if count > MOST_FILES}


def test_no_folder_is_crowded() -> None:
    assert crowded(path.relative_to(ROOT) for path in SHIPPED.values()) == {}


def test_the_count_of_files_knows_right_from_wrong() -> None:
    full = [Path(f"a/{i}.py") for i in range(MOST_FILES)]
    assert crowded([*full, Path("a/b/c.py")]) == {}
    assert crowded([*full, Path("a/c.py")]) == {Path("a"): MOST_FILES + 1}


def test_test_modules_have_unique_names_and_no_package_files() -> None:
    paths = [path for name, path in MODULES.items() if name not in SHIPPED]
    names = [path.name for path in paths if path.name != "conftest.py"]
    assert len(names) == len(set(names))
    assert "__init__.py" not in names
