/* A tier: a cache in RAM of records that stay on disk, with threads of its own that read them.
 *
 * A record is a range of bytes in one file, with a checksum: an expert, or the matrices of a layer.
 * Records are named by their index in the table given to tier_open. The tier has a fixed number of
 * slots; a slot is as large as the largest record and holds one record.
 *
 *     tier_demand(t, records, n, missed);                      reads begin
 *     ...                                                      compute while the disk works
 *     tier_acquire(t, records, n, &cancel, &which, &bytes);    block until one is resident, pin it
 *     ...                                                      compute with its bytes
 *     tier_release(t, records[which]);                         unpin it
 *
 * tier_acquire returns whichever of n records is resident first. A caller that needs more records
 * than there are slots works in waves: acquire, compute, release, acquire the next.
 *
 * States of a record:
 *     absent      it has no slot
 *     queued      it was asked for and waits for an I/O thread and a slot
 *     loading     an I/O thread reads it into its slot
 *     resident    its slot holds its bytes, and their checksum is right
 *     failed      its read failed, and a caller that asked for it has not been told yet
 *
 * Order of reads: first the records that a caller is blocked on, then the other demanded ones, then
 * speculated ones (tier_speculate); within each class, in the order in which they were asked for.
 *
 * Eviction: a read takes a free slot, or that of the least recently used record that is not in use.
 * A record is in use while it is pinned, while a caller is blocked on it, and from its demand until
 * it is acquired. If every resident record is in use, only a read that a caller is blocked on may
 * evict: it takes the slot of the most recently used record that is demanded, but neither pinned
 * nor one that a caller is blocked on. The evicted record is queued again. Other reads stay queued.
 *
 * Threads: every function but tier_open and tier_close may be called from any thread.
 *
 * Deadlock: a caller that pins every slot and then blocks on another record waits forever. So do
 * several callers that together pin every slot and then block. Either every caller releases its
 * pins before it blocks, or the pins of all callers together leave at least n_threads slots
 * unpinned.
 *
 * Failures: tier_acquire reports a failed read to every caller that demanded the record or is
 * blocked on it. The next demand reads the record again.
 *
 * Timeouts: a read that has taken timeout_s is stuck. tier_acquire then returns TIER_TIMED_OUT to
 * callers that are blocked on its record, and at once to later callers. Once every I/O thread has a
 * stuck read, the same holds for queued records. A stuck read keeps its I/O thread and its slot
 * until the kernel completes it; if its bytes are right, the record is resident from then on. Each
 * I/O thread can lose one slot in this way, so the budget must hold n_threads + 1 slots, or a slot
 * for each record if there are fewer records. */
#ifndef CFLOW_TIER_H
#define CFLOW_TIER_H

#include <stdatomic.h>
#include <sys/types.h>

#include "file.h"

typedef struct tier tier;

typedef struct {     /* read and checked as a whole, padding included */
    uint64_t offset; /* in the file, a multiple of FILE_PAGE */
    uint64_t bytes;  /* a multiple of FILE_PAGE, above 0 */
    uint32_t crc;    /* CRC-32C of the bytes */
} tier_record;

typedef enum {
    TIER_OK = 0,
    TIER_EIO = 1,       /* the operating system failed the read */
    TIER_CUT = 2,       /* the file ends inside the record */
    TIER_ALTERED = 3,   /* the checksum is wrong */
    TIER_TIMED_OUT = 4, /* the disk did not answer within timeout_s */
    TIER_CANCELLED = 5  /* the caller's cancel flag was set; says nothing about the record */
} tier_result;

/* Replacements for tests. NULL: pread, and the monotonic clock. */
typedef struct {
    void *arg; /* must outlive the last read, which may return after tier_close */
    /* Like pread. Called without the tier's lock. */
    ssize_t (*read)(void *arg, int fd, void *out, size_t n, off_t offset);
    /* Seconds. Called under the tier's lock, so it must not call the tier. */
    double (*now)(void *arg);
} tier_hooks;

