"""Does reading a checkpoint ever hold a second copy of the weights?

Reads every tensor of a checkpoint as loading does, keeps them all, and compares the peak resident
memory with what is kept. The bound is kept * 1.15 + 300 MB, the 300 MB being the interpreter and
its libraries. Without MODEL a `bench-small` checkpoint (1.5 GB, float32) is written to a temporary
folder first, by a process of its own.

    python benchmarks/load_memory.py [MODEL] [--rows N] [--whole]

With `--rows` the Engram tables are mapped instead of read, and N random rows of each are looked up
(480 are what a prompt of 20 tokens looks up in the published model).

With `--whole` the model is loaded as `load_model` does, prepared for the CPU's kernels.

Prints one line per figure; the last line is one JSON object. Exit code 1 when a bound is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import tensor_bytes

from deepinfer import load_model
from deepinfer.checkpoint import Checkpoint, StoredTensor, dequantize, resolve_model
from deepinfer.config import ModelConfig
from deepinfer.kernels.cpu import CpuKernels

_TABLE = ".engram.embed.weight"
_SYNTHESIZE = "import sys; from deepinfer.checkpoint import synthesize; " + (
    "synthesize(sys.argv[1], config='bench-small', format='plain')"
)


def resident_bytes() -> int:
    """Resident memory now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    """Highest resident memory so far.

    Linux's getrusage also counts the parent before exec, so its status file comes first.
    """
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def kept_bytes(stored: StoredTensor) -> int:
    parts = [part for part in (stored.data, stored.scale) if part is not None]
    return sum(part.numel() * part.element_size() for part in parts)


def look_up(checkpoint: Checkpoint, name: str, num_rows: int) -> int:
    """Map a table and look rows up; returns the table's size in bytes."""
    table = checkpoint.map(name)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, table.shape[0], (num_rows,), generator=generator)
    dequantize(table.rows(rows))
    return kept_bytes(table)


def measure(folder: Path, num_rows: int) -> dict[str, float]:
    """Read the checkpoint and take the figures."""
    config = ModelConfig.from_folder(folder)
    before = resident_bytes()
    started = time.perf_counter()
    with Checkpoint.open(folder, config) as checkpoint:
        opened_s = time.perf_counter() - started
        names = checkpoint.names()
        tables = [name for name in names if num_rows and name.endswith(_TABLE)]
        kept = [checkpoint.read(name) for name in names if name not in tables]
        read_s = time.perf_counter() - started - opened_s
        weights = sum(kept_bytes(stored) for stored in kept)
        after_read = resident_bytes()
        table_bytes = sum(look_up(checkpoint, name, num_rows) for name in tables)
        added = resident_bytes() - after_read
    return {
        "kept_bytes": weights,
        "resident_before_bytes": before,
        "peak_resident_bytes": peak_bytes(),
        "bound_bytes": int(1.15 * weights + 300e6),
        "open_s": round(opened_s, 3),
        "read_s": round(read_s, 3),
        "table_bytes": table_bytes,
        "table_rows_looked_up": num_rows * len(tables),
        "table_added_bytes": added,
    }


def measure_whole(folder: Path) -> dict[str, float]:
    """Load and prepare the whole model."""
    before = resident_bytes()
    started = time.perf_counter()
    model = load_model(folder, kernels=CpuKernels())
    kept = int(tensor_bytes(model.transformer, {}))
    return {
        "kept_bytes": kept,
        "resident_before_bytes": before,
        "peak_resident_bytes": peak_bytes(),
        "bound_bytes": int(1.15 * kept + 300e6),
        "open_s": 0.0,
        "read_s": round(time.perf_counter() - started, 3),
        "table_bytes": 0,
        "table_rows_looked_up": 0,
        "table_added_bytes": 0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or hub id; default: a made-up one")
    parser.add_argument("--rows", type=int, default=0, help="rows to look up in each Engram table")
    parser.add_argument("--whole", action="store_true", help="load and prepare the whole model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.model is None:
            folder = Path(scratch) / "bench-small"
            subprocess.run([sys.executable, "-c", _SYNTHESIZE, str(folder)], check=True)
        else:
            folder = resolve_model(options.model)
        figures = measure_whole(folder) if options.whole else measure(folder, options.rows)
    is_within = figures["peak_resident_bytes"] <= figures["bound_bytes"]
    is_within = is_within and figures["table_added_bytes"] < 100e6
    print(f"machine          {platform.platform()}, python {platform.python_version()}")
    print(f"torch            {torch.__version__}")
    print(f"kept weights     {figures['kept_bytes'] / 1e6:10.1f} MB")
    print(f"before reading   {figures['resident_before_bytes'] / 1e6:10.1f} MB resident")
    print(f"peak             {figures['peak_resident_bytes'] / 1e6:10.1f} MB resident")
    print(f"bound            {figures['bound_bytes'] / 1e6:10.1f} MB (kept * 1.15 + 300)")
    print(f"open, read       {figures['open_s']:.2f} s, {figures['read_s']:.2f} s")
    if figures["table_bytes"]:
        print(f"mapped tables    {figures['table_bytes'] / 1e6:10.1f} MB")
        print(f"added by look-up {figures['table_added_bytes'] / 1e6:10.1f} MB resident")
    ratio = figures["peak_resident_bytes"] / max(1, figures["kept_bytes"])
    print(json.dumps(figures | {"peak_to_kept": round(ratio, 4), "within_bound": is_within}))
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
