"""The list of kernels, and their names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .. import cpu
from .bodies.rules import RULES

#: Bytes of an element. Signed and unsigned integers of a size share a kernel: sums wrap.
ITEMSIZE = {name.removeprefix("u"): size for name, (size, _) in cpu.dtypes().items()}
FLOATS = tuple(name for name, (_, is_float) in cpu.dtypes().items() if is_float)
HALVES = tuple(name for name in FLOATS if ITEMSIZE[name] == 2)

#: Update rules that exist as kernels, and the number of their states. Rules of kernels/rules.h are missing
#: here if they need norms of whole tensors (LAMB) or the C library's logarithm and cosine (SGLD).
RULE_STATES = {name: cpu.rule_states(name) for name in cpu.rules() if name in RULES}

#: Codecs that exist as kernels, and the module of `bodies` of each.
CODECS = {"2bit": "two_bit", "1bit": "one_bit"}
#: Operations on words of a codec: sum and quantise, dequantise and sum, and both without packed words.
CODEC_OPS = tuple(f"{verb}_{codec}" for codec in CODECS for verb in ("quantise", "dequantise", "reduce"))
OPS = ("sum", "update", "cast", *CODEC_OPS)

#: The largest number of values that a kernel may have compiled in.
MOST = 8
_CHUNK_BYTES = 32 * 1024


@dataclass(frozen=True)
class KernelSpec:
    """One kernel.

    Attributes
    ----------
    op : str
        One of `OPS`:

        * ``"sum"``: dst and every out become ((src0 + src1) + src2) + ...; 16-bit floats are summed in
          float32 and rounded once, integers wrap.
        * ``"update"``: the sum of the sources is the gradient of `rule`, which moves dst (the weight) and the
          states; every out receives the new weight. 16-bit weights without `master` have 16-bit states.
        * ``"cast"``: dst and every out become the source as `target`, rounded to nearest even.
        * ``"quantise_2bit"``, ``"quantise_1bit"``: the sum of the sources is added to the residual, words are
          written, and the rest stays in the residual.
        * ``"dequantise_2bit"``, ``"dequantise_1bit"``: dst and every out become the sum of the decoded words.
        * ``"reduce_2bit"``, ``"reduce_1bit"``: each source is quantised with its own residual, and dst and
          every out become the sum of the decoded values. No words are written.
    dtype : str
        Element type of the sources, dst and outs. float32 for the codecs.
    k : int
        Number of sources (of words, where they are decoded), compiled in: 1 to 8. 0: each row has its own,
        and any, number.
    rule : str or None
        For updates; one of `RULE_STATES`.
    master : bool
        For updates of 16-bit weights: a float32 copy of the weight and float32 states stand behind them.
    target : str or None
        For casts, where either `dtype` or `target` is float32 and the other has 16 bits.
    """

    op: str
    dtype: str = "float32"
    k: int = 0
    rule: str | None = None
    master: bool = False
    target: str | None = None

    def __post_init__(self) -> None:
        if self.dtype.startswith("u"):
            object.__setattr__(self, "dtype", self.dtype[1:])
        if self.op == "cast":
            object.__setattr__(self, "k", 1)
        problem = _spec_problem(self)
        if problem:
            raise ValueError(f"there is no such CUDA kernel: {problem}; got {self}")

    @cached_property
    def name(self) -> str:
        """The kernel's name: of its file, and within its entry point."""
        count = f"k{self.k}" if self.k else "any"
        if self.op == "sum":
            return f"sum_{self.dtype}_{count}"
        if self.op == "update":
            return f"update_{self.rule}_{self.dtype}{'_master' * self.master}_{count}"
        if self.op == "cast":
            return f"cast_{self.dtype}_{self.target}"
        return f"{self.op}_{count}"

    @property
    def entry(self) -> str:
        """Name of its entry point; a compiler extends it."""
        return _ENTRY + self.name

    @classmethod
    def of_entry(cls, entry: str) -> KernelSpec:
        """Return the spec of an entry point, by its full name; ValueError if it is not one."""
        found = re.search(_ENTRY + "([a-z0-9_]+)", entry)
        return cls.from_name(found[1] if found else entry)

    @classmethod
    def from_name(cls, name: str) -> KernelSpec:
        """Return the spec of that name; ValueError if there is none."""
        for pattern in _NAMES:
            found = re.fullmatch(pattern, name)
            if found:
                fields = found.groupdict()
                count = fields.pop("count", None) or "any"
                master = bool(fields.pop("master", None))
                return cls(k=0 if count == "any" else int(count[1:]), master=master, **fields)
        raise ValueError(f"no CUDA kernel is called {name!r}")

    @property
    def codec(self) -> str | None:
        """The codec of `CODECS` that the kernel works with, or None."""
        return self.op.partition("_")[2] if self.op in CODEC_OPS else None

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the float32 numbers that a launch takes after the image."""
        return ("threshold",) if self.codec else ()

    @property
    def states(self) -> int:
        """Number of states of a row."""
        return RULE_STATES[self.rule] if self.rule else 0

    @property
    def real_type(self) -> str:
        """Type that a rule is computed in: float64 for float64, else float32."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def chunk(self) -> int:
        """Elements of one key that a block of threads works on."""
        size = (
            max(ITEMSIZE[self.dtype], ITEMSIZE[self.real_type]) if self.op != "sum" else ITEMSIZE[self.dtype]
        )
        return _CHUNK_BYTES // size


