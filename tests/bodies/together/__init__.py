"""What processes do in the tests of collective calls."""
