"""Peers of the store on a GPU. All of them work in one process, on the same tensors of PyTorch."""
