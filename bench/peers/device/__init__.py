"""Peers of the store on a GPU. All peers run in one process, on the same tensors of PyTorch."""
