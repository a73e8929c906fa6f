/* One end of a stream: a connected socket that carries messages of several frames, as ZeroMQ does.
 *
 * A message is a head, {KP_MAGIC, number of frames}, the sizes of the frames, and the frames. The stream's owner, one thread
 * at a time, receives; a large frame is received into its final memory. The owner queues messages to send, and sends what the
 * socket accepts; the thread of sender.h sends the rest. A queued frame is read until it is sent: its memory must not
 * change, except rows of a table, which are copied before they change. With a cipher, all these bytes are sent as chunks
 * of cipher.h.
 *
 * Functions under 'sending' need the stream's lock; functions under 'receiving' belong to the owner and need no lock. None
 * waits for the socket. */
#ifndef KP_STREAM_H
#define KP_STREAM_H

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "cipher.h"
#include "messages.h"
#include "traffic.h"

enum {
    KP_READ_BYTES = 64 * 1024,
    KP_DECRYPT_BYTES = KP_CHUNKS * KP_SEALED_BYTES, /* the text of all chunks of one read, also of many small ones */
    KP_DIRECT_BYTES = 16 * 1024, /* the rest of a frame is received into its final memory, from this size on */
    KP_WAKE_BYTES = 1 << 20, /* of a large frame: the waiting thread is woken after so many bytes, or at its end */
    KP_PIECES = 64,              /* of one system call */
    KP_MOST_PIECES = 1 << 16,    /* in the queue */
    KP_MOST_FRAMES = 1 << 18,    /* of a message */
    KP_SEND_BYTES = 1 << 20      /* of one system call of the sender's thread, which holds the stream's lock for it */
};
_Static_assert(KP_DECRYPT_BYTES >= sizeof ((kp_direction *)0)->bytes, "a text is shorter than its encryption");
#define KP_MOST_MESSAGE ((uint64_t)1 << 30)
#define KP_MOST_UNSENT ((uint64_t)1 << 30) /* of a server, to a worker that does not read; no worker requests so much */
#define KP_ENOUGH ((uint64_t)8 << 20) /* bytes received at once, before other streams are served */

enum kp_stream_state { KP_HEAD, KP_SIZES, KP_FRAMES };
enum kp_outcome { KP_OPEN, KP_BLOCKED, KP_CLOSED, KP_FOREIGN, KP_NO_MEMORY };

struct kp_sender;

typedef struct kp_stream {
    int fd;
    kp_cipher *cipher; /* NULL: nothing is encrypted */
    /* Receiving. */
    enum kp_stream_state state;
    char *bytes; /* received, and not parsed */
    size_t from, to;
    uint64_t frame_limit;
    int is_near;     /* the peer is on this host */
    int limits_in_flight; /* with other workers that send to the peer */
    uint32_t head[2], at;
    uint64_t *sizes, got; /* `got`: bytes of the sizes, or of frame `at` */
    size_t sizes_capacity;
    kp_message *incoming, *first, **last; /* the incoming message, and the list of complete ones */
    enum kp_outcome end;                /* the reason why receiving has ended, if not KP_OPEN or KP_BLOCKED */
    int wakes;                          /* SO_RCVLOWAT, or 0 as long as it is the default of 1 */
    const kp_inlet *inlet;              /* NULL: all messages are for Python */
    kp_buffer *(*place)(struct kp_stream *s); /* if set: returns memory for frame `at` of the incoming message */
    void *placer;                             /* data of `place` */
    /* Sending; under the lock. */
    pthread_mutex_t lock;
    struct kp_sender *sender;
    kp_piece *pieces; /* a ring */
    size_t first_piece, n_pieces, pieces_capacity, sent; /* `sent`: bytes of the first piece */
    uint64_t unsent, most_unsent;                    /* bytes in the queue; nothing is queued above the limit */
    int waits; /* for the sender's thread */
    int broken;
    /* Of a server with two threads that serve streams; see second_thread.h. */
    struct kp_stream *_Atomic *inbox; /* of the thread that serves it; NULL: there is only one */
    int epoll;                       /* of that thread, */
    epoll_data_t event;              /* with the data of the stream's events; these two need the state lock and the lock */
    int asked;                       /* that thread has been asked to send; under the lock */
    int may_move;                    /* to the second thread */
    int in_a_row;                    /* successive messages that are a reason to move it to the other thread */
    kp_observer observer;
} kp_stream;

