"""What workers, servers and the scheduler say to each other; no sockets and no clocks."""
