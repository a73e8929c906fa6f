"""Measurements of kvstore beside its rivals; see README.md in this folder."""
