"""Sums between GPUs of several processes, by CUDA IPC."""
