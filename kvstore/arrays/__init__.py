"""What callers hand over: arrays of the host, row-sparse arrays, keys with values, memory of the store."""
