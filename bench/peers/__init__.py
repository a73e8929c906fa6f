"""Rivals with one interface; each can run in its own process and environment."""
