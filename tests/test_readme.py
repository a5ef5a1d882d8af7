"""README files are run or looked up here, so that they stay true."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from attn.bench.results.chart import workloads_of
from tests.tools import house

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def benchmark(name: str) -> str:
    return (ROOT / f"docs/benchmarks/{name}.md").read_text()


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_the_python_example_attends():
    names: dict = {}
    exec(EXAMPLE, names)
    assert names["output"].shape == (25, 32, 128)
    # The first token of a prompt sees itself alone: its output is its own value.
    expected = names["value"][0].repeat_interleave(4, dim=0)
    torch.testing.assert_close(names["output"][0], expected)


def test_the_python_example_is_clean_under_strict_mypy(tmp_path):
    (tmp_path / "example.py").write_text(EXAMPLE)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "example.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout


def standings(table: str) -> Counter:
    """Numbers of cases ahead, level and behind per layer, as the head of a table counts them."""
    (line,) = re.findall(r"Per layer, beside the fastest peer: ([^.]+)\.", benchmark(table))
    return Counter({word: int(count) for count, word in re.findall(r"(\d+) ([a-z ]+)", line)})


def test_the_lead_of_the_dense_kernels_is_that_of_the_table():
    counts = standings("h200_hopper")
    ahead, level, behind = (counts[word] for word in ("ahead", "level", "behind"))
    said = f"in {ahead} of {ahead + level + behind} measured cases, level in {level} and behind in "
    assert f"{said}{behind or 'none'}." in " ".join(README.split())


def test_the_standing_of_latent_and_sparse_kernels_is_that_of_their_tables():
    for table, page in (("h200_mla", "triton_mla"), ("h200_sparse_mla", "sparse_mla")):
        counts = standings(table)
        words = " ".join((ROOT / f"docs/backends/{page}.md").read_text().split())
        ahead, level, behind = (counts[word] for word in ("ahead", "level", "behind"))
        said = f"ahead of the fastest of them in {ahead} cases, level in {level} and behind in "
        assert f"{said}{behind}" in words, page


def test_the_lag_of_the_indexer_is_that_of_the_table():
    row = r"\| index_b64_32k \|[^|]*\| device \|[^|]*\|[^|]*\| deepgemm \|[^|]*\| ([\d.]+) \|"
    (ratio,) = re.findall(row, benchmark("h200_sparse_mla"))
    words = " ".join((ROOT / "docs/backends/sparse_mla.md").read_text().split())
    assert f"take {float(ratio):.2f} times DeepGEMM's time" in words


def test_the_tokens_per_second_in_vllm_are_those_of_the_table():
    prefill, decode, long = workloads_of(benchmark("h200_vllm"))

    def gains(backend: str) -> list[str]:
        loads = (prefill, decode, long)
        found = [load.tokens["CUSTOM"] / load.tokens[backend] for load in loads]
        for load, gain in zip(loads, found, strict=True):
            assert gain - 1 > load.spread, "a lead within the spread is level"
        return [f"{gain:.2f} x" for gain in found]

    in_prefill, in_decode, in_long = gains("TRITON_ATTN")
    assert f"{in_prefill} in prefill, {in_decode} in decode, {in_long} in long prompts" in README
    assert f"of its FLASH_ATTN: {', '.join(gains('FLASH_ATTN'))}" in README


def test_the_tokens_per_second_of_sparse_models_are_those_of_the_table():
    sections = benchmark("h200_vllm_latent").split("\n## ")
    models = [
        next(text for text in sections if text.startswith(f"DeepSeek-V3.2-like, {heads} heads"))
        for heads in (16, 8)
    ]

    def goals(load: str, rival: str) -> list[tuple[str, str]]:
        """Ratio and verdict with 16 and with 8 heads."""
        row = rf"\| {load}: CUSTOM[^|]*>= 1.00 x {rival}[^|]*\| ([\d.]+) x \| (\w+)"
        return [re.search(row, text).groups() for text in models]

    rivals = ("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE")
    for rival in rivals:
        (many, first), (few, second) = goals("prefill", rival)
        assert first == second == "met"
        words = f"{float(many):.2f} x and {float(few):.2f} x of (?:vLLM's|its) {rival}"
        assert re.search(words, README)
        assert {verdict for _, verdict in goals("decode", rival)} == {"level"}
    assert "decodes are level" in README


def test_the_tokens_per_second_in_sglang_are_those_of_the_table():
    page = benchmark("h200_sglang")
    row = r"^\| (\w+): attn >= triton and flashinfer \| ([\d.]+) x \| met \|"
    gains = {load: f"{float(ratio):.2f} x" for load, ratio in re.findall(row, page, re.MULTILINE)}
    words = f"{gains['prefill']} in prefill, {gains['decode']} in decode, {gains['long']} in long"
    assert f"faster of SGLang's triton and flashinfer backends: {words} prompts" in README


def test_the_tokens_per_second_in_transformers_are_those_of_the_table():
    found = re.findall(
        r"\| Transformers [\d.]+: >= 2 x sdpa \| ([\d.]+) x \| met \|",
        benchmark("h200_transformers"),
    )
    assert found
    assert (
        f"has {min(found, key=float)} x the [tokens/s](docs/benchmarks/h200_transformers.md)"
        in README
    )


def test_no_other_number_in_the_readme_is_a_speed():
    """Ratios and rates are quoted only where a test above compares them with a table."""
    found = re.findall(r"\b\d+\.\d\d x|\b[\d.]+ (?:us|TF|GB/s|%)", README)
    assert len(found) == 14


@pytest.mark.parametrize("table", ["h200_mla", "h200_sparse_mla"])
def test_no_lead_is_claimed_from_a_table_of_latent_kernels(table):
    # A sentence that names the table.
    found = [text for text in re.split(r"\. |\n|\|", README) if table in text]
    assert found
    for text in found:
        assert not re.search(r"ahead|faster|level|\d x", text)


# -- The tables of kernels and of builders.

KERNELS = (ROOT / "attn/kernels/README.md").read_text()
BUILDERS = (ROOT / "builders/README.md").read_text()
CALLED_BY_CONSTEXPR = {"decode_e5m2_float32"}
"""Device functions that no other function names, and that are no kernels: tables hold them."""
LAUNCHED = {
    name: path
    for name, path in house.launched_kernels(house.modules_of(ROOT, "builders", "attn")).items()
    if name not in CALLED_BY_CONSTEXPR
}


def table_under(text: str, first_column: str) -> list[list[str]]:
    """The cells of the table of a page whose first column has that heading."""
    lines = text[text.index(f"| {first_column} |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    assert {len(row) for row in rows} == {len(rows[0])}
    return rows[2:]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def names_in(path: str) -> set[str]:
    """Functions and classes at the top of a file."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_every_kernel_is_in_the_table_with_its_file():
    rows = [(*quoted(row[0]), *quoted(row[1])) for row in table_under(KERNELS, "kernel")]
    assert len(rows) == len(dict(rows))
    assert dict(rows) == LAUNCHED


