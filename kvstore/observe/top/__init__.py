"""``kvstore top``: the activity of the jobs of this user on this machine.

It reads the pages of counters of other processes (`kvstore.observe.native`), which take times while it runs.
"""
