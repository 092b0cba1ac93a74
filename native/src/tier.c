/* One lock guards everything but the bytes in the slots. I/O threads sleep on `work`, callers on
 * `settled`.
 *
 * Reads are pread calls on plain threads, not io_uring: one or two direct reads in flight saturate
 * a disk, the checksum needs a thread anyway, and containers often forbid io_uring. */
#include "tier.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "arena.h"
#include "clock.h"
#include "ghost.h"
#include "kernels.h"
#include "list.h"
#include "status.h"

enum { MAX_THREADS = 64, MAX_TIMEOUT_S = 1000000, MIN_BYTES_PER_S = 1000 };
enum { FIRST_LATENCY_NS = 64000 };

#define NO_SLOT UINT32_MAX
#define CREDIT_S 1e-3 /* a rate-limited read may begin this late and still catch up, not more */

typedef enum { ABSENT, QUEUED, LOADING, RESIDENT, FAILED } state;

typedef struct {
    tier_record range;
    state state;
    tier_result fault; /* FAILED: why */
    uint32_t slot;     /* LOADING, RESIDENT */
    uint32_t pins;     /* acquired, not yet released */
    uint32_t demands;  /* not yet acquired */
    uint32_t waiters;  /* callers blocked on it */
    int speculative;   /* speculated, and neither demanded nor awaited since */
    int warming;       /* QUEUED, LOADING: read by the warm start */
    int overdue;       /* LOADING: already counted as timed out */
    double started;    /* LOADING: when, in seconds */
    uint64_t uses;     /* demands so far */
} entry;

typedef struct { /* an I/O thread */
    tier *tier;
    pthread_t thread;
    uint32_t record; /* being read, or NO_RECORD */
    int left;        /* its loop has ended */
} reader;

struct tier {
    pthread_mutex_t lock;
    pthread_cond_t work;    /* a read was queued, a slot became free, or the tier closes */
    pthread_cond_t settled; /* a read ended, or an I/O thread did */
    file file;
    tier_options options;
    uint32_t (*crc32c)(uint32_t crc, const void *data, size_t bytes);
    entry *entries; /* (n_records,) */
    uint32_t n_records;
    list_link *links;          /* (n_records,) shared by the three lists */
    list demanded, speculated; /* QUEUED, in the order of requests */
    list used;                 /* RESIDENT, the least recently used first */
    ghost ghost;
    arena memory; /* (n_slots, slot_bytes) */
    size_t slot_bytes;
    uint32_t n_slots, n_free;
    uint32_t *free_slots; /* (n_slots,) a stack, n_free deep */
    reader *readers;      /* (n_threads,) */
    int n_started;        /* readers whose thread was created */
    int n_readers;        /* of these, whose loop has not ended */
    int closing;
    int abandoned;          /* tier_close returned without the stuck readers */
    double next_read_s;     /* max_bytes_per_s: no read begins before this time */
    cflow_tier_stats stats; /* counters only; tier_get_stats adds the state */
};

/* ---- time ---- */

static double now_s(const tier *t) {
    return t->options.hooks.now ? t->options.hooks.now(t->options.hooks.arg) : clock_s();
}

static void sleep_on(tier *t, pthread_cond_t *cond, double seconds) {
    const double end = clock_s() + fmin(seconds, MAX_TIMEOUT_S);
    const struct timespec until = {.tv_sec = (time_t)end,
                                   .tv_nsec = (long)((end - floor(end)) * 1e9)};
    pthread_cond_timedwait(cond, &t->lock, &until);
}

/* When a wait for a record that is loading or queued times out: timeout_s after its own read began,
 * or, while it is queued, once all readers have been stuck for that long. */
static double deadline_s(const tier *t, const entry *e) {
    if (e->state == LOADING) return e->started + t->options.timeout_s;
    double latest = 0;
    for (int i = 0; i < t->options.n_threads; i++) {
        const uint32_t r = t->readers[i].record;
        if (r == NO_RECORD) return INFINITY;
        latest = fmax(latest, t->entries[r].started);
    }
    return latest + t->options.timeout_s;
}

