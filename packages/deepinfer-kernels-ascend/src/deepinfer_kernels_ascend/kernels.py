"""The operations on Ascend devices."""

from __future__ import annotations

from deepinfer.kernels.reference import ReferenceKernels

__all__ = ["AscendKernels"]


class AscendKernels(ReferenceKernels):
    """All operations of the reference, on an Ascend device.

    Overrides nothing yet: every operation is the plain torch reference that it inherits, so
    results are the reference's and speed is not what this package is for. Kernels written for
    Ascend 950 will replace operations one by one.
    """
