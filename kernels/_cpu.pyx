# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""CPU kernels: the Python interface of the loops in the headers of this folder.

Every array is an exact `numpy.ndarray`, C-contiguous, aligned and in native byte order; any other argument raises
before memory is read or written. Large work releases the GIL and uses all cores; the bits of a result depend neither
on the number of threads nor on the instruction set.
"""

cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc

import numpy as np

cnp.import_array()

cdef extern from "job_chunks.h" nogil:
    enum:
        KV_MAX_PARAMS
        KV_F32
        KV_F64
        KV_BF16
        KV_U8
        KV_I64
        KV_N_DTYPES
        KV_PLAIN
        KV_N_CODES
        KV_DIVIDED
    ctypedef struct kv_coding:
        int code, packed
        float threshold
        float *residual
    ctypedef struct kv_encoding:
        int code, k
        float threshold
        ptrdiff_t n
        char **src
        float *residual
        unsigned char *to
    ctypedef struct kv_item:
        int dtype, rule, k, m, n_states
        ptrdiff_t n
        char *dst
        const char *weight
        char *master
        char **src
        char **out
        const kv_coding *coding
        char **states
        char **kept
        const double *p
    ctypedef struct kv_rows:
        int dtype, rule, k, n_states
        ptrdiff_t cols, n_rows
        char **src
        const int64_t **map
        const int64_t *dst_row
        char *dst
        char *master
        char *before
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
    ctypedef struct kv_extent:
        pass
    void kv_add_extent(kv_extent **at, const char *array, ptrdiff_t n_bytes, ptrdiff_t item, int write)
    void kv_sort_extents(kv_extent *e, ptrdiff_t n)
    int kv_extents_clash(const kv_extent *e, ptrdiff_t n)
    const kv_level *kv_now
    const kv_level **kv_all_levels
    ptrdiff_t kv_stream_bytes
    const int *kv_itemsize
    const int *kv_code_bits
    int kv_usable_levels()
    int kv_cpus()
    ptrdiff_t kv_cache_bytes(int threads)
    void kv_run_init()
    int kv_run_dense(kv_item *items, ptrdiff_t n, ptrdiff_t n_bytes, int threads)
    void kv_run_rows(const kv_rows *rows, const kv_group *group, int threads)
    int kv_run_norm(kv_norm_job *job, double *sums, int threads)
    void kv_run_cast(kv_cast_job *job, int threads)
    void kv_run_encode(kv_encoding *job, int threads)
    ptrdiff_t kv_encoded_bytes(int code, ptrdiff_t n)
    ptrdiff_t kv_merge(const int64_t **ids, const ptrdiff_t *n, int k, int64_t *out, int64_t **map, ptrdiff_t *at)
    void kv_locate(const int64_t *have, ptrdiff_t n_have, const int64_t *wanted, ptrdiff_t n, int64_t *position)
    ptrdiff_t kv_unique(int64_t *ids, ptrdiff_t n)
    ptrdiff_t kv_unique_by_map(int64_t *ids, ptrdiff_t n, int64_t rows)

cdef extern from *:
    """
    #define KV_DTYPE(tag, name, T) #name,
    #define KV_IS_REAL(tag, name, T) (T)0.5 > 0,
    #define KV_YES(tag, name, T) 1,
    #define KV_NO(tag, name, T) 0,
    static const char *const kv_dtype_names[] = {KV_DTYPES(KV_DTYPE, KV_DTYPE)};
    static const int kv_is_float[] = {KV_DTYPES(KV_IS_REAL, KV_YES)}, kv_is_half[] = {KV_DTYPES(KV_NO, KV_YES)};
    #define KV_CODEC(tag, name, bits, residual) #name,
    #define KV_LEAVES(tag, name, bits, residual) residual,
    static const char *const kv_code_names[] = {"plain", KV_CODECS(KV_CODEC)};
    static const int kv_has_residual[] = {0, KV_CODECS(KV_LEAVES)};
    #define KV_RULE_NAME(name, states, params) #name,
    #define KV_N_STATES(name, states, params) states,
    #define KV_N_PARAMS(name, states, params) 4 + params,
    static const char *const kv_rule_names[] = {KV_RULES(KV_RULE_NAME)};
    static const int kv_rule_states[] = {KV_RULES(KV_N_STATES)}, kv_rule_params[] = {KV_RULES(KV_N_PARAMS)};
    static const int kv_n_rules = (int)(sizeof kv_rule_states / sizeof kv_rule_states[0]);
    """
    const char **kv_dtype_names
    const int *kv_is_float
    const int *kv_is_half
    const char **kv_code_names
    const int *kv_has_residual
    const char **kv_rule_names
    const int *kv_rule_states
    const int *kv_rule_params
    const int kv_n_rules

# Below this many bytes, releasing and acquiring the GIL costs more than the work.
cdef ptrdiff_t GIL_BYTES = 32 * 1024
cdef ptrdiff_t SMALL_BYTES = 64 * 1024  # a call of one key up to this size keeps the GIL: some microseconds at most
cdef enum:
    SMALL_VALUES = 16  # the most arrays of one key in a call of the short path
cdef object np_ndarray = np.ndarray  # a module attribute costs a look-up at every use
cdef int default_threads

kv_run_init()
default_threads = kv_cpus()

cdef dict _rule_ids = {kv_rule_names[i].decode(): i for i in range(kv_n_rules)}


def rules():
    """Names of the compiled update rules, in the order of their ids."""
    return list(_rule_ids)


def rule_id(str name):
    """Id of a compiled rule. Raises KeyError for an unknown name."""
    return _rule_ids[name]


def rule_states(str name):
    """Number of state arrays that a rule needs."""
    return kv_rule_states[<int>_rule_ids[name]]


def rule_parameters(str name):
    """Number of parameters that a rule reads, including the four that all rules have."""
    return kv_rule_params[<int>_rule_ids[name]]


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
    """From now on, use `n` threads, and the cache shares of as many cores, for large work; 0: all usable cores."""
    global default_threads, kv_stream_bytes
    if n < 0:
        raise ValueError(f"the number of threads must not be negative, got {n}")
    default_threads = n if n > 0 else kv_cpus()
    kv_stream_bytes = kv_cache_bytes(default_threads)


def stream_bytes():
    """Size in bytes from which on a call writes past the cache."""
    return kv_stream_bytes


def set_stream_bytes(ptrdiff_t n):
    """Set the size from which on a call writes past the cache, until `set_threads`: for tests and measurements."""
    global kv_stream_bytes
    kv_stream_bytes = n


def level_pointer():
    """For other compiled modules: a capsule with the address of the level in use."""
    return PyCapsule_New(<void *>&kv_now, "kvstore.level", NULL)


def run_pointer():
    """For other compiled modules: a capsule with the function that processes dense items (`kv_run_dense`)."""
    return PyCapsule_New(<void *>&kv_run_dense, "kvstore.run", NULL)


def run_rows_pointer():
    """For other compiled modules: a capsule with the function that processes rows (`kv_run_rows`)."""
    return PyCapsule_New(<void *>&kv_run_rows, "kvstore.run_rows", NULL)


def threads_pointer():
    """For other compiled modules: a capsule with the address of the number of threads."""
    return PyCapsule_New(<void *>&default_threads, "kvstore.threads", NULL)


include "fits.pxi"
include "arrays.pxi"
include "arena.pxi"
include "codecs.pxi"
include "dense.pxi"
include "norms.pxi"
include "rows.pxi"