/* ---- queues ---- */

static void move(tier *t, list *to, uint32_t record) {
    list_take_out(t->links, record);
    list_append(to, t->links, record);
}

static void wake_readers(tier *t) {
    if (t->demanded.n || t->speculated.n) pthread_cond_broadcast(&t->work);
}

/* ---- slots ---- */

static int is_in_use(const entry *e) {
    return e->pins || e->demands || e->waiters;
}

/* The least recently used record that is not in use, or NO_RECORD. */
static uint32_t choose_unused(const tier *t) {
    uint32_t r = t->used.first;
    while (r != NO_RECORD && is_in_use(&t->entries[r])) r = t->links[r].after;
    return r;
}

/* The most recently used record that is demanded, but neither pinned nor awaited, or NO_RECORD. */
static uint32_t choose_demanded(const tier *t) {
    uint32_t r = t->used.last;
    while (r != NO_RECORD && (t->entries[r].pins || t->entries[r].waiters)) r = t->links[r].before;
    return r;
}

static void enqueue(tier *t, list *l, uint32_t record) {
    t->entries[record].state = QUEUED;
    list_append(l, t->links, record);
}

/* outcome: the counter of what became of the speculation. */
static void end_speculation(entry *e, uint64_t *outcome) {
    if (!e->speculative) return;
    e->speculative = 0;
    ++*outcome;
}

/* Returns the slot that becomes free. A record that is demanded is queued again. */
static uint32_t evict(tier *t, uint32_t record) {
    entry *e = &t->entries[record];
    list_take_out(t->links, record);
    e->state = ABSENT;
    t->stats.evictions++;
    end_speculation(e, &t->stats.wasted);
    if (e->demands) {
        t->stats.extra_reads++;
        enqueue(t, &t->demanded, record);
    }
    return e->slot;
}

/* A slot for the bytes of e, or NO_SLOT. */
static uint32_t find_slot(tier *t, const entry *e) {
    if (t->n_free) return t->free_slots[--t->n_free];
    uint32_t victim = choose_unused(t);
    if (victim == NO_RECORD && e->waiters) victim = choose_demanded(t);
    return victim == NO_RECORD ? NO_SLOT : evict(t, victim);
}

static uint8_t *slot_data(const tier *t, uint32_t slot) {
    return t->memory.base + slot * t->slot_bytes;
}

/* ---- reading ---- */

static ssize_t read_some(const tier *t, int fd, uint8_t *out, size_t n, uint64_t offset) {
    const tier_hooks *h = &t->options.hooks;
    return h->read ? h->read(h->arg, fd, out, n, (off_t)offset) : pread(fd, out, n, (off_t)offset);
}

static int is_direct(const tier *t) {
    return !t->options.cached && file_is_direct(&t->file);
}

/* A short read is continued, through the page cache if it ended off a page border. */
static tier_result read_record(tier *t, const tier_record *r, uint8_t *out) {
    for (uint64_t done = 0; done < r->bytes;) {
        const int direct = is_direct(t) && done % FILE_PAGE == 0;
        const ssize_t got = read_some(t, direct ? t->file.direct_fd : t->file.fd, out + done,
                                      r->bytes - done, r->offset + done);
        if (got > 0)
            done += (uint64_t)got;
        else if (got == 0)
            return TIER_CUT;
        else if (errno == EINVAL && direct)
            atomic_store(&t->file.refused, 1);
        else if (errno != EINTR)
            return TIER_EIO;
    }
    return t->crc32c(0, out, r->bytes) == r->crc ? TIER_OK : TIER_ALTERED;
}

/* The most urgent queued record, or NO_RECORD. */
static uint32_t next_read(const tier *t) {
    for (uint32_t r = t->demanded.first; r != NO_RECORD; r = t->links[r].after)
        if (t->entries[r].waiters) return r;
    return t->demanded.n ? t->demanded.first : t->speculated.first;
}

