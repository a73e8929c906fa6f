# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""CPU kernels: the Python face of the loops in the headers beside this file.

Every array is an exact `numpy.ndarray`, C-contiguous, aligned and in native byte order; whatever does not fit
raises before any memory is touched. Large work releases the GIL and uses all cores; the bits of a result
depend neither on the number of threads nor on the instruction set.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

import numpy as np

cnp.import_array()

cdef extern from "numpy/arrayobject.h":
    enum:
        NPY_HALF

cdef extern from "run.h" nogil:
    enum:
        KV_MAX_STATES
        KV_F32
        KV_F64
        KV_F16
        KV_BF16
        KV_I8
        KV_U8
        KV_I32
        KV_I64
    ctypedef struct kv_item:
        int dtype, rule, k, m, n_states
        ptrdiff_t n
        char *dst
        char *master
        char **src
        char **out
        char **states
        const double *p
    ctypedef struct kv_rows:
        int dtype, rule, k, n_states
        ptrdiff_t cols, n_rows
        char **src
        const int64_t **map
        const int64_t *dst_row
        char *dst
        char *master
        char **states
        const double *p
    ctypedef struct kv_group:
        int dtype
        ptrdiff_t cols, n_rows
        const char *grad
        const int64_t *dst_row
        char *weight
        char *history
        const double *p
    ctypedef struct kv_norm_job:
        int dtype
        ptrdiff_t n
        const char *w
        const char *m
        const char *v
        const double *p
    ctypedef struct kv_cast_job:
        int to_dtype, from_dtype
        char *to
        const char *from_ "from"
        ptrdiff_t n
    ctypedef struct kv_level:
        const char *name
    const kv_level *kv_now
    const kv_level **kv_all_levels
    ptrdiff_t kv_stream_bytes
    const int *kv_itemsize
    int kv_usable_levels()
    int kv_cpus()
    void kv_run_init()
    int kv_run_dense(kv_item *items, ptrdiff_t n, ptrdiff_t n_bytes, int threads)
    void kv_run_rows(const kv_rows *rows, const kv_group *group, int threads)
    int kv_run_norm(kv_norm_job *job, double *sums, int threads)
    void kv_run_cast(kv_cast_job *job, int threads)
    ptrdiff_t kv_merge(const int64_t **ids, const ptrdiff_t *n, int k, int64_t *out, int64_t **map, ptrdiff_t *at)
    void kv_locate(const int64_t *have, ptrdiff_t n_have, const int64_t *wanted, ptrdiff_t n, int64_t *position)
    ptrdiff_t kv_unique(int64_t *ids, ptrdiff_t n)
    ptrdiff_t kv_unique_by_map(int64_t *ids, ptrdiff_t n, int64_t rows)

cdef extern from *:
    """
    #define KV_NAME(name, states) #name,
    #define KV_COUNT(name, states) states,
    static const char *const kv_rule_names[] = {KV_RULES(KV_NAME)};
    static const int kv_rule_states[] = {KV_RULES(KV_COUNT)};
    static const int kv_n_rules = (int)(sizeof kv_rule_states / sizeof kv_rule_states[0]);
    #undef KV_NAME
    #undef KV_COUNT
    """
    const char **kv_rule_names
    const int *kv_rule_states
    const int kv_n_rules

# Below this many bytes, giving up the GIL and taking it again costs more than the work.
cdef ptrdiff_t GIL_BYTES = 32 * 1024
cdef enum:
    MIN_PARAMS = 16  # more than any rule reads
cdef int default_threads
cdef int bfloat16_num = -1

kv_run_init()
default_threads = kv_cpus()

cdef dict _rule_ids = {kv_rule_names[i].decode(): i for i in range(kv_n_rules)}


# ---------------------------------------------------------------------------------------------- settings

def rules():
    """Names of the compiled update rules, in the order of their ids."""
    return list(_rule_ids)


def rule_id(str name):
    """Id of a compiled rule. Raises KeyError for an unknown name."""
    return _rule_ids[name]


