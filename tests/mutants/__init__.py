"""Mutants: the code, changed in one place so that a promise is broken, has to be caught by its histories."""