/* Begins the most urgent read, as self->record. Returns 0 if there was none to begin: the reader
 * has slept, and the caller tries again. */
static int begin_read(tier *t, reader *self) {
    const double rate = t->options.max_bytes_per_s, now = now_s(t);
    const uint32_t r = next_read(t);
    if (r != NO_RECORD && rate > 0 && t->next_read_s > now) {
        sleep_on(t, &t->work, t->next_read_s - now);
        return 0;
    }
    const uint32_t slot = r == NO_RECORD ? NO_SLOT : find_slot(t, &t->entries[r]);
    if (slot == NO_SLOT) {
        pthread_cond_wait(&t->work, &t->lock);
        return 0;
    }
    entry *e = &t->entries[r];
    list_take_out(t->links, r);
    e->state = LOADING;
    e->slot = slot;
    e->started = now;
    self->record = r;
    t->stats.speculated += e->speculative != 0;
    if (rate > 0)
        t->next_read_s = fmax(t->next_read_s, now - CREDIT_S) + (double)e->range.bytes / rate;
    return 1;
}

static void count_failure(tier *t, tier_result result) {
    cflow_tier_stats *s = &t->stats;
    uint64_t *const counts[] = {[TIER_EIO] = &s->failed_io,
                                [TIER_CUT] = &s->failed_cut,
                                [TIER_ALTERED] = &s->failed_altered,
                                [TIER_TIMED_OUT] = &s->failed_timed_out};
    ++*counts[result];
}

static void count_read(tier *t, const entry *e, tier_result result) {
    const uint64_t ns = (uint64_t)(1e9 * fmax(now_s(t) - e->started, 0));
    uint32_t bucket = 0;
    while (bucket < CFLOW_LATENCIES - 1 && ns >= (uint64_t)FIRST_LATENCY_NS << bucket) bucket++;
    t->stats.read_ns += ns;
    t->stats.latencies[bucket]++;
    if (result) count_failure(t, result);
    if (result && result != TIER_ALTERED) return;
    if (e->warming) {
        t->stats.warm_bytes += e->range.bytes;
        return;
    }
    t->stats.reads++;
    t->stats.disk_bytes += e->range.bytes;
}

/* Once no caller wants the record any more: forgets its failure, or its queued read. */
static void settle(tier *t, uint32_t record) {
    entry *e = &t->entries[record];
    if (e->demands || e->waiters) return;
    if (e->state == QUEUED && t->links[record].in == &t->demanded) {
        list_take_out(t->links, record);
        e->warming = 0;
        e->state = ABSENT;
    }
    if (e->state == FAILED) e->state = ABSENT;
}

static void end_read(tier *t, reader *self, tier_result result) {
    const uint32_t r = self->record;
    entry *e = &t->entries[r];
    self->record = NO_RECORD;
    count_read(t, e, result);
    e->overdue = e->warming = 0;
    if (result) {
        t->free_slots[t->n_free++] = e->slot;
        e->state = FAILED;
        e->fault = result;
        end_speculation(e, &t->stats.wasted);
        settle(t, r);
    } else {
        e->state = RESIDENT;
        list_append(&t->used, t->links, r);
        if (t->options.placed && !t->closing)
            t->options.placed(t->options.placed_arg, r, slot_data(t, e->slot));
    }
    pthread_cond_broadcast(&t->settled);
    wake_readers(t);
}

static void tier_free(tier *t) {
    pthread_cond_destroy(&t->work);
    pthread_cond_destroy(&t->settled);
    pthread_mutex_destroy(&t->lock);
    file_close(&t->file);
    arena_close(&t->memory);
    memory_free(t->entries);
    memory_free(t->links);
    memory_free(t->free_slots);
    memory_free(t->readers);
    ghost_close(&t->ghost);
    memory_free(t);
}

