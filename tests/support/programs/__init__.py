"""Random programs of calls, played in all stores that mean the same, and compared with one process."""
