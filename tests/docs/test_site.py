"""The site: its front page, its links, its drawings and the parts that are made from the code."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from attn.bench.results.chart import write
from docs.tools import blocks, drawings, hook
from specs.rows import LatentFormat

ROOT = Path(__file__).parents[2]


def words_of(path: Path) -> list[str]:
    """The texts of a drawing, in order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_committed_drawing_says_what_is_drawn_now(name, tmp_path):
    # Lines may differ by matplotlib's version; what is written may not.
    write(drawings.DRAWINGS[name](), tmp_path / "now.svg")
    committed = ROOT / f"docs/images/{name}.svg"
    assert words_of(committed) == words_of(tmp_path / "now.svg"), "python -m docs.tools.drawings"


def test_no_picture_lacks_its_drawing():
    committed = {path.stem for path in (ROOT / "docs/images").glob("*.svg")}
    assert committed == set(drawings.DRAWINGS)


def test_the_drawing_of_latent_rows_has_every_field_of_the_specs(tmp_path):
    write(drawings.latent_rows(), tmp_path / "rows.svg")
    words = words_of(tmp_path / "rows.svg")
    for item in LatentFormat:
        if item is not LatentFormat.INDEXER_FP8:
            assert f"{item.value}: {item.row().nbytes} bytes" in words
            assert {str(field.offset) for field in item.row().fields} <= set(words)


def test_no_picture_asks_for_anything_else():
    for path in (ROOT / "docs/images").glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'(href|src)="(?!#)', text), path
        assert "url(http" not in text


def test_the_front_page_is_the_readme_with_links_of_docs():
    text = "See [the guide](docs/vllm.md#serve), ![x](docs/images/x.svg), [y](attn/y.py)."
    front = "See [the guide](vllm.md#serve), ![x](images/x.svg), [y](attn/y.py)."
    assert hook.front_page(text) == front


@pytest.mark.parametrize(
    ("page", "link", "becomes"),
    [
        ("index.md", "[k](attn/kernels/README.md)", "[k](kernels.md)"),
        ("index.md", "[log](CHANGELOG.md)", "[log](changelog.md)"),
        ("index.md", "[v](vllm.md#serve)", "[v](vllm.md#serve)"),
        ("backends/README.md", "[k](../kernels.md#split-kv)", "[k](../kernels.md#split-kv)"),
        ("backends/README.md", "[k](../../attn/kernels/README.md)", "[k](../kernels.md)"),
        ("builders.md", "[s](../docs/life-of-a-step.md)", "[s](life-of-a-step.md)"),
        ("kernels.md", "[the code](../specs/rows.py)", "`specs/rows.py`"),
        ("kernels.md", "[`specs/rows.py`](../specs/rows.py)", "`specs/rows.py`"),
        ("python.md", "[one layer](examples/one_layer.py)", "`docs/examples/one_layer.py`"),
        ("python.md", "[it](examples/a-b/README.md)", "`docs/examples/a-b/README.md`"),
        ("kernels.md", "[far](https://example.org/x)", "[far](https://example.org/x)"),
        ("kernels.md", "[here](#all-kernels)", "[here](#all-kernels)"),
    ],
)
def test_links_stay_on_the_site(page, link, becomes):
    assert hook.links_inside(link, page) == becomes


def test_a_page_that_asks_another_machine_is_refused():
    html = """<link rel=stylesheet href="site.css"><a href="https://example.org">x</a>
    <script src=https://example.org/a.js></script><img alt="" src="//example.org/b.png">"""
    assert hook.loads(html) == ["https://example.org/a.js", "//example.org/b.png"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="vllm.md"))
    with pytest.raises(ValueError, match=r"vllm\.md loads https://example\.org/a\.js"):
        hook.on_post_page(html, page)
    assert hook.on_post_page("<p>", page) == "<p>"


def test_a_page_that_is_not_there_is_left_out_of_the_navigation():
    config = SimpleNamespace(nav=["index.md", {"Work": [{"Testing": "testing.md"}]}])
    assert hook.on_config(config).nav == ["index.md", {"Work": [{"Testing": "testing.md"}]}]
    config.nav[1]["Work"].insert(0, {"Outside": hook.OPTIONAL[0]})
    is_there = (ROOT / "docs" / hook.OPTIONAL[0]).exists()
    assert len(hook.on_config(config).nav[1]["Work"]) == 1 + is_there


def test_an_unknown_part_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"generated part must be one of .*cli.*, got 'colours'"):
        blocks.filled("<!-- generated: colours -->\n<!-- /generated -->\n")


def test_an_empty_part_is_filled_only_when_asked():
    text = "<!-- generated: environment -->\n<!-- /generated -->\n"
    assert blocks.filled(text, empty_too=False) == text
    filled = blocks.filled(text)
    assert "| `ATTN_DEBUG` |" in filled
    assert blocks.filled(filled) == filled


def test_the_reference_of_the_command_has_every_command_and_option():
    text = blocks.cli()
    for words in ("### `attn run`", "`--kv-cache-dtype", "### `attn explain`", "#### `attn bench"):
        assert words in text


def test_settings_have_their_defaults_and_meanings():
    text = blocks.settings()
    assert "| `max_num_seqs` | `256` | Most requests in a step. |" in text
    assert not re.search(r"\|  \|$", text, re.MULTILINE), "a field without a docstring"
