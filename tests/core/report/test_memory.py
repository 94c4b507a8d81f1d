"""Free memory, and the one message about too little of it."""

import pytest
from tests.core.checkpoint.small import small_config
from tests.core.config.published import published

from deepinfer.config import ModelConfig
from deepinfer.config.machine import available_memory_bytes, shown_bytes
from deepinfer.errors import ConfigError
from deepinfer.report.memory import require_memory, resident_bytes

pytestmark = pytest.mark.torchless


@pytest.fixture
def machine(tmp_path):
    """Control files of a made-up machine: MemAvailable in kB, container limit and use."""

    def make(available, limit=None, used=None):
        (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available} kB\n")
        if limit is not None:
            (tmp_path / "memory.max").write_text(f"{limit}\n")
            (tmp_path / "memory.current").write_text(f"{used}\n")
        return available_memory_bytes(tmp_path, tmp_path)

    return make


def test_free_memory_is_what_the_system_says(machine):
    assert machine(1000) == 1_024_000


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [("max", 5, 1_024_000), (2**40, 0, 1_024_000), (600_000, 500_000, 100_000), (1, 2, 0)],
)
def test_a_tighter_limit_of_the_container_counts(machine, limit, used, free):
    assert machine(1000, limit, used) == free


def test_a_system_without_control_files_is_asked_otherwise(tmp_path):
    assert available_memory_bytes(tmp_path, tmp_path) > 2**20


def test_large_tables_and_the_vision_tower_are_not_held_in_memory():
    config = ModelConfig.from_dict(published())
    held = resident_bytes(config)
    assert held == pytest.approx(306.6e9, rel=1e-3)
    assert resident_bytes(config, is_stored_form=False) > 4 * 500e9


def test_weights_above_the_free_memory_are_refused_with_what_is_needed_and_there():
    config = ModelConfig.from_dict(published())
    with pytest.raises(ConfigError) as caught:
        require_memory(config, available_bytes=64 * 10**9)
    assert str(caught.value) == (
        "not enough memory: 306.6 GB of weights are needed, 64.0 GB are free; use a machine with "
        "more memory, end other programs, or choose a smaller model"
    )


def test_caches_above_what_the_weights_leave_are_refused_with_what_to_lower():
    config = ModelConfig.from_dict(small_config())
    weights = resident_bytes(config)
    with pytest.raises(ConfigError) as caught:
        require_memory(config, cache_bytes=10**9, available_bytes=weights + 5000)
    assert "1.0 GB of caches are needed" in str(caught.value)
    assert "lower kv_cache_memory_bytes to 5000 or less" in str(caught.value)
    require_memory(config, cache_bytes=5000, available_bytes=weights + 5000)
    require_memory(config)


@pytest.mark.parametrize(
    ("count", "text"),
    [(12, "12 bytes"), (1500, "1.5 kB"), (10**9, "1.0 GB"), (2 * 10**12, "2.0 TB")],
)
def test_sizes_are_shown_in_powers_of_1000(count, text):
    assert shown_bytes(count) == text
