"""The store of several processes of one machine."""
