"""ZeroMQ and nothing but ZeroMQ: frames, channels, the pulse, authentication."""
