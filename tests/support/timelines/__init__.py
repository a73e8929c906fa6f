"""Files and traces of timelines, for tests."""
