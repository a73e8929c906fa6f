"""A server: its event loop, its state machine, and its values."""
