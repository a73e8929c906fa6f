"""Claims: who takes part, and what the tables show."""