typedef struct {
    uint64_t budget_bytes;  /* RAM for slots, rounded down to whole slots */
    double timeout_s;       /* a read that takes longer times out; must be above 0 */
    double max_bytes_per_s; /* limit on the rate of reads; 0: none */
    int32_t n_threads;      /* I/O threads, each with one read in flight */
    int32_t cached;         /* 1: read through the page cache; 0: bypass it where possible */
    /* Called with the address of a record's bytes before any caller gets them; may be NULL. Runs on
     * an I/O thread under the tier's lock, so it must not call the tier. Never called once
     * tier_close has begun. */
    void (*placed)(void *arg, uint32_t record, const uint8_t *bytes);
    void *placed_arg;
    tier_hooks hooks;
} tier_options;

/* Opens a tier over the file *f and starts its I/O threads. On success the tier owns the open file,
 * and *f is set to a closed one; on failure the caller still owns *f. `records` (n_records,) is
 * copied. Errors: EINVAL for a budget that is too small or an argument out of range, with the
 * numbers in err; ENOMEM. */
cflow_status tier_open(tier **out, file *f, const tier_record *records, uint32_t n_records,
                       const tier_options *options, cflow_error *err);
/* Ends the I/O threads and frees everything. The caller has released all pins, and no other call is
 * running. Blocks for at most timeout_s. If a read is still stuck after that, tier_close returns
 * without freeing; the last I/O thread frees everything when its read completes. */
void tier_close(tier *t);

/* Number of slots. */
uint32_t tier_slots(const tier *t);
/* Adds to *memory the bytes of the slots, and how many of these bytes are in huge pages. Reads
 * /proc, so it is too slow to call in every step. */
void tier_add_memory(const tier *t, cflow_memory *memory);

/* Announces that each of n different records will be acquired once, and queues reads of those that
 * are absent. Counts each as used, and as a hit or a miss. A miss is a record that is read for this
 * demand, or one that was speculated and that no caller has needed since. missed: (n,) or NULL; 1
 * for a miss. */
void tier_demand(tier *t, const uint32_t *records, uint32_t n, uint8_t *missed);
/* For n records that may be demanded soon: queues reads of those that are absent. These reads begin
 * when nothing more urgent is queued. Drops earlier speculation whose reads have not begun. */
void tier_speculate(tier *t, const uint32_t *records, uint32_t n);
/* Ends all demands that were not acquired, of all callers: their queued reads are dropped unless a
 * caller is blocked on them. For the end of a step that failed or was cancelled. */
void tier_withdraw(tier *t);

/* Blocks until one of n >= 1 records is resident, then pins it, ends one demand for it, and sets
 * *which to its index in `records` and *bytes to its bytes. A record that was not demanded is read
 * as well. Errors: why records[*which] could not be read (it is not pinned); TIER_CANCELLED
 * once *cancel is not 0 (cancel may be NULL; see tier_interrupt). *bytes is NULL on errors. */
tier_result tier_acquire(tier *t, const uint32_t *records, uint32_t n, const atomic_int *cancel,
                         uint32_t *which, const uint8_t **bytes);
/* Like tier_acquire for one record, but does not block: NULL if it is not resident. */
const uint8_t *tier_try_acquire(tier *t, uint32_t record);
/* Ends one pin that tier_acquire or tier_try_acquire made. A caller without a pin on the record
 * must not use its bytes any more. */
void tier_release(tier *t, uint32_t record);
/* Wakes all callers blocked in tier_acquire, so that they check their cancel flags. */
void tier_interrupt(tier *t);

/* The reason of a failure as a clause about the record: "the file ends inside it". */
const char *tier_result_text(tier_result result);
/* The status for a caller whose record has failed. */
static inline cflow_status record_status(tier_result result) {
    return result == TIER_CUT || result == TIER_ALTERED ? CFLOW_EFORMAT : CFLOW_EIO;
}

/* How often each record was demanded, (n_records,), uses taken over by tier_warm included. */
void tier_uses(tier *t, uint64_t *uses);
/* Warm start: takes over `uses` (n_records,) of an earlier run and reads the most used records, as
 * many as there are slots, in the file's order. Blocks until each of them is resident or its
 * read has failed; failed reads are counted and do not end the warm start. progress may be NULL.
 * Errors: ECANCELLED after progress->cancel, ENOMEM. */
cflow_status tier_warm(tier *t, const uint64_t *uses, cflow_progress *progress, cflow_error *err);

/* Counters since tier_open, and the current state. If no read failed, no demand was withdrawn and
 * no speculation is pending, then reads = misses + wasted + extra_reads and speculated = useful +
 * late + wasted. */
void tier_get_stats(tier *t, cflow_tier_stats *out);

#endif
