/* The tier: the right bytes or a named failure, for every budget, order of calls and fault. Time is
 * that of a clock that the tests move. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "expect.h"
#include "temporary.h"
#include "tier.h"

enum { PAGE = 4096, MAX_RECORDS = 16, MAX_BYTES = 5 * PAGE, LOG = 64 };

/* ---- a file of records, on a disk whose reads and clock a test controls ---- */

typedef struct {
    char path[64];
    int own_fd; /* keeps the file, which has no name, in existence */
    uint32_t n;
    tier_record records[MAX_RECORDS];
    uint8_t bytes[MAX_RECORDS][MAX_BYTES];

    pthread_mutex_t lock;
    pthread_cond_t changed;
    int held[MAX_RECORDS];  /* 1: reads of the record block */
    int error[MAX_RECORDS]; /* errno of reads of the record; 0: they succeed */
    size_t piece;           /* most bytes that one read returns; 0: no limit */
    int interrupts;         /* not 0: every second read fails with EINTR */
    int refuses_direct;
    int fd, direct_fd;
    uint32_t log[LOG]; /* records in the order in which their reads began */
    uint32_t n_log;
    uint32_t looks;        /* how often the clock was read */
    double time_s, tick_s; /* the clock, and what each look adds to it */
    double rate;           /* not 0: the limit on bytes per second since from_s */
    double from_s;
    uint64_t read_bytes; /* since from_s */
    int too_fast;        /* 1: the limit was exceeded */
} disk;

static uint32_t crc_bitwise(const uint8_t *data, size_t n) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < n; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

static void write_record(const disk *d, uint32_t r) {
    const tier_record *at = &d->records[r];
    CHECK(pwrite(d->own_fd, d->bytes[r], at->bytes, (off_t)at->offset) == (ssize_t)at->bytes,
          "cannot write record %u", r);
}

/* n records of 1 to 5 pages (or all of `pages`), in the file from the last to the first. */
static disk *make_disk(uint32_t n, uint32_t pages) {
    disk *d = calloc(1, sizeof *d);
    d->own_fd = temporary_file(d->path);
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->changed, NULL);
    d->n = n;
    uint64_t at = PAGE;
    uint32_t x = 1;
    for (uint32_t r = n; r-- > 0;) {
        const uint64_t bytes = PAGE * (uint64_t)(pages ? pages : 1 + r % 5);
        for (uint64_t i = 0; i < bytes; i++) {
            x = x * 1664525 + 1013904223;
            d->bytes[r][i] = (uint8_t)(x >> 24);
        }
        d->records[r] = (tier_record){at, bytes, crc_bitwise(d->bytes[r], bytes)};
        write_record(d, r);
        at += bytes;
    }
    return d;
}

static void drop_disk(disk *d) {
    close(d->own_fd);
    free(d);
}

static uint32_t record_at(const disk *d, off_t offset) {
    uint32_t r = 0;
    while (r + 1 < d->n && !((uint64_t)offset >= d->records[r].offset &&
                             (uint64_t)offset < d->records[r].offset + d->records[r].bytes))
        r++;
    return r;
}

static ssize_t disk_read(void *arg, int fd, void *out, size_t n, off_t offset) {
    disk *d = arg;
    pthread_mutex_lock(&d->lock);
    const uint32_t r = record_at(d, offset);
    int error = d->error[r];
    if (d->interrupts && d->interrupts++ % 2) error = EINTR;
    if (d->refuses_direct && fd == d->direct_fd) error = EINVAL;
    if ((uint64_t)offset == d->records[r].offset) d->log[d->n_log++ % LOG] = r;
    if (d->rate > 0 &&
        (double)d->read_bytes > d->rate * (d->time_s - d->from_s + 1.1e-3) + MAX_BYTES)
        d->too_fast = 1;
    d->read_bytes += n;
    pthread_cond_broadcast(&d->changed);
    while (d->held[r]) pthread_cond_wait(&d->changed, &d->lock);
    const size_t most = d->piece ? d->piece : n;
    pthread_mutex_unlock(&d->lock);
    if (error) {
        errno = error;
        return -1;
    }
    const ssize_t got = pread(fd, out, n, offset);
    return got > (ssize_t)most ? (ssize_t)most : got;
}

static double disk_now(void *arg) {
    disk *d = arg;
    pthread_mutex_lock(&d->lock);
    d->looks++;
    const double now = d->time_s += d->tick_s;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
    return now;
}

