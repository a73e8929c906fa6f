"""Counters and events of a process as C structs, and the Cython classes that own them."""
