"""Lines of a batch file: ids, requests, and what is refused, each line alone and by name."""

from __future__ import annotations

import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.core.batch.tools import (
    answer,
    chat,
    completion,
    errors_of,
    read_rows,
    write_lines,
)

from deepinfer.batch import MAX_LINE_BYTES, BatchFile
from deepinfer.errors import ConfigError


def refusal(line: object, tmp_path: Path) -> str:
    """What is said of a line among two good ones, which are served."""
    source = write_lines(tmp_path / "in.jsonl", [completion("first"), line, completion("last")])
    summary = answer(source, tmp_path / "out.jsonl")
    rows = read_rows(tmp_path / "out.jsonl")
    assert (summary.num_written, summary.num_failed) == (3, 1)
    (bad,) = [row for row in rows if row["error"] is not None]
    assert bad["response"] is None
    assert bad["error"]["line"] == 2
    assert bad["error"]["message"].startswith("line 2")
    good = {row["custom_id"] for row in rows if row["response"] is not None}
    assert good == {"first", "last"}
    return bad["error"]["message"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"prompt": "a\xff"}', "byte 13 is no UTF-8"),
        (b"not json", "no JSON object"),
        (b"[1, 2]", "give a JSON object"),
        (b'{"prompt": "a", "prompt": "b"}', "appears twice"),
        (b"[" * 10_000, "brackets"),
        (b'{"prompt": "' + b"x" * 10_000_000 + b'"}', "10,000,015 bytes, allowed are 8,388,608"),
        ({"custom_id": "x", "method": "POST", "url": "/v1/completions"}, "body is missing"),
        ({**completion("x"), "url": "/v1/embeddings"}, "'/v1/embeddings', allowed: /v1/chat"),
        ({**completion("x"), "method": "GET"}, "method: found 'GET'"),
        ({**completion("x"), "custom_id": 7}, "custom_id is 7"),
        ({**completion("x"), "extra": 7}, "no keyword 'extra'"),
        (completion("x", None), "body has no prompt"),
        (completion("x", ["a", "b"]), "2 prompts; give each a line"),
        (completion("x", 5), "prompt: found 5"),
        (completion("x", []), "0 tokens long"),
        (completion("x", [999_999]), "has 999999"),
        (completion("x", "a" * 600), "max_model_len=512"),
        (completion("x", temprature=1), "did you mean temperature?"),
        (completion("x", temperature="hot"), "temperature='hot'"),
        (completion("x", stream=True), "stream: found True"),
        (completion("x", echo=True), "echo: found True"),
        (completion("x", suffix="s"), "suffix"),
        (completion("x", best_of=3), "best_of"),
        (completion("x", n=1_000_000), "at most 128 answers"),
        (completion("x", presence_penalty=1), "presence_penalty=1"),
        (completion("x", logit_bias={"5": 1}), "logit_bias"),
        (completion("x", messages=[]), "no keyword 'messages'"),
        (chat("x", "a", response_format={"type": "json_object"}), "response_format: found 'json_"),
        (chat("x", "a", parallel_tool_calls=False), "parallel_tool_calls"),
        (chat("x", "a", thinking={"type": "maybe"}), "thinking"),
        (chat("x", "a", max_tokens=1, max_completion_tokens=2), "contradict"),
        ({"custom_id": "x"}, "found none of prompt"),
        ({"prompt": "a", "messages": []}, "found prompt and messages"),
        ({"prompt": "a", "id": 1, "custom_id": "x"}, "both custom_id and id"),
        ({"prompt": "a", "id": True}, "id is True"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_line_gets_its_own_error_and_the_others_are_served(
    line: object, told: str, tmp_path: Path
) -> None:
    assert told in refusal(line, tmp_path)


def test_keys_that_ask_for_nothing_are_taken(tmp_path: Path) -> None:
    body: dict[str, Any] = {
        **{"model": "any", "user": "u", "metadata": {"a": "b"}, "store": False},
        **{"stream": False, "echo": False, "best_of": 1, "suffix": None, "logit_bias": {}},
        **{"presence_penalty": 0, "temperature": None, "logprobs": None},
    }
    source = write_lines(tmp_path / "in.jsonl", [completion("a", **body)])
    assert answer(source, tmp_path / "out.jsonl").num_failed == 0


def test_a_line_without_an_id_is_known_by_its_number(tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, b"", {"prompt": "b", "id": 7}, {"prompt": "c", "custom_id": "x"}]
    source = write_lines(tmp_path / "in.jsonl", [*lines, {"prompt_token_ids": [1, 2]}])
    assert answer(source, tmp_path / "out.jsonl").num_lines == 4
    found = {row["custom_id"] for row in read_rows(tmp_path / "out.jsonl")}
    assert found == {"line-1", 7, "x", "line-5"}


def test_the_keys_of_a_line_go_before_the_defaults(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "id": "default"},
        {"prompt": "a", "id": "own", "max_tokens": 2},
        completion("openai", max_tokens=3),
    ]
    answer(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    tokens = {
        row["custom_id"]: row["response"]["body"]["usage"]["completion_tokens"]
        for row in read_rows(tmp_path / "out.jsonl")
    }
    assert tokens == {"default": 4, "own": 2, "openai": 3}


def test_ids_that_stand_twice_are_refused_with_their_lines(tmp_path: Path) -> None:
    lines = [completion("a"), completion("b"), {"prompt": "x", "id": "a"}, {"prompt": "y", "id": 5}]
    source = write_lines(tmp_path / "in.jsonl", [*lines, {"prompt": "z", "id": "5"}])
    with pytest.raises(ConfigError, match=r"2 ids .*\('a' on lines 1, 3; '5' on lines 4, 5\)"):
        BatchFile(source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists(), "refused before work"


def test_a_stream_and_a_pipe_are_read_as_a_file_is(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}'
    with BatchFile(io.BytesIO(data), tmp_path / "out.jsonl") as batch:
        assert [line.custom_id for line in batch.lines()] == ["line-1", "line-2"]
        assert [line.values for line in batch.lines()] == [{"prompt": "a"}, {"prompt": "b"}]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()
    with BatchFile(pipe, tmp_path / "out.jsonl") as batch:
        assert batch.num_lines == 2
    writer.join()


def test_lines_up_to_the_limit_are_read_and_longer_ones_are_skipped_whole(tmp_path: Path) -> None:
    def line_of(length: int) -> bytes:
        head, tail = b'{"prompt": "', b'"}'
        return head + b"x" * (length - len(head) - len(tail) - 1) + tail

    lengths = [MAX_LINE_BYTES, MAX_LINE_BYTES + 1, MAX_LINE_BYTES + 2, 3 * MAX_LINE_BYTES]
    lines = [piece for length in lengths for piece in (line_of(length), b'{"prompt": "s"}')]
    source = write_lines(tmp_path / "in.jsonl", lines)
    with BatchFile(source, tmp_path / "out.jsonl") as batch:
        errors = [line.error for line in batch.lines()]
    assert [error is None for error in errors] == [True, True, False, True] + [False, True] * 2


def test_what_is_appended_while_it_runs_is_left_for_another_time(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [completion("a")])
    with BatchFile(source, tmp_path / "out.jsonl") as batch:
        with source.open("a") as file:
            file.write(json.dumps(completion("b")) + "\n")
        assert [line.custom_id for line in batch.lines()] == ["a"]


def test_an_input_that_is_cut_while_it_runs_is_an_error(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [completion(f"r{n}") for n in range(9)])
    with BatchFile(source, tmp_path / "out.jsonl") as batch:
        source.write_bytes(source.read_bytes()[:200])
        with pytest.raises(OSError, match="was cut short"):
            list(batch.lines())


def test_half_of_a_surrogate_pair_is_an_error_or_an_id_like_any_other(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [completion("\ud800"), completion("b", "\udfff")])
    answer(source, tmp_path / "out.jsonl")
    rows = {row["custom_id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    assert rows["\ud800"]["error"] is None
    assert "encode" in errors_of([rows["b"]])["b"]
