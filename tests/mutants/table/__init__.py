"""Small changes of the code, each of which breaks a promise."""

from .duplicates import DUPLICATES
from .fencing import FENCING
from .mutant import Mutant
from .phases import PHASES
from .reads import READS
from .rounds import ROUNDS
from .settings import SETTINGS
from .snapshots import SNAPSHOTS

__all__ = ["MUTANTS", "Mutant"]

MUTANTS: list[Mutant] = [*ROUNDS, *DUPLICATES, *FENCING, *SNAPSHOTS, *READS, *PHASES, *SETTINGS]
