"""The operations on NVIDIA devices."""

from __future__ import annotations

from deepinfer.kernels.reference import ReferenceKernels

__all__ = ["NvidiaKernels"]


class NvidiaKernels(ReferenceKernels):
    """All operations of the reference, on an NVIDIA device.

    Overrides nothing yet: every operation is the plain torch reference that it inherits, so
    results are the reference's and speed is not what this package is for. Kernels written for
    SM90 and SM100 will replace operations one by one.
    """
