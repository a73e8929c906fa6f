"""The timeline of a job: each process records its events and writes them; `job` reads the files of all."""
