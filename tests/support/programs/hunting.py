"""Programs of many seeds, several at a time; the first difference of each is made small and printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from .crews import PLACES, Crews, Found, Script
from .drawing import drawn
from .shrinking import shrunk


def hunted(
    crews: Crews, seeds: Iterable[int], stores: Sequence[str], small: bool = True, side_by_side: int = 4
) -> Iterator[str]:
    """Play the programs of these seeds in these stores; yield what differs, as small as it can be."""
    programs = {seed: drawn(seed) for seed in seeds}
    work = [(seed, store) for seed in programs for store in stores]
    with ThreadPoolExecutor(side_by_side) as pool:
        played = [pool.submit(crews.differs, programs[seed].script(), store) for seed, store in work]
        try:
            for (seed, _), one in zip(work, played, strict=True):
                if (found := one.result()) is not None:
                    program = programs[seed]
                    if small:
                        program, found = shrunk(crews, program, found)
                    yield told(f"seed {seed}", program.script(), found)
        finally:
            pool.shutdown(cancel_futures=True)


def told(name: str, script: Script, found: Found) -> str:
    """Return a difference, and the program that shows it."""
    place = PLACES[found.store]
    options = ', hierarchy="host"' if place.by_hosts else ""
    numbered = [f"{line}  # <- here" if at == found.line else line for at, line in enumerate(script.lines)]
    servers = f" -s {place.servers}" if place.servers and place.name != "shared" else ""
    head = f"{name}: {found.store}, worker {found.rank}: {found.text}"
    how = f"# kvstore run -n {script.workers}{servers} -- python THIS, with tests/support on the path"
    begin = f'globals().update(playing.alone("{place.name}", "{script.dtype}"{options}))'
    return "\n".join([head, "", how, "from programs import playing", begin, *numbered, "show()", ""])
