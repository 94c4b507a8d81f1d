"""DeepInfer kernels for Ascend 950 devices.

Found by the engine through the entry point ``ascend`` of the group ``deepinfer.kernels``.
"""

from __future__ import annotations

from deepinfer_kernels_ascend.backend import create_backend

__all__ = ["create_backend"]