/* Initialise a stream, which then owns the socket and the cipher, if any. 0; -1: no memory, and the caller owns them still. */
static int kp_open_stream(kp_stream *s, int fd, uint64_t frame_limit, kp_cipher *cipher)
{
    memset(s, 0, sizeof *s);
    s->bytes = (char *)malloc(cipher ? KP_DECRYPT_BYTES : KP_READ_BYTES);
    if (!s->bytes)
        return -1;
    s->cipher = cipher;
    s->fd = fd;
    s->frame_limit = frame_limit;
    s->last = &s->first;
    s->most_unsent = UINT64_MAX;
    pthread_mutex_init(&s->lock, NULL);
    return 0;
}

/* Close and free a stream, its queue and its cipher; no thread may use it any more (`kp_remove_stream` first). */
static void kp_free_stream(kp_stream *s)
{
    for (size_t i = 0; i < s->n_pieces; i++)
        kp_release_piece(&s->pieces[(s->first_piece + i) % s->pieces_capacity]);
    free(s->pieces);
    kp_free_message(s->incoming);
    while (s->first) {
        kp_message *message = s->first;
        s->first = message->next;
        kp_free_message(message);
    }
    free(s->sizes);
    free(s->bytes);
    kp_free_cipher(s->cipher);
    close(s->fd);
    pthread_mutex_destroy(&s->lock);
    memset(s, 0, sizeof *s);
}

/* --------------------------------------------------------------------------------------------------- sending */

static int kp_grow_queue(kp_stream *s)
{
    size_t capacity = s->pieces_capacity ? 2 * s->pieces_capacity : KP_PIECES;
    kp_piece *pieces = (kp_piece *)malloc(capacity * sizeof *pieces);
    if (!pieces)
        return -1;
    for (size_t i = 0; i < s->n_pieces; i++)
        pieces[i] = s->pieces[(s->first_piece + i) % s->pieces_capacity];
    free(s->pieces);
    s->pieces = pieces;
    s->pieces_capacity = capacity;
    s->first_piece = 0;
    return 0;
}

/* Queue all pieces, with a reference to the owner of each, or none of them. 0; -1: no memory, or too much is queued. */
static int kp_queue_pieces(kp_stream *s, const kp_piece *pieces, size_t n)
{
    if (s->n_pieces + n > KP_MOST_PIECES || s->unsent > s->most_unsent)
        return -1;
    while (s->n_pieces + n >= s->pieces_capacity) /* one place stays free, for gathered rows */
        if (kp_grow_queue(s))
            return -1;
    for (size_t i = 0; i < n; i++) {
        s->unsent += pieces[i].nbytes;
        if (pieces[i].nbytes)
            s->pieces[(s->first_piece + s->n_pieces++) % s->pieces_capacity] = pieces[i];
        else
            kp_release_piece(&pieces[i]);
    }
    return 0;
}

static void kp_count_sent_bytes(kp_stream *s, size_t nbytes)
{
    s->unsent -= nbytes;
    while (nbytes) {
        kp_piece *piece = &s->pieces[s->first_piece];
        size_t left = piece->nbytes - s->sent;
        if (nbytes < left) {
            s->sent += nbytes;
            return;
        }
        nbytes -= left;
        s->sent = 0;
        kp_release_piece(piece);
        s->first_piece = (s->first_piece + 1) % s->pieces_capacity;
        s->n_pieces--;
    }
}

/* Return whether there are bytes to send. */
static int kp_has_unsent(const kp_stream *s)
{
    return s->n_pieces || (s->cipher && s->cipher->sending.from < s->cipher->sending.to);
}

/* If rows are next in the queue, gather some of them. 0; -1: no memory. */
static int kp_gather_first(kp_stream *s)
{
    if (!s->n_pieces || !s->pieces[s->first_piece].rows)
        return 0;
    kp_piece *rows = &s->pieces[s->first_piece], made = {0};
    made.owner = kp_gather_next(rows->rows, &made.nbytes);
    if (!made.owner)
        return -1;
    made.at = made.owner->data;
    rows->nbytes -= made.nbytes;
    if (!rows->nbytes) {
        kp_release_piece(rows);
    } else {
        s->first_piece = (s->first_piece + s->pieces_capacity - 1) % s->pieces_capacity;
        s->n_pieces++;
    }
    s->pieces[s->first_piece] = made;
    return 0;
}

