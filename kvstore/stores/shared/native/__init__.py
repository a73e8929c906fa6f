"""Memory that the workers of one machine share: the region, its table of keys, waiting and waking."""
