"""The part of the transport that is C and Cython: streams of messages beside ZeroMQ."""
