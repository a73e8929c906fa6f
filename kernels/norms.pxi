# Sums of squares. Part of _cpu.pyx.

def sumsq(a):
    """Return the sum of squares in float64, in an order that depends on the size of `a` only."""
    return norms(a, None, None, ())[0]


def lamb_norms(weight, m, v, tuple params):
    """Return the sums of squares of the weight and of the LAMB direction u, which is computed and not stored."""
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
