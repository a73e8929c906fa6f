"""Random programs, by seed, for stores that mean the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from .playing import SHAPES, TABLES
from .program import BARRIER, Call, Key, Program, Stage

#: Constructor arguments of each optimizer, of which some are used.
RULES: dict[str, tuple[str, ...]] = {
    "SGD": ("momentum=0.5", "lazy_update=True"),
    "NAG": ("momentum=0.5",),
    "Adam": ("lazy_update=True", "beta1=0.5"),
    "AdamW": ("beta1=0.5",),
    "AdaGrad": ("epsilon=0.5",),
    "AdaDelta": ("rho=0.5",),
    "Adamax": ("beta2=0.5",),
    "Nadam": ("schedule_decay=0.5",),
    "RMSProp": ("centered=True", "momentum=0.5"),
    "Ftrl": ("lamda1=0.125",),
    "FTML": ("beta1=0.5",),
    "Signum": ("momentum=0.5", "wd_lh=0.125"),
    "SGLD": ("seed=3",),
    "DCASGD": ("momentum=0.5",),
    "LAMB": ("bias_correction=False",),
    "LARS": ("momentum=0.5", "lazy_update=True"),
    "GroupAdaGrad": (),
    "Test": (),
}
COMMON = ("rescale_grad=0.5", "clip_gradient=0.75", "lr_mult={KEY: 0.5}")
SCHEDULES = (
    "kv.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.5)",
    "kv.lr_scheduler.MultiFactorScheduler([2, 3, 5], 0.5, base_lr=0.25)",
    "kv.lr_scheduler.PolyScheduler(9, base_lr=0.5)",
    "kv.lr_scheduler.CosineScheduler(7, base_lr=0.25, warmup_steps=2)",
)
#: Settings that change, with the values that they get.
CHANGES = {
    "learning_rate": ("0.25", "0.0625", "0.5"),
    "rescale_grad": ("0.25", "2.0", "0.75"),
    "wd": ("0.125", "0.25", "0.0"),
    "clip_gradient": ("0.25", "1.5", "None"),
    "lr_mult": ("{KEY: 0.25}", "{KEY: 2.0}", "{}"),
    "wd_mult": ("{KEY: 0.25}", "{KEY: 2.0}", "{}"),
}
COMPRESSIONS = ("2bit", "1bit", "fp16")
SECONDS = (0.0, 0.001, 0.01, 0.1)
EXCHANGES = {
    "store.push(KEYS, g(KEYS, NUMBERHOWWITHOUT))": 4,
    "store.pushpull(KEYS, seen(g(KEYS, NUMBERHOWWITHOUT), KEYS))": 2,
    "store.pushpull(KEYS, g(KEYS, NUMBERHOWWITHOUT), out=out(KEYS))": 4,
    "later(store.push, KEYS, g(KEYS, NUMBERHOWWITHOUT), priority=NUMBER)": 2,
    "later(store.pushpull, KEYS, g(KEYS, NUMBERHOWWITHOUT), out=out(KEYS))": 1,
    "store.push(KEYS, at_home(KEYS, g(KEYS, NUMBERWITHOUT))); store.pull(KEYS, out=out(KEYS))": 2,
    "store.pushpull(KEYS, at_home(KEYS, g(KEYS, NUMBERWITHOUT))); home(KEYS)": 1,
    "store.pull(KEYS, out=out(KEYS))": 3,
    "later(store.pull, KEYS, out=out(KEYS))": 1,
}
KINDS = ("all", "one", "different")
#: Before a file is read or written, all workers must have reached this place; after it is written, none may
#: be ahead.
TOGETHER = Call("store.wait(); store.barrier()", kept=True)


def drawn(seed: int) -> Program:
    """Draw the program of a seed."""
    return _Drawing(seed).program()


class _Drawing:
    """The state of the program so far."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.workers = self.draw.choice((2, 3, 4))
        self.dtype = self.draw.choice(
            ("float32",) * 5 + ("float64", "float64", "float16", "float16", "int32")
        )
        self.kind = self.draw.choice(KINDS)
        self.compressed = self.dtype == "float32" and self.draw.random() < 0.2
        self.all_keys = self._keys()
        self.keys: list[Key] = []
        self.scheduled = self.draw.random() < 0.3
        self.rule = self.codec = ""
        self.number = 0
        self.optimizers = 0
        self.joined = False
        self.files: list[tuple[str, int, str]] = []

    def _keys(self) -> list[Key]:
        names = [key for key in SHAPES if isinstance(key, str)]
        if self.compressed:
            names = [key for key in names if key not in TABLES]
        some = self.draw.sample(names, self.draw.randint(1, min(4, len(names))))
        if self.draw.random() < 0.8:
            return list(some)
        return [list(SHAPES).index(key) + 1 for key in some]

    def program(self) -> Program:
        stages = [self._init(self.all_keys[: self.draw.randint(1, len(self.all_keys))])]
        if self.compressed:
            stages.append(self._compression())
        stages += [self._exchange() for _ in range(self.draw.randint(0, 2))]
        stages += self._optimizer()
        for _ in range(self.draw.randint(6, 24)):
            stages += self._stage()
        return Program(self.workers, self.dtype, tuple(stages))

    def _init(self, keys: Sequence[Key]) -> Stage:
        self.keys += keys
        return (Call("store.init(KEYS, first(KEYS))", tuple(keys)),)

    def _stage(self) -> list[Stage]:
        late = [self._sleep()] if self.draw.random() < 0.25 else []
        kinds = {
            self._exchange: 50, self._change: 20, self._save: 8, self._load: 12, self._rows: 4, self._wait: 4,
            self._more: 6, self._optimizer: 5, self._join: 2,
        }  # fmt: skip
        (made,) = self.draw.choices([*kinds], [*kinds.values()])
        found: Any = made()
        stages = found if isinstance(found, list) else [found]
        return [*late, *(stage for stage in stages if stage)]

    def _sleep(self) -> Stage:
        (seconds,) = self.draw.choices(SECONDS, (4, 4, 4, 1))
        return (Call(f"time.sleep({seconds})", by=self.draw.randrange(self.workers)),)

    # ------------------------------------------------------------------------------------------ exchanges

    def _some(self) -> tuple[Key, ...]:
        some = self.draw.sample(self.keys, self.draw.randint(1, len(self.keys)))
        return (*some, some[0]) if self.draw.random() < 0.1 else tuple(some)

    def _exchange(self) -> Stage:
        (text,) = self.draw.choices([*EXCHANGES], [*EXCHANGES.values()])
        keys = self._some()
        if "seen(" in text or "home(" in text:  # rows would get only the stored rows
            keys = tuple(key for key in dict.fromkeys(keys) if key not in TABLES)
            text = text.replace("HOW", "")
        return (Call(self._numbered(text), keys),) if keys else ()

    def _numbered(self, text: str) -> str:
        self.number += 1
        how = self.draw.choice(("", "", "", ", values=2", ", values=3"))
        if self.draw.random() < 0.2 and not self.compressed:
            how += self.draw.choice((', rows="all"', ', rows="all"', ', rows="some"'))
        return text.replace("NUMBER", str(self.number)).replace("HOW", how)

    def _rows(self) -> Stage:
        tables = tuple(key for key in self.keys if key in TABLES)
        self.number += 1
        text = f"store.row_sparse_pull(KEYS, out=rows_out(KEYS), row_ids=ids(KEYS, {self.number}))"
        return (Call(text, tables),) if tables else ()

    def _wait(self) -> Stage:
        return (self.draw.choice((BARRIER, Call("store.wait()"))),)

    def _more(self) -> Stage:
        left = [key for key in self.all_keys if key not in self.keys]
        if not left:
            return ()
        if self.draw.random() < 0.5 or left[0] in TABLES:
            return self._init(left[:1])
        self.keys += left[:1]
        return (Call("store.broadcast(KEYS, first(KEYS), out=out(KEYS))", tuple(left[:1])),)

    def _join(self) -> Stage:
        may = self.workers > 2 and not (self.joined or self.compressed or self.kind != "all")
        if not may:
            return ()
        self.joined = True
        return (Call("store.join()", by=self.workers - 1, joins=True),)

    # ----------------------------------------------------------------------------------------- settings

    def _optimizer(self) -> list[Stage]:
        if self.dtype == "int32":
            return []
        text = self._optimizer_text()
        self.optimizers += 1
        return [(Call(f"o = {text}; store.set_optimizer(o)"),)]

    def _optimizer_text(self) -> str:
        rules = dict(RULES)
        if self.scheduled:  # a rate of 0 is refused by these; which call reports it depends on the store
            del rules["Ftrl"], rules["FTML"]
        if any(len(SHAPES[key]) < 2 for key in self.all_keys):
            del rules["GroupAdaGrad"]
        self.rule = self.draw.choice([*rules])
        own = [one for one in rules[self.rule] if self.draw.random() < 0.5]
        own += [one for one in COMMON if self.draw.random() < 0.2]
        wd = self.rule != "GroupAdaGrad" and self.draw.random() < 0.3
        own += ["wd=0.0625"] if wd else []
        own += ["multi_precision=True"] if self.dtype == "float16" else []
        if self.scheduled:
            own.append(f"lr_scheduler={self.draw.choice(SCHEDULES)}")
        else:
            own.append(f"learning_rate={self.draw.choice(('0.125', '0.03125'))}")
        return f"kv.optimizer.{self.rule}({', '.join(own)})".replace("KEY", repr(self.keys[0]))

    def _one(self) -> int | None:
        return None if self.kind == "all" else self.draw.randrange(self.workers)

    def _change(self) -> Stage:
        if self.compressed and self.draw.random() < 0.2:
            return self._compression()
        if self.kind == "different":
            ranks = self.draw.sample(range(self.workers), self.draw.randint(2, self.workers))
            names = self.draw.sample(self._names(), len(ranks))
            return tuple(
                Call(self._one_change(name), by=rank, holds=True)
                for name, rank in zip(names, ranks, strict=True)
            )
        if self.draw.random() < 0.05 and self.kind == "all" and not self.scheduled:
            return (Call(self.draw.choice(("store.set_updater(adding(0.5))", "store.set_updater(None)"))),)
        name = self.draw.choice(["learning_rate", *self._names()])
        if self.kind == "all" and self.optimizers and not self.joined and self.draw.random() < 0.2:
            return self._assignment(name)
        return (Call(self._one_change(name), by=self._one(), holds=True),)

    def _compression(self) -> Stage:
        """Set the codec, or its threshold later."""
        self.codec = self.codec or self.draw.choice(COMPRESSIONS)
        more = f', "threshold": {self.draw.choice((0.25, 0.5, 1.0))}' if self.codec == "2bit" else ""
        return (Call(f'store.set_gradient_compression({{"type": "{self.codec}"{more}}})'),)

    def _assignment(self, name: str) -> Stage:
        """Change the object, which the next push sends."""
        keys = self._some()
        text = self._numbered("store.pushpull(KEYS, g(KEYS, NUMBERHOWWITHOUT), out=out(KEYS))")
        return (Call(f"o.{self._text_of(name)}; {text}", keys),)

    def _names(self) -> list[str]:
        names = [name for name in CHANGES if self.rule != "GroupAdaGrad" or not name.startswith("wd")]
        return names

    def _one_change(self, name: str) -> str:
        text = self._text_of(name)
        if text.startswith("learning_rate") and self.draw.random() < 0.7:
            return f"store.set_learning_rate({text.partition('=')[2]})"
        return f"store.update_optimizer({text})"

    def _text_of(self, name: str) -> str:
        if name == "learning_rate" and self.scheduled:
            return f"lr_scheduler={self.draw.choice(SCHEDULES)}"
        value = self.draw.choice(CHANGES[name]).replace("KEY", repr(self.draw.choice(self.keys)))
        return f"{name}={value}"

    # -------------------------------------------------------------------------------------------- files

    def _save(self) -> Stage:
        self.number += 1
        verb = self.draw.choice(("save", "save_optimizer_states", "save_optimizer_states"))
        dump = ", dump_optimizer=True" if verb != "save" and self.draw.random() < 0.5 else ""
        self.files.append((verb.replace("save", "load"), self.number, self.rule))
        return (TOGETHER, Call(f"note(store.{verb}, {self.number}{dump})", by=self._one()), TOGETHER)

    def _load(self) -> Stage:
        some = [one for one in self.files if one[0] == "load" or one[2] == self.rule]
        if not some:
            return ()
        verb, number, _ = self.draw.choice(some)
        return (TOGETHER, Call(f"store.{verb}(path({number}))", by=self._one()))
