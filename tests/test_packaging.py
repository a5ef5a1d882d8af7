"""What pyproject.toml promises: versions that vLLM pins, packages that are shipped."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import attn

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DEPENDENCIES = {
    requirement.name: requirement
    for requirement in map(Requirement, PROJECT["project"]["dependencies"])
}

# Versions that vLLM's wheels require, exactly.
VLLM_PINS = {
    "0.26.0": {"torch": "2.11.0", "flashinfer-python": "0.6.14"},
    "0.33.0": {"torch": "2.14.0", "flashinfer-python": "0.7.2.post1"},
}


@pytest.mark.parametrize(
    ("version", "package", "pin"),
    [(version, *item) for version, pins in VLLM_PINS.items() for item in pins.items()],
)
def test_the_ranges_accept_what_vllm_pins(version: str, package: str, pin: str) -> None:
    specifier = DEPENDENCIES[package].specifier
    assert specifier.contains(pin), f"vLLM {version} pins {package} {pin}, outside {specifier}"


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("torch", "2.10.0"),
        ("pydantic", "2.11.9"),
        ("triton", "3.5.1"),
        ("flashinfer-python", "0.6.13"),
        ("flashinfer-python", "0.8.0"),
    ],
)
def test_the_ranges_refuse_what_is_too_old_or_too_new(package: str, version: str) -> None:
    assert not DEPENDENCIES[package].specifier.contains(version)


def test_no_other_package_is_needed_to_import_the_library() -> None:
    assert set(DEPENDENCIES) == {"torch", "pydantic", "triton", "flashinfer-python"}


@pytest.mark.parametrize("package", ["triton", "flashinfer-python"])
def test_gpu_packages_are_asked_for_on_linux_alone(package: str) -> None:
    marker = DEPENDENCIES[package].marker
    assert marker is not None
    environment = dict(default_environment())
    assert marker.evaluate({**environment, "sys_platform": "linux"})
    assert not marker.evaluate({**environment, "sys_platform": "darwin"})
    assert not marker.evaluate({**environment, "sys_platform": "win32"})


@pytest.mark.parametrize("package", ["torch", "pydantic"])
def test_the_rest_is_needed_everywhere(package: str) -> None:
    assert DEPENDENCIES[package].marker is None


def test_the_command_needs_an_extra_that_tests_include() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert {Requirement(text).name for text in extras["cli"]} == {
        "typer",
        "rich",
        "matplotlib",
        "jinja2",
    }
    own = [Requirement(text) for text in extras["test"] if "attn-backends" in text]
    assert [(item.name, item.extras) for item in own] == [("attn-backends", {"cli"})]


def test_one_extra_has_all_others() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {"cli", "docs", "test", "all"}
    (everything,) = map(Requirement, extras["all"])
    assert everything.name == "attn-backends"
    assert everything.extras == {"cli", "docs", "test"}


def test_the_version_is_in_one_place() -> None:
    project = PROJECT["project"]
    assert "version" not in project
    assert project["dynamic"] == ["version"]
    path = PROJECT["tool"]["hatch"]["version"]["path"]
    found = re.findall(r'^__version__ = "(.+)"$', (ROOT / path).read_text(), re.MULTILINE)
    assert found == [attn.__version__]
    assert str(Version(attn.__version__)) == attn.__version__


def test_the_changelog_speaks_of_this_version_or_of_the_next() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[0] == "Unreleased" or headings[0].startswith(attn.__version__)


def test_the_wheel_ships_three_packages_and_no_tests() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert sorted(wheel["packages"]) == ["attn", "builders", "specs"]


@pytest.mark.parametrize("package", ["attn", "builders", "specs"])
def test_every_shipped_package_is_typed_and_importable(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert (ROOT / package / "__init__.py").is_file()


def test_the_python_versions_agree() -> None:
    lowest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + lowest.replace(".", "")


def test_warnings_are_errors_and_markers_are_declared() -> None:
    options = PROJECT["tool"]["pytest"]["ini_options"]
    first, *others = options["filterwarnings"]
    assert first == "error"
    # No warning may be ours: only numpy's warnings inside Triton's interpreter are let through, or
    # inside the operators that stand for its own in tests.
    modules = r":RuntimeWarning:(triton\.runtime\.interpreter|tests\.tools\.quick_operators)"
    assert all(line.endswith(modules) for line in others)
    assert {"--strict-markers", "--strict-config", "--import-mode=importlib"} <= set(
        options["addopts"]
    )


def test_every_package_that_is_asked_for_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    extras = PROJECT["project"]["optional-dependencies"].values()
    asked = [*PROJECT["project"]["dependencies"], *(text for texts in extras for text in texts)]
    wanted = {canonicalize_name(Requirement(text).name) for text in asked}
    assert wanted - pins == {"attn-backends"}


# -- builders and specs are common names.


def imported_from(folder: Path, *, first: bool = True) -> subprocess.CompletedProcess[str]:
    """Import attn where another folder is on the path, before ours or behind it."""
    path = [str(folder), str(ROOT)] if first else [str(ROOT), str(folder)]
    code = f"import sys; sys.path[:0] = {path!r}; import attn; print(attn.__version__)"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["builders", "specs"])
@pytest.mark.parametrize("shadow", ["{}/__init__.py", "{}.py"])
def test_a_module_that_shadows_ours_is_named(name: str, shadow: str, tmp_path: Path) -> None:
    path = tmp_path / shadow.format(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise SystemExit('the other one must not be imported')\n")
    done = imported_from(tmp_path)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ImportError: ")]
    assert line.startswith(f"ImportError: attn needs its package {name!r} at {ROOT / name}")
    assert f"but Python finds {path} first" in line


def test_what_does_not_shadow_ours_is_no_error(tmp_path: Path) -> None:
    # A folder that is no package gives way to one; a package behind ours is not found.
    (tmp_path / "builders").mkdir()
    specs = tmp_path / "behind" / "specs"
    specs.mkdir(parents=True)
    (specs / "__init__.py").write_text("")
    assert imported_from(tmp_path).stdout == f"{attn.__version__}\n"
    assert imported_from(tmp_path / "behind", first=False).stdout == f"{attn.__version__}\n"
