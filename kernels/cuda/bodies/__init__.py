"""Bodies of kernels, which are compiled for GPUs, and run on the processor in tests."""
