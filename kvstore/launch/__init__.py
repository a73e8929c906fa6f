"""The `kvstore` command and what stands behind it."""
