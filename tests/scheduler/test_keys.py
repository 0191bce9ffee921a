"""Keys of the prefix index: chained, salted, and only over full blocks."""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from octavo.scheduler.keys import KEY_BYTES, chain_keys, root_key

IDS = np.arange(100, 140, dtype=np.int32)


def test_only_full_blocks_have_keys():
    root = root_key(16)
    assert len(chain_keys(root, IDS, 16)) == 2
    assert chain_keys(root, IDS[:15], 16) == []
    assert all(len(key) == KEY_BYTES for key in chain_keys(root, IDS, 16))


def test_a_key_is_the_hash_of_its_parent_and_its_own_ids():
    root = root_key(4)
    first, second = chain_keys(root, IDS[:8], 4)
    assert first == sha256(root + IDS[:4].astype("<i4").tobytes()).digest()[:16]
    assert second == sha256(first + IDS[4:8].astype("<i4").tobytes()).digest()[:16]


def test_a_chain_can_go_on_from_a_key():
    root = root_key(4)
    whole = chain_keys(root, IDS, 4)
    assert whole[:3] + chain_keys(whole[2], IDS[12:], 4) == whole


def test_the_same_block_after_another_beginning_is_another_key():
    root = root_key(8)
    other = IDS.copy()
    other[0] += 1
    assert not set(chain_keys(root, IDS, 8)) & set(chain_keys(root, other, 8))


def test_roots_differ_by_block_size_salt_and_adapter_and_parts_cannot_imitate_each_other():
    roots = [
        root_key(16), root_key(32), root_key(16, "a"), root_key(16, "", "a"), root_key(16, "a", "b"),
        root_key(16, "ab"), root_key(16, "", "ab"), root_key(16, "b", "a"), root_key(16, "a\0", "b"),
    ]  # fmt: skip
    assert len(set(roots)) == len(roots)


def test_any_integer_array_gives_the_same_keys():
    root = root_key(8)
    assert chain_keys(root, IDS.astype(np.int64), 8) == chain_keys(root, np.stack([IDS, IDS], 1)[:, 0], 8)
