"""``kvstore bench``: the time of a user's push and pull, compared with other libraries on the same machine.

`worker_group` (the processes of a peer) and `rounds` (their turns) are also the engine of ``bench/``.
"""