/* Collect at most `most` bytes to send in `io`; returns the number of parts; 0: no memory for the next rows. */
static size_t kp_next_pieces(kp_stream *s, struct iovec *io, size_t most)
{
    size_t n = s->n_pieces < KP_PIECES ? s->n_pieces : KP_PIECES, bytes = 0, used = 0;
    if (kp_gather_first(s))
        return 0;
    for (; used < n && bytes < most; used++) {
        const kp_piece *piece = &s->pieces[(s->first_piece + used) % s->pieces_capacity];
        if (piece->rows)
            break;
        size_t skip = used ? 0 : s->sent, left = piece->nbytes - skip;
        left = left < most - bytes ? left : most - bytes;
        io[used] = (struct iovec){(void *)(piece->at + skip), left};
        bytes += left;
    }
    return used;
}

/* Encrypt the next chunk: the beginning of a large piece, or several small pieces. 0; -1: the stream must be closed. */
static int kp_encrypt_pieces(kp_stream *s)
{
    unsigned char *gathered = kp_chunk_text(s->cipher);
    const void *text = gathered;
    size_t bytes = 0;
    if (kp_gather_first(s))
        return -1;
    for (size_t i = 0; i < s->n_pieces && bytes < KP_CHUNK_BYTES; i++) {
        const kp_piece *piece = &s->pieces[(s->first_piece + i) % s->pieces_capacity];
        if (piece->rows)
            break;
        size_t skip = i ? 0 : s->sent, left = piece->nbytes - skip, capacity = KP_CHUNK_BYTES - bytes;
        if (left >= KP_CHUNK_BYTES) {
            if (!bytes) {
                text = piece->at + skip;
                bytes = KP_CHUNK_BYTES;
            }
            break;
        }
        left = left < capacity ? left : capacity;
        memcpy(gathered + bytes, piece->at + skip, left);
        bytes += left;
    }
    if (kp_encrypt(s->cipher, text, bytes))
        return -1;
    kp_count_sent_bytes(s, bytes);
    return 0;
}

/* Set `io` to the encrypted bytes that are not sent, or encrypt the next chunks; 0: the stream must be closed. */
static size_t kp_next_encrypted(kp_stream *s, struct iovec *io)
{
    kp_direction *d = &s->cipher->sending;
    if (d->from == d->to) {
        d->from = d->to = 0;
        while (s->n_pieces && sizeof d->bytes - d->to >= KP_SEALED_BYTES)
            if (kp_encrypt_pieces(s))
                return 0;
    }
    io[0] = (struct iovec){d->bytes + d->from, d->to - d->from};
    return 1;
}

/* Send what the socket accepts, at most about `most` bytes. KP_OPEN: the queue is empty, or `most` is reached. KP_BLOCKED: the
 * socket is full. KP_CLOSED: the stream is broken now. */
