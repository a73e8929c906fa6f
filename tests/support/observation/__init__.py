"""Files and traces of timelines, and a Prometheus, for tests."""
