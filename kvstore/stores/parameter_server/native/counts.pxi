# How a worker counts its pushes and their rounds, by slice. Part of _native.pyx.


def count_requests(list slices not None, dict pushes not None, dict first_rounds not None, bint are_pushes):
    """Count a push into each slice, if that is what requests are; return their rounds, as the server counts.

    `pushes` are by slice, `first_rounds` the rounds before the worker's first.
    """
    cdef list rounds = []
    for slice_ in slices:
        count = pushes.get(slice_, 0)
        if are_pushes:
            pushes[slice_] = count = count + 1
        rounds.append(count + first_rounds.get(slice_, 0))
    return rounds


def count_answers(
    list slices not None, list rounds not None, list last not None, dict complete not None, dict accepted not None,
    dict first_rounds not None,
):
    """Note the answers to one request for each slice; return how many rounds more are complete.

    `rounds` are those of pushes, of which there are none if the requests were pulls; `last` are the last ones that are
    complete. `complete` and `accepted` are by slice.
    """
    cdef Py_ssize_t at, n = len(slices)
    if len(last) != n or len(rounds) not in (0, n):
        raise ValueError("not a round for each slice")
    cdef bint are_pushes = len(rounds) > 0
    seen = 0
    for at in range(n):
        slice_, round_ = slices[at], last[at]
        before = complete.get(slice_)
        seen += round_ - (first_rounds.get(slice_, 0) if before is None else before)
        complete[slice_] = round_
        if are_pushes:
            round_, before = rounds[at], accepted.get(slice_)
            if before is None or before < round_:
                accepted[slice_] = round_
    return seen
