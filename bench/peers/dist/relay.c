/* A switch between tun devices, one in the network namespace of each host: links with a bandwidth, a delay one way, and
 * losses of frames. The kernel passes TCP in pieces of up to 64 KB, which the relay forwards whole; time on the link and
 * losses are computed for the Ethernet frames of a piece.
 *
 * A piece is sent by the link of its host and by the link of the other host, concurrently where both are free. If the
 * queue of a port is larger than its buffer, the piece is dropped, as in a switch. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <math.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST_HOSTS = 16, ROOM = 1 << 17, AT_ONCE = 32 };
enum { FRAMING = 38 };                   /* Ethernet's header, check sum, preamble and gap */
static const double BUFFER = 4e6;        /* most bytes in the queue of a port */
static const double CATCH_UP = 131072.0; /* bytes that a link can catch up after a delay of the relay */

typedef struct virtio_net_hdr head;

typedef struct piece {
    struct piece *next;
    double due;
    size_t n;
    char bytes[]; /* a head, then IP */
} piece;

typedef struct {
    int fd;
    double out, in; /* times at which its link has sent, and delivered, all pieces so far */
    piece *first, *last;
} port;

typedef struct {
    port ports[MOST_HOSTS];
    int n;
    double rate, delay, loss; /* bytes a second, seconds, share of the frames */
    uint64_t seed;
    int64_t until_loss; /* frames */
    int64_t lost, dropped;
} net;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double drawn(net *s)
{
    s->seed ^= s->seed << 13, s->seed ^= s->seed >> 7, s->seed ^= s->seed << 17;
    return ((double)(s->seed >> 11) + 0.5) / 9007199254740992.0;
}

/* Draw the number of frames until the next loss. */
static int64_t run_of_luck(net *s)
{
    return s->loss > 0 ? (int64_t)(log(drawn(s)) / log1p(-s->loss)) : INT64_MAX;
}

static int opened(int pid, const char *name)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/net", pid);
    int space = open(path, O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET))
        return -1;
    close(space);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), size = sizeof(head);
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) || ioctl(fd, TUNSETVNETHDRSZ, &size))
        return -1;
    return ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) ? -1 : fd;
}

static uint16_t sum_of(const void *bytes, size_t n)
{
    uint32_t sum = 0;
    for (size_t i = 0; i + 1 < n; i += 2) {
        uint16_t word;
        memcpy(&word, (const char *)bytes + i, 2);
        sum += word;
    }
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)~sum;
}

/* Return the offset of TCP's payload. */
static size_t payload_at(const char *ip)
{
    size_t above = (size_t)((const struct iphdr *)ip)->ihl * 4;
    return above + (size_t)((const struct tcphdr *)(ip + above))->doff * 4;
}

static int64_t frames(const head *h, const char *ip, size_t n)
{
    if (h->gso_type == VIRTIO_NET_HDR_GSO_NONE || !h->gso_size)
        return 1;
    size_t payload = n - payload_at(ip);
    return (int64_t)((payload + h->gso_size - 1) / h->gso_size);
}

static double on_wire(const head *h, const char *ip, size_t n)
{
    int64_t count = frames(h, ip, n);
    double heads = count > 1 ? (double)(count - 1) * (double)payload_at(ip) : 0;
    return (double)n + heads + (double)count * FRAMING;
}

static int add(port *to, const char *bytes, size_t n, double due)
{
    piece *p = malloc(sizeof *p + n);
    if (!p)
        return -1;
    *p = (piece){.due = due, .n = n};
    memcpy(p->bytes, bytes, n);
    if (to->first)
        to->last->next = p;
    else
        to->first = p;
    to->last = p;
    return 0;
}

/* Append frames `from` to `to` of a piece as another piece: TCP segments with a corrected header. */
static int add_frames(port *where, const char *bytes, size_t n, int64_t from, int64_t to, double due)
{
    static char room[ROOM];
    head h;
    memcpy(&h, bytes, sizeof h);
    const char *ip = bytes + sizeof h;
    size_t whole = n - sizeof h, above = payload_at(ip), size = h.gso_size;
    size_t start = above + (size_t)from * size, end = above + (size_t)to * size;
    end = end < whole ? end : whole;
    if (start >= end)
        return 0;
    size_t length = above + end - start;
    char *made = room + sizeof h;
    memcpy(made, ip, above);
    memcpy(made + above, ip + start, end - start);
    struct iphdr *i = (struct iphdr *)made;
    struct tcphdr *t = (struct tcphdr *)(made + i->ihl * 4);
    i->tot_len = htons((uint16_t)length);
    i->id = htons((uint16_t)(ntohs(i->id) + from));
    i->check = 0;
    i->check = sum_of(i, (size_t)i->ihl * 4);
    t->seq = htonl(ntohl(t->seq) + (uint32_t)((size_t)from * size));
    if (end < whole)
        t->fin = t->psh = 0;
    struct { uint32_t from, to; uint16_t protocol, length; } pseudo = {
        i->saddr, i->daddr, htons(IPPROTO_TCP), htons((uint16_t)(length - (size_t)i->ihl * 4))};
    t->check = (uint16_t)~sum_of(&pseudo, sizeof pseudo); /* the kernel adds the rest */
    h.flags = VIRTIO_NET_HDR_F_NEEDS_CSUM;
    if (end - start <= size)
        h.gso_type = VIRTIO_NET_HDR_GSO_NONE, h.gso_size = 0;
    memcpy(room, &h, sizeof h);
    return add(where, room, sizeof h + length, due);
}

