"""Bodies of kernels: what is compiled for GPUs, and runs on the processor in tests."""
