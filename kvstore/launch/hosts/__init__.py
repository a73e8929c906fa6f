"""Other hosts of a job, reached by ssh."""
