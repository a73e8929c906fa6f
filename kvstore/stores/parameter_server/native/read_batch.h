/* A message of requests, and the checks of its form: nothing is read beyond its frames.
 *
 * The message must stay valid while the batch is open. No function blocks. */
#ifndef KP_READ_BATCH_H
#define KP_READ_BATCH_H

#include "messages.h"
#include "wire_format.h"

typedef struct {
    const kp_message *message;
    const kp_head *head;
    const kp_record *records;
    kp_buffer *inlined; /* an aligned copy of the payload after the records; NULL: there is none */
} kp_batch;

/* Release a batch; also after a failed `kp_read_batch`. */
static void kp_close_batch(kp_batch *batch)
{
    kp_release(batch->inlined);
    batch->inlined = NULL;
}

/* Read the head of a message, of at least one frame. 0: not a batch of this job and version, or Python has to read it. */
static int kp_read_batch(kp_batch *batch, const kp_message *message, uint16_t version, uint64_t job)
{
    const kp_buffer *first = message->frames[0];
    *batch = (kp_batch){.message = message, .head = (const kp_head *)first->data};
    const kp_head *head = batch->head;
    if (first->nbytes < sizeof *head || memcmp(head->magic, "KVST", 4) || head->kind != KP_DATA)
        return 0;
    size_t end = sizeof *head + head->records * sizeof(kp_record);
    if (head->version != version || head->job != job || head->records > KP_MOST_RECORDS || first->nbytes < end)
        return 0;
    batch->records = (const kp_record *)(first->data + sizeof *head);
    size_t inlined = first->nbytes - end;
    if (inlined > KP_INLINE_BYTES || head->flags != (inlined ? KP_INLINE : 0))
        return 0;
    if (!inlined)
        return 1;
    batch->inlined = kp_new_buffer(inlined);
    if (batch->inlined)
        memcpy(batch->inlined->data, first->data + end, inlined);
    return batch->inlined != NULL;
}

/* Return the frame that has all of a record's payload; NULL: there is none. The reference belongs to the batch. */
static kp_buffer *kp_frame_of(const kp_batch *batch, const kp_record *record)
{
    uint64_t number = (uint64_t)record->frame + !batch->inlined;
    kp_buffer *frame = NULL;
    if (number == 0)
        frame = batch->inlined;
    else if (number < batch->message->n)
        frame = batch->message->frames[number];
    if (!frame || record->offset > frame->nbytes || record->nbytes > frame->nbytes - record->offset)
        return NULL;
    return frame;
}

#endif
