# Sums and updates of whole arrays. Part of _cpu.pyx.

def reduce(list items):
    """Sum arrays key by key, all keys in one parallel job.

    Parameters
    ----------
    items : list of (srcs, dst, outs)
        `srcs`: list of one or more arrays, or `Coded`; `dst`: array or None; `outs`: list of arrays; all of one type and size.
        One array may be given without a list, and None for no outs: the garbage collector soon stops tracking a tuple of
        arrays, but never a list.
        ``dst = outs[j] = ((srcs[0] + srcs[1]) + srcs[2]) + ...``; 16-bit floats are summed in float32 and rounded
        once, integers wrap. An out may be one of the sources. Where arrays overlap otherwise, the sums of all items
        that have a dst are made in the order of the items before any out is written.
    """
    cdef Arena arena = Arena()
    cdef Py_ssize_t i, n_items = len(items)
    cdef size_t need = n_items * sizeof(kv_item)
    cdef ptrdiff_t n_bytes = 0
    cdef kv_item *list_ = NULL
    cdef kv_item *it
    cdef object dst, srcs, outs
    for i in range(n_items):
        srcs, dst, outs = <tuple?>items[i]
        need += sources_size(srcs) + how_many(outs) * sizeof(char *)
    arena.reserve(need)
    list_ = <kv_item *>arena.take(n_items * sizeof(kv_item))
    for i in range(n_items):
        srcs, dst, outs = <tuple>items[i]
        it = &list_[i]
        it.rule = -1
        it.n_states = 0
        if type(srcs) is np.ndarray:
            it.dtype, it.n = dtype_of(srcs), cnp.PyArray_SIZE(<cnp.ndarray>srcs)
        elif type(srcs) is list:
            if not srcs:
                raise ValueError("a sum needs at least one array")
            it.dtype = dtype_of((<list>srcs)[0])
            it.n = cnp.PyArray_SIZE(<cnp.ndarray>(<list>srcs)[0])
        else:
            it.dtype = KV_F32
            it.n = (<Coded?>srcs).size
            if dst is None:
                raise ValueError("a coded sum needs a dst")
        it.m = <int>how_many(outs)
        it.weight = it.master = NULL
        it.dst = NULL
        if dst is not None:
            it.dst = pointer(dst, it.dtype, it.n, True)
        take_item_sources(arena, it, srcs)
        it.out = take_pointers(arena, outs, it.dtype, it.n, True)
        n_bytes += it.n * kv_itemsize[it.dtype] * (it.k + it.m + (dst is not None))
    run_dense(list_, n_items, n_bytes)


def reduce_small(value, cnp.ndarray dst, out):
    """Sum one small key in the usual case; for calls in which each microsecond counts.

    Parameters
    ----------
    value : array or list of arrays
    dst : plain array
    out : array, list of arrays, or None
        None: the values themselves.

    Returns
    -------
    bool
        Whether it is done: ``dst = outs[j] = sum(values)``. False, and nothing has changed, if a value or out is not a
        plain array of the shape and type of `dst`, if there is none, or if the work is large.
    """
    cdef kv_item it
    cdef char *src[SMALL_VALUES]
    cdef char *outs[SMALL_VALUES]
    it.dtype = code_of(cnp.PyArray_TYPE(dst))
    it.n = cnp.PyArray_SIZE(dst)
    it.k = small_pointers(value, dst, src, out is None)
    it.m = it.k if out is None else small_pointers(out, dst, outs, True)
    if it.k <= 0 or it.m <= 0 or it.n * kv_itemsize[it.dtype] * (it.k + it.m + 1) > SMALL_BYTES:
        return False
    it.rule = -1
    it.n_states = 0
    it.weight = it.master = NULL
    it.coding = NULL
    it.dst = <char *>cnp.PyArray_DATA(dst)
    it.src = &src[0]
    it.out = &outs[0]
    if out is None:
        it.out = &src[0]
    if kv_run_dense(&it, 1, 0, 1):
        raise MemoryError()
    return True


cdef int small_pointers(value, cnp.ndarray like, char **into, bint write):
    """Write the addresses of one or a few arrays to `into` and return their number; 0 if they are not plain."""
    cdef Py_ssize_t i, n
    if type(value) is list:
        n = len(<list>value)
        if n > SMALL_VALUES:
            return 0
        for i in range(n):
            if not fits((<list>value)[i], like, write):
                return 0
            into[i] = <char *>cnp.PyArray_DATA(<cnp.ndarray>(<list>value)[i])
        return <int>n
    if not fits(value, like, write):
        return 0
    into[0] = <char *>cnp.PyArray_DATA(<cnp.ndarray>value)
    return 1


