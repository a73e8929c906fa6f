/* Bytes at a stream, plain or encrypted: it returns whole messages within the limits, and nothing else. */
#include "input.h"
#include "stream.h"

enum { LIMIT = 1 << 16 };

static fuzz_coming coming;

static fuzz_coming *fuzz_coming_at(int fd) { return &coming; }

/* A cipher that takes a chunk if its tag begins as it should: the decrypted data is made up, too. */
static int seal(unsigned char *sealed, unsigned char *tag, unsigned long long *tag_bytes, const unsigned char *text,
                unsigned long long nbytes, const unsigned char *ad, unsigned long long ad_bytes,
                const unsigned char *none, const unsigned char *nonce, const unsigned char *key)
{
    return -1;
}

static int unseal(unsigned char *text, unsigned char *none, const unsigned char *sealed, unsigned long long nbytes,
                  const unsigned char *tag, const unsigned char *ad, unsigned long long ad_bytes,
                  const unsigned char *nonce, const unsigned char *key)
{
    if (*tag == 0xbd)
        return -1;
    memmove(text, sealed, nbytes);
    return 0;
}

static int next_key(unsigned char *out, size_t out_bytes, const unsigned char *text, unsigned long long nbytes,
                    const unsigned char *key, size_t key_bytes)
{
    memcpy(out, key, out_bytes);
    return 0;
}

static const kp_aead aead = {seal, unseal, next_key, 24, 16};

static void check(kp_stream *s)
{
    kp_message *message = kp_take_messages(s);
    while (message) {
        kp_message *following = message->next;
        uint64_t total = 0;
        MUST(message->n && message->n <= KP_MOST_FRAMES);
        for (uint32_t i = 0; i < message->n; i++) {
            MUST(message->frames[i]->nbytes <= LIMIT);
            total += message->frames[i]->nbytes;
        }
        MUST(total <= KP_MOST_MESSAGE);
        kp_free_message(message);
        message = following;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const unsigned char key[KP_KEY_BYTES];
    fuzz_input in = {data, size};
    fuzz_event event;
    kp_stream s;
    uint8_t encrypted;
    if (!fuzz_take(&in, &encrypted, 1))
        return 0;
    kp_cipher *cipher = encrypted % 8 == 1 ? kp_new_cipher(&aead, key, key, 1 + encrypted / 8) : NULL; /* large: few */
    MUST(!kp_open_stream(&s, FIRST_FD, LIMIT, cipher));
    while (fuzz_next(&in, &event)) {
        event.what %= N_COMING;
        coming = fuzz_come(&in, &event);
        enum kp_outcome outcome = kp_receive(&s, 0);
        check(&s);
        MUST(outcome != KP_OPEN || !coming.left || kp_receive(&s, 0) != KP_OPEN || !coming.left);
        if (outcome != KP_BLOCKED && outcome != KP_OPEN)
            break;
    }
    kp_free_stream(&s);
    return 0;
}
