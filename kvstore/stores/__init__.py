"""One file for each kind of store."""
