"""``kvstore top``: what the jobs of this user do now on this machine, and for whom their processes wait.

It reads the pages of counters of other processes (`kvstore.observe.native`), and has them take times as
long as it looks on; nothing else changes for them. Only the command imports it.
"""
