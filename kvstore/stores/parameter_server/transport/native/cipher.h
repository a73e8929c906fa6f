/* Encryption of the bytes of a stream, by an AEAD of libsodium.
 *
 * The bytes of one direction are divided into chunks of at most KP_CHUNK_BYTES. A chunk is {bytes of its text (u32), the
 * encrypted text, tag}; the length is authenticated too. The nonce is the chunk's number, and each direction of each
 * connection has its own key, so no nonce is used twice with a key. After `chunks_of_key` chunks, both ends replace a key
 * by its hash: AES-GCM should not encrypt more than some hundred GB with one key.
 *
 * No function blocks. One direction belongs to one thread at a time: `sending` needs the stream's lock, `receiving` belongs to the
 * thread that receives. */
#ifndef KP_CIPHER_H
#define KP_CIPHER_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    KP_KEY_BYTES = 32,
    KP_NONCE_BYTES = 32, /* the most, as the tag: the actual sizes are in kp_aead */
    KP_TAG_BYTES = 32,
    KP_CHUNK_HEAD = 4,
    KP_CHUNK_BYTES = 64 * 1024,
    KP_SEALED_BYTES = KP_CHUNK_HEAD + KP_CHUNK_BYTES + KP_TAG_BYTES,
    KP_CHUNKS = 2 /* of one system call */
};
#define KP_MOST_CHUNKS ((uint64_t)1 << 63)

/* libsodium's crypto_aead_*_encrypt_detached, *_decrypt_detached, and crypto_generichash; bytes of nonce and tag. */
typedef struct {
    int (*encrypt)(unsigned char *sealed, unsigned char *tag, unsigned long long *tag_bytes, const unsigned char *text,
                   unsigned long long nbytes, const unsigned char *ad, unsigned long long ad_bytes,
                   const unsigned char *none, const unsigned char *nonce, const unsigned char *key);
    int (*decrypt)(unsigned char *text, unsigned char *none, const unsigned char *sealed, unsigned long long nbytes,
                   const unsigned char *tag, const unsigned char *ad, unsigned long long ad_bytes,
                   const unsigned char *nonce, const unsigned char *key);
    int (*hash)(unsigned char *out, size_t out_bytes, const unsigned char *text, unsigned long long nbytes,
                const unsigned char *key, size_t key_bytes);
    size_t nonce_bytes, tag_bytes;
} kp_aead;

/* One direction. `bytes` from `from` to `to` are encrypted, and not sent or not decrypted yet. */
typedef struct {
    unsigned char key[KP_KEY_BYTES];
    uint64_t chunks;
    size_t from, to;
    int failed;
    unsigned char bytes[KP_CHUNKS * KP_SEALED_BYTES];
} kp_direction;

typedef struct {
    kp_aead aead;
    uint64_t chunks_of_key;
    pid_t pid; /* the child of a fork must not send: it would use each nonce a second time */
    kp_direction sending, receiving;
} kp_cipher;

static void kp_wipe(void *memory, size_t nbytes)
{
    volatile char *at = (volatile char *)memory; /* volatile: else the compiler omits the loop */
    while (nbytes--)
        *at++ = 0;
}

/* Allocate a cipher; both keys have KP_KEY_BYTES and are copied. NULL: no memory. The caller frees it. */
static kp_cipher *kp_new_cipher(const kp_aead *aead, const void *send_key, const void *receive_key, uint64_t chunks_of_key)
{
    kp_cipher *c = (kp_cipher *)calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->aead = *aead;
    c->chunks_of_key = chunks_of_key;
    c->pid = getpid();
    memcpy(c->sending.key, send_key, KP_KEY_BYTES);
    memcpy(c->receiving.key, receive_key, KP_KEY_BYTES);
    return c;
}

/* Free a cipher, or NULL; its keys are overwritten with zeros. */
static void kp_free_cipher(kp_cipher *c)
{
    if (!c)
        return;
    kp_wipe(c->sending.key, KP_KEY_BYTES);
    kp_wipe(c->receiving.key, KP_KEY_BYTES);
    free(c);
}

