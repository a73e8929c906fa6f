"""Sums over GPUs of several processes, by CUDA IPC."""
