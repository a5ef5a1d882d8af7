"""Each counter of the house on small sources, and the command on this checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import house
from tests.tools.house import Module


def module(path: str, *lines: str) -> Module:
    return Module(path, "\n".join(lines) + "\n")


KERNEL = module(
    "attn/kernels/a.py",
    "@triton.jit(do_not_specialize=['n'])",
    "def kernel(a, b, c, N: tl.constexpr):",
    "    inner(a, b, C=c)",
    "    pair = (a, b)",
    "    inner(*pair, c, N)",
    "    tl.load(a, b, c, 1, 2, 3, 4, 5)",
    "@triton.jit",
    "def inner(a, b, C):",
    "    return a",
    "def host(a, b, c, d, e, f, g):",
    "    inner(a, b, c, d, e, f, g)",
)
PARTITIONS = module(
    "attn/kernels/b.py",
    "from attn.kernels.a import inner as consume",
    "@gluon.jit",
    "def specialized(a, b):",
    "    given = (a, b, 3, 4, 5, 6)",
    "    gl.warp_specialize([(consume, (0, a, b, 1, 2)), (consume, given)], [4], [24])",
    "    shape = (a, (1, 2, 3, 4, 5, 6, 7, 8, 9))",
)


def test_the_widest_device_call_is_found_by_its_arguments():
    count = house.widest_call([KERNEL])
    assert count.value == 4
    assert count.found[0] == "attn/kernels/a.py:5 kernel calls inner: 4"
    assert len(count.found) == 2
    assert house.widest_call([module("attn/c.py", "def f(): pass")]).value == 0


def test_partitions_count_element_by_element():
    count = house.widest_call([KERNEL, PARTITIONS])
    assert [text.split(": ")[1] for text in count.found] == ["6", "5", "4", "3"]


def test_the_widest_signature_is_a_device_functions():
    count = house.widest_function([KERNEL, PARTITIONS])
    assert (count.value, count.found[0]) == (4, "attn/kernels/a.py:2 kernel: 4")


def test_kernels_are_the_device_functions_that_none_calls():
    assert house.launched_kernels([KERNEL, PARTITIONS]) == {
        "kernel": "attn/kernels/a.py",
        "specialized": "attn/kernels/b.py",
    }


def test_full_folders_are_those_above_the_limit():
    files = [module(f"attn/full/{i}.py", "") for i in range(house.MOST_FILES + 1)]
    files += [module(f"attn/fits/{i}.py", "") for i in range(house.MOST_FILES)]
    assert house.full_folders(files).found == [f"attn/full: {house.MOST_FILES + 1}"]


def test_private_imports_are_those_from_the_project():
    source = module(
        "attn/a.py",
        "from __future__ import annotations",
        "from builders.b import _hidden, shown",
        "from .c import _other, __version__",
        "from torch import _C",
    )
    count = house.private_imports([source, module("builders/b.py", "")])
    assert count.found == ["attn/a.py:2 builders.b._hidden", "attn/a.py:3 c._other"]


def test_circles_are_imports_both_ways():
    files = [
        module("attn/__init__.py", ""),
        module("attn/a.py", "from attn import b", "from attn.c import f", "import attn.d"),
        module("attn/b.py", "def f():", "    from .a import x"),
        module("attn/c.py", "if TYPE_CHECKING:", "    from attn.a import x"),
        module("attn/d.py", "import attn.b"),
    ]
    assert house.circles(files).found == ["attn.a <-> attn.b"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Likewise, of prefills.", "likewise"),
        ("Keys.\n\nArgs:\n    value: likewise.", "likewise"),
        ("As above, for values.", "as above"),
        ("Ditto.", "ditto"),
        ("Of a step.", "Of ..."),
        ("The same for keys.", "The same ..."),
        ("As in the kernel.", "As in ..."),
        ("Values are as in :func:`f`.", "As in ..."),
        ("Errors as of :class:`C`.", "As in ..."),
        ("Values are as in a cache.", None),
        ("Programs of a step. Of these each has a row.", None),
        ("Rows above the limit are refused; the same for all.", None),
        ("Offset of a row.", None),
    ],
)
def test_leaning_texts_are_known(text, kind):
    assert house.leans(text) == kind


def test_texts_are_docstrings_and_comments():
    source = module(
        "attn/a.py",
        '"""Module."""',
        "A = 1  # beside",
        '"""Of A."""',
        "# first",
        "# second",
        "",
        "# third",
        'B = "# no comment"',
        "class C:",
        "    def f(self):",
        '        """Method."""',
        "        return 'no docstring'",
    )
    assert house.texts_of(source.source) == [
        (1, "Module."),
        (2, "beside"),
        (3, "Of A."),
        (4, "first second"),
        (7, "third"),
        (11, "Method."),
    ]
    assert house.leaning_texts([source]).found == ["attn/a.py:3 [Of ...] Of A."]


def test_launch_machinery_is_found_where_it_lies_and_where_it_lay():
    paths = (
        "builders/launch/driver.py",
        "builders/fast_launch.py",
        "attn/kernels/again.py",
        "attn/kernels/dense/again.py",
        "attn/kernels/launch.py",
    )
    others = ("attn/kernels/dense/launcher.py", "builders/sparse/launches.py")
    files = [module(path, "a = 1", "b = 2") for path in (*paths, *others)]
    assert house.launch_machinery(files).value == 2 * len(paths)


def test_wide_functions_are_the_hosts():
    source = module(
        "attn/a.py",
        "class C:",
        "    def fits(self, a, b, c, d, e, f, g, h): ...",
        "    def wide(self, a, b, c, d, e, f, *g, h, **i): ...",
        "@triton.jit",
        "def device(a, b, c, d, e, f, g, h, i, j): ...",
    )
    assert house.wide_functions([source]).found == ["attn/a.py:3 wide: 9"]


def test_doors_are_known_by_file_class_and_name():
    wide = "(self, a, b, c, d, e, f, g, h, i): ..."
    lines = (
        "class AttentionImpl:",
        f"    def forward{wide}",
        f"    def backward{wide}",
        "class Helper:",
        f"    def forward{wide}",
        f"def forward{wide}",
    )
    door, elsewhere = module("attn/impls/base.py", *lines), module("attn/ops/base.py", *lines)
    assert house.wide_functions([door]).found == [
        "attn/impls/base.py:3 backward: 9",
        "attn/impls/base.py:5 forward: 9",
        "attn/impls/base.py:6 forward: 9",
    ]
    assert house.wide_functions([elsewhere]).value == 4
    (used,) = house.used_doors([door, elsewhere])
    assert used in house.DOORS
    narrow = module("attn/impls/base.py", "class AttentionImpl:", "    def forward(self, a): ...")
    assert house.used_doors([narrow]) == set()


STEP = """
import json
from dataclasses import asdict
from tests.tools import house