/* Make the nonce of a direction's next chunk, and replace the key when due. 0; -1: the direction must not be used again. */
static int kp_next_nonce(const kp_cipher *c, kp_direction *d, unsigned char *nonce)
{
    static const unsigned char next[] = "kvstore stream: next key";
    unsigned char key[KP_KEY_BYTES];
    if (d->chunks >= KP_MOST_CHUNKS)
        return -1;
    if (d->chunks && d->chunks % c->chunks_of_key == 0) {
        if (c->aead.hash(key, sizeof key, next, sizeof next - 1, d->key, KP_KEY_BYTES))
            return -1;
        memcpy(d->key, key, sizeof key);
        kp_wipe(key, sizeof key);
    }
    memset(nonce, 0, KP_NONCE_BYTES);
    for (int i = 0; i < 8; i++)
        nonce[c->aead.nonce_bytes - 8 + i] = (unsigned char)(d->chunks >> (8 * i));
    d->chunks++;
    return 0;
}

static void kp_put_length(unsigned char *to, uint32_t n)
{
    for (int i = 0; i < KP_CHUNK_HEAD; i++)
        to[i] = (unsigned char)(n >> (8 * i));
}

static uint32_t kp_get_length(const unsigned char *from)
{
    return from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

/* Return where the caller may put the text of the next chunk, to be encrypted in place. */
static unsigned char *kp_chunk_text(kp_cipher *c)
{
    return c->sending.bytes + c->sending.to + KP_CHUNK_HEAD;
}

/* Append a chunk of `n` bytes, at most KP_CHUNK_BYTES, for which `sending` has space. 0; -1: send nothing any more. */
static int kp_encrypt(kp_cipher *c, const void *text, size_t n)
{
    kp_direction *d = &c->sending;
    unsigned char nonce[KP_NONCE_BYTES], *head = d->bytes + d->to, *sealed = kp_chunk_text(c);
    kp_put_length(head, (uint32_t)n);
    d->failed = d->failed || kp_next_nonce(c, d, nonce) ||
                c->aead.encrypt(sealed, sealed + n, NULL, (const unsigned char *)text, n, head, KP_CHUNK_HEAD, NULL,
                                nonce, d->key);
    if (!d->failed)
        d->to += KP_CHUNK_HEAD + n + c->aead.tag_bytes;
    return d->failed ? -1 : 0;
}

/* Return the bytes of text of the next received chunk; 0: it is incomplete; -1: it is invalid. */
static int64_t kp_next_chunk(const kp_cipher *c)
{
    const kp_direction *d = &c->receiving;
    size_t there = d->to - d->from;
    if (there < KP_CHUNK_HEAD)
        return 0;
    uint32_t n = kp_get_length(d->bytes + d->from);
    if (!n || n > KP_CHUNK_BYTES)
        return -1;
    return there < KP_CHUNK_HEAD + (size_t)n + c->aead.tag_bytes ? 0 : (int64_t)n;
}

/* Decrypt the next chunk, complete and of `n` bytes, to `text`. 0; -1: not authentic, and `text` is undefined. */
static int kp_decrypt(kp_cipher *c, void *text, size_t n)
{
    kp_direction *d = &c->receiving;
    unsigned char nonce[KP_NONCE_BYTES], *head = d->bytes + d->from, *sealed = head + KP_CHUNK_HEAD;
    if (kp_next_nonce(c, d, nonce) || c->aead.decrypt((unsigned char *)text, NULL, sealed, n, sealed + n, head,
                                                      KP_CHUNK_HEAD, nonce, d->key))
        return -1;
    d->from += KP_CHUNK_HEAD + n + c->aead.tag_bytes;
    return 0;
}

/* Move an incomplete chunk to the beginning of the buffer, so that its rest has space. */
static void kp_move_incomplete(kp_direction *d)
{
    memmove(d->bytes, d->bytes + d->from, d->to - d->from);
    d->to -= d->from;
    d->from = 0;
}

#endif
