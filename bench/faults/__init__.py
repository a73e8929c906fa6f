"""A table of faults: small jobs, something that happens to each, and what their histories say.

- `cells`: the faults, the stores, what cannot be, and what is promised
- `plan`: what one run is, by its seed
- `workers`: what its workers do
- `group`: its processes, of each kind of store
- `strike`: how the fault is done
- `judge`: what went wrong, and when the survivors were told
- `trial`: one run, from its seed to its outcome
- `page`: the table
- `soak`: jobs that run for long, and whether anything grows
- `command`: the options
"""

import sys

from bench import ROOT

# The tests' jobs, and their recorder and checker of histories.
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "bodies")]
