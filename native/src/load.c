#include "load.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "kernels.h"
#include "pool.h"
#include "status.h"
#include "tensors.h"
#include "widen.h"

enum { PIECE_BYTES = 8 * RUN_BYTES };

typedef struct {
    const cflow_model *m;
    file *f;
    kernels k;
    cflow_progress *progress;
    uint8_t *resident, *bank;
    uint64_t n_pieces;         /* of the resident bank; then come the records */
    uint32_t n_records;        /* to read: all or none */
    atomic_uint_fast64_t next; /* piece or record nobody has taken yet */
    atomic_int failed;         /* the first thread to set it fills in the next two */
    cflow_status status;
    cflow_error error;
} loader;

static uint64_t round_up(uint64_t n, uint64_t to) {
    return (n + to - 1) / to * to;
}

static const cflow_section *bank_section(const loader *l, cflow_section_id id) {
    return &l->m->header.sections[id];
}

static void give_up(loader *l, cflow_status status, const char *what, const cflow_error *why) {
    if (atomic_exchange(&l->failed, 1)) return;
    l->status = fail(&l->error, status, "%s: %.400s", what, why->text);
}

/* Reads n bytes, of which `counted` are news to who watches. */
static cflow_status read_piece(loader *l, uint8_t *out, uint64_t offset, uint64_t n,
                               uint64_t counted, cflow_error *err) {
    cflow_progress *p = l->progress;
    if (p && __atomic_load_n(&p->cancel, __ATOMIC_RELAXED))
        return fail(err, CFLOW_ECANCELLED, "cancelled");
    const cflow_status s = file_read_direct(l->f, out, offset, n, err);
    if (p && !s) __atomic_fetch_add(&p->done_bytes, counted, __ATOMIC_RELAXED);
    return s;
}

static cflow_status check_crc(uint32_t got, uint32_t want, cflow_error *err) {
    if (got == want) return CFLOW_OK;
    return fail(err, CFLOW_EFORMAT, "checksum is %08x, the file says %08x: its bytes were altered",
                got, want);
}

/* "resident bank, run 17 (block 3 gate)": the first tensor that has bytes there. */
static void name_run(const loader *l, uint64_t run, char out[128]) {
    const cflow_model *m = l->m;
    char name[64] = "padding";
    for (uint32_t i = 0; i < m->header.n_tensors; i++) {
        const cflow_tensor *t = &m->tensors[i];
        if (tensor_is_expert(t) || t->offset >= (run + 1) * RUN_BYTES ||
            tensor_end(t) <= run * RUN_BYTES)
            continue;
        tensor_name(name, t);
        break;
    }
    snprintf(out, 128, "resident bank, run %llu (%s)", (unsigned long long)run, name);
}

static void read_resident(loader *l, uint64_t piece) {
    const cflow_section *s = bank_section(l, CFLOW_SECTION_RESIDENT);
    const uint32_t *crcs = (const uint32_t *)(const void *)l->m->sections[CFLOW_SECTION_RUN_CRCS];
    const uint64_t at = piece * PIECE_BYTES;
    const uint64_t n = s->bytes - at < PIECE_BYTES ? s->bytes - at : PIECE_BYTES;
    cflow_error why;
    uint64_t run = at / RUN_BYTES;
    cflow_status status =
        read_piece(l, l->resident + at, s->offset + at, round_up(n, FILE_PAGE), n, &why);
    for (uint64_t done = 0; done < n && !status; done += RUN_BYTES) {
        const uint64_t bytes = n - done < RUN_BYTES ? n - done : RUN_BYTES;
        run = (at + done) / RUN_BYTES;
        status = check_crc(l->k.crc32c(0, l->resident + at + done, bytes), crcs[run], &why);
    }
    if (!status) return;
    char what[128];
    name_run(l, run, what);
    give_up(l, status, what, &why);
}

