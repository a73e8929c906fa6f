"""The engine that measures each claim and writes its page."""
