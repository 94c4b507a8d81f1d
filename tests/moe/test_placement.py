"""The planning arithmetic of the balancer, which needs numpy alone."""

import numpy as np
import pytest

from deepinfer_moe.placement import pack_evenly, place_replicas, replicate_heaviest

pytestmark = pytest.mark.torchless


def floats(*rows):
    return np.array(rows, dtype=np.float32)


def test_packing_gives_the_next_heaviest_item_to_the_lightest_pack_with_room():
    pack, rank = pack_evenly(floats([9, 1, 5, 4]), 2)
    # 9 -> pack 0; 5 -> pack 1; 4 -> pack 1 (5 < 9), now full; 1 -> pack 0
    assert pack.tolist() == [[0, 0, 1, 1]]
    assert rank.tolist() == [[0, 1, 0, 1]]


def test_packs_of_one_item_keep_the_order_of_the_items():
    pack, rank = pack_evenly(floats([1, 7, 3]), 3)
    assert pack.tolist() == [[0, 1, 2]]
    assert rank.tolist() == [[0, 0, 0]]


def test_spare_replicas_go_where_the_load_per_replica_is_highest():
    expert, rank, count = replicate_heaviest(floats([6, 2, 5], [1, 1, 1]), 6)
    # row 0: 6 -> 3+3; then 5 -> 2.5+2.5; then 3 -> thirds of 6. Row 1: in order
    assert expert.tolist() == [[0, 1, 2, 0, 2, 0], [0, 1, 2, 0, 1, 2]]
    assert rank.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 1]]
    assert count.tolist() == [[3, 1, 2], [2, 2, 2]]


def test_the_published_example_is_reproduced():
    weight = floats(
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    )
    phy2log, _, _ = place_replicas(weight, 16, 4, 2, 8)
    assert phy2log.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
