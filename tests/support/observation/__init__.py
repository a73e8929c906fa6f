"""Checks of the doctor, files and traces of timelines, and a Prometheus, for tests."""
