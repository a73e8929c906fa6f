"""A server: its loop, its state machine, and the values that it keeps."""
