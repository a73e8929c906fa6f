"""The stores on which every test of the contract runs."""

#: Names for `kv.create`, those on servers with the number of these. A new kind of store is added here, and
#: must pass test_contract.py.
STORES = ("local", "device", "shared", "dist_sync:1", "dist_sync:2", "dist_async:1")