def rule_states(str name):
    """Number of state arrays that a rule wants."""
    return kv_rule_states[<int>_rule_ids[name]]


def levels():
    """Names of the instruction-set levels that this processor can run, widest last."""
    return [kv_all_levels[i].name.decode() for i in range(kv_usable_levels())]


def level():
    """Name of the level in use."""
    return kv_now.name.decode()


def use_level(str name):
    """Switch to a level by name, for tests and measurements. Do not call it while other threads compute."""
    global kv_now
    cdef int i
    for i in range(kv_usable_levels()):
        if kv_all_levels[i].name.decode() == name:
            kv_now = kv_all_levels[i]
            return
    raise ValueError(f"unknown level {name!r}; this processor runs {levels()}")


def threads():
    """Number of threads that large work uses."""
    return default_threads


def set_threads(int n):
    """Use `n` threads for large work from now on; 0 takes the number of usable cores."""
    global default_threads
    if n < 0:
        raise ValueError(f"the number of threads must not be negative, got {n}")
    default_threads = n if n > 0 else kv_cpus()


def stream_bytes():
    """Size in bytes above which a call writes past the cache."""
    return kv_stream_bytes


def set_stream_bytes(ptrdiff_t n):
    """Set the size above which a call writes past the cache, for tests and measurements."""
    global kv_stream_bytes
    kv_stream_bytes = n


# ------------------------------------------------------------------------------------------------ arrays

cdef inline int code_of(int num) noexcept:
    """Our number of a NumPy element type, or -1."""
    if num == cnp.NPY_FLOAT: return KV_F32
    if num == cnp.NPY_DOUBLE: return KV_F64
    if num == NPY_HALF: return KV_F16
    if num == bfloat16_num: return KV_BF16
    if num == cnp.NPY_BYTE: return KV_I8
    if num == cnp.NPY_UBYTE: return KV_U8
    if num == cnp.NPY_INT: return KV_I32
    if num == cnp.NPY_LONG and sizeof(long) == 8: return KV_I64
    if num == cnp.NPY_LONG and sizeof(long) == 4: return KV_I32
    if num == cnp.NPY_LONGLONG: return KV_I64
    return -1


def accept_bfloat16(dtype):
    """Tell the kernels which NumPy dtype is bfloat16 (that of ml_dtypes, once somebody has imported it)."""
    global bfloat16_num
    if dtype.name != "bfloat16" or dtype.itemsize != 2:
        raise TypeError(f"{dtype} is not bfloat16")
    bfloat16_num = (<cnp.dtype>dtype).type_num


def supported(dtype):
    """Whether the kernels take arrays of this NumPy dtype."""
    return code_of((<cnp.dtype>dtype).type_num) >= 0 and dtype.isnative


def is_plain(array):
    """Whether `array` can go to a kernel as it is: an exact ndarray, contiguous, aligned, of a supported type."""
    return (type(array) is np.ndarray and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>array)
            and code_of(cnp.PyArray_TYPE(<cnp.ndarray>array)) >= 0)


def first_misfit(list values, cnp.ndarray like, bint write=False):
    """Index of the first value that is not a plain array of the shape and type of `like`, or -1.

    With `write`, a read-only array does not fit either. `like` itself is a plain array.
    """
    cdef int num = cnp.PyArray_TYPE(like), ndim = cnp.PyArray_NDIM(like), d
    cdef Py_ssize_t i
    cdef cnp.ndarray a
    for i in range(len(values)):
        if type(values[i]) is not np.ndarray:
            return i
        a = <cnp.ndarray>values[i]
        if cnp.PyArray_TYPE(a) != num or cnp.PyArray_NDIM(a) != ndim or not cnp.PyArray_ISCARRAY_RO(a):
            return i
        if write and not cnp.PyArray_ISWRITEABLE(a):
            return i
        for d in range(ndim):
            if cnp.PyArray_DIM(a, d) != cnp.PyArray_DIM(like, d):
                return i
    return -1


