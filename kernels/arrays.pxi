# Checks of the arrays that are passed to kernels, and their addresses. Part of _cpu.pyx.

cdef enum:
    N_NUMS = 24  # NumPy's numbers of its own element types are below this

cdef int bfloat16_num = -1
cdef int[N_NUMS] code_by_num
cdef dict _dtypes = {kv_dtype_names[i].decode(): i for i in range(KV_N_DTYPES)}

cdef int read_nums() except -1:
    cdef int i
    for i in range(N_NUMS):
        code_by_num[i] = -1
    for letter in "bBhHiIlLqQefd":  # includes both integer types of one size, such as long and long long
        dtype = np.dtype(letter)
        code_by_num[<int>dtype.num] = _dtypes.get(dtype.name, -1)
    return 0

read_nums()


cdef inline int code_of(int num) noexcept:
    """Return the kernels' number of a NumPy element type, or -1."""
    if 0 <= num < N_NUMS: return code_by_num[num]
    return KV_BF16 if num == bfloat16_num else -1


def dtypes():
    """Return the element types in the order of their numbers: name, size in bytes, and whether it is a float."""
    return {name: (kv_itemsize[i], bool(kv_is_float[i])) for name, i in _dtypes.items()}


def dtype_number(dtype):
    """Return the kernels' number of a NumPy dtype; -1: they do not support it."""
    return code_of((<cnp.dtype>dtype).type_num)


def accept_bfloat16(dtype):
    """Register the NumPy dtype of bfloat16 (that of ml_dtypes, once it is imported)."""
    global bfloat16_num
    if dtype.name != "bfloat16" or dtype.itemsize != 2:
        raise TypeError(f"{dtype} is not bfloat16")
    bfloat16_num = (<cnp.dtype>dtype).type_num


def supported(dtype):
    """Whether the kernels support arrays of this NumPy dtype."""
    return code_of((<cnp.dtype>dtype).type_num) >= 0 and dtype.isnative


def is_plain(array):
    """Whether a kernel can use `array` directly: an exact ndarray, contiguous, aligned, of a supported type."""
    return (type(array) is np.ndarray and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>array)
            and code_of(cnp.PyArray_TYPE(<cnp.ndarray>array)) >= 0)


def first_misfit(list values, cnp.ndarray like, bint write=False):
    """Return the index of the first value that is not a plain array of the shape and type of `like`, or -1.

    With `write`, a read-only array does not fit either. `like` itself is a plain array.
    """
    cdef Py_ssize_t i
    for i in range(len(values)):
        if not fits(values[i], like, write):
            return i
    return -1


def plain_arrays(list values, list likes, bint write=False):
    """Arrays, one for each key, and where their memory is.

    Parameters
    ----------
    values : list
        For each key an array, or a list of one.
    likes : list of numpy.ndarray
        As `first_misfit` takes them; as many as there are values.
    write : bool

    Returns
    -------
    (list of numpy.ndarray, bytes) or None
        The arrays, and their addresses as numbers of 64 bits; None where one does not fit.
    """
    cdef Py_ssize_t i, n = len(values)
    cdef list found = []
    cdef object value
    if n != len(likes):
        raise ValueError(f"{n} values for {len(likes)} keys")
    cdef bytes addresses = PyBytes_FromStringAndSize(NULL, n * sizeof(uint64_t))
    cdef uint64_t *at = <uint64_t *>PyBytes_AS_STRING(addresses)
    for i in range(n):
        value = values[i]
        if type(value) is list and len(<list>value) == 1:
            value = (<list>value)[0]
        if not fits(value, <cnp.ndarray?>likes[i], write):
            return None
        at[i] = <uint64_t><size_t>cnp.PyArray_DATA(<cnp.ndarray>value)
        found.append(value)
    return found, addresses


cdef char *pointer(object array, int dtype, ptrdiff_t n, bint write) except? NULL:
    """Return the address of an array of `n` elements of type `dtype`."""
    cdef cnp.ndarray a
    if type(array) is not np.ndarray:
        raise TypeError(f"a kernel needs numpy.ndarray, not {type(array).__name__}")
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
        raise TypeError(f"a kernel needs numpy.ndarray, not {type(array).__name__}")
    code = code_of(cnp.PyArray_TYPE(<cnp.ndarray>array))
    if code < 0:
        raise TypeError(f"no kernel for {array.dtype}")
    return code


cdef const int64_t *ids_of(object array) except? NULL:
    return <const int64_t *>pointer(array, KV_I64, cnp.PyArray_SIZE(<cnp.ndarray?>array), False)
