"""Peers that compress gradients, with the interface of `bench.peers`."""