/* Forward the frames that are not lost. */
static int pass(net *s, port *to, const char *bytes, size_t n, int64_t count, double due)
{
    int64_t from = 0;
    while (count - from > s->until_loss) {
        int64_t gone = from + s->until_loss;
        if (count > 1 && add_frames(to, bytes, n, from, gone, due))
            return -1;
        from = gone + 1;
        s->lost++;
        s->until_loss = run_of_luck(s);
    }
    if (s->loss > 0)
        s->until_loss -= count - from;
    if (!from)
        return add(to, bytes, n, due);
    return from < count ? add_frames(to, bytes, n, from, count, due) : 0;
}

static int take(net *s, port *from, const char *bytes, size_t n)
{
    head h;
    memcpy(&h, bytes, sizeof h);
    const char *ip = bytes + sizeof h;
    size_t length = n - sizeof h;
    if (n < sizeof h + sizeof(struct iphdr) || ((const struct iphdr *)ip)->version != 4)
        return 0;
    int number = (int)(ntohl(((const struct iphdr *)ip)->daddr) & 0xff) - 1;
    if (number < 0 || number >= s->n)
        return 0;
    port *to = &s->ports[number];
    double t = now(), late = CATCH_UP / s->rate, takes = on_wire(&h, ip, length) / s->rate;
    if ((to->in - t) * s->rate > BUFFER) {
        s->dropped++;
        return 0;
    }
    from->out = fmax(from->out, t - late) + takes;
    to->in = fmax(to->in + takes, from->out);
    return pass(s, to, bytes, n, frames(&h, ip, length), fmax(to->in, t) + s->delay);
}

static void deliver(port *to, double t)
{
    while (to->first && to->first->due <= t) {
        piece *p = to->first;
        if (write(to->fd, p->bytes, p->n) < 0 && errno == EAGAIN)
            return;
        to->first = p->next;
        free(p);
    }
}

static double next_due(const net *s)
{
    double found = INFINITY;
    for (int i = 0; i < s->n; i++)
        if (s->ports[i].first)
            found = fmin(found, s->ports[i].first->due);
    return found;
}

static int turn(net *s)
{
    static char room[ROOM];
    struct pollfd polled[MOST_HOSTS];
    for (int i = 0; i < s->n; i++) {
        deliver(&s->ports[i], now());
        polled[i] = (struct pollfd){s->ports[i].fd, POLLIN, 0};
    }
    double wait = fmin(fmax(next_due(s) - now(), 0), 1.0);
    struct timespec span = {(time_t)wait, (long)(1e9 * (wait - floor(wait)))};
    if (ppoll(polled, (nfds_t)s->n, &span, NULL) < 0 && errno != EINTR)
        return -1;
    for (int i = 0; i < s->n; i++)
        for (int k = 0; (polled[i].revents & POLLIN) && k < AT_ONCE; k++) {
            ssize_t n = read(s->ports[i].fd, room, sizeof room);
            if (n <= 0)
                break;
            if (take(s, &s->ports[i], room, (size_t)n))
                return -1;
        }
    return 0;
}

/* Relay between the hosts with these first processes; write to `ready` once the devices exist. */
int relay_run(const int *pids, int n, const char *name, double bits, double delay, double loss, uint64_t seed, int ready)
{
    static net s;
    s = (net){.n = n, .rate = bits / 8, .delay = delay, .loss = loss, .seed = seed * 0x9E3779B97F4A7C15ull + 1};
    if (n > MOST_HOSTS)
        return E2BIG;
    for (int i = 0; i < n; i++)
        if ((s.ports[i].fd = opened(pids[i], name)) < 0)
            return errno ? errno : EIO;
    s.until_loss = run_of_luck(&s);
    prctl(PR_SET_TIMERSLACK, 1000UL);
    if (write(ready, "\n", 1) != 1)
        return EPIPE;
    while (!turn(&s))
        ;
    return errno;
}
