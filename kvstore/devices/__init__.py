"""Arrays on GPUs: their location, streams and the order of work, memory of stores. No keys, no stores.

Neither CUDA nor a framework is imported before the first array on a GPU is used. Only `driver` calls the CUDA
driver.
"""