@pytest.mark.parametrize("row", table_under(KERNELS, "kernel"), ids=lambda row: row[0].strip("`"))
def test_a_kernels_twin_and_tests_exist(row):
    _, _, _, gpus, _, twin, tests = row
    assert gpus in ("all", "NVIDIA", "Hopper", "Hopper (plain Triton)")
    twins = re.findall(r"`(\w+)` in `([\w/.]+)`", twin)
    assert twins
    for name, path in twins:
        assert name in names_in(path)
    (path,) = quoted(tests)
    assert "def test_" in (ROOT / path).read_text()


def test_every_builder_is_in_the_table_with_its_record():
    rows = table_under(BUILDERS, "family")
    paths = [quoted(row[1])[0] for row in rows]
    modules = house.modules_of(ROOT, "builders")
    builders = {
        module.path
        for module in modules
        if any(name.endswith("MetadataBuilder") for name in names_in(module.path))
    }
    # The base class makes no record.
    assert sorted(paths) == sorted(builders - {"builders/base.py"})
    classes = {name for module in modules for name in names_in(module.path)}
    for family, path, record, kernels in rows:
        assert path == "`builders/mixed.py`" or f"/{family}/" in path
        assert set(quoted(record)) <= classes
        # The builder makes it: it says so where it says what it is.
        assert f"MetadataBuilder[{quoted(record)[0]}]" in (ROOT / quoted(path)[0]).read_text()
        assert set(quoted(kernels)) <= set(LAUNCHED)


def test_every_folder_of_builders_is_in_the_table():
    folders = {
        path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("builders/*/__init__.py")
    }
    assert {quoted(row[0])[0] for row in table_under(BUILDERS, "folder")} == folders


@pytest.mark.parametrize("page", ["attn/kernels/README.md", "builders/README.md"])
def test_every_path_that_a_table_names_exists(page):
    text = (ROOT / page).read_text()
    for path in re.findall(r"`((?:attn|builders|specs|tests|docs)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link
