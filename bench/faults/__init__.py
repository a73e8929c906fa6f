"""A table of faults: small jobs, something that happens to each, and what their histories say.

- `cells`: the faults, the stores, what cannot be, what is promised, and a run by its seed
- `workers`: what its workers do
- `group`: its processes, of each kind of store
- `judge`: what went wrong, and when the survivors were told
- `trial`: one run, from its seed over its fault to its outcome
- `page`: the table
- `soak`: jobs that run for long, and whether anything grows
- `command`: the options
"""

import sys

from bench import ROOT

# The tests' jobs, and their recorder and checker of histories.
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "bodies")]
