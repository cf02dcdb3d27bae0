"""What the L2 cache shall do with the lines of an access: cache policies, as `createpolicy.fractional` encodes them."""

from __future__ import annotations

EVICT_FIRST = 0x12F0000000000000
EVICT_NORMAL = 0x1000000000000000
EVICT_LAST = 0x14F0000000000000
