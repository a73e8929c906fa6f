"""How it travels: ZeroMQ, authentication, heartbeats, and payloads in shared memory."""
