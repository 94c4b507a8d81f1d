"""`ReferenceKernels`: every operation in plain torch, the definition that other kernels are
compared with.
"""

from deepinfer.kernels.reference.kernels import ReferenceKernels

__all__ = ["ReferenceKernels"]
