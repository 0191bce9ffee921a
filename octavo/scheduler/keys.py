"""Keys of the prefix index: a chain of hashes over full blocks of token ids.

key(block i) = SHA-256(key(block i - 1) || the block's ids as little-endian int32), cut to 16 bytes. The root covers
the block size, the tenant salt and whatever else changes what K and V mean (adapter, media), so chains of different
tenants never meet. Keys are made from tokens by our own code only; a key that a client sends is never trusted.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16


def root_key(block_size: int, salt: str = "", adapter: str = "") -> bytes:
    """The key before the first block. Each part is length-prefixed, so parts cannot imitate each other."""
    h = sha256(b"octavo-prefix-1")
    for part in (str(block_size), salt, adapter):
        data = part.encode()
        h.update(len(data).to_bytes(4, "little") + data)
    return h.digest()[:KEY_BYTES]


def chain_keys(parent: bytes, ids: NDArray[np.int32], block_size: int) -> list[bytes]:
    """Keys of all full blocks of `ids` that follow `parent`; a partly filled last block has none."""
    data = np.ascontiguousarray(ids, np.int32).tobytes()
    width = 4 * block_size
    keys = []
    for at in range(0, len(data) - width + 1, width):
        parent = sha256(parent + data[at : at + width]).digest()[:KEY_BYTES]
        keys.append(parent)
    return keys