static void *run_reader(void *arg) {
    reader *self = arg;
    tier *t = self->tier;
    pthread_mutex_lock(&t->lock);
    while (!t->closing) {
        if (!begin_read(t, self)) continue;
        const entry *e = &t->entries[self->record];
        uint8_t *out = slot_data(t, e->slot);
        pthread_mutex_unlock(&t->lock);
        const tier_result result = read_record(t, &e->range, out);
        pthread_mutex_lock(&t->lock);
        end_read(t, self, result);
    }
    self->left = 1;
    t->n_readers--;
    pthread_cond_broadcast(&t->settled);
    const int is_last = t->abandoned && !t->n_readers;
    pthread_mutex_unlock(&t->lock);
    if (is_last) tier_free(t);
    return NULL;
}

/* ---- demands and speculation ---- */

static void end_demand(tier *t, uint32_t record) {
    entry *e = &t->entries[record];
    if (e->demands) e->demands--;
    settle(t, record);
}

/* A caller needs the record: if it was speculated, counts that as useful or late. 1 if it was. */
static int claim_speculation(tier *t, uint32_t record) {
    entry *e = &t->entries[record];
    if (!e->speculative) return 0;
    if (e->state == QUEUED) {
        t->stats.speculated++;
        move(t, &t->demanded, record);
    }
    end_speculation(e, e->state == RESIDENT ? &t->stats.useful : &t->stats.late);
    return 1;
}

static void count_ghosts(tier *t, uint32_t record) {
    const int held_by = ghost_use(&t->ghost, record);
    t->stats.ghost_hits_2x += held_by == 2;
    t->stats.ghost_hits_4x += held_by != 0;
}

/* Returns 1 for a miss. */
static int demand(tier *t, uint32_t record) {
    entry *e = &t->entries[record];
    const int is_absent = e->state == ABSENT || e->state == FAILED;
    const int is_missed = claim_speculation(t, record) || is_absent;
    e->uses++;
    e->demands++;
    count_ghosts(t, record);
    if (is_absent) enqueue(t, &t->demanded, record);
    if (e->state == RESIDENT) move(t, &t->used, record);
    ++*(is_missed ? &t->stats.misses : &t->stats.hits);
    return is_missed;
}

void tier_demand(tier *t, const uint32_t *records, uint32_t n, uint8_t *missed) {
    pthread_mutex_lock(&t->lock);
    for (uint32_t i = 0; i < n; i++) {
        const int is_missed = demand(t, records[i]);
        if (missed) missed[i] = (uint8_t)is_missed;
    }
    wake_readers(t);
    pthread_mutex_unlock(&t->lock);
}

static void drop_speculation(tier *t) {
    while (t->speculated.n) {
        entry *e = &t->entries[t->speculated.first];
        list_take_out(t->links, t->speculated.first);
        e->state = ABSENT;
        e->speculative = 0;
    }
}

void tier_speculate(tier *t, const uint32_t *records, uint32_t n) {
    pthread_mutex_lock(&t->lock);
    drop_speculation(t);
    for (uint32_t i = 0; i < n; i++) {
        entry *e = &t->entries[records[i]];
        if (e->state != ABSENT) continue;
        e->speculative = 1;
        enqueue(t, &t->speculated, records[i]);
    }
    wake_readers(t);
    pthread_mutex_unlock(&t->lock);
}

void tier_withdraw(tier *t) {
    pthread_mutex_lock(&t->lock);
    drop_speculation(t);
    for (uint32_t r = 0; r < t->n_records; r++) {
        t->entries[r].demands = 0;
        settle(t, r);
    }
    wake_readers(t);
    pthread_mutex_unlock(&t->lock);
}

/* ---- acquiring ---- */

static const uint8_t *pin(tier *t, uint32_t record) {
    entry *e = &t->entries[record];
    claim_speculation(t, record);
    e->pins++;
    end_demand(t, record);
    return slot_data(t, e->slot);
}