def update(list items):
    """Sum the gradients of each key and apply its rule, in one pass over memory and one parallel job.

    Parameters
    ----------
    items : list of (rule, params, srcs, weight, master, states, outs) or (..., kept)
        `rule`: id; `params`: tuple of float; `srcs`: gradients, summed as by `reduce`; `weight`: updated in
        place, or a pair of the new weight and the old one, which stays as it is; `master`: float32 copy behind a 16-bit
        weight, or None; `states`: tuple of arrays of the weight's type (float32 where there is a master); `outs`: list of
        arrays that receive the new weight; `kept`: arrays like master, if there is one, and states, which receive their
        previous contents.
    """
    cdef Arena arena = Arena()
    cdef Py_ssize_t i, n_items = len(items)
    cdef size_t need = n_items * sizeof(kv_item)
    cdef ptrdiff_t n_bytes = 0
    cdef kv_item *list_ = NULL
    cdef kv_item *it
    cdef int rule
    cdef tuple params, states
    cdef object weight, before, master, srcs, outs
    cdef tuple item, kept
    for i in range(n_items):
        item = <tuple?>items[i]
        kept = <tuple?>item[7] if len(item) > 7 else ()
        rule, params, srcs, weight, master, states, outs = item[:7]
        need += sources_size(srcs) + (how_many(outs) + len(kept)) * sizeof(char *) + doubles_size(params)
    arena.reserve(need)
    list_ = <kv_item *>arena.take(n_items * sizeof(kv_item))
    for i in range(n_items):
        item = <tuple>items[i]
        kept = <tuple>item[7] if len(item) > 7 else ()
        rule, params, srcs, weight, master, states, outs = item[:7]
        it = &list_[i]
        before = None
        if type(weight) is tuple:
            weight, before = <tuple>weight
        it.dtype = dtype_of(weight)
        check_rule_dtype(it.dtype, master)
        it.n = cnp.PyArray_SIZE(<cnp.ndarray>weight)
        it.rule = rule
        it.n_states = <int>len(states)
        it.m = <int>how_many(outs)
        it.dst = pointer(weight, it.dtype, it.n, True)
        it.weight = it.master = NULL
        if before is not None:
            it.weight = pointer(before, it.dtype, it.n, False)
        if master is not None:
            it.master = pointer(master, KV_F32, it.n, True)
        take_item_sources(arena, it, srcs)
        it.out = take_pointers(arena, outs, it.dtype, it.n, True)
        it.p = take_doubles(arena, params)
        take_states(it.states, states, rule, KV_F32 if master is not None else it.dtype, it.n)
        it.kept = take_kept(arena, it, kept)
        n_bytes += it.n * kv_itemsize[it.dtype] * (it.k + it.m + 2 + 2 * it.n_states)
    run_dense(list_, n_items, n_bytes)


cdef char **take_kept(Arena arena, kv_item *it, tuple kept) except? NULL:
    """Return the arrays that receive master and states before the update; NULL: none."""
    if not kept:
        return NULL
    if len(kept) != it.n_states + (it.master != NULL):
        raise ValueError(f"{it.n_states + (it.master != NULL)} arrays are to be kept, got room for {len(kept)}")
    return take_pointers(arena, list(kept), KV_F32 if it.master != NULL else it.dtype, it.n, True)


def independent(list items):
    """Whether the arrays of a call may be read and written in any order, all at once.

    Parameters
    ----------
    items : list of (srcs, outs)
        Lists of contiguous arrays that are read, and written. A written array may overlap no other array, but it may be
        identical to arrays of its own item.
    """
    cdef Arena arena = Arena()
    cdef Py_ssize_t i, most = 0
    cdef list srcs, outs
    cdef kv_extent *first
    cdef kv_extent *end
    for i in range(len(items)):
        srcs, outs = <tuple?>items[i]
        most += len(srcs) + len(outs)
    arena.reserve(most * sizeof(kv_extent))
    first = end = <kv_extent *>arena.take(most * sizeof(kv_extent))
    for i in range(len(items)):
        srcs, outs = <tuple>items[i]
        add_extents(&end, srcs, i, False)
        add_extents(&end, outs, i, True)
    kv_sort_extents(first, end - first)
    return not kv_extents_clash(first, end - first)


cdef int add_extents(kv_extent **end, list arrays, Py_ssize_t item, bint write) except -1:
    for array in arrays:
        kv_add_extent(end, <char *>cnp.PyArray_DATA(<cnp.ndarray?>array), cnp.PyArray_NBYTES(<cnp.ndarray>array), item, write)
    return 0


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
        if code != KV_F32 and not kv_is_half[code]:
            raise TypeError(f"no cast from {src.dtype} to {dst.dtype}")
    job.n = cnp.PyArray_SIZE(<cnp.ndarray>src)
    job.from_ = pointer(src, job.from_dtype, job.n, False)
    job.to = pointer(dst, job.to_dtype, job.n, True)
    with nogil:
        kv_run_cast(&job, n_threads)
