/* Move all bytes over a blocking socket. */
#ifndef MOVE_ALL_H
#define MOVE_ALL_H

#include <errno.h>
#include <stddef.h>
#include <sys/socket.h>

/* Send or receive n bytes. Return 0, or -1 if the connection is closed. */
static int move_all(int fd, void *data, size_t n, int sends)
{
    for (size_t done = 0; done < n;) {
        char *at = (char *)data + done;
        ssize_t piece = sends ? send(fd, at, n - done, MSG_NOSIGNAL) : recv(fd, at, n - done, MSG_WAITALL);
        if (piece < 0 && errno == EINTR)
            continue;
        if (piece <= 0)
            return -1;
        done += (size_t)piece;
    }
    return 0;
}

#endif
