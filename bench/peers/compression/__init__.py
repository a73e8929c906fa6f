"""Peers that compress gradients, behind the interface of `bench.peers`."""
