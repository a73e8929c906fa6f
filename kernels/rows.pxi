# Rows of tables. Part of _cpu.pyx.

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
    """Check low <= id < high for every id, before memory is accessed."""
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
        if maps[i] is None:
            if rows < job.n_rows:
                raise IndexError(f"a source of {rows} rows lacks some of {job.n_rows}")
            job.map[i] = NULL
            continue
        if cnp.PyArray_SIZE(<cnp.ndarray?>maps[i]) != job.n_rows:
            raise ValueError("a map needs one entry for each row")
        job.map[i] = ids_of(maps[i])
        check_ids(job.map[i], job.n_rows, -1, rows)
    return 0


def reduce_rows(list srcs, list maps, dst):
    """``dst[u] = sum over s of srcs[s][maps[s][u]]``, left to right; -1 in a map means that source has no such row.

    Rows that no source has become zero. With one source this is a gather. A map that is None means row u itself.
    """
    cdef Arena arena = Arena()
    cdef kv_rows job
    cdef int n_threads = default_threads
    arena.reserve((len(srcs) + len(maps)) * sizeof(char *))
    job.dtype = dtype_of(dst)
    job.rule = -1
    job.n_states = 0
    job.master = NULL
    job.before = NULL
    job.dst_row = NULL
    job.cols = columns(dst, &job.n_rows)
    job.dst = pointer(dst, job.dtype, job.n_rows * job.cols, True)
    take_sources(arena, &job, srcs, maps)
    with nogil:
        kv_run_rows(&job, NULL, n_threads)


def update_rows(int rule, tuple params, list srcs, list maps, rows, weight, master, tuple states, before=None):
    """Apply a rule to the listed rows of a table, with the sum of the sources' rows as the gradient.

    Parameters
    ----------
    rule, params, master, states
        As in `update`; `master` and `states` have the size of `weight`.
    srcs, maps
        As in `reduce_rows`; each row has at least one source.
    rows : int64 array or None
        Unique row ids of `weight`, one for each entry of the maps; None: all, in their order.
    weight : array of shape (n_rows, ...)
    before : array of shape (len(rows), ...), optional
        Receives the previous rows.
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
    job.n_rows, job.dst_row = table_rows, NULL
    if rows is not None:
        job.n_rows = cnp.PyArray_SIZE(<cnp.ndarray?>rows)
        job.dst_row = ids_of(rows)
        check_ids(job.dst_row, job.n_rows, 0, table_rows)
    job.dst = pointer(weight, job.dtype, table_rows * job.cols, True)
    job.master = NULL
    if master is not None:
        job.master = pointer(master, KV_F32, table_rows * job.cols, True)
    job.before = NULL
    if before is not None:
        job.before = pointer(before, job.dtype, job.n_rows * job.cols, True)
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
    """Return the union of ascending, unique id lists.

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
    """Return the position of each ascending `wanted` id in the ascending `have`, or -1."""
    cdef const int64_t *p = ids_of(have)
    cdef const int64_t *w = ids_of(wanted)
    cdef ptrdiff_t n_have = cnp.PyArray_SIZE(<cnp.ndarray>have), n = cnp.PyArray_SIZE(<cnp.ndarray>wanted)
    positions = np.empty(n, np.int64)
    cdef int64_t *into = <int64_t *>cnp.PyArray_DATA(<cnp.ndarray>positions)
    with nogil:
        kv_locate(p, n_have, w, n, into)
    return positions


def unique_ids(ids, int64_t rows):
    """Sort an int64 array in place, remove repetitions, and return the part of it that holds the result.

    Raises IndexError, with the array unchanged, if an id is not in ``0 <= id < rows``.
    """
    cdef int64_t *p = <int64_t *>pointer(ids, KV_I64, cnp.PyArray_SIZE(<cnp.ndarray?>ids), True)
    cdef ptrdiff_t n = cnp.PyArray_SIZE(<cnp.ndarray>ids), kept
    if do_ascend(p, n, rows):
        return ids
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


def ascending_ids(ids, int64_t rows):
    """Whether the int64 `ids` ascend strictly, within ``0 <= id < rows``."""
    return bool(do_ascend(ids_of(ids), cnp.PyArray_SIZE(<cnp.ndarray>ids), rows))


cdef bint do_ascend(const int64_t *p, ptrdiff_t n, int64_t rows) noexcept:
    cdef ptrdiff_t i
    cdef bint wrong = n > 0 and (p[0] < 0 or p[n - 1] >= rows)
    with nogil:
        for i in range(1, n):
            wrong |= p[i] <= p[i - 1]
    return not wrong