print(json.dumps([asdict(count) for count in house.decode_step()]))
"""


def run(*arguments: str) -> str:
    # Kernels are compiled there, not interpreted: it is the step of a GPU that is traced.
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=house.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_decode_step_is_traced():
    counts = {count["name"]: count for count in json.loads(run("-c", STEP))}
    files = [text.split(": ")[0] for text in counts["step modules"]["found"]]
    assert counts["step modules"]["value"] == len(set(files)) == len(files)
    expected = {
        "builders/dense/triton_attn.py",
        "builders/splitkv/planner.py",
        "builders/splitkv/device/plan.py",
        "attn/impls/dense/triton_attn.py",
        "attn/kernels/dense/launcher.py",
        "attn/kernels/dense/hopper_decode/kernel.py",
        # Reached from the kernel alone.
        "attn/kernels/dense/hopper_decode/consumer.py",
        "attn/kernels/lang/masks.py",
    }
    assert expected <= set(files)
    # Neither what is only imported, nor another family, nor the kernel that another GPU gets.
    absent = {"attn/kernels/dense/decode.py", "builders/latent/record.py", "attn/selector.py"}
    assert not absent & set(files)
    lines = [int(text.split(": ")[1]) for text in counts["step lines"]["found"]]
    assert counts["step lines"]["value"] == sum(lines)


def test_another_checkout_is_counted_by_its_files_alone(tmp_path: Path):
    for name in house.PACKAGES:
        (tmp_path / name).mkdir()
    (tmp_path / "builders" / "fast_launch.py").write_text("a = 1\n")
    lines = run("-m", "tests.tools.house", "--root", str(tmp_path)).splitlines()
    assert [line.split()[0] for line in lines] == [
        "widest",
        "signature",
        "folders",
        "private",
        "leaning",
        "launch",
        "parameters",
        "circles",
    ]
    assert next(line for line in lines if line.startswith("launch")).split()[1] == "1"
    found = json.loads(run("-m", "tests.tools.house", "--json", "--root", str(tmp_path)))
    assert found[5]["found"] == ["builders/fast_launch.py: 1"]
    shown = run("-m", "tests.tools.house", "--show", "launch", "--root", str(tmp_path))
    assert shown == "builders/fast_launch.py: 1\n"
