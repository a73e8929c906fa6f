"""Rivals of the parameter server, and limits of its wire."""
