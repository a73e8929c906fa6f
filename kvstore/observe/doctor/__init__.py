"""``kvstore doctor``: all that decides whether and how fast kvstore runs on this machine.

A check is a function that returns one finding or several; its name is the subject. `report` lists the checks.
"""
