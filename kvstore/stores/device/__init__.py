"""The store of one process with values that may be on GPUs."""
