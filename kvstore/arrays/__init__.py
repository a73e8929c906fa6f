"""Arrays of callers: arrays on the host, row-sparse arrays, keys with values; and the memory of stores."""
