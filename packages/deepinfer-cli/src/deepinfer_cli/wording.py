"""The words of Python in an error text as the words of the command line."""

from __future__ import annotations

import re

__all__ = ["OPTIONS", "in_cli_words"]

OPTIONS = {
    name: "--" + name.replace("_", "-")
    for name in (
        *("async_scheduling", "device", "device_memory_utilization", "enable_prefix_caching"),
        *("ignore_eos", "ignore_unexpected", "kv_cache_memory_bytes", "kv_format"),
        *("log_interval_s", "logprobs", "max_model_len", "max_num_batched_tokens"),
        *("max_num_seqs", "max_tokens", "min_p", "min_tokens", "numerics", "offline", "seed"),
        *("snapshot_memory_bytes", "stop_token_ids", "swa_replay", "swa_replay_keep"),
        *("temperature", "top_k", "top_p"),
    )
} | {"kernels": "--backend"}
"""Options of Python that a command has as well, and how it spells them."""

_NAMES = "|".join(sorted(OPTIONS, key=len, reverse=True))
_OPTION = re.compile(rf"(?<![\w'-])({_NAMES})\b(=('[^']*'|[\w.+-]*\w))?", re.ASCII)


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
