"""Arrays on GPUs: what lies where, streams and their order, memory of our own. No keys, no stores.

Nothing here imports CUDA or a framework before an array of a GPU has been met; `driver` is the one module
that talks to the driver.
"""
