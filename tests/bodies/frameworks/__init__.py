"""What processes do in the tests of the frameworks that kvstore works with."""
