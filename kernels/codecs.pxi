# Packing of gradients, and sums of packed gradients. Part of _cpu.pyx.

cdef dict _codings = {kv_code_names[i].decode(): i for i in range(KV_PLAIN + 1, KV_N_CODES)}


DIVIDED = KV_DIVIDED  # the code of plain numbers that are divided by the number in the place of the threshold


def codings():
    """Return the names of the compiled codes."""
    return list(_codings)


def coding(str name):
    """Return the number of a code. Raises KeyError for an unknown name."""
    return _codings[name]


cdef int check_code(int code) except -1:
    if code <= KV_PLAIN or code >= KV_N_CODES:
        raise ValueError(f"no code has the number {code}")
    return 0


def coding_bits(int code):
    """Return the bits of a packed element."""
    check_code(code)
    return kv_code_bits[code]


def encoded_bytes(int code, ptrdiff_t size):
    """Return the bytes of `size` packed elements: whole 32-bit words for the codes of one and two bits."""
    check_code(code)
    if size < 0:
        raise ValueError(f"the number of elements must not be negative, got {size}")
    return kv_encoded_bytes(code, size)


cdef class Coded:
    """The coded float32 sources of one sum, which adds their decoded values; for `reduce` and `update`.

    Parameters
    ----------
    code : int
    threshold : float
        Of the codes with one and two bits.
    size : int
        Elements of the sum.
    arrays : list of numpy.ndarray
        Gradients if there are residuals or the code needs none, each float32 with `size` elements. Packed gradients,
        each uint8 with `encoded_bytes(code, size)` elements, where `packed`.
    residuals : list of numpy.ndarray, optional
        One for each gradient, float32, changed in place.
    packed : bool
    """

    cdef readonly int code
    cdef readonly double threshold
    cdef readonly ptrdiff_t size
    cdef readonly list arrays, residuals
    cdef readonly bint packed

    def __init__(self, int code, double threshold, ptrdiff_t size, list arrays, list residuals=None, bint packed=False):
        check_code(code)
        if not arrays:
            raise ValueError("a sum needs at least one array")
        if not packed and kv_has_residual[code] and (residuals is None or len(residuals) != len(arrays)):
            raise ValueError("each gradient needs a residual")
        self.code, self.threshold, self.size, self.packed = code, threshold, size, packed
        self.arrays, self.residuals = arrays, residuals


cdef size_t sources_size(object srcs) except? 0:
    """Return the bytes of an arena that `take_item_sources` uses."""
    if type(srcs) is list or type(srcs) is np.ndarray:
        return how_many(srcs) * sizeof(char *)
    return len((<Coded?>srcs).arrays) * (sizeof(char *) + sizeof(kv_coding)) + 16


cdef int take_item_sources(Arena arena, kv_item *it, object srcs) except -1:
    """Fill in the sources of an item with known type and size."""
    cdef Coded coded
    cdef kv_coding *codes
    cdef int j
    it.coding = NULL
    if type(srcs) is list or type(srcs) is np.ndarray:
        it.k = <int>how_many(srcs)
        it.src = take_pointers(arena, srcs, it.dtype, it.n, False)
        return 0
    coded = <Coded>srcs
    if it.dtype != KV_F32 or coded.size != it.n:
        raise TypeError(f"a coded sum of {coded.size} elements is float32, and so is its weight")
    it.k = <int>len(coded.arrays)
    codes = <kv_coding *>arena.take(it.k * sizeof(kv_coding))
    if coded.packed:
        it.src = take_pointers(arena, coded.arrays, KV_U8, kv_encoded_bytes(coded.code, it.n), False)
    else:
        it.src = take_pointers(arena, coded.arrays, KV_F32, it.n, False)
    for j in range(it.k):
        codes[j].code, codes[j].packed, codes[j].threshold = coded.code, coded.packed, <float>coded.threshold
        codes[j].residual = NULL
        if not coded.packed and kv_has_residual[coded.code]:
            codes[j].residual = <float *>pointer(coded.residuals[j], KV_F32, it.n, True)
    it.coding = codes
    return 0


def encode(int code, double threshold, list srcs, residual, packed):
    """Pack the sum of gradients.

    Parameters
    ----------
    code : int
        From `coding`.
    threshold : float
        Rounded to float32.
    srcs : list of numpy.ndarray
        float32, summed left to right.
    residual : numpy.ndarray or None
        float32, as many elements; added to the sum, and set to the part that was not sent. None for the codes of 16 bits.
    packed : numpy.ndarray
        uint8, `encoded_bytes(code, n)` of them. Written.
    """
    cdef Arena arena = Arena()
    cdef kv_encoding job
    cdef int n_threads = default_threads
    check_code(code)
    if not srcs:
        raise ValueError("a sum needs at least one array")
    dtype_of(srcs[0])
    job.code, job.threshold, job.k = code, <float>threshold, <int>len(srcs)
    job.n = cnp.PyArray_SIZE(<cnp.ndarray>srcs[0])
    arena.reserve(len(srcs) * sizeof(char *) + 8)
    job.src = take_pointers(arena, srcs, KV_F32, job.n, False)
    job.residual = NULL
    if kv_has_residual[code]:
        job.residual = <float *>pointer(residual, KV_F32, job.n, True)
    job.to = <unsigned char *>pointer(packed, KV_U8, kv_encoded_bytes(code, job.n), True)
    if <size_t>job.to & 1 and not kv_has_residual[code]:
        raise ValueError("16-bit floats are packed to an even address")
    with nogil:
        kv_run_encode(&job, n_threads)


def decode(int code, double threshold, list packed, dst, bint accumulate=False):
    """Sum packed gradients, left to right: ``dst = p[0] + p[1] + ...``.

    Parameters
    ----------
    code, threshold
        As they were packed.
    packed : list of numpy.ndarray
        uint8, `encoded_bytes(code, dst.size)` of them each.
    dst : numpy.ndarray
        float32. Written.
    accumulate : bool
        The sum begins with what is in `dst`.
    """
    cdef Arena arena = Arena()
    cdef kv_item item
    cdef kv_coding *codes
    cdef ptrdiff_t n
    cdef int j, first = 1 if accumulate else 0
    check_code(code)
    if not packed:
        raise ValueError("a sum needs at least one array")
    if dtype_of(dst) != KV_F32:
        raise TypeError(f"gradients are decoded to float32, not {dst.dtype}")
    item.dtype, item.rule, item.m, item.n_states, item.k = KV_F32, -1, 0, 0, <int>len(packed) + first
    item.n = n = cnp.PyArray_SIZE(<cnp.ndarray>dst)
    item.dst, item.master, item.out = pointer(dst, KV_F32, n, True), NULL, NULL
    arena.reserve(item.k * (sizeof(char *) + sizeof(kv_coding)) + 16)
    codes = <kv_coding *>arena.take(item.k * sizeof(kv_coding))
    item.src = <char **>arena.take(item.k * sizeof(char *))
    for j in range(item.k):
        codes[j].code, codes[j].packed, codes[j].threshold, codes[j].residual = code, 1, <float>threshold, NULL
        if j >= first:
            item.src[j] = pointer(packed[j - first], KV_U8, kv_encoded_bytes(code, n), False)
    if accumulate:
        codes[0].code, codes[0].packed, item.src[0] = KV_PLAIN, 0, item.dst
    item.coding = codes
    run_dense(&item, 1, n * 4 * (1 + first) + n * (item.k - first) // 16)
