"""Stores on servers with a first sum on each host: one sum for each host is sent."""
