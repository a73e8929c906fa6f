# Records and references, converted between C and Python. Part of _native.pyx.

cdef list KINDS = [RecordKind(kind) if kind in RecordKind._value2member_map_ else kind for kind in range(256)]
cdef list PLACES = [PayloadLocation(place) for place in range(3)]


cdef int to_record(object record, kp_record *r) except -1:
    """Write a `Record` as a struct; OverflowError or TypeError where a number does not fit."""
    if not isinstance(record, tuple) or len(record) != 14:
        raise TypeError(f"{record!r} is no record")
    cdef tuple given = <tuple>record
    r.kind, r.slice, r.sequence, r.round, r.version, r.clock = given[0], given[1], given[2], given[3], given[4], given[5]
    r.coding, r.threshold, r.rows = given[6], given[7], given[8]
    r.place, r.frame, r.offset, r.nbytes, r.flags = given[9], given[10], given[11], given[12], given[13]
    return 0


cdef object from_record(const kp_record *r):
    return Record(
        KINDS[r.kind], r.slice, r.sequence, r.round, r.version, r.clock, r.coding, r.threshold, r.rows,
        PLACES[r.place], r.frame, r.offset, r.nbytes, r.flags,
    )


cdef kp_buffer *buffer_of(object owner) except NULL:
    """Return a new buffer that refers to a Python object."""
    cdef kp_buffer *made
    release_dropped()
    made = kp_buffer_of(<void *>owner)
    if made == NULL:
        raise MemoryError()
    Py_INCREF(owner)
    return made


cdef void release_dropped() noexcept:
    """Release the Python objects that no struct refers to any more."""
    cdef kp_buffer *first = kp_take_released()
    cdef kp_buffer *following
    while first != NULL:
        following = first.next
        Py_DECREF(<object>first.owner)
        free(first)
        first = following


cdef tuple request_of(const kp_record *r, kp_buffer *data):
    """Return a request as Python handles it: its record, and the frames of its message."""
    if data == NULL:
        return from_record(r), ()
    return from_record(r), payload_of(data) if data.owner == NULL else <object>data.owner


cdef kp_observer observer_of(object counters):
    """Where a `Counters` counts; it must be kept."""
    cdef kp_observer found
    found.counters = <kv_counters *>PyCapsule_GetPointer(counters.capsule, "kvstore.counters")
    found.store = counters.number
    return found


def count_values(counters not None, int way, list records not None, bint sent):
    """Count the bytes of values that the records of a message bring, or say where they lie in shared memory.

    Parameters
    ----------
    counters : Counters
    way : int
        How the message went; a number of `kvstore.observe.counters.WAYS`.
    records : list of Record
    sent : bool
        Whether they were sent, and not received.

    Returns
    -------
    int
        Bytes in the message.
    """
    cdef kp_observer observer = observer_of(counters)
    cdef kp_moved moved = kp_moved(0, 0)
    cdef kp_record r
    for record in records:
        r.kind, r.place = record[0], record[9]
        if r.place and r.kind != KP_FAILED:
            r.rows, r.nbytes = record[8], record[12]
            kp_add_record_bytes(&moved, &r)
    if sent:
        kp_count_sent(&observer, way, &moved)
    else:
        kp_count_received(&observer, way, &moved)
    return moved.carried
