"""Checkpoints that several tests read; each is written once and never changed in place.

torch is imported by the fixtures alone: this file is also loaded where there is none.
"""

import json

import pytest
from tests.core.checkpoint.small import read_tensors, small_config, smallest_config


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """Folder of a small checkpoint in the published storage format."""
    from deepinfer.checkpoint import synthesize

    return synthesize(tmp_path_factory.mktemp("small") / "served", config=small_config())


@pytest.fixture(scope="session")
def served_config(served):
    """Its `config.json`; to be copied before it is changed."""
    return json.loads((served / "config.json").read_text())


@pytest.fixture(scope="session")
def served_tensors(served):
    """What it stores, by name; to be copied before it is changed."""
    return read_tensors(served)


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """Folder of a checkpoint of two float32 layers."""
    from deepinfer.checkpoint import synthesize

    out = tmp_path_factory.mktemp("small") / "plain"
    return synthesize(out, config=smallest_config(), format="plain")


@pytest.fixture(scope="session")
def plain_config(plain):
    return json.loads((plain / "config.json").read_text())


@pytest.fixture(scope="session")
def plain_tensors(plain):
    return read_tensors(plain)
