/* The expert tier: a byte-budgeted cache in RAM of records of one file, read as they are needed.
 *
 *     tier_demand(t, records, n, missed);                           the router has spoken
 *     ...                                                           compute hides the reads
 *     tier_acquire(t, records, n, &cancel, &which, &bytes);         any of them, waits, pins
 *     tier_release(t, records[which]);
 *
 * A record is absent, queued, loading or resident. It lies in one slot, all of one size, and stays
 * while it is pinned, waited for, or demanded and not yet acquired; the least recently used of the
 * others gives way. Where there is none, what is only demanded gives way to what is waited for, and
 * is read again. Acquiring any of a list lets a stage that needs more records than there are
 * slots run in waves: acquire, compute, release, acquire. A queued record waits until a slot can be
 * had; who holds pins on every slot and waits for another record waits for himself.
 *
 * Reads go past the page cache, one pread a record on one of n_threads I/O threads, so that many
 * are in flight at most. Threads, not io_uring: the best depth of direct reads of a record is 1 or
 * 2, the checksum wants a thread anyway, and containers often forbid the ring. First come the
 * records somebody waits for, then demanded ones, then speculation, each in the order of asking.
 * The CRC-32C of every record read is checked before anybody sees its bytes.
 *
 * A fault fails the read for those who demanded or wait for it; a later demand reads again. A read
 * that the kernel holds for longer than timeout_s fails for its waiters, at once for later ones,
 * and keeps its slot and its thread until the kernel gives them back; then its bytes, if right,
 * serve as any. tier_close waits timeout_s at most for such a read and then leaves thread, memory
 * and descriptors to it: the last I/O thread to come back frees them. Each thread can lose one slot
 * that way, hence the smallest budget: a slot per thread and one more.
 *
 * Every call but open and close may come from any thread. */
#ifndef CFLOW_TIER_H
#define CFLOW_TIER_H

#include <stdatomic.h>
#include <sys/types.h>

#include "file.h"

typedef struct tier tier;

typedef struct {     /* multiples of FILE_PAGE: padding is read and checked too */
    uint64_t offset; /* in the file */
    uint64_t bytes;
    uint32_t crc;
} tier_record;

typedef enum {
    TIER_OK = 0,
    TIER_EIO = 1,       /* the system failed the read */
    TIER_CUT = 2,       /* the file ends inside the record */
    TIER_ALTERED = 3,   /* the checksum is wrong */
    TIER_TIMED_OUT = 4, /* no answer from the disk in timeout_s */
    TIER_CANCELLED = 5  /* the caller's flag was set; no fault of the record */
} tier_result;

typedef struct { /* what tests replace; NULL: pread, CLOCK_MONOTONIC in seconds */
    void *arg;   /* lives until the last read has returned, which may be after tier_close */
    ssize_t (*read)(void *arg, int fd, void *out, size_t n, off_t offset);
    double (*now)(void *arg);
} tier_hooks;

typedef struct {
    uint64_t budget_bytes;  /* as many slots as it holds whole */
    double timeout_s;       /* above 0 */
    double max_bytes_per_s; /* bound on reads begun, a record and a millisecond ahead; 0: none */
    int32_t n_threads;      /* reads in flight at most */
    int32_t cached;         /* 1: reads go through the page cache */
    /* NULL, or told where a record lies once it has been read, before anybody gets its bytes; under
     * the tier's lock, and no more once tier_close has begun. */
    void (*placed)(void *arg, uint32_t record, const uint8_t *bytes);
    void *placed_arg;
    tier_hooks hooks;
} tier_options;

/* Takes over *f (left closed) once all is well. Errors: EINVAL with the numbers where the budget is
 * below the smallest or an argument out of range, ENOMEM. */
cflow_status tier_open(tier **out, file *f, const tier_record *records, uint32_t n_records,
                       const tier_options *options, cflow_error *err);
/* Nobody waits or holds pins any more. */
void tier_close(tier *t);
/* How many records fit. */
uint32_t tier_slots(const tier *t);
/* Adds what the slots take, and of it what huge pages back, read back now; reads /proc, so not for
 * every step. */
void tier_add_memory(const tier *t, cflow_memory *memory);

/* Says that each of n different records will be acquired, and counts it as used, hit or missed.
 * missed (n,) or NULL: 1 where its bytes come from the disk because of this demand. */
void tier_demand(tier *t, const uint32_t *records, uint32_t n, uint8_t *missed);
/* Reads them if nothing more urgent is to be read. Earlier speculation not begun yet is dropped. */
void tier_speculate(tier *t, const uint32_t *records, uint32_t n);
/* Ends all demands not acquired: what nobody waits for is no longer read. For the end of a step
 * that failed or was cancelled. */
void tier_withdraw(tier *t);

/* Waits until one of n >= 1 records is resident, pins it and gives its bytes; or until one failed,
 * or *cancel is not 0 (cancel may be NULL). *which: the index of the one that came or failed. What
 * was never demanded is read as well. */
tier_result tier_acquire(tier *t, const uint32_t *records, uint32_t n, const atomic_int *cancel,
                         uint32_t *which, const uint8_t **bytes);
/* The bytes of a resident record, now pinned; NULL if it is not resident. */
const uint8_t *tier_try_acquire(tier *t, uint32_t record);
/* Ends one pin. */
void tier_release(tier *t, uint32_t record);
/* Makes everybody in tier_acquire look at his cancel flag. */
void tier_interrupt(tier *t);

/* "the file ends inside it" */
const char *tier_result_text(tier_result result);
/* The status of whoever needs a record that failed. */
static inline cflow_status record_status(tier_result result) {
    return result == TIER_CUT || result == TIER_ALTERED ? CFLOW_EFORMAT : CFLOW_EIO;
}

/* How often each record was demanded, (n_records,), warm start included. */
void tier_uses(tier *t, uint64_t *uses);
/* Warm start: takes over `uses` of an earlier run and reads the most used records, as many as there
 * are slots, in the file's order. Records that fail are left out and counted. ECANCELLED when
 * progress->cancel (progress may be NULL) ended it early, ENOMEM. */
cflow_status tier_warm(tier *t, const uint64_t *uses, cflow_progress *progress, cflow_error *err);

/* reads = misses + wasted + extra_reads where none failed, none was withdrawn and no speculation is
 * pending; then speculated = useful + late + wasted. */
void tier_get_stats(tier *t, cflow_tier_stats *out);

#endif
