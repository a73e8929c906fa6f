"""Not BytePS: a stand-in for its worker, which sums over this library's own `dist_sync`.

It has the names and signatures of BytePS 0.2.5.post15 that the store calls (tests/data/byteps.json), and its
rules that matter to the store, as they were read in its source.
"""

__version__ = "0.2.5.post15 (stand-in)"
