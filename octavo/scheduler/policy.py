"""Who is served next, and who gives way: order keys, the waiting queue, fair shares.

An order key is fixed when a sequence is submitted and kept through preemption, so the queue is a heap and a preempted
sequence comes back to its old place. Smaller keys are served first; the victim of a preemption is the running
sequence with the largest.

- fcfs: the key is the arrival number.
- priority: a step of priority counts as `PRIORITY_STEP` arrivals. So a larger number is served earlier, and nobody
  waits for ever: a sequence is overtaken only by those who come within that many arrivals of it (ageing).
- fair: first come first served within each tenant; the next sequence comes from the tenant that was served the
  fewest tokens, a generated one counting twice. A tenant that comes (back) starts level with the least served of
  those who wait, or with the one served last, so that nobody saves up credit. Source: virtual token counter, Sheng
  et al. 2024, "Fairness in serving large language models".
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

POLICIES = ("fcfs", "priority", "fair")
PRIORITY_STEP = 1024
MAX_TENANTS = 1024

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
CHARGED_TOGETHER = 4
_TIE_BITS = 20


def order_key(policy: str, arrival: int, priority: int) -> int:
    """The order key of the sequence with this arrival number. Unique among sequences that live at the same time."""
    place = arrival - priority * PRIORITY_STEP if policy == "priority" else arrival
    return (place << _TIE_BITS) | (arrival & ((1 << _TIE_BITS) - 1))


class WaitingQueue:
    """Rows that wait for a device row: a heap for each tenant, the least served tenant first. Removal is lazy.

    Without fair shares all rows belong to tenant "", and so do those of tenants beyond the first `MAX_TENANTS`.
    """

    def __init__(self, *, fair: bool = False) -> None:
        self.fair = fair
        self.served: dict[str, int] = defaultdict(int)  # tokens by tenant, weighted
        self.names = [""]  # tenants by number
        self._numbers = {"": 0}
        self._heaps: dict[str, list[tuple[int, int]]] = {}
        self._keys: dict[int, int] = {}
        self._tenants: dict[int, str] = {}  # of the rows that wait
        self._waiting: dict[str, int] = {}  # rows that wait, by tenant
        self._decodes: list[NDArray[np.int64]] = []  # tenants of decode rows that are not charged yet
        self._last_served = 0  # counter of the tenant whose row was taken last

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, row: int) -> bool:
        return row in self._keys

    def number(self, tenant: str) -> int:
        """The number of a tenant."""
        if not self.fair or tenant in self._numbers:
            return self._numbers.get(tenant, 0)
        if len(self.names) > MAX_TENANTS:
            return 0
        self._numbers[tenant] = len(self.names)
        self.names.append(tenant)
        return self._numbers[tenant]

    def push(self, row: int, key: int, tenant: str = "", *, fresh: bool = False) -> None:
        """Add a row; `key` is unique. `fresh`: a new arrival, not one that comes back."""
        tenant = tenant if self.fair else ""
        heap = self._heaps.setdefault(tenant, [])
        if self.fair and fresh and not self._waiting.get(tenant):
            others = [self.served.get(other, 0) for other, rows in self._waiting.items() if rows]
            self.served[tenant] = max(self.served.get(tenant, 0), min(others, default=self._last_served))
        self._keys[row] = key
        self._tenants[row] = tenant
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1
        heappush(heap, (key, row))

    def pop(self) -> int | None:
        """Take out the row that is served next, None when nothing waits."""
        tenant = self._next()
        if tenant is None:
            return None
        row = self._first(tenant)
        heappop(self._heaps[tenant])
        self.remove(row)
        self._last_served = self.served.get(tenant, 0)
        return row

    def peek(self) -> int | None:
        """The row that is served next; it stays."""
        tenant = self._next()
        return None if tenant is None else self._first(tenant)

    def _next(self) -> str | None:
        """The least served tenant that waits; of equals the first by name."""
        best, least = None, 0
        for tenant, rows in self._waiting.items():
            if rows:
                served = self.served.get(tenant, 0)
                if best is None or served < least or (served == least and tenant < best):
                    best, least = tenant, served
        return best

    def _first(self, tenant: str) -> int:
        """The first row of a tenant that waits; entries before it of rows that were taken out go."""
        heap, keys = self._heaps[tenant], self._keys
        while True:
            key, row = heap[0]
            if keys.get(row) == key:
                return row
            heappop(heap)

    def remove(self, row: int) -> None:
        """Take out a row that waits."""
        del self._keys[row]
        self._waiting[self._tenants.pop(row)] -= 1

    def rows(self) -> list[int]:
        """The rows that wait, in any order."""
        return list(self._keys)

    def charge(self, tenant: str, tokens: int) -> None:
        """Count tokens that a tenant was served."""
        self.served[tenant] += tokens

    def charge_decodes(self, tenants: NDArray[np.int64]) -> None:
        """Count one step's decode rows, by their tenants' numbers. A few steps are counted together."""
        self._decodes.append(tenants)
        if len(self._decodes) == CHARGED_TOGETHER:
            for tenant, rows in enumerate(np.bincount(np.concatenate(self._decodes)).tolist()):
                if rows:
                    self.charge(self.names[tenant], rows * (PROMPT_WEIGHT + OUTPUT_WEIGHT))
            self._decodes = []