static void read_record(loader *l, uint32_t index) {
    const cflow_record *r = &l->m->records[index];
    const uint64_t total = record_bytes(r);
    const uint64_t start = bank_section(l, CFLOW_SECTION_EXPERT_BANK)->offset + r->offset;
    uint8_t *out = l->bank + r->offset;
    cflow_error why;
    cflow_status status = CFLOW_OK;
    uint32_t crc = 0;
    for (uint64_t at = 0; at < total && !status; at += PIECE_BYTES) {
        const uint64_t n = total - at < PIECE_BYTES ? total - at : PIECE_BYTES;
        status = read_piece(l, out + at, start + at, n, n, &why);
        if (!status) crc = l->k.crc32c(crc, out + at, n);
    }
    if (!status) status = check_crc(crc, r->crc, &why);
    if (!status) return;
    char what[128];
    snprintf(what, sizeof what, "expert bank, block %u expert %u", r->block, r->expert);
    give_up(l, status, what, &why);
}

static void read_banks(void *arg, int thread) {
    (void)thread;
    loader *l = arg;
    const uint64_t n = l->n_pieces + l->n_records;
    while (!atomic_load(&l->failed)) {
        const uint64_t i = atomic_fetch_add(&l->next, 1);
        if (i >= n) return;
        if (i < l->n_pieces)
            read_resident(l, i);
        else
            read_record(l, (uint32_t)(i - l->n_pieces));
    }
}

static uint64_t total_bytes(const loader *l) {
    uint64_t bytes = bank_section(l, CFLOW_SECTION_RESIDENT)->bytes;
    for (uint32_t i = 0; i < l->n_records; i++) bytes += record_bytes(&l->m->records[i]);
    return bytes;
}

static void place_stored(cflow_model *m, const loader *l) {
    for (uint32_t i = 0; i < m->header.n_tensors; i++)
        if (!tensor_is_expert(&m->tensors[i]))
            tensor_matrix(m, &m->tensors[i])->data = l->resident + m->tensors[i].offset;
    for (uint32_t i = 0; i < l->n_records; i++) m->expert_data[i] = l->bank + m->records[i].offset;
    m->expert_bank = l->bank;
}

/* The banks as they lie in the file, into m->weights. */
static cflow_status read_stored(cflow_model *m, file *f, const cflow_model_options *options,
                                pool *threads, cflow_error *err) {
    loader l = {.m = m, .f = f, .progress = options->progress};
    l.n_records = options->expert_cache ? 0 : m->header.n_records;
    const uint64_t resident = round_up(bank_section(&l, CFLOW_SECTION_RESIDENT)->bytes, FILE_PAGE);
    const uint64_t bank = l.n_records ? bank_section(&l, CFLOW_SECTION_EXPERT_BANK)->bytes : 0;
    kernels_select(&l.k, NULL);
    const cflow_status status = arena_open(&m->weights, resident + bank, "the weights", err);
    if (status != CFLOW_OK) return status;
    l.resident = arena_take(&m->weights, resident);
    l.bank = bank ? arena_take(&m->weights, bank) : NULL;
    l.n_pieces = (resident + PIECE_BYTES - 1) / PIECE_BYTES;
    if (l.progress) __atomic_store_n(&l.progress->total_bytes, total_bytes(&l), __ATOMIC_RELAXED);
    pool_run(threads, read_banks, &l);
    if (l.status) return fail(err, l.status, "%s", l.error.text);
    place_stored(m, &l);
    m->memory.direct_io = file_is_direct(f);
    return CFLOW_OK;
}

cflow_status load_weights(cflow_model *m, file *f, const cflow_model_options *options,
                          cflow_error *err) {
    pool *threads;
    cflow_status status = pool_open(&threads, options->n_threads, err);
    if (status != CFLOW_OK) return status;
    status = read_stored(m, f, options, threads, err);
    if (!status && m->as_f32) status = widen_weights(m, threads, err);
    pool_close(threads);
    m->memory.resident_bytes = m->weights.bytes;
    m->memory.huge_bytes = arena_huge_bytes(&m->weights);
    return status;
}
