"""The C and Cython part of the transport: streams of messages, and exchanges over them."""
