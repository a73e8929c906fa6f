"""Cases, their inputs and goals: a module for each claim."""