_ENTRY = "kvstore_kernel_"
_COUNT = r"(?P<count>any|k[1-8])"
_NAMES = (
    rf"(?P<op>sum)_(?P<dtype>\w+?)_{_COUNT}",
    rf"(?P<op>update)_(?P<rule>\w+?)_(?P<dtype>b?float\d\d)(?P<master>_master)?_{_COUNT}",
    r"(?P<op>cast)_(?P<dtype>\w+?)_(?P<target>\w+)",
    rf"(?P<op>{'|'.join(CODEC_OPS)})_{_COUNT}",
)


def _spec_problem(spec: KernelSpec) -> str | None:
    """Return what is wrong with a spec, or None."""
    if spec.op not in OPS:
        return f"op must be one of {', '.join(OPS)}"
    if not 0 <= spec.k <= MOST:
        return f"k must be 0 (any number) or 1 to {MOST}"
    if spec.dtype not in ITEMSIZE:
        return f"dtype must be one of {', '.join(ITEMSIZE)}"
    if spec.op != "update":
        if spec.rule or spec.master:
            return "only updates have a rule or a master"
    elif spec.rule not in RULE_STATES:
        return f"rule must be one of {', '.join(RULE_STATES)}"
    elif spec.dtype not in FLOATS:
        return "only floats are updated"
    elif spec.master and spec.dtype not in HALVES:
        return "only 16-bit weights have a master"
    if (spec.op == "cast") != (spec.target is not None):
        return "casts, and only they, have a target"
    if spec.op == "cast" and (spec.dtype, spec.target) not in _CASTS:
        return "casts go between float32 and float16 or bfloat16"
    if spec.codec and spec.dtype != "float32":
        return "codecs work on float32"
    return None


def most_registers(spec: KernelSpec) -> int:
    """Return the registers that a thread of a kernel may have, for no spills and enough concurrent blocks.

    64, or 80 for updates with wide numbers (float64) or many of them (eight 16-bit weights and their states).
    """
    many = spec.dtype == "float64" or (spec.dtype in HALVES and not spec.master)
    return 80 if spec.op == "update" and many else 64


_CASTS = tuple(pair for half in HALVES for pair in (("float32", half), (half, "float32")))
# Numbers of values that are compiled in: all for sums, for codecs those of machines with 1, 2, 4 or 8 GPUs.
# Every other number is the work of "any", which costs a loop; of updates, which are many, there is only that.
_COMPILED_IN = {"sum": range(MOST + 1), "update": (0,), **dict.fromkeys(CODEC_OPS, (0, 1, 2, 4, 8))}


def _generated_specs() -> Iterator[KernelSpec]:
    for dtype in ITEMSIZE:
        for k in _COMPILED_IN["sum"]:
            yield KernelSpec("sum", dtype, k)
    for rule in RULE_STATES:
        for dtype in FLOATS:
            for master in (False, True) if dtype in HALVES else (False,):
                yield KernelSpec("update", dtype, 0, rule, master)
    for op in CODEC_OPS:
        for k in _COMPILED_IN[op]:
            yield KernelSpec(op, k=k)
    for dtype, target in _CASTS:
        yield KernelSpec("cast", dtype, target=target)


@lru_cache(maxsize=1)
def all_specs() -> tuple[KernelSpec, ...]:
    """Return every kernel that is built ahead and checked; others are compiled when they are needed."""
    return tuple(_generated_specs())


@lru_cache(maxsize=4096)
def choose_spec(
    op: str,
    dtype: str = "float32",
    k: int | None = None,
    rule: str | None = None,
    master: bool = False,
    target: str | None = None,
) -> KernelSpec:
    """Return the best kernel of `all_specs` for a call.

    Parameters
    ----------
    op, dtype, rule, master, target
        As in `KernelSpec`.
    k : int or None
        Number of arrays that every row sums; None where rows differ.
    """
    compiled_in = k is not None and k in _COMPILED_IN.get(op, ())
    return KernelSpec(op, dtype, k if k and compiled_in else 0, rule, master, target)