cdef char *pointer(object array, int dtype, ptrdiff_t n, bint write) except? NULL:
    """The data of an array that has `n` elements of type `dtype`."""
    cdef cnp.ndarray a
    if type(array) is not np.ndarray:
        raise TypeError(f"a kernel takes numpy.ndarray, not {type(array).__name__}")
    a = <cnp.ndarray>array
    if not cnp.PyArray_ISCARRAY_RO(a) or code_of(cnp.PyArray_TYPE(a)) != dtype:
        raise TypeError(f"array of type {a.dtype} is not contiguous, not aligned, or not of the type of its key")
    if cnp.PyArray_SIZE(a) != n:
        raise ValueError(f"array has {a.size} elements where {n} are needed")
    if write and not cnp.PyArray_ISWRITEABLE(a):
        raise ValueError("output array is read-only")
    return <char *>cnp.PyArray_DATA(a)


cdef int dtype_of(object array) except -1:
    cdef int code
    if type(array) is not np.ndarray:
        raise TypeError(f"a kernel takes numpy.ndarray, not {type(array).__name__}")
    code = code_of(cnp.PyArray_TYPE(<cnp.ndarray>array))
    if code < 0:
        raise TypeError(f"no kernel for {array.dtype}")
    return code


cdef const int64_t *ids_of(object array) except? NULL:
    return <const int64_t *>pointer(array, KV_I64, cnp.PyArray_SIZE(<cnp.ndarray?>array), False)


# ------------------------------------------------------------------------------------------- scratch memory

cdef class Arena:
    """Memory for the pointers and numbers of one call, freed with it."""

    cdef char *at
    cdef char *memory
    cdef char small[2048]

    def __cinit__(self):
        self.memory = NULL

    def __dealloc__(self):
        free(self.memory)

    cdef int reserve(self, size_t size) except -1:
        self.at = self.small
        if size > sizeof(self.small):
            self.memory = <char *>malloc(size)
            if self.memory == NULL:
                raise MemoryError()
            self.at = self.memory
        return 0

    cdef void *take(self, size_t size) noexcept:
        cdef void *piece = self.at
        self.at += (size + 7) & ~<size_t>7
        return piece


cdef char **take_pointers(Arena arena, list arrays, int dtype, ptrdiff_t n, bint write) except? NULL:
    cdef char **pointers = <char **>arena.take(len(arrays) * sizeof(char *))
    cdef Py_ssize_t i
    for i in range(len(arrays)):
        pointers[i] = pointer(arrays[i], dtype, n, write)
    return pointers


cdef inline size_t doubles_size(tuple params) noexcept:
    return max(<size_t>len(params), <size_t>MIN_PARAMS) * sizeof(double)


cdef double *take_doubles(Arena arena, tuple params) except? NULL:
    """The parameters of a rule; those that are not given are zero, so that no rule reads past them."""
    cdef double *p = <double *>arena.take(doubles_size(params))
    cdef Py_ssize_t i
    for i in range(MIN_PARAMS):
        p[i] = 0
    for i in range(len(params)):
        p[i] = params[i]
    return p


cdef int take_states(char **into, tuple states, int rule, int dtype, ptrdiff_t n) except -1:
    cdef Py_ssize_t i
    if rule < 0 or rule >= kv_n_rules:
        raise ValueError(f"no rule has the id {rule}")
    if len(states) != kv_rule_states[rule]:
        raise ValueError(f"rule {kv_rule_names[rule].decode()} wants {kv_rule_states[rule]} states, got {len(states)}")
    for i in range(len(states)):
        into[i] = pointer(states[i], dtype, n, True)
    return 0


cdef int check_rule_dtype(int dtype, object master) except -1:
    if dtype != KV_F32 and dtype != KV_F64 and dtype != KV_F16 and dtype != KV_BF16:
        raise TypeError("update rules need floating-point weights")
    if master is not None and dtype != KV_F16 and dtype != KV_BF16:
        raise TypeError("only 16-bit weights have a float32 master copy")
    return 0


# ------------------------------------------------------------------------------------------------- dense