static void hold(disk *d, uint32_t r, int yes) {
    pthread_mutex_lock(&d->lock);
    d->held[r] = yes;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

static void set_error(disk *d, uint32_t r, int error) {
    pthread_mutex_lock(&d->lock);
    d->error[r] = error;
    pthread_mutex_unlock(&d->lock);
}

static void advance(disk *d, double seconds) {
    pthread_mutex_lock(&d->lock);
    d->time_s += seconds;
    pthread_mutex_unlock(&d->lock);
}

static void wait_reads(disk *d, uint32_t n) {
    pthread_mutex_lock(&d->lock);
    while (d->n_log < n) pthread_cond_wait(&d->changed, &d->lock);
    pthread_mutex_unlock(&d->lock);
}

static uint32_t n_reads(disk *d) {
    pthread_mutex_lock(&d->lock);
    const uint32_t n = d->n_log;
    pthread_mutex_unlock(&d->lock);
    return n;
}

static void check_log(disk *d, const char *want, int line) {
    char got[2 * LOG + 1] = "";
    pthread_mutex_lock(&d->lock);
    for (uint32_t i = 0; i < d->n_log && i < LOG; i++)
        snprintf(got + strlen(got), sizeof got - strlen(got), "%x", d->log[i]);
    pthread_mutex_unlock(&d->lock);
    CHECK(!strcmp(got, want), "line %d: records were read in the order %s, want %s", line, got,
          want);
}

/* ---- a tier over it ---- */

static cflow_status open_tier(tier **t, disk *d, int n_threads, uint64_t budget, int cached,
                              file *f, cflow_error *err) {
    CHECK(!file_open(f, d->path, err), "%s", err->text);
    d->fd = f->fd;
    d->direct_fd = f->direct_fd;
    return tier_open(t, f, d->records, d->n,
                     &(tier_options){.budget_bytes = budget,
                                     .timeout_s = 10,
                                     .max_bytes_per_s = d->rate,
                                     .n_threads = n_threads,
                                     .cached = cached,
                                     .hooks = {d, disk_read, disk_now}},
                     err);
}

static tier *make_tier(disk *d, int n_threads, uint64_t budget, int cached) {
    tier *t;
    file f;
    cflow_error err;
    CHECK(!open_tier(&t, d, n_threads, budget, cached, &f, &err), "%s", err.text);
    CHECK(f.fd == -1 && f.direct_fd == -1, "the file was not taken over");
    return t;
}

/* For records of one page. */
static tier *page_tier(disk *d, int n_threads, uint32_t n_slots) {
    return make_tier(d, n_threads, (uint64_t)n_slots * PAGE, 0);
}

static void end(tier *t, disk *d) {
    tier_close(t);
    drop_disk(d);
}

static cflow_tier_stats stats_of(tier *t) {
    cflow_tier_stats s;
    tier_get_stats(t, &s);
    return s;
}

static void check_bytes(const disk *d, uint32_t r, const uint8_t *bytes, const char *what) {
    CHECK(bytes && !memcmp(bytes, d->bytes[r], d->records[r].bytes),
          "%s: record %u has other bytes", what, r);
}

static tier_result get(tier *t, const disk *d, uint32_t r) {
    uint32_t which;
    const uint8_t *bytes;
    const tier_result result = tier_acquire(t, &r, 1, NULL, &which, &bytes);
    CHECK(which == 0 && (result == TIER_OK) == (bytes != NULL), "which %u", which);
    if (result) return result;
    check_bytes(d, r, bytes, "get");
    tier_release(t, r);
    return TIER_OK;
}

static void demand_and_get(tier *t, const disk *d, uint32_t r) {
    tier_demand(t, &r, 1, NULL);
    const tier_result result = get(t, d, r);
    CHECK(!result, "record %u: %s", r, tier_result_text(result));
}

static int is_resident(tier *t, uint32_t r) {
    const uint8_t *bytes = tier_try_acquire(t, r);
    if (bytes) tier_release(t, r);
    return bytes != NULL;
}

static void wait_resident(tier *t, uint32_t n) {
    while (stats_of(t).n_resident < n) sched_yield();
}

static void wait_idle(tier *t) {
    while (stats_of(t).n_loading) sched_yield();
}

/* Demands records and returns once the read of the first has begun; it blocks until hold(.., 0). */
static void hold_in_flight(tier *t, disk *d, const uint32_t *records, uint32_t n) {
    hold(d, records[0], 1);
    tier_demand(t, records, n, NULL);
    wait_reads(d, 1);
}

typedef struct {
    tier *t;
    disk *d;
    uint32_t record;
    atomic_int cancel;
    tier_result result;
    pthread_t thread;
} waiter;

static void *wait_for_record(void *arg) {
    waiter *w = arg;
    uint32_t which;
    const uint8_t *bytes;
    w->result = tier_acquire(w->t, &w->record, 1, &w->cancel, &which, &bytes);
    if (w->result) return NULL;
    check_bytes(w->d, w->record, bytes, "waiter");
    tier_release(w->t, w->record);
    return NULL;
}

/* Starts a thread that waits for a record and returns once it does: it reads the clock after it has
 * registered as a waiter. No I/O thread may read the clock meanwhile. */
static void start_waiter(waiter *w, tier *t, disk *d, uint32_t record) {
    *w = (waiter){.t = t, .d = d, .record = record};
    pthread_mutex_lock(&d->lock);
    const uint32_t before = d->looks;
    pthread_mutex_unlock(&d->lock);
    pthread_create(&w->thread, NULL, wait_for_record, w);
    pthread_mutex_lock(&d->lock);
    while (d->looks == before) pthread_cond_wait(&d->changed, &d->lock);
    pthread_mutex_unlock(&d->lock);
}

static tier_result end_waiter(waiter *w) {
    pthread_join(w->thread, NULL);
    return w->result;
}

/* ---- bytes ---- */

static void gives_the_bytes_of_the_file(int cached, size_t piece, int interrupts, int refuses) {
    disk *d = make_disk(MAX_RECORDS, 0);
    d->piece = piece;
    d->interrupts = interrupts;
    d->refuses_direct = refuses;
    tier *t = make_tier(d, 2, 3 * MAX_BYTES, cached);
    const int direct = d->direct_fd >= 0 && !cached;
    CHECK(stats_of(t).direct_io == direct, "direct %d, want %d", stats_of(t).direct_io, direct);
    for (uint32_t i = 0; i < 3 * d->n; i++) demand_and_get(t, d, i * 7 % d->n);
    const cflow_tier_stats s = stats_of(t);
    CHECK(s.direct_io == (direct && !refuses), "refused, yet direct");
    CHECK(s.reads == s.misses && s.misses == 3 * d->n && !s.hits, "%llu reads, %llu misses",
          (unsigned long long)s.reads, (unsigned long long)s.misses);
    uint64_t bytes = 0, latencies = 0;
    for (uint32_t r = 0; r < d->n; r++) bytes += 3 * d->records[r].bytes;
    for (int i = 0; i < CFLOW_LATENCIES; i++) latencies += s.latencies[i];
    CHECK(s.disk_bytes == bytes, "%llu bytes, want %llu", (unsigned long long)s.disk_bytes,
          (unsigned long long)bytes);
    CHECK(latencies == s.reads, "%llu latencies", (unsigned long long)latencies);
    end(t, d);
}

/* ---- opening ---- */

static void names_the_smallest_budget(void) {
    disk *d = make_disk(MAX_RECORDS, 0);
    for (int threads = 1; threads <= 3; threads++) {
        const uint64_t least = (uint64_t)(threads + 1) * MAX_BYTES;
        tier *t;
        file f;
        cflow_error err;
        char want[64];
        CHECK(open_tier(&t, d, threads, least - 1, 0, &f, &err) == CFLOW_EINVAL && !t,
              "%d threads: a byte too few", threads);
        snprintf(want, sizeof want, "must hold %d: %llu bytes", threads + 1,
                 (unsigned long long)least);
        CHECK(strstr(err.text, want), "%s", err.text);
        CHECK(f.fd >= 0, "the file was taken over nevertheless");
        file_close(&f);
        CHECK(!open_tier(&t, d, threads, least, 0, &f, &err), "%s", err.text);
        const cflow_tier_stats s = stats_of(t);
        CHECK(s.n_slots == (uint32_t)threads + 1 && s.slot_bytes == MAX_BYTES, "%u slots of %llu",
              s.n_slots, (unsigned long long)s.slot_bytes);
        tier_close(t);
    }
    drop_disk(d);
}

static void takes_no_more_slots_than_records(void) {
    disk *d = make_disk(2, 1);
    tier *t = page_tier(d, 4, 1000);
    CHECK(tier_slots(t) == 2, "%u slots", tier_slots(t));
    cflow_memory memory = {0};
    tier_add_memory(t, &memory);
    CHECK(memory.resident_bytes == 2 << 20 && memory.huge_bytes <= 2 << 20, "one huge page's");
    demand_and_get(t, d, 0);
    demand_and_get(t, d, 1);
    demand_and_get(t, d, 0);
    CHECK(stats_of(t).hits == 1 && !stats_of(t).evictions, "all fit");
    end(t, d);
}

static void expect_refused(disk *d, const tier_record *records, uint32_t n, tier_options o,
                           const char *why) {
    tier *t;
    file f;
    cflow_error err = {{0}};
    CHECK(!file_open(&f, d->path, &err), "%s", err.text);
    CHECK(tier_open(&t, &f, records, n, &o, &err) == CFLOW_EINVAL && !t, "accepted: %s", why);
    CHECK(strstr(err.text, why), "%s", err.text);
    file_close(&f);
}

static void refuses_wrong_arguments(void) {
    disk *d = make_disk(1, 1);
    const tier_options good = {.budget_bytes = 8 * PAGE, .timeout_s = 1, .n_threads = 1};
    tier_options o = good;
    o.n_threads = 0;
    expect_refused(d, d->records, 1, o, "0 I/O threads");
    o = good;
    o.timeout_s = 0;
    expect_refused(d, d->records, 1, o, "times out after 0 s");
    o = good;
    o.max_bytes_per_s = -1;
    expect_refused(d, d->records, 1, o, "-1 bytes a second");
    expect_refused(d, d->records, 0, good, "without records");
    expect_refused(d, &(tier_record){1, PAGE, 0}, 1, good, "record 0: 4096 bytes at 1");
    expect_refused(d, &(tier_record){0, 0, 0}, 1, good, "record 0: 0 bytes");
    expect_refused(d, &(tier_record){0, 100, 0}, 1, good, "record 0: 100 bytes");
    expect_refused(d, &(tier_record){1ull << 63, PAGE, 0}, 1, good, "below 2^63");
    expect_refused(d, &(tier_record){(1ull << 63) - PAGE, PAGE, 0}, 1, good, "below 2^63");
    drop_disk(d);
    tier_close(NULL);
}

/* ---- eviction ---- */

static void evicts_the_least_recently_used(void) {
    disk *d = make_disk(5, 1);
    tier *t = page_tier(d, 1, 3);
    const uint32_t order[] = {0, 1, 2, 0, 3, 1, 4};
    for (uint32_t i = 0; i < 7; i++) demand_and_get(t, d, order[i]);
    check_log(d, "012314", __LINE__);
    const cflow_tier_stats s = stats_of(t);
    CHECK(s.hits == 1 && s.misses == 6 && s.evictions == 3, "%llu hits, %llu misses, %llu evicted",
          (unsigned long long)s.hits, (unsigned long long)s.misses,
          (unsigned long long)s.evictions);
    CHECK(!is_resident(t, 0) && is_resident(t, 1) && !is_resident(t, 2) && is_resident(t, 3) &&
              is_resident(t, 4),
          "3, 1 and 4 should be there"); /* and in this order of use */
    CHECK(!get(t, d, 3) && !get(t, d, 0), "acquiring alone is use as well");
    CHECK(is_resident(t, 3) && !is_resident(t, 1), "1 was the oldest");
    end(t, d);
}

static void counts_each_demand_once(void) {
    disk *d = make_disk(4, 1);
    tier *t = page_tier(d, 1, 4);
    uint8_t missed[3];
    demand_and_get(t, d, 1);
    tier_demand(t, (const uint32_t[]){0, 1, 2}, 3, missed);
    CHECK(missed[0] == 1 && missed[1] == 0 && missed[2] == 1, "missed %u %u %u", missed[0],
          missed[1], missed[2]);
    for (uint32_t r = 0; r < 3; r++) CHECK(!get(t, d, r), "record %u", r);
    uint64_t uses[4];
    tier_uses(t, uses);
    CHECK(uses[0] == 1 && uses[1] == 2 && uses[2] == 1 && uses[3] == 0, "uses");
    const cflow_tier_stats s = stats_of(t);
    CHECK(s.hits == 1 && s.misses == 3 && s.reads == 3 && !s.extra_reads, "counts");
    CHECK(!get(t, d, 3) && stats_of(t).extra_reads == 1 && stats_of(t).misses == 3,
          "acquired without a demand");
    end(t, d);
}

static void keeps_what_is_pinned(void) {
    disk *d = make_disk(8, 1);
    tier *t = page_tier(d, 1, 3);
    const uint32_t kept = 0;
    uint32_t which;
    const uint8_t *bytes, *again;
    CHECK(!tier_acquire(t, &kept, 1, NULL, &which, &bytes), "acquire");
    again = tier_try_acquire(t, kept);
    CHECK(again == bytes, "pinned twice");
    tier_release(t, kept);
    for (uint32_t i = 1; i < 3 * d->n; i++) {
        if (i % d->n) demand_and_get(t, d, i % d->n);
        check_bytes(d, kept, bytes, "pinned");
    }
    CHECK(tier_try_acquire(t, kept) == bytes, "moved");
    tier_release(t, kept);
    tier_release(t, kept);
    for (uint32_t r = 1; r < d->n; r++) demand_and_get(t, d, r);
    CHECK(!is_resident(t, kept), "never evicted");
    end(t, d);
}

/* 12 records through a few slots, each as soon as it is there. */
static void runs_in_waves(int n_threads, uint32_t n_slots) {
    disk *d = make_disk(12, 1);
    tier *t = page_tier(d, n_threads, n_slots);
    for (int round = 0; round < 20; round++) {
        uint32_t left[12], n = 12;
        for (uint32_t r = 0; r < n; r++) left[r] = r;
        tier_demand(t, left, n, NULL);
        while (n) {
            uint32_t which;
            const uint8_t *bytes;
            const tier_result result = tier_acquire(t, left, n, NULL, &which, &bytes);
            CHECK(!result, "%s", tier_result_text(result));
            check_bytes(d, left[which], bytes, "wave");
            tier_release(t, left[which]);
            left[which] = left[--n];
        }
    }
    const cflow_tier_stats s = stats_of(t);
    CHECK(s.hits + s.misses == 240 && s.reads == s.misses && !s.extra_reads,
          "%llu hits, %llu misses, %llu reads, %llu extra", (unsigned long long)s.hits,
          (unsigned long long)s.misses, (unsigned long long)s.reads,
          (unsigned long long)s.extra_reads);
    CHECK(s.disk_bytes == s.misses * PAGE, "%llu bytes", (unsigned long long)s.disk_bytes);
    CHECK(s.hits >= n_slots * 19ull, "what is resident serves first: %llu hits",
          (unsigned long long)s.hits);
    end(t, d);
}

/* In a cache full of demanded records, a demand evicts none of them, but a waiter does. */
static void only_waiters_evict_demanded_records(void) {
    disk *d = make_disk(5, 1);
    tier *t = page_tier(d, 1, 2);
    tier_demand(t, (const uint32_t[]){0, 1}, 2, NULL);
    wait_resident(t, 2);
    tier_demand(t, (const uint32_t[]){2, 3}, 2, NULL);
    check_log(d, "01", __LINE__);
    CHECK(!get(t, d, 3), "the waiter's");
    CHECK(!get(t, d, 0), "the first demand stayed");
    while (stats_of(t).reads < 5) sched_yield(); /* the other is read again unasked */
    CHECK(!get(t, d, 2) && !get(t, d, 1), "the others");
    const cflow_tier_stats s = stats_of(t);
    CHECK(s.extra_reads == 1 && s.reads == 5 && s.misses == 4, "%llu extra, %llu reads",
          (unsigned long long)s.extra_reads, (unsigned long long)s.reads);
    tier_demand(t, (const uint32_t[]){1}, 1, NULL);
    tier_demand(t, (const uint32_t[]){2}, 1, NULL); /* both are there, 2 is needed last */
    CHECK(!get(t, d, 4) && is_resident(t, 1), "what is needed first stayed");
    end(t, d);
}

/* A record that was only waited for is not evicted before its waiter has it. */
static void waiters_get_what_was_read_for_them(void) {
    disk *d = make_disk(6, 1);
    tier *t = page_tier(d, 1, 2);
    waiter all[6];
    hold(d, 0, 1);
    tier_speculate(t, (const uint32_t[]){0}, 1);
    wait_reads(d, 1);
    for (uint32_t r = 0; r < d->n; r++) start_waiter(&all[r], t, d, r);
    hold(d, 0, 0);
    for (uint32_t r = 0; r < d->n; r++) CHECK(!end_waiter(&all[r]), "record %u", r);
    CHECK(n_reads(d) == d->n, "%u reads for %u records", n_reads(d), d->n);
    end(t, d);
}

/* ---- order ---- */

static void shares_a_read_in_flight(void) {
    disk *d = make_disk(3, 1);
    tier *t = page_tier(d, 1, 2);
    const uint32_t r = 1;
    waiter a, b;
    uint8_t missed[2];
    hold(d, r, 1);
    tier_demand(t, &r, 1, &missed[0]);
    wait_reads(d, 1);
    tier_demand(t, &r, 1, &missed[1]);
    start_waiter(&a, t, d, r);
    start_waiter(&b, t, d, r);
    advance(d, 2);
    hold(d, r, 0);
    CHECK(!end_waiter(&a) && !end_waiter(&b), "both get it");
    check_log(d, "1", __LINE__);
    const cflow_tier_stats s = stats_of(t);
    CHECK(missed[0] == 1 && missed[1] == 0 && s.misses == 1 && s.hits == 1, "one miss, one hit");
    CHECK(s.stall_ns == 4000000000ull, "two waited 2 s each: %llu ns",
          (unsigned long long)s.stall_ns);
    CHECK(s.read_ns == 2000000000ull && s.latencies[15] == 1, "one read took 2 s: %llu ns",
          (unsigned long long)s.read_ns);
    end(t, d);
}

static void reads_the_most_urgent_first(void) {
    disk *d = make_disk(8, 1);
    tier *t = page_tier(d, 1, 8);
    waiter w;
    hold_in_flight(t, d, (const uint32_t[]){0}, 1);
    tier_speculate(t, (const uint32_t[]){1, 2, 3}, 3);
    tier_demand(t, (const uint32_t[]){4, 5}, 2, NULL);
    tier_demand(t, (const uint32_t[]){3}, 1, NULL);
    start_waiter(&w, t, d, 5);
    hold(d, 0, 0);
    CHECK(!end_waiter(&w), "5");
    wait_resident(t, 6);
    check_log(d, "054312", __LINE__);
    CHECK(stats_of(t).late == 1, "3 was asked for too late");
    end(t, d);
}

static void waiting_makes_speculation_urgent(void) {
    disk *d = make_disk(4, 1);
    tier *t = page_tier(d, 1, 4);
    waiter w;
    hold_in_flight(t, d, (const uint32_t[]){0}, 1);
    tier_speculate(t, (const uint32_t[]){1, 2}, 2);
    start_waiter(&w, t, d, 2);
    tier_speculate(t, (const uint32_t[]){3}, 1); /* drops 1, not 2 */
    hold(d, 0, 0);
    CHECK(!end_waiter(&w), "2");
    wait_resident(t, 3);
    check_log(d, "023", __LINE__);
    end(t, d);
}

static void speculation_is_counted(void) {
    disk *d = make_disk(8, 1);
    tier *t = page_tier(d, 1, 2);
    tier_speculate(t, (const uint32_t[]){0, 1}, 2);
    wait_resident(t, 2);
    uint8_t missed;
    tier_demand(t, (const uint32_t[]){0}, 1, &missed);
    CHECK(missed == 1 && !get(t, d, 0), "its bytes came from the disk for this demand");
    tier_demand(t, (const uint32_t[]){0}, 1, &missed);
    CHECK(missed == 0 && !get(t, d, 0), "a hit from then on");
    demand_and_get(t, d, 2); /* evicts 1 */
    hold(d, 3, 1);
    tier_speculate(t, (const uint32_t[]){3, 4, 5}, 3);
    wait_reads(d, 4);
    tier_speculate(t, (const uint32_t[]){2, 6}, 2); /* 4 and 5 are dropped, 2 is there */
    tier_demand(t, (const uint32_t[]){3}, 1, &missed);
    hold(d, 3, 0);
    CHECK(missed == 1 && !get(t, d, 3), "in flight when demanded");
    while (stats_of(t).reads < 5) sched_yield();
    check_log(d, "01236", __LINE__);
    demand_and_get(t, d, 6);
    set_error(d, 7, EIO);
    tier_speculate(t, (const uint32_t[]){7}, 1);
    while (!stats_of(t).failed_io) sched_yield();
    const cflow_tier_stats s = stats_of(t);
    CHECK(s.speculated == 5 && s.useful == 2 && s.late == 1 && s.wasted == 2,
          "%llu speculated: %llu useful, %llu late, %llu wasted", (unsigned long long)s.speculated,
          (unsigned long long)s.useful, (unsigned long long)s.late, (unsigned long long)s.wasted);
    /* The wasted read that failed brought no bytes. */
    CHECK(s.disk_bytes == (s.misses + s.wasted - 1) * PAGE, "%llu bytes",
          (unsigned long long)s.disk_bytes);
    end(t, d);
}

static void withdrawn_demands_are_not_read(void) {
    disk *d = make_disk(5, 1);
    tier *t = page_tier(d, 1, 2);
    waiter w;
    hold_in_flight(t, d, (const uint32_t[]){0, 1, 2, 3}, 4);
    start_waiter(&w, t, d, 2);
    tier_withdraw(t);
    hold(d, 0, 0);
    CHECK(!end_waiter(&w), "a waiter still gets its record");
    tier_demand(t, (const uint32_t[]){4, 1}, 2, NULL);
    wait_reads(d, 4); /* nothing holds the slots */
    CHECK(!get(t, d, 4) && !get(t, d, 1), "4 and 1");
    check_log(d, "0241", __LINE__);
    end(t, d);
}

static void cancelled_waits_end(void) {
    disk *d = make_disk(3, 1);
    tier *t = page_tier(d, 1, 2);
    waiter w;
    hold_in_flight(t, d, (const uint32_t[]){0}, 1);
    start_waiter(&w, t, d, 1);
    atomic_store(&w.cancel, 1);
    tier_interrupt(t);
    CHECK(end_waiter(&w) == TIER_CANCELLED, "%s", tier_result_text(w.result));
    hold(d, 0, 0);
    CHECK(!get(t, d, 0) && !get(t, d, 2), "all is well afterwards");
    check_log(d, "02", __LINE__);
    end(t, d);
}

/* The clock moves only when the tier reads it, before each read of the disk. */
static void keeps_to_its_rate(int n_threads) {
    disk *d = make_disk(MAX_RECORDS, 0);
    d->rate = 50e6;
    d->tick_s = 5e-6;
    const uint64_t budget = (uint64_t)(n_threads + 1) * MAX_BYTES;
    tier *t = make_tier(d, n_threads, budget, 0);
    uint32_t all[MAX_RECORDS];
    for (uint32_t r = 0; r < d->n; r++) all[r] = r;
    for (int round = 0; round < 3; round++) {
        tier_demand(t, all, d->n, NULL);
        for (uint32_t r = 0; r < d->n; r++) CHECK(!get(t, d, r), "record %u", r);
        wait_idle(t);
        pthread_mutex_lock(&d->lock);
        CHECK(!d->too_fast && d->read_bytes, "more than %.0f bytes a second", d->rate);
        d->from_s = d->time_s += 1; /* idle time is not saved up */
        d->read_bytes = 0;
        pthread_mutex_unlock(&d->lock);
    }
    end(t, d);
}

/* ---- faults ---- */

static void a_failed_read_fails_its_callers(void) {
    disk *d = make_disk(4, 1);
    tier *t = page_tier(d, 1, 2);
    const uint32_t r = 1;
    waiter a, b;
    set_error(d, r, EIO);
    hold_in_flight(t, d, &r, 1);
    start_waiter(&a, t, d, r);
    start_waiter(&b, t, d, r);
    hold(d, r, 0);
    CHECK(end_waiter(&a) == TIER_EIO && end_waiter(&b) == TIER_EIO, "both are told");
    CHECK(stats_of(t).failed_io == 1, "one read failed");

    tier_demand(t, &r, 1, NULL); /* fails before a caller waits */
    while (stats_of(t).failed_io < 2) sched_yield();
    set_error(d, r, 0);
    CHECK(get(t, d, r) == TIER_EIO, "its demand is told");
    check_log(d, "11", __LINE__);
    demand_and_get(t, d, r);
    check_log(d, "111", __LINE__);
    for (uint32_t i = 0; i < d->n; i++) demand_and_get(t, d, i);
    CHECK(stats_of(t).n_resident == 2, "%u resident: a slot was lost", stats_of(t).n_resident);
    end(t, d);
}

static void altered_records_are_rejected(void) {
    disk *d = make_disk(4, 1);
    tier *t = page_tier(d, 2, 3);
    for (uint32_t at = 0; at < PAGE; at += PAGE - 1) {
        d->bytes[2][at] ^= 0x10;
        write_record(d, 2);
        CHECK(get(t, d, 2) == TIER_ALTERED, "byte %u", at);
        CHECK(!get(t, d, 1) && !get(t, d, 3), "the others are fine");
        CHECK(!tier_try_acquire(t, 2), "pinned nevertheless");
        d->bytes[2][at] ^= 0x10;
        write_record(d, 2);
        CHECK(!get(t, d, 2), "right again");
        demand_and_get(t, d, 0);
        demand_and_get(t, d, 1);
        demand_and_get(t, d, 3); /* 2 has gone */
    }
    CHECK(stats_of(t).failed_altered == 2, "both counted");
    end(t, d);
}

static void a_cut_file_fails_the_lost_records(int cached) {
    disk *d = make_disk(4, 2); /* 3, 2, 1, 0 in the file */
    tier *t = make_tier(d, 1, 4 * PAGE, cached);
    CHECK(!get(t, d, 0), "whole");
    CHECK(!ftruncate(d->own_fd, (off_t)d->records[1].offset + PAGE + 100), "truncate");
    CHECK(!get(t, d, 0), "resident still");
    CHECK(get(t, d, 1) == TIER_CUT && get(t, d, 1) == TIER_CUT, "cut inside");
    CHECK(!get(t, d, 2) && !get(t, d, 3), "before the cut");
    CHECK(get(t, d, 0) == TIER_CUT, "behind it");
    CHECK(stats_of(t).failed_cut == 3, "counted");
    write_record(d, 1);
    write_record(d, 0);
    CHECK(!get(t, d, 0) && !get(t, d, 1), "whole again");
    end(t, d);
}

/* The records are those of the opened file, even if its name is gone. */
static void a_replaced_file_goes_on_serving(void) {
    disk *d = make_disk(4, 1);
    close(d->own_fd);
    strcpy(d->path, "/var/tmp/cflow-test-XXXXXX"); /* one with a name */
    d->own_fd = mkstemp(d->path);
    for (uint32_t r = 0; r < d->n; r++) write_record(d, r);
    tier *t = page_tier(d, 1, 2);
    demand_and_get(t, d, 0);
    CHECK(!unlink(d->path), "unlink");
    for (uint32_t r = 0; r < d->n; r++) demand_and_get(t, d, r);
    end(t, d);
}

static void a_read_that_hangs_times_out(void) {
    disk *d = make_disk(8, 1);
    tier *t = page_tier(d, 2, 3);
    waiter w;
    hold_in_flight(t, d, (const uint32_t[]){0}, 1);
    start_waiter(&w, t, d, 0);
    for (uint32_t r = 1; r < d->n; r++) demand_and_get(t, d, r); /* the other thread works */
    advance(d, 10);
    demand_and_get(t, d, 1); /* the end of this read wakes the waiter */
    CHECK(end_waiter(&w) == TIER_TIMED_OUT, "%s", tier_result_text(w.result));
    CHECK(get(t, d, 0) == TIER_TIMED_OUT, "later callers are told at once");
    cflow_tier_stats s = stats_of(t);
    CHECK(s.failed_timed_out == 1 && s.n_overdue == 1 && s.n_loading == 1,
          "%llu timed out, %u overdue", (unsigned long long)s.failed_timed_out, s.n_overdue);
    for (int round = 0; round < 10; round++)
        for (uint32_t r = 1; r < d->n; r++) demand_and_get(t, d, r);
    CHECK(stats_of(t).n_resident == 2, "the third slot is the kernel's");
    hold(d, 0, 0);
    while (!is_resident(t, 0)) sched_yield();
    CHECK(!get(t, d, 0) && stats_of(t).n_resident == 3 && !stats_of(t).n_overdue,
          "back, and its bytes are right");
    end(t, d);
}

static void queued_records_time_out_too(void) {
    disk *d = make_disk(4, 1);
    tier *t = page_tier(d, 1, 2);
    hold_in_flight(t, d, (const uint32_t[]){0, 1}, 2);
    advance(d, 10);
    CHECK(get(t, d, 1) == TIER_TIMED_OUT && get(t, d, 2) == TIER_TIMED_OUT, "queued behind it");
    uint32_t which;
    const uint8_t *bytes;
    CHECK(tier_acquire(t, (const uint32_t[]){3, 0}, 2, NULL, &which, &bytes) == TIER_TIMED_OUT,
          "either of two");
    hold(d, 0, 0);
    wait_resident(t, 1);
    CHECK(!get(t, d, 1) && !get(t, d, 2) && !get(t, d, 3), "it answers again");
    check_log(d, "0123", __LINE__);
    end(t, d);
}

static void times_out_by_the_real_clock(void) {
    disk *d = make_disk(1, 1);
    tier *t;
    file f;
    cflow_error err;
    CHECK(!file_open(&f, d->path, &err), "%s", err.text);
    CHECK(!tier_open(&t, &f, d->records, d->n,
                     &(tier_options){.budget_bytes = PAGE,
                                     .timeout_s = 0.02,
                                     .n_threads = 1,
                                     .hooks = {.arg = d, .read = disk_read}},
                     &err),
          "%s", err.text);
    hold(d, 0, 1);
    CHECK(get(t, d, 0) == TIER_TIMED_OUT, "held");
    hold(d, 0, 0);
    wait_resident(t, 1);
    CHECK(!get(t, d, 0) && stats_of(t).stall_ns > 0, "let go");
    end(t, d);
}

static void close_abandons_a_stuck_read(void) {
    disk *d = make_disk(4, 1);
    tier *t = make_tier(d, 2, 3 * PAGE, 0);
    char descriptor[32];
    snprintf(descriptor, sizeof descriptor, "/proc/self/fd/%d", d->fd);
    hold_in_flight(t, d, (const uint32_t[]){0}, 1);
    demand_and_get(t, d, 1);
    advance(d, 10);
    tier_close(t);
    CHECK(!access(descriptor, F_OK), "its descriptor is needed still");
    hold(d, 0, 0);
    while (!access(descriptor, F_OK)) sched_yield(); /* closed in the end */
    drop_disk(d);
}

static void close_waits_for_a_healthy_read(void) {
    disk *d = make_disk(8, 1);
    for (int i = 0; i < 50; i++) {
        const uint64_t budget = 8 * PAGE;
        tier *t = make_tier(d, 2, budget, 1);
        char descriptor[32];
        snprintf(descriptor, sizeof descriptor, "/proc/self/fd/%d", d->fd);
        tier_demand(t, (const uint32_t[]){0, 1, 2, 3, 4, 5, 6, 7}, 8, NULL);
        wait_reads(d, (uint32_t)i + 1);
        tier_close(t);
        CHECK(access(descriptor, F_OK), "a reader is left");
    }
    drop_disk(d);
}

/* ---- ghosts ---- */

/* A reference LRU cache: the time of each record's last use. */
typedef struct {
    uint32_t n_slots;
    uint64_t used[MAX_RECORDS]; /* 0: not in it */
    uint64_t hits;
} plain_lru;

static void use_plainly(plain_lru *c, uint32_t record, uint64_t now) {
    uint32_t n = 0, oldest = record;
    c->hits += c->used[record] != 0;
    c->used[record] = now;
    for (uint32_t r = 0; r < MAX_RECORDS; r++) {
        n += c->used[r] != 0;
        if (c->used[r] && c->used[r] < c->used[oldest]) oldest = r;
    }
    if (n > c->n_slots) c->used[oldest] = 0;
}

static void ghosts_tell_what_larger_caches_would_hold(uint32_t n_slots) {
    disk *d = make_disk(MAX_RECORDS, 1);
    tier *t = page_tier(d, 1, n_slots);
    plain_lru same = {n_slots}, twice = {2 * n_slots}, four = {4 * n_slots};
    uint64_t uses[MAX_RECORDS];
    for (uint32_t r = 0; r < d->n; r++) { /* a warm start fills larger caches with more */
        uses[r] = d->n - r;
        use_plainly(&same, d->n - 1 - r, r + 1);
        use_plainly(&twice, d->n - 1 - r, r + 1);
        use_plainly(&four, d->n - 1 - r, r + 1);
    }
    same.hits = twice.hits = four.hits = 0;
    cflow_error err;
    CHECK(!tier_warm(t, uses, NULL, &err), "%s", err.text);
    for (uint32_t r = n_slots; r-- > 0;) { /* it came in the file's order */
        demand_and_get(t, d, r);
        use_plainly(&same, r, 50 - r);
        use_plainly(&twice, r, 50 - r);
        use_plainly(&four, r, 50 - r);
    }
    uint32_t x = n_slots;
    for (uint32_t i = 0; i < 2000; i++) {
        x = x * 1664525 + 1013904223;
        const uint32_t among = 1 + (x >> 8) % MAX_RECORDS, r = (x >> 16) % among;
        demand_and_get(t, d, r);
        use_plainly(&same, r, 100 + i);
        use_plainly(&twice, r, 100 + i);
        use_plainly(&four, r, 100 + i);
    }
    const cflow_tier_stats s = stats_of(t);
    CHECK(s.hits == same.hits && s.ghost_hits_2x == twice.hits && s.ghost_hits_4x == four.hits,
          "%u slots: %llu hits, %llu with twice as many, %llu with four times; want %llu, %llu, "
          "%llu",
          n_slots, (unsigned long long)s.hits, (unsigned long long)s.ghost_hits_2x,
          (unsigned long long)s.ghost_hits_4x, (unsigned long long)same.hits,
          (unsigned long long)twice.hits, (unsigned long long)four.hits);
    CHECK(n_slots > 3 || (s.hits < s.ghost_hits_2x && s.ghost_hits_2x < s.ghost_hits_4x), "order");
    end(t, d);
}

/* ---- warm start ---- */

static void a_warm_start_reads_the_most_used(void) {
    disk *d = make_disk(6, 1); /* record 5 is the first in the file */
    tier *t = page_tier(d, 1, 3);
    const uint64_t uses[] = {7, 0, 3, 9, 1, 4};
    cflow_progress p = {0};
    cflow_error err;
    set_error(d, 3, EIO);
    CHECK(!tier_warm(t, uses, &p, &err), "%s", err.text);
    check_log(d, "530", __LINE__);
    CHECK(p.total_bytes == 3 * PAGE && p.done_bytes == 3 * PAGE, "%llu of %llu",
          (unsigned long long)p.done_bytes, (unsigned long long)p.total_bytes);
    CHECK(is_resident(t, 5) && is_resident(t, 0) && !is_resident(t, 3), "5 and 0 are there");
    set_error(d, 3, 0);
    demand_and_get(t, d, 0);
    demand_and_get(t, d, 1);
    const cflow_tier_stats s = stats_of(t);
    CHECK(s.hits == 1 && s.misses == 1 && s.reads == 1 && s.disk_bytes == PAGE &&
              s.warm_bytes == 2 * PAGE && s.failed_io == 1 && !s.extra_reads && !s.stall_ns,
          "counts");
    uint64_t now[6];
    tier_uses(t, now);
    CHECK(now[0] == 8 && now[1] == 1 && now[3] == 9, "uses go on from there");
    end(t, d);
}

static void a_warm_start_can_be_cancelled(void) {
    disk *d = make_disk(6, 1);
    tier *t = page_tier(d, 1, 6);
    const uint64_t uses[] = {1, 1, 1, 1, 1, 1};
    cflow_progress p = {.cancel = 1};
    cflow_error err;
    CHECK(tier_warm(t, uses, &p, &err) == CFLOW_ECANCELLED, "%s", err.text);
    for (uint32_t r = 0; r < d->n; r++) demand_and_get(t, d, r);
    check_log(d, "012345", __LINE__);
    end(t, d);
}

/* ---- all at once ---- */

typedef struct {
    tier *t;
    disk *d;
    uint32_t seed;
    uint64_t n_failed;
    pthread_t thread;
} hammer;

static uint32_t next_random(hammer *h) {
    h->seed = h->seed * 1664525 + 1013904223;
    return h->seed >> 16;
}

/* Random lists of records, in waves; all bytes are checked while they are pinned. */
static void *swing(void *arg) {
    hammer *h = arg;
    for (int round = 0; round < 200; round++) {
        uint32_t left[4], n = 1 + next_random(h) % 4;
        const uint32_t first = next_random(h);
        for (uint32_t i = 0; i < n; i++) left[i] = (first + 3 * i) % h->d->n;
        if (round % 5) tier_demand(h->t, left, n, NULL);
        if (round % 7 == 0) tier_speculate(h->t, (const uint32_t[]){first % h->d->n}, 1);
        if (round % 31 == 0) tier_withdraw(h->t);
        while (n) {
            uint32_t which;
            const uint8_t *bytes;
            if (tier_acquire(h->t, left, n, NULL, &which, &bytes)) {
                h->n_failed++;
            } else {
                check_bytes(h->d, left[which], bytes, "hammer");
                tier_release(h->t, left[which]);
            }
            left[which] = left[--n];
        }
    }
    return NULL;
}

static void many_threads_see_right_bytes(int n_io, uint32_t n_slots, uint32_t bad) {
    disk *d = make_disk(MAX_RECORDS, 0);
    d->piece = 3000;
    d->interrupts = 1;
    if (bad < d->n) d->error[bad] = EIO;
    tier *t = make_tier(d, n_io, (uint64_t)n_slots * MAX_BYTES, 0);
    hammer all[6];
    for (uint32_t i = 0; i < 6; i++) {
        all[i] = (hammer){.t = t, .d = d, .seed = i + 1};
        pthread_create(&all[i].thread, NULL, swing, &all[i]);
    }
    uint64_t n_failed = 0;
    for (uint32_t i = 0; i < 6; i++) {
        pthread_join(all[i].thread, NULL);
        n_failed += all[i].n_failed;
    }
    tier_withdraw(t);
    wait_idle(t);
    const cflow_tier_stats s = stats_of(t);
    CHECK((n_failed > 0) == (bad < d->n) && (s.failed_io > 0) == (n_failed > 0), "%llu failed",
          (unsigned long long)n_failed);
    CHECK(s.n_resident <= n_slots, "%u resident", s.n_resident);
    for (uint32_t r = 0; r < d->n; r++) /* no pin or demand is left */
        if (r != bad) demand_and_get(t, d, r);
    CHECK(stats_of(t).n_resident == (n_slots < d->n ? n_slots : d->n - (bad < d->n)),
          "%u of %u slots serve", stats_of(t).n_resident, n_slots);
    end(t, d);
}

int main(void) {
    CHECK(crc_bitwise((const uint8_t *)"123456789", 9) == 0xe3069283, "the test's own checksum");
    gives_the_bytes_of_the_file(0, 0, 0, 0);
    gives_the_bytes_of_the_file(1, 0, 0, 0);
    gives_the_bytes_of_the_file(0, PAGE, 0, 0);
    gives_the_bytes_of_the_file(0, 1000, 1, 0);
    gives_the_bytes_of_the_file(0, 0, 1, 1);
    names_the_smallest_budget();
    takes_no_more_slots_than_records();
    refuses_wrong_arguments();
    evicts_the_least_recently_used();
    counts_each_demand_once();
    keeps_what_is_pinned();
    runs_in_waves(1, 2);
    runs_in_waves(2, 3);
    runs_in_waves(4, 12);
    only_waiters_evict_demanded_records();
    waiters_get_what_was_read_for_them();
    shares_a_read_in_flight();
    reads_the_most_urgent_first();
    waiting_makes_speculation_urgent();
    speculation_is_counted();
    withdrawn_demands_are_not_read();
    cancelled_waits_end();
    keeps_to_its_rate(1);
    keeps_to_its_rate(3);
    a_failed_read_fails_its_callers();
    altered_records_are_rejected();
    a_cut_file_fails_the_lost_records(0);
    a_cut_file_fails_the_lost_records(1);
    a_replaced_file_goes_on_serving();
    a_read_that_hangs_times_out();
    queued_records_time_out_too();
    times_out_by_the_real_clock();
    close_abandons_a_stuck_read();
    close_waits_for_a_healthy_read();
    for (uint32_t n_slots = 2; n_slots <= MAX_RECORDS; n_slots++)
        ghosts_tell_what_larger_caches_would_hold(n_slots);
    a_warm_start_reads_the_most_used();
    a_warm_start_can_be_cancelled();
    many_threads_see_right_bytes(1, 2, MAX_RECORDS);
    many_threads_see_right_bytes(3, 4, 5);
    many_threads_see_right_bytes(2, MAX_RECORDS, MAX_RECORDS);
    printf(failed ? "tier: failed\n" : "tier: ok\n");
    return failed;
}