static void unpin(tier *t, uint32_t record) {
    t->entries[record].pins--;
    move(t, &t->used, record);
    wake_readers(t);
}

static void begin_wait(tier *t, uint32_t record) {
    entry *e = &t->entries[record];
    if (e->state == QUEUED || e->state == LOADING) claim_speculation(t, record);
    e->waiters++;
    if (e->state != ABSENT) return;
    t->stats.extra_reads++;
    enqueue(t, &t->demanded, record);
}

static void end_wait(tier *t, uint32_t record) {
    t->entries[record].waiters--;
    settle(t, record);
}

static void time_out(tier *t, entry *e) {
    if (!e->overdue) count_failure(t, TIER_TIMED_OUT);
    e->overdue = e->state == LOADING;
}

/* Finds a record that is resident (pins it), failed or timed out. Returns 1 with *which, *bytes and
 * *result; else 0, with *again: when the next record may time out. */
static int find_settled(tier *t, const uint32_t *records, uint32_t n, double now, uint32_t *which,
                        const uint8_t **bytes, tier_result *result, double *again) {
    *again = now + t->options.timeout_s; /* a read that begins meanwhile times out later */
    for (uint32_t i = 0; i < n; i++) {
        entry *e = &t->entries[records[i]];
        *which = i;
        *result = TIER_OK;
        if (e->state == RESIDENT) {
            *bytes = pin(t, records[i]);
            return 1;
        }
        if (e->state == FAILED) {
            *result = e->fault;
        } else {
            const double deadline = deadline_s(t, e);
            *again = fmin(*again, deadline);
            if (now < deadline) continue;
            *result = TIER_TIMED_OUT;
            time_out(t, e);
        }
        end_demand(t, records[i]);
        return 1;
    }
    return 0;
}

/* *slept: seconds spent asleep. */
static tier_result wait_for_any(tier *t, const uint32_t *records, uint32_t n,
                                const atomic_int *cancel, uint32_t *which, const uint8_t **bytes,
                                double *slept) {
    tier_result result;
    double again;
    const double began = now_s(t);
    for (double now = began;; now = now_s(t)) {
        *slept = now - began;
        if (find_settled(t, records, n, now, which, bytes, &result, &again)) return result;
        if (cancel && atomic_load(cancel)) return TIER_CANCELLED;
        sleep_on(t, &t->settled, again - now);
    }
}

static tier_result acquire(tier *t, const uint32_t *records, uint32_t n, const atomic_int *cancel,
                           uint32_t *which, const uint8_t **bytes, double *slept) {
    for (uint32_t i = 0; i < n; i++) begin_wait(t, records[i]);
    wake_readers(t);
    const tier_result result = wait_for_any(t, records, n, cancel, which, bytes, slept);
    for (uint32_t i = 0; i < n; i++) end_wait(t, records[i]);
    wake_readers(t);
    return result;
}

tier_result tier_acquire(tier *t, const uint32_t *records, uint32_t n, const atomic_int *cancel,
                         uint32_t *which, const uint8_t **bytes) {
    double slept;
    *bytes = NULL;
    pthread_mutex_lock(&t->lock);
    const tier_result result = acquire(t, records, n, cancel, which, bytes, &slept);
    t->stats.stall_ns += (uint64_t)(1e9 * fmax(slept, 0));
    pthread_mutex_unlock(&t->lock);
    return result;
}

const uint8_t *tier_try_acquire(tier *t, uint32_t record) {
    pthread_mutex_lock(&t->lock);
    const uint8_t *bytes = t->entries[record].state == RESIDENT ? pin(t, record) : NULL;
    pthread_mutex_unlock(&t->lock);
    return bytes;
}

void tier_release(tier *t, uint32_t record) {
    pthread_mutex_lock(&t->lock);
    unpin(t, record);
    pthread_mutex_unlock(&t->lock);
}

void tier_interrupt(tier *t) {
    pthread_mutex_lock(&t->lock);
    pthread_cond_broadcast(&t->settled);
    pthread_mutex_unlock(&t->lock);
}

