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

enum { PIECE_BYTES = 8 * RUN_BYTES, MAX_PARTS = 3 };

typedef struct {     /* a part of the resident bank that begins with a run */
    uint64_t offset; /* in the bank */
    uint64_t bytes;
    uint64_t n_pieces; /* of PIECE_BYTES, the last one shorter */
    uint8_t *out;      /* where it is loaded */
} part;

typedef struct {
    const model_weights *m;
    file *f;
    kernels k;
    cflow_progress *progress;
    part parts[MAX_PARTS]; /* the whole bank; with a ring, embedding, final norm and head */
    int n_parts;
    uint8_t *bank;             /* where the expert bank is loaded */
    uint64_t n_pieces;         /* of all parts */
    uint32_t n_records;        /* all, or 0 if there is an expert cache */
    atomic_uint_fast64_t next; /* the next piece, or after these the next record, to be read */
    atomic_int failed;         /* the thread that sets it fills in status and error */
    cflow_status status;
    cflow_error error;
} loader;

static const cflow_section *bank_section(const loader *l, cflow_section_id id) {
    return &l->m->header.sections[id];
}

static void give_up(loader *l, cflow_status status, const char *what, const cflow_error *why) {
    if (atomic_exchange(&l->failed, 1)) return;
    l->status = fail(&l->error, status, "%s: %.400s", what, why->text);
}

/* Reads n bytes, of which `counted` are added to the progress. */
static cflow_status read_piece(loader *l, uint8_t *out, uint64_t offset, uint64_t n,
                               uint64_t counted, cflow_error *err) {
    cflow_progress *p = l->progress;
    if (p && __atomic_load_n(&p->cancel, __ATOMIC_RELAXED))
        return fail(err, CFLOW_ECANCELLED, "loading was cancelled");
    const cflow_status s = file_read_direct(l->f, out, offset, n, err);
    if (p && !s) __atomic_fetch_add(&p->done_bytes, counted, __ATOMIC_RELAXED);
    return s;
}

static cflow_status check_crc(uint32_t got, uint32_t want, cflow_error *err) {
    if (got == want) return CFLOW_OK;
    return fail(err, CFLOW_EFORMAT,
                "checksum is %08x, but the file says %08x: its bytes were altered", got, want);
}

