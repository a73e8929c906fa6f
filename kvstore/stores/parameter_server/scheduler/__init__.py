"""The scheduler of a job: its event loop, its state machine, and the journal for its restarts."""