const char *tier_result_text(tier_result result) {
    static const char *const texts[] = {
        "it is resident",
        "the operating system failed the read",
        "the file ends inside it",
        "its checksum is wrong: its bytes were altered",
        "the disk did not answer in time",
        "the wait was cancelled",
    };
    return texts[result];
}

/* ---- warm start ---- */

typedef struct {
    uint64_t key;
    uint32_t record;
} ranked;

static int by_key(const void *a, const void *b) {
    const uint64_t x = ((const ranked *)a)->key, y = ((const ranked *)b)->key;
    return (x > y) - (x < y);
}

/* chosen: the most used records, as many as there are slots, in the file's order. Returns how many.
 * The ghosts of larger caches are warmed with as many as those would hold. */
static uint32_t choose_warm(tier *t, const uint64_t *uses, ranked *chosen) {
    uint32_t n = 0;
    for (uint32_t r = 0; r < t->n_records; r++)
        if (uses[r]) chosen[n++] = (ranked){.key = UINT64_MAX - uses[r], .record = r};
    qsort(chosen, n, sizeof *chosen, by_key);
    for (uint32_t i = n; i-- > 0;) ghost_use(&t->ghost, chosen[i].record);
    if (n > t->n_slots) n = t->n_slots;
    for (uint32_t i = 0; i < n; i++) chosen[i].key = t->entries[chosen[i].record].range.offset;
    qsort(chosen, n, sizeof *chosen, by_key);
    return n;
}

/* Demands the chosen records. Returns their bytes. */
static uint64_t demand_warm(tier *t, const ranked *chosen, uint32_t n) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < n; i++) {
        entry *e = &t->entries[chosen[i].record];
        e->demands++;
        bytes += e->range.bytes;
        if (e->state != ABSENT) continue;
        e->warming = 1;
        enqueue(t, &t->demanded, chosen[i].record);
    }
    wake_readers(t);
    return bytes;
}

static cflow_status warm(tier *t, const ranked *chosen, uint32_t n, cflow_progress *progress,
                         cflow_error *err) {
    cflow_progress unwatched = {0}, *p = progress ? progress : &unwatched;
    uint32_t i = 0, which;
    const uint8_t *bytes;
    double slept;
    __atomic_store_n(&p->total_bytes, demand_warm(t, chosen, n), __ATOMIC_RELAXED);
    for (; i < n && !__atomic_load_n(&p->cancel, __ATOMIC_RELAXED); i++) {
        const uint32_t r = chosen[i].record;
        if (acquire(t, &r, 1, NULL, &which, &bytes, &slept) == TIER_OK) unpin(t, r);
        __atomic_fetch_add(&p->done_bytes, t->entries[r].range.bytes, __ATOMIC_RELAXED);
    }
    if (i == n) return CFLOW_OK;
    for (; i < n; i++) end_demand(t, chosen[i].record);
    return fail(err, CFLOW_ECANCELLED, "loading was cancelled");
}

cflow_status tier_warm(tier *t, const uint64_t *uses, cflow_progress *progress, cflow_error *err) {
    ranked *chosen = memory_zeroed(t->n_records, sizeof *chosen);
    if (!chosen) return fail(err, CFLOW_ENOMEM, "no memory to order %u records", t->n_records);
    pthread_mutex_lock(&t->lock);
    for (uint32_t r = 0; r < t->n_records; r++) t->entries[r].uses += uses[r];
    const cflow_status status = warm(t, chosen, choose_warm(t, uses, chosen), progress, err);
    pthread_mutex_unlock(&t->lock);
    memory_free(chosen);
    return status;
}

/* ---- statistics ---- */

void tier_uses(tier *t, uint64_t *uses) {
    pthread_mutex_lock(&t->lock);
    for (uint32_t r = 0; r < t->n_records; r++) uses[r] = t->entries[r].uses;
    pthread_mutex_unlock(&t->lock);
}

