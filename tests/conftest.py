"""What the whole suite shares: which tests can run on this machine, and with how many threads."""

from __future__ import annotations

import functools
import importlib.util
import os

import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several workers share the cores; read by torch when it is imported, here and in subprocesses.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_ignore_collect(collection_path, config):
    """Without torch, look only into the modules that are marked torchless: others import it.

    A folder without such a module is left out whole, since its conftest.py may import torch too.
    """
    if HAS_TORCH:
        return None
    files = collection_path.rglob("*.py") if collection_path.is_dir() else [collection_path]
    marked = any("pytest.mark.torchless" in file.read_text("utf-8") for file in files)
    return None if marked else True


def pytest_report_header(config):
    if HAS_TORCH:
        return None
    return "torch is not installed: only the modules marked torchless are collected"


def pytest_runtest_setup(item):
    """Skip what needs a device that is not here, with the reason that its backend gives."""
    for platform in ("nvidia", "ascend"):
        if item.get_closest_marker(platform) and (reason := _problem_with(platform)):
            pytest.skip(reason)


@functools.cache
def _problem_with(platform: str) -> str:
    backend = importlib.import_module(f"deepinfer_kernels_{platform}").create_backend()
    probe = backend.probe()
    return "" if probe.usable else probe.reason
