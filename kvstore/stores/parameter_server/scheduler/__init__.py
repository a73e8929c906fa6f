"""The scheduler: its loop, and the state machine that knows who takes part."""