void tier_get_stats(tier *t, cflow_tier_stats *out) {
    pthread_mutex_lock(&t->lock);
    *out = t->stats;
    out->n_records = t->n_records;
    out->n_slots = t->n_slots;
    out->slot_bytes = t->slot_bytes;
    out->direct_io = is_direct(t);
    out->n_resident = t->used.n;
    const double now = now_s(t);
    for (int i = 0; i < t->options.n_threads; i++) {
        const uint32_t r = t->readers[i].record;
        if (r == NO_RECORD) continue;
        out->n_loading++;
        out->n_overdue += now >= deadline_s(t, &t->entries[r]);
    }
    pthread_mutex_unlock(&t->lock);
}

uint32_t tier_slots(const tier *t) {
    return t->n_slots;
}

void tier_add_memory(const tier *t, cflow_memory *memory) {
    memory->resident_bytes += t->memory.bytes;
    memory->huge_bytes += arena_huge_bytes(&t->memory);
}

/* ---- opening and closing ---- */

static cflow_status check_options(const tier_options *o, cflow_error *err) {
    if (o->n_threads < 1 || o->n_threads > MAX_THREADS)
        return fail(err, CFLOW_EINVAL, "%d I/O threads; there must be 1 to %d", o->n_threads,
                    MAX_THREADS);
    if (!(o->timeout_s > 0 && o->timeout_s <= MAX_TIMEOUT_S))
        return fail(err, CFLOW_EINVAL,
                    "a read times out after %g s; the timeout must be above 0 and at most %d s",
                    o->timeout_s, MAX_TIMEOUT_S);
    if (!(o->max_bytes_per_s == 0 || o->max_bytes_per_s >= MIN_BYTES_PER_S))
        return fail(err, CFLOW_EINVAL,
                    "a limit of %g bytes a second; it must be 0 for none, or at least %d",
                    o->max_bytes_per_s, MIN_BYTES_PER_S);
    return CFLOW_OK;
}

static cflow_status set_records(tier *t, const tier_record *records, uint32_t n_records,
                                cflow_error *err) {
    t->entries = memory_zeroed(n_records, sizeof *t->entries);
    t->links = memory_zeroed(n_records, sizeof *t->links);
    if (!t->entries || !t->links)
        return fail(err, CFLOW_ENOMEM, "no memory for %u records", n_records);
    t->n_records = n_records;
    for (uint32_t r = 0; r < n_records; r++) {
        const tier_record *in = &records[r];
        if (!in->bytes || in->bytes % FILE_PAGE || in->offset % FILE_PAGE ||
            in->offset > INT64_MAX || in->bytes > INT64_MAX - in->offset)
            return fail(err, CFLOW_EINVAL,
                        "record %u: %llu bytes at %llu; both must be multiples of %d, below 2^63",
                        r, (unsigned long long)in->bytes, (unsigned long long)in->offset,
                        FILE_PAGE);
        t->entries[r].range = *in;
        if (t->slot_bytes < in->bytes) t->slot_bytes = in->bytes;
    }
    return CFLOW_OK;
}

static cflow_status take_slots(tier *t, cflow_error *err) {
    const uint64_t budget = t->options.budget_bytes, n = budget / t->slot_bytes;
    const uint32_t threads = (uint32_t)t->options.n_threads;
    const uint32_t least = t->n_records < threads + 1 ? t->n_records : threads + 1;
    if (n < least)
        return fail(err, CFLOW_EINVAL,
                    "an expert cache of %llu bytes holds %llu records of %zu bytes; with %u I/O "
                    "threads it must hold %u: %llu bytes",
                    (unsigned long long)budget, (unsigned long long)n, t->slot_bytes, threads,
                    least, (unsigned long long)least * t->slot_bytes);
    t->n_slots = t->n_free = n < t->n_records ? (uint32_t)n : t->n_records;
    t->free_slots = memory_zeroed(t->n_slots, sizeof *t->free_slots);
    if (!t->free_slots || !ghost_open(&t->ghost, t->n_records, t->n_slots))
        return fail(err, CFLOW_ENOMEM, "no memory for %u slots", t->n_slots);
    for (uint32_t i = 0; i < t->n_slots; i++) t->free_slots[i] = t->n_slots - 1 - i;
    return arena_open(&t->memory, t->n_slots * t->slot_bytes, "the slots of a cache", err);
}

