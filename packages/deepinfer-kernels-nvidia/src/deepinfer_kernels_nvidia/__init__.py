"""DeepInfer kernels for NVIDIA devices of compute capability 9.0 (SM90) and newer.

Found by the engine through the entry point ``nvidia`` of the group ``deepinfer.kernels``.
"""

from __future__ import annotations

from deepinfer_kernels_nvidia.backend import create_backend

__all__ = ["create_backend"]
