"""What is measured: cases, their inputs and goals, a module for each claim."""
