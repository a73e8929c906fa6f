"""The store of one process whose values may lie on GPUs."""
