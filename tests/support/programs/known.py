"""Programs that showed a fault once, as small as they can be: by the letters of the fault."""

from __future__ import annotations

import random

from .crews import Script

_SGD, _SCHEDULE = "kv.optimizer.SGD", "kv.lr_scheduler.PolyScheduler(9, base_lr=0.5)"

#: CHANGELOG.md describes the fault of each letter.
KNOWN: dict[str, str] = {
    "A: states of a key that the file does not have": """
store.init(["c"], first(["c"]))
store.set_optimizer(kv.optimizer.Adam(learning_rate=0.125))
note(store.save_optimizer_states, 1)
for n in (1, 2, 3): store.pushpull(["c"], g(["c"], n), out=out(["c"]))
store.barrier()
if rank == 0: store.load_optimizer_states(path(1))
store.barrier()
store.pushpull(["c"], g(["c"], 4), out=out(["c"]))
""",
    "A: loaded by all": """
store.init(["c"], first(["c"]))
store.set_optimizer(kv.optimizer.Adam(learning_rate=0.125))
note(store.save_optimizer_states, 1)
for n in (1, 2, 3): store.pushpull(["c"], g(["c"], n), out=out(["c"]))
store.load_optimizer_states(path(1))
store.pushpull(["c"], g(["c"], 4), out=out(["c"]))
""",
    "B: a change before the next optimizer": f"""
store.init(["a"], first(["a"]))
store.set_optimizer({_SGD}(learning_rate=0.125))
if rank == 1: time.sleep(0.05)
store.set_learning_rate(0.25)
store.set_optimizer({_SGD}(learning_rate=0.5))
store.pushpull(["a"], g(["a"], 1), out=out(["a"]))
""",
    "B: another rule": f"""
store.init(["a"], first(["a"]))
store.set_optimizer(kv.optimizer.Adam(learning_rate=0.125))
if rank == 1: time.sleep(0.05)
store.update_optimizer(beta1=0.5)
store.set_optimizer({_SGD}(learning_rate=0.5))
store.pushpull(["a"], g(["a"], 1), out=out(["a"]))
""",
    "C: a change by one before one by all": f"""
store.init(["a"], first(["a"]))
store.set_optimizer({_SGD}(learning_rate=0.125))
if rank == 0: store.set_learning_rate(0.25)
store.barrier()
store.update_optimizer(rescale_grad=0.5)
store.pushpull(["a"], g(["a"], 1), out=out(["a"]))
""",
    "C: the same value again, by another worker": f"""
store.init(["a"], first(["a"]))
store.set_optimizer({_SGD}(learning_rate=0.125))
if rank == 0: store.set_learning_rate(0.25); store.set_learning_rate(0.5)
store.barrier()
if rank == 1: store.set_learning_rate(0.25)
store.barrier()
store.pushpull(["a"], g(["a"], 1), out=out(["a"]))
""",
    "CI: two workers, two settings": f"""
store.init(["a"], first(["a"]))
store.set_optimizer({_SGD}(learning_rate=0.125))
if rank == 0: store.set_learning_rate(0.25)
if rank == 1: store.update_optimizer(rescale_grad=0.5)
store.barrier()
store.pushpull(["a"], g(["a"], 1), out=out(["a"]))
""",
    "C: before a join": f"""
store.init(["a"], first(["a"]))
store.set_optimizer({_SGD}(learning_rate=0.125))
store.pushpull(["a"], g(["a"], 1), out=out(["a"]))
if rank == 1: store.set_learning_rate(0.25); store.join()
if rank == 0: time.sleep(0.1); store.pushpull(["a"], g(["a"], 2, without=[1]), out=out(["a"]))
""",
    "D: keys that were pushed before": f"""
store.init(["a", "b", "c"], first(["a", "b", "c"]))
store.push(["a"], g(["a"], 1))
store.set_optimizer({_SGD}(lr_scheduler={_SCHEDULE}))
for n in (2, 3, 4): store.push(["b"], g(["b"], n))
store.push(["c"], g(["c"], 5))
store.pull(["a", "b", "c"], out=out(["a", "b", "c"]))
""",
    "D: counts of a file": f"""
store.init(["a", "b"], first(["a", "b"]))
store.set_optimizer({_SGD}(lr_scheduler={_SCHEDULE}))
for n in (1, 2, 3): store.push(["a"], g(["a"], n))
store.push(["b"], g(["b"], 4))
note(store.save_optimizer_states, 1)
store.barrier()
store.set_optimizer({_SGD}(lr_scheduler={_SCHEDULE}))
store.load_optimizer_states(path(1))
store.push(["b"], g(["b"], 5))
store.pull(["a", "b"], out=out(["a", "b"]))
note(store.save_optimizer_states, 2)
""",
    "E: rows of a key whose slices do not begin at rows": """
store.init(["d"], first(["d"]))
store.set_optimizer(kv.optimizer.Adam(learning_rate=0.125, lazy_update=True))
for n in (1, 2): store.pushpull(["d"], g(["d"], n, rows="all"), out=out(["d"]))
""",
    "F: a slower worker still reads": """
store.init(["a", "c"], first(["a", "c"]))
if rank == 1: time.sleep(0.1)
store.pull(["a", "c"], out=out(["a", "c"]))
store.set_optimizer(kv.optimizer.LARS(learning_rate=0.125))
store.pushpull(["a", "c"], g(["a", "c"], 1), out=out(["a", "c"]))
""",
    "GJ: a schedule in the background": f"""
store.init(["a", "b"], first(["a", "b"]))
store.set_optimizer({_SGD}(lr_scheduler={_SCHEDULE}))
for n in (1, 2, 3): later(store.push, ["a"], g(["a"], n))
later(store.push, ["b"], g(["b"], 4))
store.wait()
store.pull(["a", "b"], out=out(["a", "b"]))
""",
    "H: counts of the optimizer before": f"""
store.init(["a", "b"], first(["a", "b"]))
store.set_optimizer({_SGD}(learning_rate=0.125))
for n in (1, 2): store.pushpull(["a", "b"], g(["a", "b"], n), out=out(["a", "b"]))
store.barrier()
store.set_optimizer({_SGD}(learning_rate=0.25))
store.pushpull(["a"], g(["a"], 3), out=out(["a"]))
note(store.save_optimizer_states, 1)
""",
    "H: a setting with a state": f"""
store.init(["a"], first(["a"]))
store.set_optimizer({_SGD}(learning_rate=0.125))
store.pushpull(["a"], g(["a"], 1), out=out(["a"]))
store.barrier()
store.set_optimizer({_SGD}(learning_rate=0.25))
store.update_optimizer(momentum=0.5)
for n in (2, 3): store.pushpull(["a"], g(["a"], n), out=out(["a"]))
""",
    "J: keys with different counts": f"""
store.init(["a", "b"], first(["a", "b"]))
store.set_optimizer({_SGD}(lr_scheduler=kv.lr_scheduler.PolyScheduler(999, base_lr=0.5)))
for n in range(50): store.push(["a"], g(["a"], n)); store.push(["a", "b"], g(["a", "b"], 50 + n))
store.pull(["a", "b"], out=out(["a", "b"]))
""",
    "N: an object that changes, with a push in the background": f"""
store.init(["a"], first(["a"]))
o = {_SGD}(learning_rate=0.125); store.set_optimizer(o)
for n in range(20): later(store.push, ["a"], g(["a"], n)); o.learning_rate = 1 / (2 + n)
store.wait()
store.pull(["a"], out=out(["a"]))
""",
    "P: residuals of keys that move to one server": """
store.init(["d"], first(["d"]))
store.set_gradient_compression({"type": "1bit"})
store.pushpull(["d"], g(["d"], 1), out=out(["d"]))
store.set_optimizer(kv.optimizer.LARS(learning_rate=0.125))
store.pushpull(["d"], g(["d"], 2), out=out(["d"]))
""",
    "G: the time of a push behind a pull in the background": """
store.init(["a", "b"], first(["a", "b"]))
store.set_optimizer(kv.optimizer.SGD(lr_scheduler=kv.lr_scheduler.PolyScheduler(9, base_lr=0.5)))
later(store.pushpull, ["a", "b"], g(["a", "b"], 1), out=out(["a", "b"]))
for n in (2, 3): store.pushpull(["b"], g(["b"], n), out=out(["b"]))
later(store.pull, ["a", "b"], out=out(["a", "b"]))
later(store.push, ["a"], g(["a"], 4))
store.pull(["a", "b"], out=out(["a", "b"]))
""",
    "H: states that a slower worker loads into the next optimizer": """
store.init(["b"], first(["b"]))
store.set_optimizer(kv.optimizer.Adam(learning_rate=0.125))
store.pushpull(["b"], g(["b"], 1), out=out(["b"]))
note(store.save_optimizer_states, 1)
store.wait(); store.barrier()
store.load_optimizer_states(path(1))
store.set_optimizer(kv.optimizer.AdaGrad(learning_rate=0.125))
store.wait(); store.barrier()
note(store.save_optimizer_states, 2)
store.pushpull(["b"], g(["b"], 3), out=out(["b"]))
""",
    "J: the time of a table that is initialised before a dense key": """
store.init(["t", "b"], first(["t", "b"]))
store.set_optimizer(kv.optimizer.SGD(lr_scheduler=kv.lr_scheduler.PolyScheduler(9, base_lr=0.5)))
for n in (1, 2): store.pushpull(["b"], g(["b"], n), out=out(["b"]))
store.push(["t", "b"], g(["t", "b"], 3))
store.pull(["b"], out=out(["b"]))
""",
    "J: the time of a key to which some workers push rows": """
store.init(["t", "b", "a", "d"], first(["t", "b", "a", "d"]))
store.set_optimizer(kv.optimizer.SGD(lr_scheduler=kv.lr_scheduler.PolyScheduler(20, base_lr=0.5)))
for n in (1, 2, 3): store.pushpull(["a"], g(["a"], n), out=out(["a"]))
for n in (1, 2): store.pushpull(["d"], g(["d"], n), out=out(["d"]))
store.push(["t", "b", "a", "d"], g(["t", "b", "a", "d"], 4, rows="some"))
store.push(["t", "d", "a", "b"], g(["t", "d", "a", "b"], 5, rows="all"))
for n in (1, 2): store.push(["t"], g(["t"], n))
later(store.push, ["t", "b", "a", "d"], g(["t", "b", "a", "d"], 6, rows="some"))
later(store.push, ["t", "b", "d"], g(["t", "b", "d"], 7, rows="all"))
store.pull(["a", "b", "d"], out=out(["a", "b", "d"]))
""",
    "K: rows of a table that is loaded after a change of the optimizer": """
store.init(["t", "b"], first(["t", "b"]))
store.set_optimizer(kv.optimizer.NAG(momentum=0.5, learning_rate=0.125))
store.wait(); store.barrier()
note(store.save, 1)
store.wait(); store.barrier()
for n in range(8): store.push(["t", "b"], g(["t", "b"], n))
store.wait(); store.barrier()
store.load(path(1))
store.wait(); store.barrier()
note(store.save, 2)
store.push(["t", "b"], g(["t", "b"], 9))
store.wait(); store.barrier()
store.set_optimizer(kv.optimizer.Nadam(learning_rate=0.125))
store.wait(); store.barrier()
store.load(path(1))
store.wait(); store.barrier()
note(store.save, 3)
""",
    "K: rows of a table that is loaded after pushes to an optimizer without states": """
store.init(["t", "u"], first(["t", "u"]))
store.set_optimizer(kv.optimizer.SGD(learning_rate=0.125))
store.wait(); store.barrier()
note(store.save, 1)
for n in (1, 2): store.push(["t", "u"], g(["t", "u"], n))
store.wait(); store.barrier()
note(store.save_optimizer_states, 2, dump_optimizer=True)
store.load(path(1))
store.wait(); store.barrier()
note(store.save, 3)
store.push(["t", "u"], g(["t", "u"], 3))
store.wait(); store.barrier()
note(store.save, 4)
note(store.save_optimizer_states, 5)
""",
    "K: rows of a table that is loaded after its states": """
store.init(["t", "b"], first(["t", "b"]))
store.set_optimizer(kv.optimizer.NAG(momentum=0.5, learning_rate=0.125))
store.wait(); store.barrier()
note(store.save, 1)
for n in (1, 2): store.push(["t", "b"], g(["t", "b"], n))
store.wait(); store.barrier()
note(store.save_optimizer_states, 2, dump_optimizer=True)
store.wait(); store.barrier()
store.load_optimizer_states(path(2))
store.wait(); store.barrier()
store.load(path(1))
store.wait(); store.barrier()
note(store.save, 3)
store.push(["t", "b"], g(["t", "b"], 3))
store.wait(); store.barrier()
note(store.save, 4)
note(store.save_optimizer_states, 5)
""",
    "K: rows that are absent": """
store.init(["t"], first(["t"]))
store.set_optimizer(kv.optimizer.FTML(clip_gradient=0.75, learning_rate=0.125))
for n in (3, 4): store.pushpull(["t"], g(["t"], n), out=out(["t"]))
store.row_sparse_pull(["t"], out=rows_out(["t"]), row_ids=ids(["t"], 1))
store.pull(["t"], out=out(["t"]))
note(store.save_optimizer_states, 1)
note(store.save, 2)
""",
}


def script(name: str) -> Script:
    """Return a program as one for two workers."""
    return Script(2, "float32", tuple(KNOWN[name].strip().split("\n")))


def late(whole: Script, seconds: float, draw: random.Random) -> Script:
    """Let a worker be late somewhere."""
    at = draw.randrange(1, len(whole.lines))
    line = f"if rank == {draw.randrange(whole.workers)}: time.sleep({seconds})"
    return whole._replace(lines=(*whole.lines[:at], line, *whole.lines[at:]))
