"""``kvstore bench``: the time of a user's own push and pull, beside other libraries on the same machine.

`run` is the whole course. Each peer has processes of its own (`worker_group`, `worker`), which take turns
within each round (`rounds`) while all others sleep.
"""