static enum kp_outcome kp_flush(kp_stream *s, size_t most)
{
    size_t done = 0;
    while (kp_has_unsent(s) && !s->broken && done < most) {
        struct iovec io[KP_PIECES];
        size_t used = s->cipher ? kp_next_encrypted(s, io) : kp_next_pieces(s, io, most - done);
        if (!used) {
            s->broken = 1;
            shutdown(s->fd, SHUT_RDWR);
            break;
        }
        struct msghdr message = {.msg_iov = io, .msg_iovlen = used};
        ssize_t sent = sendmsg(s->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return KP_BLOCKED;
        if (sent < 0) {
            s->broken = 1;
            shutdown(s->fd, SHUT_RDWR); /* the receiving thread sees the end */
            break;
        }
        if (s->cipher)
            s->cipher->sending.from += (size_t)sent;
        else
            kp_count_sent_bytes(s, (size_t)sent);
        done += (size_t)sent;
    }
    return s->broken ? KP_CLOSED : KP_OPEN;
}

/* ------------------------------------------------------------------------------------------------- receiving */

static size_t kp_take_bytes(kp_stream *s, void *to, size_t want)
{
    size_t there = s->to - s->from, take = there < want ? there : want;
    memcpy(to, s->bytes + s->from, take);
    s->from += take;
    return take;
}

static enum kp_outcome kp_read_head(kp_stream *s)
{
    s->got += kp_take_bytes(s, (char *)s->head + s->got, sizeof s->head - s->got);
    if (s->got < sizeof s->head)
        return KP_BLOCKED;
    uint32_t n = s->head[1];
    if (s->head[0] != KP_MAGIC || !n || n > KP_MOST_FRAMES)
        return KP_FOREIGN;
    if (n > s->sizes_capacity) {
        uint64_t *sizes = (uint64_t *)realloc(s->sizes, n * sizeof *sizes);
        if (!sizes)
            return KP_NO_MEMORY;
        s->sizes = sizes;
        s->sizes_capacity = n;
    }
    s->got = 0;
    s->state = KP_SIZES;
    return KP_OPEN;
}

static enum kp_outcome kp_read_sizes(kp_stream *s)
{
    uint32_t n = s->head[1];
    s->got += kp_take_bytes(s, (char *)s->sizes + s->got, n * sizeof *s->sizes - s->got);
    if (s->got < n * sizeof *s->sizes)
        return KP_BLOCKED;
    uint64_t total = 0;
    for (uint32_t i = 0; i < n; i++)
        if (s->sizes[i] > s->frame_limit || (total += s->sizes[i]) > KP_MOST_MESSAGE)
            return KP_FOREIGN;
    s->incoming = (kp_message *)calloc(1, sizeof *s->incoming + n * sizeof(kp_buffer *));
    if (!s->incoming)
        return KP_NO_MEMORY;
    s->got = s->at = 0;
    s->state = KP_FRAMES;
    return KP_OPEN;
}

/* Read the frames, each with memory from its first byte on; then the message is complete. */
static enum kp_outcome kp_read_frames(kp_stream *s)
{
    kp_message *message = s->incoming;
    for (; s->at < s->head[1]; s->at++) {
        if (message->n == s->at) {
            kp_buffer *memory = s->place ? s->place(s) : kp_new_buffer((size_t)s->sizes[s->at]);
            if (!(message->frames[s->at] = memory))
                return KP_NO_MEMORY;
            message->n++;
        }
        s->got += kp_take_bytes(s, message->frames[s->at]->data + s->got, (size_t)(s->sizes[s->at] - s->got));
        if (s->got < s->sizes[s->at])
            return KP_BLOCKED;
        s->got = 0;
    }
    *s->last = message;
    s->last = &message->next;
    s->incoming = NULL;
    s->state = KP_HEAD;
    return KP_OPEN;
}

/* Parse the next part of a message. */
static enum kp_outcome kp_parse_more(kp_stream *s)
{
    return s->state == KP_HEAD ? kp_read_head(s) : s->state == KP_SIZES ? kp_read_sizes(s) : kp_read_frames(s);
}

/* Parse the received bytes. KP_BLOCKED: all are parsed. */
static enum kp_outcome kp_parse(kp_stream *s)
{
    enum kp_outcome outcome = KP_OPEN;
    while (outcome == KP_OPEN)
        outcome = kp_parse_more(s);
    return outcome;
}

/* Decrypt all complete chunks: into a large frame if they lie in one, and otherwise behind each other in `bytes`. Returns the
 * bytes of text; -1 with EBADMSG: the first one is not authentic. */
static ssize_t kp_decrypt_chunks(kp_stream *s)
{
    kp_direction *d = &s->cipher->receiving;
    ssize_t done = 0;
    int64_t n = 0;
    while (!d->failed && (n = kp_next_chunk(s->cipher)) > 0) {
        int direct = !s->to && s->state == KP_FRAMES && s->incoming->n > s->at && s->sizes[s->at] - s->got >= (uint64_t)n;
        d->failed = kp_decrypt(s->cipher, direct ? s->incoming->frames[s->at]->data + s->got : s->bytes + s->to, (size_t)n);
        if (d->failed)
            break;
        if (direct)
            s->got += (uint64_t)n;
        else
            s->to += (size_t)n;
        done += n;
    }
    if (d->failed || n < 0) {
        d->failed = 1;
        shutdown(s->fd, SHUT_RDWR); /* the receiving thread sees the end, now or after the earlier bytes */
        errno = EBADMSG;
        return done ? done : -1;
    }
    kp_move_incomplete(d);
    return done;
}

/* As `kp_read_socket`, encrypted. No complete chunk remains, so all is parsed when the descriptor is not readable. */
static ssize_t kp_read_encrypted(kp_stream *s)
{
    kp_direction *d = &s->cipher->receiving;
    ssize_t done = 0;
    while (!done && !d->failed) {
        ssize_t got = read(s->fd, d->bytes + d->to, sizeof d->bytes - d->to);
        if (got <= 0)
            return got;
        d->to += (size_t)got;
        done = kp_decrypt_chunks(s);
    }
    if (!done)
        errno = EBADMSG;
    return done ? done : -1;
}

/* Receive once: the rest of a large frame into its memory, and the bytes after it. As readv. */
static ssize_t kp_read_socket(kp_stream *s)
{
    struct iovec io[2];
    int n = 0;
    size_t direct = 0;
    s->from = s->to = 0; /* all bytes are parsed */
    if (s->cipher)
        return kp_read_encrypted(s);
    if (s->state == KP_FRAMES && s->incoming->n > s->at && s->sizes[s->at] - s->got >= KP_DIRECT_BYTES) {
        direct = (size_t)(s->sizes[s->at] - s->got);
        io[n++] = (struct iovec){s->incoming->frames[s->at]->data + s->got, direct};
    }
    io[n++] = (struct iovec){s->bytes, KP_READ_BYTES};
    ssize_t got = readv(s->fd, io, n);
    if (got > 0) {
        size_t placed = (size_t)got < direct ? (size_t)got : direct;
        s->got += placed;
        s->to = (size_t)got - placed;
    }
    return got;
}

static enum kp_outcome kp_receive_some(kp_stream *s, int until_whole)
{
    for (uint64_t done = 0; done < KP_ENOUGH;) {
        ssize_t got = kp_read_socket(s);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? KP_BLOCKED : errno == EBADMSG ? KP_FOREIGN : KP_CLOSED;
        if (got == 0)
            return KP_CLOSED;
        done += (uint64_t)got;
        enum kp_outcome outcome = kp_parse(s);
        if (outcome != KP_BLOCKED)
            return outcome;
        if (until_whole && s->first && done >= KP_READ_BYTES)
            break;
    }
    return KP_OPEN;
}

/* Return the bytes of a large frame that the socket still has to deliver. */
static uint64_t kp_still_to_come(const kp_stream *s)
{
    if (s->state != KP_FRAMES || s->incoming->n <= s->at)
        return 0;
    uint64_t left = s->sizes[s->at] - s->got, there = s->cipher ? s->cipher->receiving.to - s->cipher->receiving.from : 0;
    return left > there ? left - there : 0;
}

/* Set SO_RCVLOWAT before a wait: to be woken for every packet of a large frame costs more than to receive it. */
static void kp_choose_wakes(kp_stream *s)
{
    uint64_t left = kp_still_to_come(s);
    int wakes = left < KP_DIRECT_BYTES ? 0 : left < KP_WAKE_BYTES ? (int)left : KP_WAKE_BYTES;
    if (wakes == s->wakes)
        return;
    int lowest = wakes ? wakes : 1;
    if (!setsockopt(s->fd, SOL_SOCKET, SO_RCVLOWAT, &lowest, sizeof lowest))
        s->wakes = wakes;
}

/* Receive and parse; with `until_whole` only until there is a complete message, so that it is handled while more arrives.
 * KP_BLOCKED: nothing more has arrived. KP_OPEN: there may be more; serve other streams first. Other results are final: the
 * complete messages stay in the stream, and later calls return the same. */
static enum kp_outcome kp_receive(kp_stream *s, int until_whole)
{
    if (s->end == KP_OPEN || s->end == KP_BLOCKED) {
        s->end = kp_receive_some(s, until_whole);
        kp_choose_wakes(s);
    }
    return s->end;
}

/* Return the complete messages as a list, which the caller frees with `kp_free_message`. */
static kp_message *kp_take_messages(kp_stream *s)
{
    kp_message *first = s->first;
    s->first = NULL;
    s->last = &s->first;
    return first;
}

#endif
