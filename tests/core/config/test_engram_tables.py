"""Primes and multipliers of Engram against the check values of docs/model.md 5.2 and 5.3."""

import pytest
from tests.core.config.published import published

from deepinfer.config import EngramConfig, ModelConfig, column_offsets
from deepinfer.config.engram_tables import engram_multipliers, engram_primes, is_prime

pytestmark = pytest.mark.torchless


def test_primes_of_the_release():
    first, second = engram_primes(ModelConfig.from_dict(published()).engram)
    base = 16_000_000
    assert [p - base for p in first[:8]] == [57, 79, 81, 97, 121, 129, 133, 183]
    assert [p - base for p in first[8:16]] == [189, 207, 211, 253, 277, 289, 307, 321]
    assert [p - base for p in first[16:]] == [339, 381, 393, 399, 403, 409, 447, 463]
    assert [p - base for p in second[:8]] == [477, 487, 499, 507, 511, 573, 609, 627]
    assert [p - base for p in second[16:]] == [781, 799, 813, 819, 841, 877, 879, 889]
    assert (sum(first), sum(second)) == (384006168, 384016682)


def test_multipliers_of_the_release():
    assert engram_multipliers(ModelConfig.from_dict(published()).engram) == (
        (76632096046245, 4839876093313, 35959672319349, 73987337458391),
        (67716810739261, 51510806800915, 30921347202721, 82619226485591),
    )


def test_hash_vector_of_the_release():
    """The worked lookup of docs/model.md 5.4, with the primes, offsets and multipliers above."""
    config = ModelConfig.from_dict(published()).engram
    ids = (11, 7, 5, 3)
    wanted = (
        ((809761672273296, 637715765624537, 714821260265052), (3507628, 26094887), 383729552),
        ((1093503095568922, 965457780015935, 1002174598764858), (479760, 21082118), 374548603),
    )
    for primes, multipliers, (hashes, first_rows, last_row) in zip(
        engram_primes(config), engram_multipliers(config), wanted, strict=True
    ):
        offsets = column_offsets(primes)
        mixed, found, rows = ids[0] * multipliers[0], [], []
        for order in range(1, 4):
            mixed ^= ids[order] * multipliers[order]
            found.append(mixed)
            columns = range((order - 1) * 8, order * 8)
            rows += [mixed % primes[column] + offsets[column] for column in columns]
        assert tuple(found) == hashes
        assert tuple(rows[:2]) == first_rows
        assert rows[-1] == last_row


def engram(**changes) -> EngramConfig:
    values = {
        "layer_ids": (1, 3), "num_embeddings": (556, 638), "max_ngram_size": 3, "n_heads": 2,
        "head_dim": 32, "vocab_size": 128, "pad_token_id": 2, "compressed_vocab_size": 100,
    }  # fmt: skip
    return EngramConfig(**(values | changes))


def test_primes_of_the_tiny_config():
    assert engram_primes(engram()) == ((131, 137, 139, 149), (151, 157, 163, 167))


def test_search_starts_at_the_vocabulary_size_itself():
    assert engram_primes(engram(vocab_size=131))[0][0] == 131
    assert engram_primes(engram(vocab_size=132))[0][0] == 137
    assert engram_primes(engram(vocab_size=2, layer_ids=(0,))) == ((2, 3, 5, 7),)


def test_columns_lie_one_behind_the_other():
    assert column_offsets((131, 137, 139, 149)) == (0, 131, 268, 407)


def test_primality_agrees_with_a_sieve():
    limit = 20_000
    sieve = bytearray([1]) * limit
    sieve[0:2] = b"\0\0"
    for number in range(2, 142):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, limit, number)))
    assert [n for n in range(limit) if is_prime(n)] == [n for n in range(limit) if sieve[n]]


@pytest.mark.parametrize("pseudoprime", [3215031751, 3825123056546413051, 2**61 - 3])
def test_strong_pseudoprimes_are_told_apart(pseudoprime):
    assert not is_prime(pseudoprime)
    assert is_prime(2**61 - 1)
