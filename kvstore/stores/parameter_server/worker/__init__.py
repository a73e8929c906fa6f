"""A worker's end: verbs become requests about slices, and replies become arrays."""
