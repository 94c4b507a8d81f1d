"""The words of Python in an error text as the words of the command line."""

from __future__ import annotations

import re

__all__ = ["OPTIONS", "in_cli_words"]

OPTIONS = {
    name: "--" + name.replace("_", "-")
    for name in (
        *("device", "device_memory_utilization", "ignore_eos", "ignore_unexpected", "kv_format"),
        *("kv_cache_memory_bytes", "max_model_len"),
        *("max_num_batched_tokens", "max_num_seqs", "max_tokens", "numerics", "offline"),
        *("seed", "temperature"),
    )
} | {"kernels": "--backend"}
"""Options of Python that a command has as well, and how it spells them."""

_OPTION = re.compile(rf"(?<![\w-])({'|'.join(OPTIONS)})\b(=('[^']*'|[\w.+-]*\w))?", re.ASCII)


def in_cli_words(text: str) -> str:
    """``max_num_seqs=8`` becomes ``--max-num-seqs 8``; a word of English stays one."""
    return _OPTION.sub(_spelt, text)


def _spelt(found: re.Match[str]) -> str:
    name, value = found[1], found[3]
    if value is None:
        return OPTIONS[name] if "_" in name else name
    if value == "True":  # a switch
        return OPTIONS[name]
    return f"{OPTIONS[name]} {value.strip(chr(39))}"
