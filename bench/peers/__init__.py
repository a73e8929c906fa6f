"""Rivals behind one interface; each may run in a process, and an environment, of its own."""
