/* A message of requests, as far as its form can be relied upon: nothing is read beyond its frames. */
#ifndef KP_BATCHES_H
#define KP_BATCHES_H

#include "messages.h"
#include "requests.h"

typedef struct {
    const kp_message *message;
    const kp_head *head;
    const kp_record *records;
    kp_buffer *inlined; /* the payload that follows the records, where elements can lie; NULL: there is none */
} kp_batch;

static void kp_close_batch(kp_batch *batch)
{
    kp_drop(batch->inlined);
    batch->inlined = NULL;
}

/* 0: it is no batch of this job, or one that Python has to look at. */
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

/* The frame that has a record's payload, whole; NULL: there is no such. */
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
