"""A table of faults: small jobs with one fault each, judged by their histories.

- `cells`: faults, stores, impossible cells, promises, and a run by its seed
- `workers`: the code of its workers
- `group`: its processes, of each kind of store
- `judge`: violations, and the times when survivors raised an error
- `trial`: one run, from its seed to its outcome
- `page`: the table
- `soak`: long jobs, and the growth of their processes
- `command`: the options
"""

import sys

from bench import ROOT

# The tests' jobs, and their recorder and checker of histories.
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "bodies")]