/* "resident bank, run 17 (block 3 gate)": the first tensor that has bytes there. */
static void name_run(const loader *l, uint64_t run, char out[128]) {
    const model_weights *m = l->m;
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

/* Reads n bytes of whole runs, from offset `at` of the bank on; the bank's last run may be shorter.
 */
static void read_runs(loader *l, uint8_t *out, uint64_t at, uint64_t n) {
    const uint32_t *crcs = (const uint32_t *)(const void *)l->m->sections[CFLOW_SECTION_RUN_CRCS];
    const uint64_t start = bank_section(l, CFLOW_SECTION_RESIDENT)->offset + at;
    cflow_error why;
    uint64_t run = at / RUN_BYTES;
    cflow_status status = read_piece(l, out, start, round_up(n, FILE_PAGE), n, &why);
    for (uint64_t done = 0; done < n && !status; done += RUN_BYTES) {
        const uint64_t bytes = n - done < RUN_BYTES ? n - done : RUN_BYTES;
        run = (at + done) / RUN_BYTES;
        status = check_crc(l->k.crc32c(0, out + done, bytes), crcs[run], &why);
    }
    if (!status) return;
    char what[128];
    name_run(l, run, what);
    give_up(l, status, what, &why);
}

static void read_resident(loader *l, uint64_t index) {
    const part *p = l->parts;
    for (; index >= p->n_pieces; p++) index -= p->n_pieces;
    const uint64_t at = index * PIECE_BYTES;
    const uint64_t n = p->bytes - at < PIECE_BYTES ? p->bytes - at : PIECE_BYTES;
    read_runs(l, p->out + at, p->offset + at, n);
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
    uint64_t bytes = 0;
    for (int i = 0; i < l->n_parts; i++) bytes += l->parts[i].bytes;
    for (uint32_t i = 0; i < l->n_records; i++) bytes += record_bytes(&l->m->records[i]);
    return bytes;
}

/* The part that contains a tensor of the resident bank, or NULL. */
static const part *find_part(const loader *l, const cflow_tensor *t) {
    for (int i = 0; i < l->n_parts; i++) {
        const part *p = &l->parts[i];
        if (t->offset >= p->offset && tensor_end(t) <= p->offset + p->bytes) return p;
    }
    return NULL;
}

static void place_stored(model_weights *m, const loader *l) {
    for (uint32_t i = 0; i < m->header.n_tensors; i++) {
        const cflow_tensor *t = &m->tensors[i];
        const part *p = tensor_is_expert(t) ? NULL : find_part(l, t);
        if (p) tensor_entry(m, t)->data = p->out + (t->offset - p->offset);
    }
    for (uint32_t i = 0; i < l->n_records; i++) m->expert_data[i] = l->bank + m->records[i].offset;
    m->expert_bank = l->bank;
}

/* ---- vectors of layers, with a ring ---- */

/* 1 for a vector outside the parts: it is copied, and the rest of its runs is not kept. */
static int is_lone_vector(const loader *l, const cflow_tensor *t) {
    return !t->stripe_rows && !find_part(l, t);
}

/* The runs that a vector is in. */
static part vector_runs(const loader *l, const cflow_tensor *t) {
    const uint64_t end = round_up(tensor_end(t), RUN_BYTES),
                   offset = t->offset / RUN_BYTES * RUN_BYTES;
    const uint64_t limit = bank_section(l, CFLOW_SECTION_RESIDENT)->bytes;
    return (part){.offset = offset, .bytes = (end < limit ? end : limit) - offset};
}

/* Bytes of all vectors outside the parts; *most: the most bytes of runs that a vector is in. */
static uint64_t measure_vectors(const loader *l, uint64_t *most) {
    uint64_t bytes = 0;
    *most = 0;
    for (uint32_t i = 0; i < l->m->header.n_tensors; i++) {
        const cflow_tensor *t = &l->m->tensors[i];
        if (!is_lone_vector(l, t)) continue;
        const part runs = vector_runs(l, t);
        bytes += arena_size(tensor_end(t) - t->offset);
        if (*most < runs.bytes) *most = runs.bytes;
    }
    return bytes;
}

static cflow_status read_vectors(model_weights *m, loader *l, uint64_t most, cflow_error *err) {
    arena runs;
    part last = {0};
    const cflow_status status =
        arena_open(&runs, round_up(most, FILE_PAGE), "checking vectors", err);
    for (uint32_t i = 0; i < m->header.n_tensors && !status && !l->status; i++) {
        const cflow_tensor *t = &m->tensors[i];
        if (!is_lone_vector(l, t)) continue;
        const part now = vector_runs(l, t);
        if (now.offset != last.offset || now.bytes != last.bytes)
            read_runs(l, runs.base, now.offset, now.bytes);
        last = now;
        const uint64_t bytes = tensor_end(t) - t->offset;
        uint8_t *own = arena_take(&m->memory, bytes);
        memcpy(own, runs.base + (t->offset - now.offset), bytes);
        tensor_entry(m, t)->data = own;
    }
    arena_close(&runs);
    return status;
}

/* ---- loading ---- */

static void choose_parts(loader *l, const ring *r) {
    const uint64_t all = bank_section(l, CFLOW_SECTION_RESIDENT)->bytes;
    if (!r) l->parts[l->n_parts++] = (part){.bytes = all};
    for (uint32_t i = 0; r && i < r->n_segments; i++) {
        const segment *s = &r->segments[i];
        if (s->record == NO_RECORD)
            l->parts[l->n_parts++] = (part){.offset = s->start, .bytes = s->end - s->start};
    }
    for (int i = 0; i < l->n_parts; i++) {
        l->parts[i].n_pieces = (l->parts[i].bytes + PIECE_BYTES - 1) / PIECE_BYTES;
        l->n_pieces += l->parts[i].n_pieces;
    }
}

static cflow_status take_memory(model_weights *m, loader *l, uint64_t vectors, cflow_error *err) {
    const uint64_t bank = l->n_records ? bank_section(l, CFLOW_SECTION_EXPERT_BANK)->bytes : 0;
    uint64_t bytes = bank + vectors;
    for (int i = 0; i < l->n_parts; i++) bytes += round_up(l->parts[i].bytes, FILE_PAGE);
    const cflow_status status = arena_open(&m->memory, bytes, "the weights", err);
    if (status != CFLOW_OK) return status;
    for (int i = 0; i < l->n_parts; i++)
        l->parts[i].out = arena_take(&m->memory, round_up(l->parts[i].bytes, FILE_PAGE));
    l->bank = bank ? arena_take(&m->memory, bank) : NULL;
    return CFLOW_OK;
}

/* Loads the banks into m->memory as they are in the file. */
static cflow_status read_stored(model_weights *m, const ring *r, file *f,
                                const cflow_model_options *options, pool *threads,
                                cflow_error *err) {
    loader l = {.m = m, .f = f, .progress = options->progress};
    l.n_records = options->expert_cache ? 0 : m->header.n_records;
    kernels_select(&l.k, NULL);
    choose_parts(&l, r);
    uint64_t most;
    const uint64_t vectors = measure_vectors(&l, &most);
    cflow_status status = take_memory(m, &l, vectors, err);
    if (status != CFLOW_OK) return status;
    if (l.progress) __atomic_store_n(&l.progress->total_bytes, total_bytes(&l), __ATOMIC_RELAXED);
    pool_run(threads, read_banks, &l);
    if (vectors && !l.status) status = read_vectors(m, &l, most, err);
    if (status) return status;
    if (l.status) return fail(err, l.status, "%s", l.error.text);
    place_stored(m, &l);
    return CFLOW_OK;
}

cflow_status load_weights(model_weights *m, const ring *r, file *f,
                          const cflow_model_options *options, cflow_memory *taken,
                          cflow_error *err) {
    pool *threads;
    cflow_status status = pool_open(&threads, options->n_threads, err);
    if (status != CFLOW_OK) return status;
    status = read_stored(m, r, f, options, threads, err);
    if (!status && m->as_f32) status = widen_weights(m, threads, err);
    pool_close(threads);
    taken->direct_io = file_is_direct(f);
    taken->resident_bytes = m->memory.bytes;
    taken->huge_bytes = arena_huge_bytes(&m->memory);
    return status;
}
