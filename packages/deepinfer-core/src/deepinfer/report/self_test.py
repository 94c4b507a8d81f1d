"""One token on the CPU: a made-up model with every feature, computed by two sets of kernels."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SelfTest", "run_self_test"]

_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
_TOLERANCE = 1e-3
"""Largest difference of a logit of size 1; both sum in float32, in different orders. Caches keep
full precision: quantised ones would turn the last bit of a sum into a whole step now and then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """How the test ended."""

    token: int
    """Most likely next token, by the CPU's kernels."""
    reference_token: int
    difference: float
    """Largest difference of two logits."""
    kernels: str
    """Class of the CPU's kernels."""

    @property
    def passed(self) -> bool:
        return self.token == self.reference_token and self.difference <= _TOLERANCE


def run_self_test() -> SelfTest:
    """Write a model, load it twice, and compare one token; on one thread, as it is that small."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run()
    finally:
        torch.set_num_threads(threads)


def _run() -> SelfTest:
    import torch

    from deepinfer.checkpoint import synthesize
    from deepinfer.kernels.registry import cpu_backend, reference_backend
    from deepinfer.model.load import load_model

    device = torch.device("cpu")
    with tempfile.TemporaryDirectory(prefix="deepinfer-") as folder:
        path = synthesize(Path(folder) / "tiny")
        logits = []
        for backend in (cpu_backend(), reference_backend()):
            kernels = backend.create(numerics="exact", kv_format="none", device=device)
            model = load_model(path, kernels=kernels)
            logits.append((model.full_logits([_PROMPT])[0][-1], type(kernels).__name__))
    (ours, name), (reference, _) = logits
    return SelfTest(
        token=int(ours.argmax()),
        reference_token=int(reference.argmax()),
        difference=float((ours - reference).abs().max()),
        kernels=name,
    )
