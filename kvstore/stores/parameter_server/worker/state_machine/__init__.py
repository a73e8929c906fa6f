"""A worker without its sockets and its clock: events and the time go in, actions come out."""