def reduce(list items):
    """Sum arrays key by key, all keys in one parallel job.

    Parameters
    ----------
    items : list of (srcs, dst, outs)
        `srcs`: list of one or more arrays; `dst`: array or None; `outs`: list of arrays; all of one type and size.
        ``dst = outs[j] = ((srcs[0] + srcs[1]) + srcs[2]) + ...``; 16-bit floats are summed in float32 and rounded
        once, integers wrap. An out may be one of the sources. Where arrays overlap otherwise, all sums are made in
        the order of the items before any out is written.
    """
    cdef Arena arena = Arena()
    cdef Py_ssize_t i, n_items = len(items)
    cdef size_t need = n_items * sizeof(kv_item)
    cdef ptrdiff_t n_bytes = 0
    cdef kv_item *list_ = NULL
    cdef kv_item *it
    cdef list srcs, outs
    cdef object dst
    for i in range(n_items):
        srcs, dst, outs = <tuple?>items[i]
        need += (len(srcs) + len(outs)) * sizeof(char *)
    arena.reserve(need)
    list_ = <kv_item *>arena.take(n_items * sizeof(kv_item))
    for i in range(n_items):
        srcs, dst, outs = <tuple>items[i]
        if not srcs:
            raise ValueError("a sum needs at least one array")
        it = &list_[i]
        it.dtype = dtype_of(srcs[0])
        it.n = cnp.PyArray_SIZE(<cnp.ndarray>srcs[0])
        it.rule = -1
        it.n_states = 0
        it.k = <int>len(srcs)
        it.m = <int>len(outs)
        it.master = NULL
        it.dst = NULL
        if dst is not None:
            it.dst = pointer(dst, it.dtype, it.n, True)
        it.src = take_pointers(arena, srcs, it.dtype, it.n, False)
        it.out = take_pointers(arena, outs, it.dtype, it.n, True)
        n_bytes += it.n * kv_itemsize[it.dtype] * (it.k + it.m + (dst is not None))
    run_dense(list_, n_items, n_bytes)


def update(list items):
    """Sum the gradients of each key and apply its rule, in one pass over memory and one parallel job.

    Parameters
    ----------
    items : list of (rule, params, srcs, weight, master, states, outs)
        `rule`: id; `params`: tuple of float; `srcs`: list of gradients, summed as by `reduce`; `weight`: updated in
        place; `master`: float32 copy behind a 16-bit weight, or None; `states`: tuple of arrays of the weight's type
        (float32 where there is a master); `outs`: list of arrays that receive the new weight.
    """
    cdef Arena arena = Arena()
    cdef Py_ssize_t i, n_items = len(items)
    cdef size_t need = n_items * sizeof(kv_item)
    cdef ptrdiff_t n_bytes = 0
    cdef kv_item *list_ = NULL
    cdef kv_item *it
    cdef int rule
    cdef tuple params, states
    cdef list srcs, outs
    cdef object weight, master
    for i in range(n_items):
        rule, params, srcs, weight, master, states, outs = <tuple?>items[i]
        need += (len(srcs) + len(outs)) * sizeof(char *) + doubles_size(params)
    arena.reserve(need)
    list_ = <kv_item *>arena.take(n_items * sizeof(kv_item))
    for i in range(n_items):
        rule, params, srcs, weight, master, states, outs = <tuple>items[i]
        it = &list_[i]
        it.dtype = dtype_of(weight)
        check_rule_dtype(it.dtype, master)
        it.n = cnp.PyArray_SIZE(<cnp.ndarray>weight)
        it.rule = rule
        it.n_states = <int>len(states)
        it.k = <int>len(srcs)
        it.m = <int>len(outs)
        it.dst = pointer(weight, it.dtype, it.n, True)
        it.master = NULL
        if master is not None:
            it.master = pointer(master, KV_F32, it.n, True)
        it.src = take_pointers(arena, srcs, it.dtype, it.n, False)
        it.out = take_pointers(arena, outs, it.dtype, it.n, True)
        it.p = take_doubles(arena, params)
        take_states(it.states, states, rule, KV_F32 if master is not None else it.dtype, it.n)
        n_bytes += it.n * kv_itemsize[it.dtype] * (it.k + it.m + 2 + 2 * it.n_states)
    run_dense(list_, n_items, n_bytes)


