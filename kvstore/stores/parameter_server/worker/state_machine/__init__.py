"""The state machine of a worker: it gets events and the time, and returns actions; no sockets, no clock."""
