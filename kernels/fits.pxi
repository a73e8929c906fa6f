# Whether a kernel can use an array for a key. Part of every module that checks callers' arrays.

cdef inline bint fits(object value, cnp.ndarray like, bint write) noexcept:
    """Whether `value` is a plain array of the shape and type of `like`."""
    cdef cnp.ndarray a
    cdef int d, ndim = cnp.PyArray_NDIM(like)
    if type(value) is not np_ndarray:
        return False
    a = <cnp.ndarray>value
    if cnp.PyArray_TYPE(a) != cnp.PyArray_TYPE(like) or cnp.PyArray_NDIM(a) != ndim:
        return False
    if not cnp.PyArray_ISCARRAY_RO(a) or (write and not cnp.PyArray_ISWRITEABLE(a)):
        return False
    for d in range(ndim):
        if cnp.PyArray_DIM(a, d) != cnp.PyArray_DIM(like, d):
            return False
    return True
