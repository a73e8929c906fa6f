"""The stores on parameter servers: workers, servers and a scheduler."""
