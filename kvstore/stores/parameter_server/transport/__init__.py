"""The transport of messages: ZeroMQ, streams, authentication, heartbeats, and shared memory."""
