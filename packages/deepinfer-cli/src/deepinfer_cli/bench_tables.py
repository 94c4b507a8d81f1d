"""The figures of ``deepinfer bench`` as tables of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["latency_table", "machine_lines", "throughput_table"]

_REQUEST_ROWS = (
    ("time to first token (TTFT)", "ttft_s", "ms"),
    ("time per output token (TPOT)", "tpot_s", "ms"),
    ("request latency", "request_latency_s", "ms"),
    ("speed of a request", "request_tokens_per_s", "tokens/s"),
    ("prefill step", "prefill_step_s", "ms"),
    ("decode step", "decode_step_s", "ms"),
)
_RATE_ROWS = (
    ("prefill", "prefill_tokens_per_s", "tokens/s"),
    ("decode", "decode_steps_per_s", "steps/s"),
    ("output", "output_tokens_per_s", "tokens/s"),
    ("requests", "requests_per_s", "requests/s"),
)


def machine_lines(record: Mapping[str, Any]) -> str:
    """What ran where, under which limits: the head of a table."""
    hardware, config = record["hardware"], record["config"]
    device = hardware["device_name"] or hardware["device"]
    code = f"deepinfer {record['version']}"
    if record["commit"]:
        code += f" (commit {record['commit']})"
    rows = [
        ("model", f"{record['model']} (revision {record['revision'] or '-'})"),
        ("code", f"{code}, torch {hardware['torch']}, {record['date']}"),
        (
            "machine",
            f"{hardware['cpu']}, {hardware['num_cores']} cores, "
            f"{hardware['memory_bytes'] / 1e9:.1f} GB",
        ),
        ("device", f"{device}, {hardware['num_devices']} of them, {record['kernels'] or '-'}"),
        ("numerics", f"{record['numerics'] or '-'}, cache records {record['kv_format']}"),
        (
            "limits",
            f"{config['max_num_seqs']} sequences, {config['max_num_batched_tokens']} tokens a "
            f"step, {config['max_model_len']} tokens a sequence, "
            f"{config['cache_bytes'] / 1e6:.1f} MB of caches, "
            f"{'asynchronous' if config['async_scheduling'] else 'synchronous'} scheduling",
        ),
    ]
    return _aligned(rows)


def throughput_table(figures: Mapping[str, Any]) -> str:
    """The figures of many requests at once."""
    failed = f" ({figures['num_failed']} failed)" if figures["num_failed"] else ""
    rows = [
        ("requests", f"{figures['num_requests']}{failed}"),
        ("prompt tokens", str(figures["prompt_tokens"])),
        ("output tokens", str(figures["output_tokens"])),
        ("time", f"{figures['duration_s']:.2f} s"),
        *_rates(figures),
        ("preemptions", str(figures["num_preemptions"])),
        ("peak memory", _number(figures["peak_memory_bytes"], "MB", 1e-6)),
    ]
    return f"\n{_aligned(rows)}\n{_percentile_table(figures)}"


def latency_table(figures: Mapping[str, Any]) -> str:
    """The figures of each batch size."""
    parts = []
    for batch in figures["batches"]:
        head = (
            f"batch size {batch['batch_size']}, {figures['input_len']} tokens in, "
            f"{figures['output_len']} tokens out, {figures['num_iters']} runs\n"
        )
        rows = [("whole run", "run_s", "ms")]
        parts.append(f"\n{head}{_aligned(_rates(batch))}\n{_percentile_table(batch, rows)}")
    return "".join(parts)


def _rates(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, _number(figures[key], unit)) for name, key, unit in _RATE_ROWS]


def _percentile_table(
    figures: Mapping[str, Any], extra: Sequence[tuple[str, str, str]] = ()
) -> str:
    """Median, p90 and p99, a row for each kind of figure."""
    lines = [f"{'':<30}{'median':>12}{'p90':>12}{'p99':>12}"]
    for name, key, unit in (*extra, *_REQUEST_ROWS):
        scale = 1e3 if unit == "ms" else 1.0
        cells = [_number(figures[key][column], "", scale) for column in ("median", "p90", "p99")]
        lines.append(f"{name:<30}" + "".join(f"{cell:>12}" for cell in cells) + f"  {unit}")
    return "\n".join(lines) + "\n"


def _aligned(rows: Sequence[tuple[str, str]]) -> str:
    return "".join(f"{name:<16}{value}\n" for name, value in rows)


def _number(value: float | None, unit: str, scale: float = 1.0) -> str:
    if value is None:
        return "-"
    return f"{value * scale:.2f} {unit}".rstrip()