cdef int run_dense(kv_item *items, Py_ssize_t n, ptrdiff_t n_bytes) except -1:
    cdef int failed, n_threads = default_threads
    if n_bytes < GIL_BYTES:
        failed = kv_run_dense(items, n, n_bytes, 1)
    else:
        with nogil:
            failed = kv_run_dense(items, n, n_bytes, n_threads)
    if failed:
        raise MemoryError()
    return 0


def cast(src, dst):
    """Convert between float16, bfloat16 and float32, rounding to nearest even; ``dst[...] = src``."""
    cdef kv_cast_job job
    cdef int n_threads = default_threads
    job.from_dtype = dtype_of(src)
    job.to_dtype = dtype_of(dst)
    for code in (job.from_dtype, job.to_dtype):
        if code != KV_F32 and code != KV_F16 and code != KV_BF16:
            raise TypeError(f"no cast from {src.dtype} to {dst.dtype}")
    job.n = cnp.PyArray_SIZE(<cnp.ndarray>src)
    job.from_ = pointer(src, job.from_dtype, job.n, False)
    job.to = pointer(dst, job.to_dtype, job.n, True)
    with nogil:
        kv_run_cast(&job, n_threads)


# ------------------------------------------------------------------------------------------------- norms

def sumsq(a):
    """Sum of squares in float64, added in an order that depends on the size of `a` only."""
    return norms(a, None, None, ())[0]


def lamb_norms(weight, m, v, tuple params):
    """Sums of squares of the weight and of the LAMB direction u, which is computed and not stored."""
    return norms(weight, m, v, params)


cdef tuple norms(object w, object m, object v, tuple params):
    cdef Arena arena = Arena()
    cdef kv_norm_job job
    cdef double[2] sums
    cdef int failed, n_threads = default_threads
    job.dtype = dtype_of(w)
    check_rule_dtype(job.dtype, None)
    job.n = cnp.PyArray_SIZE(<cnp.ndarray>w)
    job.w = pointer(w, job.dtype, job.n, False)
    job.m = job.v = NULL
    arena.reserve(doubles_size(params))
    job.p = take_doubles(arena, params)
    if m is not None:
        if job.dtype != KV_F32 and job.dtype != KV_F64:
            raise TypeError("LAMB's norms are taken of float32 or float64")
        job.m = pointer(m, job.dtype, job.n, False)
        job.v = pointer(v, job.dtype, job.n, False)
    with nogil:
        failed = kv_run_norm(&job, sums, n_threads)
    if failed:
        raise MemoryError()
    return sums[0], sums[1]


# -------------------------------------------------------------------------------------------------- rows

cdef ptrdiff_t columns(object table, ptrdiff_t *n_rows) except -1:
    cdef cnp.ndarray a
    cdef ptrdiff_t cols = 1
    cdef int d
    if type(table) is not np.ndarray or (<cnp.ndarray>table).ndim < 1:
        raise TypeError("a table of rows is an ndarray with at least one dimension")
    a = <cnp.ndarray>table
    n_rows[0] = cnp.PyArray_DIM(a, 0)
    for d in range(1, cnp.PyArray_NDIM(a)):
        cols *= cnp.PyArray_DIM(a, d)
    return cols


cdef int check_ids(const int64_t *ids, ptrdiff_t n, int64_t low, int64_t high) except -1:
    """Every id in low <= id < high: the last line of defence before memory is touched."""
    cdef ptrdiff_t i
    cdef bint bad = False
    with nogil:
        for i in range(n):
            bad |= (ids[i] < low) | (ids[i] >= high)
    if bad:
        raise IndexError(f"row ids must lie in [{low}, {high})")
    return 0


