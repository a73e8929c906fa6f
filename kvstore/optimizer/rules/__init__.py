"""One file for each optimizer."""
