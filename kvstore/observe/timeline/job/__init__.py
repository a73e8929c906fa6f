"""The files of all processes of a job together: the trace, and the report."""
