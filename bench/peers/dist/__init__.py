"""Rivals of the parameter server and limits of its wire: groups of processes, as in `bench.peers_shared`."""
