"""References to pages of `docs/` lead somewhere: the page, its section, the function named."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("packages", "tests", "docs", "benchmarks", "examples", "tools", ".ci")
SUFFIXES = {".py", ".c", ".h", ".md", ".toml", ".txt", ".sh", ""}
SOURCES = ROOT / "packages/deepinfer-core/src/deepinfer"

NUMBER = r"\d+(?:\.\d+)?"
SECTIONS = rf"{NUMBER}(?: ?- ?{NUMBER})?(?: \([^)]*\))?"
AFTER = re.compile(
    rf"docs/([\w-]+\.md)(?:,? sections?)?(?: ({SECTIONS}(?:(?:,| and|, and) {SECTIONS})*))?"
)
BEFORE = re.compile(rf"({NUMBER}) of docs/([\w-]+\.md)")
LINK = re.compile(r"\[[^\]]*\]\(([\w./-]+\.md)\)")
INTERNAL = re.compile(
    r"\bspec/[\w-]+\.md|\bdesign\.md|(?<![\w/-])(?:kernels|model|checkpoint)\.md (?=\d)"
)


@cache
def files():
    """Text files of the repository, by path from its root."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8", "replace")
        for path in found
        if path.suffix in SUFFIXES and "__pycache__" not in path.parts
    }


def flat(text):
    """Text in one line, without what begins a comment's lines; links between pages as paths."""
    text = re.sub(r"\n[ \t]*(?:\*(?!/)|#|//)?[ \t]*", " ", text)
    return re.sub(r"\[([a-z-]+\.md)\]\(\1\)", r"docs/\1", text)


@cache
def sections(page):
    """Numbers of a page's headings."""
    return set(re.findall(rf"^#+ ({NUMBER})\.? ", (DOCS / page).read_text("utf-8"), re.M))


def references(text):
    """(page, section or None) of every reference in a text."""
    text = flat(text)
    for page, listed in AFTER.findall(text):
        numbers = re.findall(NUMBER, re.sub(r"\([^)]*\)", "", listed))
        for number in numbers or [None]:
            yield page, number
    for number, page in BEFORE.findall(text):
        yield page, number


def dead(references):
    return [
        f"docs/{page} {number or ''}".strip()
        for page, number in references
        if not (DOCS / page).is_file() or (number is not None and number not in sections(page))
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("(docs/model.md 3.4-3.6)", [("model.md", "3.4"), ("model.md", "3.6")]),
        ("docs/model.md\n    2.3).", [("model.md", "2.3")]),
        (" * docs/model.md;\n * K2.4", [("model.md", None)]),
        ("docs/model.md 5.2 (a) and 5.3 (b, 7).", [("model.md", "5.2"), ("model.md", "5.3")]),
        ("docs/a.md 2, 3.8; docs/b.md 1.", [("a.md", "2"), ("a.md", "3.8"), ("b.md", "1")]),
        ("3.9 of docs/model.md)", [("model.md", None), ("model.md", "3.9")]),
        ("[model.md](model.md) 1.5", [("model.md", "1.5")]),
    ],
)
def test_references_are_found_in_every_way_they_are_written(text, found):
    assert list(references(text)) == found


def test_every_reference_names_a_page_and_a_section_that_exist():
    wrong, total = {}, 0
    for name, text in files().items():
        if name != "tests/docs/test_references.py":
            listed = list(references(text))
            total += len(listed)
            if lines := dead(listed):
                wrong[name] = lines
    assert not wrong
    assert total > 100


def test_a_dead_reference_would_be_found():
    assert dead([("model.md", "3.4"), ("model.md", "3.99"), ("nowhere.md", None)]) == [
        "docs/model.md 3.99",
        "docs/nowhere.md",
    ]


def test_section_numbers_of_a_page_are_unique_and_ascend():
    for page in sorted(DOCS.glob("*.md")):
        found = re.findall(rf"^#+ ({NUMBER})\.? ", page.read_text("utf-8"), re.M)
        order = [tuple(map(int, number.split("."))) for number in found]
        assert order == sorted(set(order)), page.name


def test_no_file_refers_to_pages_outside_the_repository():
    found = {
        name: INTERNAL.findall(flat(text))
        for name, text in files().items()
        if name != "tests/docs/test_references.py"
    }
    assert not {name: hits for name, hits in found.items() if hits}


def test_links_between_pages_lead_to_files():
    for name, text in files().items():
        if name.endswith(".md"):
            for target in LINK.findall(text):
                assert (ROOT / name).parent.joinpath(target).is_file(), f"{name}: {target}"


def test_the_table_from_formula_to_code_names_what_there_is():
    text = (DOCS / "architecture.md").read_text("utf-8")
    table = text.partition("## From formula to code")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    assert len(rows) > 20
    for _, section, *cells in rows[2:]:
        page = "formats.md" if "formats" in section else "model.md"
        assert set(re.findall(NUMBER, section)) <= sections(page), section
        for cell, start in zip(cells, ("", "", "kernels/cpu.c"), strict=True):
            path = start
            for word in re.findall(r"`([^`]+)`", cell):
                if word.endswith(".py"):
                    path = f"kernels/{word}" if word.startswith("reference/") else word
                    assert (SOURCES / path).is_file(), path
                else:
                    name, code = word.rpartition(".")[2], (SOURCES / path).read_text("utf-8")
                    assert re.search(rf"(def |class |void |i64 |float \*){name}\b", code), (
                        f"{path}: {word}"
                    )
