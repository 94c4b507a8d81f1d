"""Reading prompts: order, formats, and faults that stay with their line."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from deepinfer_cli.exits import UsageError
from deepinfer_cli.prompts import Prompt, collect_prompts, parse_lines

pytestmark = pytest.mark.torchless


def parse(data: bytes, *, is_jsonl: bool = False) -> list[Prompt]:
    return list(parse_lines(data, name="f", is_jsonl=is_jsonl))


def test_text_lines_keep_their_spaces_and_blank_lines_are_skipped():
    prompts = parse(b"one\n\n   \n  two \r\nthree")
    assert [prompt.text for prompt in prompts] == ["one", "  two ", "three"]
    assert all(prompt.error is None for prompt in prompts)


def test_a_byte_order_mark_is_not_part_of_the_prompt():
    assert parse(b"\xef\xbb\xbfone\n")[0].text == "one"


def test_json_lines_among_text_lines():
    prompts = parse(b'plain\n{"prompt": "x", "id": "a"}\n{"prompt_token_ids": [1, 2], "id": 7}\n')
    assert [(p.text, p.token_ids, p.id) for p in prompts] == [
        ("plain", None, None),
        ("x", None, "a"),
        (None, [1, 2], 7),
    ]


def test_a_json_prompt_may_hold_line_breaks():
    assert parse(b'{"prompt": "a\\nb"}')[0].text == "a\nb"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param(b'{"prompt": "x"', "not valid JSON", id="cut"),
        pytest.param(b"{" * 100_000, "not valid JSON", id="garbage"),
        pytest.param(b'{"prompt":' + b"[" * 100_000, "not valid JSON", id="deep"),
        pytest.param(b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}", "not valid JSON", id="huge"),
        pytest.param(b"{}", "exactly one of", id="neither"),
        pytest.param(b'{"prompt": "x", "prompt_token_ids": [1]}', "exactly one of", id="both"),
        pytest.param(b'{"promt": "x"}', "did you mean 'prompt'", id="near key"),
        pytest.param(b'{"prompt": "x", "zzz": 1}', "unknown key 'zzz'", id="far key"),
        pytest.param(b'{"prompt": 3}', "must be a string, found int", id="not text"),
        pytest.param(b'{"prompt": null}', "must be a string", id="null"),
        pytest.param(b'{"prompt_token_ids": "12"}', "list of integers", id="ids text"),
        pytest.param(b'{"prompt_token_ids": [1, true]}', "list of integers", id="ids bool"),
        pytest.param(b'{"prompt_token_ids": [1.0]}', "list of integers", id="ids float"),
        pytest.param(b'{"prompt_token_ids": []}', "is empty", id="no ids"),
        pytest.param(b'{"prompt": ""}', "is empty", id="empty"),
        pytest.param(b'{"prompt": "x", "id": [1]}', "'id' must be", id="id list"),
        pytest.param(b'{"prompt": "x", "id": true}', "'id' must be", id="id bool"),
        pytest.param(b'{"prompt": "\\ud800"}', "not valid Unicode", id="surrogate"),
        pytest.param(b"ab\xff", "byte 0xff at 2 is not valid UTF-8", id="bytes"),
        pytest.param(b"\xe4", "byte 0xe4 at 0 is not valid UTF-8", id="cut character"),
    ],
)
def test_a_bad_line_keeps_its_fault_and_the_next_line_is_read(line: bytes, message: str):
    prompts = parse(b"first\n" + line + b"\nlast\n")
    assert [prompts[0].text, prompts[2].text] == ["first", "last"]
    assert message in (prompts[1].error or "")
    assert (prompts[1].error or "").startswith("line 2 of f: ")


def test_in_a_jsonl_file_every_line_is_json(tmp_path: Path):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "x"}\ntext\n"text"\n')
    prompts = collect_prompts(None, str(file))
    assert prompts[0].text == "x"
    assert "not valid JSON" in (prompts[1].error or "")
    assert "expected a JSON object, found str" in (prompts[2].error or "")


def test_the_id_of_a_faulty_line_is_kept():
    assert parse(b'{"id": "a"}')[0].id == "a"


def test_sources_come_in_the_order_prompt_then_file(tmp_path: Path):
    file = tmp_path / "p.txt"
    file.write_text("three\n", "utf-8")
    assert [p.text for p in collect_prompts(["one", "two"], str(file))] == ["one", "two", "three"]


def test_standard_input_is_read_only_when_nothing_else_is_given(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"in\n"), "utf-8"))
    assert [p.text for p in collect_prompts(["one"], None)] == ["one"]
    assert [p.text for p in collect_prompts(None, None)] == ["in"]


def test_a_dash_is_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"in\n"), "utf-8"))
    assert [p.text for p in collect_prompts(["one"], "-")] == ["one", "in"]


def test_a_terminal_is_not_waited_for(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(UsageError, match="no prompt given"):
        collect_prompts(None, None)


def test_a_source_without_prompts_is_wrong_usage(tmp_path: Path):
    file = tmp_path / "p.txt"
    file.write_bytes(b"\n \n")
    with pytest.raises(UsageError, match="holds no prompt"):
        collect_prompts(None, str(file))


def test_an_undecodable_argument_fails_alone():
    prompts = collect_prompts(["ok", "a\udcff", ""], None)
    assert prompts[0].error is None
    assert "not valid Unicode" in (prompts[1].error or "")
    assert "is empty" in (prompts[2].error or "")


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        (Prompt(text="a\n b\tc"), "a b c"),
        (Prompt(text="\x1b[31mred"), "?[31mred"),
        (Prompt(text="x" * 100), "x" * 57 + "..."),
        (Prompt(token_ids=[1, 2]), "[1, 2]"),
        (Prompt(error="bad"), ""),
    ],
)
def test_preview_is_one_short_printable_line(prompt: Prompt, shown: str):
    assert prompt.preview() == shown
