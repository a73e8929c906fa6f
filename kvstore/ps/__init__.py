"""The parameter server: state machines without sockets, clocks or chance, and the loops that drive them."""