cdef int take_sources(Arena arena, kv_rows *job, list srcs, list maps) except -1:
    cdef Py_ssize_t i
    cdef ptrdiff_t rows, cols
    job.k = <int>len(srcs)
    if len(maps) != len(srcs):
        raise ValueError("each source needs its map")
    job.src = <char **>arena.take(len(srcs) * sizeof(char *))
    job.map = <const int64_t **>arena.take(len(srcs) * sizeof(char *))
    for i in range(len(srcs)):
        cols = columns(srcs[i], &rows)
        if rows > 0 and cols != job.cols:
            raise ValueError(f"rows of {cols} elements do not fit a table with {job.cols}")
        job.src[i] = pointer(srcs[i], job.dtype, rows * cols, False)
        if cnp.PyArray_SIZE(<cnp.ndarray?>maps[i]) != job.n_rows:
            raise ValueError("a map needs one entry for each row")
        job.map[i] = ids_of(maps[i])
        check_ids(job.map[i], job.n_rows, -1, rows)
    return 0


def reduce_rows(list srcs, list maps, dst):
    """``dst[u] = sum over s of srcs[s][maps[s][u]]``, left to right; -1 in a map means that source has no such row.

    Rows that no source has become zero. With one source this is a gather.
    """
    cdef Arena arena = Arena()
    cdef kv_rows job
    cdef int n_threads = default_threads
    arena.reserve((len(srcs) + len(maps)) * sizeof(char *))
    job.dtype = dtype_of(dst)
    job.rule = -1
    job.n_states = 0
    job.master = NULL
    job.dst_row = NULL
    job.cols = columns(dst, &job.n_rows)
    job.dst = pointer(dst, job.dtype, job.n_rows * job.cols, True)
    take_sources(arena, &job, srcs, maps)
    with nogil:
        kv_run_rows(&job, NULL, n_threads)


def update_rows(int rule, tuple params, list srcs, list maps, rows, weight, master, tuple states):
    """Apply a rule to the listed rows of a table, with the sum of the sources' rows as the gradient.

    Parameters
    ----------
    rule, params, master, states
        As in `update`; `master` and `states` have the size of `weight`.
    srcs, maps
        As in `reduce_rows`; each row has at least one source.
    rows : int64 array
        Unique row ids of `weight`, one for each entry of the maps.
    weight : array of shape (n_rows, ...)
    """
    cdef Arena arena = Arena()
    cdef kv_rows job
    cdef ptrdiff_t table_rows
    cdef int n_threads = default_threads
    arena.reserve((len(srcs) + len(maps)) * sizeof(char *) + doubles_size(params))
    job.dtype = dtype_of(weight)
    check_rule_dtype(job.dtype, master)
    job.rule = rule
    job.cols = columns(weight, &table_rows)
    job.n_rows = cnp.PyArray_SIZE(<cnp.ndarray?>rows)
    job.dst_row = ids_of(rows)
    check_ids(job.dst_row, job.n_rows, 0, table_rows)
    job.dst = pointer(weight, job.dtype, table_rows * job.cols, True)
    job.master = NULL
    if master is not None:
        job.master = pointer(master, KV_F32, table_rows * job.cols, True)
    take_sources(arena, &job, srcs, maps)
    job.p = take_doubles(arena, params)
    job.n_states = <int>len(states)
    take_states(job.states, states, rule, KV_F32 if master is not None else job.dtype, table_rows * job.cols)
    with nogil:
        kv_run_rows(&job, NULL, n_threads)


