"""The memory that the workers of one machine share: the region, its table of keys, waits and wake-ups."""
