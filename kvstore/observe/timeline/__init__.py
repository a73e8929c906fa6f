"""The timeline of a job: each process records its events, and `kvstore timeline` puts them together.

Here is what runs inside of a job; `job` reads what was written.
"""