def group_adagrad(tuple params, grad, weight, history, rows=None):
    """GroupAdaGrad: one accumulator for each row of `weight`, float32 or float64.

    `grad` has a row for each id in `rows`, or, without `rows`, for each row of `weight`.
    """
    cdef Arena arena = Arena()
    cdef kv_group job
    cdef ptrdiff_t table_rows, grad_rows
    cdef int n_threads = default_threads
    arena.reserve(doubles_size(params))
    job.dtype = dtype_of(weight)
    if job.dtype != KV_F32 and job.dtype != KV_F64:
        raise TypeError(f"group_adagrad works on float32 and float64, not {weight.dtype}")
    job.cols = columns(weight, &table_rows)
    columns(grad, &grad_rows)
    job.n_rows = grad_rows
    job.dst_row = NULL
    if rows is None and grad_rows != table_rows:
        raise ValueError(f"gradient has {grad_rows} rows, the weight {table_rows}")
    if rows is not None:
        if cnp.PyArray_SIZE(<cnp.ndarray?>rows) != grad_rows:
            raise ValueError("each row of the gradient needs its id")
        job.dst_row = ids_of(rows)
        check_ids(job.dst_row, grad_rows, 0, table_rows)
    job.grad = pointer(grad, job.dtype, grad_rows * job.cols, False)
    job.weight = pointer(weight, job.dtype, table_rows * job.cols, True)
    job.history = pointer(history, job.dtype, table_rows, True)
    job.p = take_doubles(arena, params)
    with nogil:
        kv_run_rows(NULL, &job, n_threads)


def merge_ids(list ids):
    """Union of ascending, unique id lists.

    Returns
    -------
    rows : int64 array
        The union, ascending.
    maps : list of int64 arrays
        For each list, the position of every row of the union in it, or -1.
    """
    cdef Arena arena = Arena()
    cdef Py_ssize_t i, k = len(ids)
    cdef ptrdiff_t total = 0, u
    cdef const int64_t **lists
    cdef int64_t **maps
    cdef ptrdiff_t *counts
    cdef ptrdiff_t *at
    cdef int64_t *out
    cdef int count = <int>k
    arena.reserve(4 * k * sizeof(char *))
    lists = <const int64_t **>arena.take(k * sizeof(char *))
    maps = <int64_t **>arena.take(k * sizeof(char *))
    counts = <ptrdiff_t *>arena.take(k * sizeof(ptrdiff_t))
    at = <ptrdiff_t *>arena.take(k * sizeof(ptrdiff_t))
    for i in range(k):
        lists[i] = ids_of(ids[i])
        counts[i] = cnp.PyArray_SIZE(<cnp.ndarray>ids[i])
        total += counts[i]
    rows = np.empty(total, np.int64)
    table = np.empty((k, total), np.int64)
    out = <int64_t *>cnp.PyArray_DATA(<cnp.ndarray>rows)
    for i in range(k):
        maps[i] = <int64_t *>cnp.PyArray_DATA(<cnp.ndarray>table) + i * total
    with nogil:
        u = kv_merge(lists, counts, count, out, maps, at)
    return rows[:u], [row[:u] for row in table]


def locate_ids(have, wanted):
    """Position of each ascending `wanted` id in the ascending `have`, or -1."""
    cdef const int64_t *p = ids_of(have)
    cdef const int64_t *w = ids_of(wanted)
    cdef ptrdiff_t n_have = cnp.PyArray_SIZE(<cnp.ndarray>have), n = cnp.PyArray_SIZE(<cnp.ndarray>wanted)
    positions = np.empty(n, np.int64)
    cdef int64_t *into = <int64_t *>cnp.PyArray_DATA(<cnp.ndarray>positions)
    with nogil:
        kv_locate(p, n_have, w, n, into)
    return positions


def unique_ids(ids, int64_t rows):
    """Sort an int64 array in place, drop repetitions, and return the part of it that holds the result.

    Raises IndexError, with the array as it was, if an id lies outside ``0 <= id < rows``.
    """
    cdef int64_t *p = <int64_t *>pointer(ids, KV_I64, cnp.PyArray_SIZE(<cnp.ndarray?>ids), True)
    cdef ptrdiff_t n = cnp.PyArray_SIZE(<cnp.ndarray>ids), kept
    if rows > 256 * <int64_t>n:  # a map of a huge table costs more than a sort of a few ids
        check_ids(p, n, 0, rows)
        ids.sort()
        with nogil:
            kept = kv_unique(p, n)
    else:
        with nogil:
            kept = kv_unique_by_map(p, n, rows)
    if kept == -2:
        raise MemoryError()
    if kept < 0:
        raise IndexError(f"row ids must lie in [0, {rows})")
    return ids[:kept]
