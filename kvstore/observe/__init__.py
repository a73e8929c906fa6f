"""Tools that show what kvstore does, and why it does not."""
