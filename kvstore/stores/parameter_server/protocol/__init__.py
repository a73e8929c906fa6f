"""The messages of workers, servers and the scheduler, and their common rules; no sockets and no clocks."""