/* I/O threads block all signals: these are for the caller's threads. */
static cflow_status start_readers(tier *t, cflow_error *err) {
    const int n = t->options.n_threads;
    t->readers = memory_zeroed((size_t)n, sizeof *t->readers);
    if (!t->readers) return fail(err, CFLOW_ENOMEM, "no memory for %d I/O threads", n);
    for (int i = 0; i < n; i++) t->readers[i] = (reader){.tier = t, .record = NO_RECORD};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_mutex_lock(&t->lock);
    int code = 0;
    while (t->n_started < n && !code) {
        reader *r = &t->readers[t->n_started];
        code = pthread_create(&r->thread, NULL, run_reader, r);
        if (!code) t->n_started++;
    }
    t->n_readers = t->n_started;
    pthread_mutex_unlock(&t->lock);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!code) return CFLOW_OK;
    return fail(err, CFLOW_ENOMEM, "cannot start I/O thread %d of %d: %s", t->n_started + 1, n,
                strerror(code));
}

static void open_locks(tier *t) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->work, &monotonic);
    pthread_cond_init(&t->settled, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

cflow_status tier_open(tier **out, file *f, const tier_record *records, uint32_t n_records,
                       const tier_options *options, cflow_error *err) {
    *out = NULL;
    cflow_status status = check_options(options, err);
    if (status) return status;
    if (!n_records) return fail(err, CFLOW_EINVAL, "an expert cache without records");
    tier *t = memory_zeroed(1, sizeof *t);
    if (!t) return fail(err, CFLOW_ENOMEM, "no memory for an expert cache");
    const file closed = {.fd = -1, .direct_fd = -1};
    kernels k;
    kernels_select(&k, NULL);
    t->crc32c = k.crc32c;
    t->options = *options;
    t->demanded = t->speculated = t->used = EMPTY_LIST;
    t->file = closed;
    open_locks(t);
    status = set_records(t, records, n_records, err);
    if (!status) status = take_slots(t, err);
    if (!status) status = start_readers(t, err);
    if (status) {
        tier_close(t);
        return status;
    }
    t->file = *f; /* no reader uses it before the first demand */
    *f = closed;
    *out = t;
    return CFLOW_OK;
}

/* 1 if every reader has left or is stuck. *again: when that may change without a wake-up. */
static int readers_are_out(const tier *t, double now, double *again) {
    *again = now + t->options.timeout_s;
    int out = 1;
    for (int i = 0; i < t->n_started; i++) {
        const reader *r = &t->readers[i];
        if (r->left) continue;
        const double deadline =
            r->record == NO_RECORD ? INFINITY : deadline_s(t, &t->entries[r->record]);
        *again = fmin(*again, deadline);
        out &= now >= deadline;
    }
    return out;
}

void tier_close(tier *t) {
    if (!t) return;
    double again;
    pthread_mutex_lock(&t->lock);
    t->closing = 1;
    pthread_cond_broadcast(&t->work);
    for (double now = now_s(t); !readers_are_out(t, now, &again); now = now_s(t))
        sleep_on(t, &t->settled, again - now);
    for (int i = 0; i < t->n_started; i++) {
        if (t->readers[i].left)
            pthread_join(t->readers[i].thread, NULL);
        else
            pthread_detach(t->readers[i].thread);
    }
    t->abandoned = t->n_readers != 0;
    const int is_last = !t->abandoned;
    pthread_mutex_unlock(&t->lock);
    if (is_last) tier_free(t);
}
