"""What processes do in the tests of counters and events."""
