#include "ring.h"

#include <stdlib.h>

#include "check.h"
#include "kernels.h"
#include "status.h"
#include "tensors.h"

typedef unsigned long long ull;

/* ---- cutting the bank ---- */

/* By start; of equals, a tensor outside the layers first. */
static int by_start(const void *a, const void *b) {
    const segment *x = a, *y = b;
    if (x->start != y->start) return x->start < y->start ? -1 : 1;
    return (x->block != CFLOW_MODEL_LEVEL) - (y->block != CFLOW_MODEL_LEVEL);
}

/* Lists where weight blocks, and tensors outside the layers, begin, in rising order. Returns their
 * number. */
static uint32_t list_cuts(const model_weights *m, segment *cuts) {
    uint32_t n = m->header.n_blocks;
    for (uint32_t b = 0; b < n; b++) cuts[b] = (segment){.start = UINT64_MAX, .block = b};
    for (uint32_t i = 0; i < m->header.n_tensors; i++) {
        const cflow_tensor *t = &m->tensors[i];
        if (t->block == CFLOW_MODEL_LEVEL)
            cuts[n++] = (segment){.start = t->offset, .block = CFLOW_MODEL_LEVEL};
        else if (!tensor_is_expert(t) && t->stripe_rows && t->offset < cuts[t->block].start)
            cuts[t->block].start = t->offset;
    }
    qsort(cuts, n, sizeof *cuts, by_start);
    return n;
}

/* Makes segments of n cuts: one for each weight block, one for each stretch of other tensors. */
static void join_cuts(ring *r, uint32_t n, uint64_t bank_bytes) {
    segment *s = r->segments;
    for (uint32_t i = 0; i < n; i++) {
        const segment *last = r->n_segments ? &s[r->n_segments - 1] : NULL;
        const int goes_on = last && last->block == CFLOW_MODEL_LEVEL && last->block == s[i].block;
        if (last && (goes_on || last->start == s[i].start)) continue;
        s[r->n_segments++] = s[i];
    }
    for (uint32_t i = 0; i < r->n_segments; i++) {
        s[i].end = i + 1 < r->n_segments ? s[i + 1].start : bank_bytes;
        s[i].record = s[i].block == CFLOW_MODEL_LEVEL ? NO_RECORD : r->n_records++;
    }
}

/* Finds the record of each tensor. */
static cflow_status assign_tensors(ring *r, cflow_error *err) {
    const model_weights *m = r->weights;
    for (uint32_t i = 0; i < m->header.n_tensors; i++) {
        const cflow_tensor *t = &m->tensors[i];
        r->record_of[i] = NO_RECORD;
        if (tensor_is_expert(t) || (!t->stripe_rows && t->block != CFLOW_MODEL_LEVEL)) continue;
        const segment *s = &r->segments[r->n_segments - 1];
        while (s->start > t->offset) s--;
        r->record_of[i] = s->record;
        if (tensor_end(t) <= s->end) continue;
        char name[64];
        tensor_name(name, t);
        return fail(
            err, CFLOW_EINVAL,
            "weights_memory needs a file whose weight blocks do not overlap; %s, which ends at "
            "%llu of the resident bank, overlaps the block that begins at %llu",
            name, (ull)tensor_end(t), (ull)s->end);
    }
    return CFLOW_OK;
}

/* ---- checksums ---- */

/* Its checksum is joined from those of its runs and of the zeros that pad it. */
static tier_record make_record(const model_weights *m, const segment *s) {
    static const uint8_t padding[FILE_PAGE];
    const uint32_t *crcs = (const uint32_t *)(const void *)m->sections[CFLOW_SECTION_RUN_CRCS];
    const uint64_t bank = m->header.sections[CFLOW_SECTION_RESIDENT].offset;
    const uint64_t bytes = s->end - s->start, padded = round_up(bytes, FILE_PAGE);
    uint32_t crc = 0;
    for (uint64_t done = 0; done < bytes; done += RUN_BYTES) {
        const uint64_t n = bytes - done < RUN_BYTES ? bytes - done : RUN_BYTES;
        crc = crc_join(crc, crcs[(s->start + done) / RUN_BYTES], n);
    }
    const uint32_t zeros = cflow_crc32c(0, padding, padded - bytes);
    return (tier_record){
        .offset = bank + s->start, .bytes = padded, .crc = crc_join(crc, zeros, padded - bytes)};
}

static void make_records(ring *r) {
    const model_weights *m = r->weights;
    const uint64_t bank_bytes = m->header.sections[CFLOW_SECTION_RESIDENT].bytes;
    for (uint32_t i = 0; i < r->n_segments; i++) {
        segment *s = &r->segments[i];
        s->start = s->start / RUN_BYTES * RUN_BYTES;
        s->end =
            round_up(s->end, RUN_BYTES) < bank_bytes ? round_up(s->end, RUN_BYTES) : bank_bytes;
        if (s->record == NO_RECORD) continue;
        r->records[s->record] = make_record(m, s);
        if (r->slot_bytes < r->records[s->record].bytes)
            r->slot_bytes = r->records[s->record].bytes;
    }
}

cflow_status ring_cut(ring **out, model_weights *m, cflow_error *err) {
    const cflow_header *h = &m->header;
    const size_t most = (size_t)h->n_blocks + h->n_tensors;
    ring *r = *out = memory_zeroed(1, sizeof *r);
    if (r) {
        r->weights = m;
        r->segments = memory_zeroed(most, sizeof *r->segments);
        r->records = memory_zeroed(h->n_blocks, sizeof *r->records);
        r->record_of = memory_zeroed(h->n_tensors, sizeof *r->record_of);
    }
    if (!r || !r->segments || !r->records || !r->record_of)
        return fail(err, CFLOW_ENOMEM, "no memory for the records of %u blocks", h->n_blocks);
    join_cuts(r, list_cuts(m, r->segments), h->sections[CFLOW_SECTION_RESIDENT].bytes);
    const cflow_status status = assign_tensors(r, err);
    if (status) return status;
    make_records(r);
    if (r->n_records) return CFLOW_OK;
    return fail(err, CFLOW_EINVAL,
                "weights_memory needs a file whose weight blocks are apart from its other tensors");
}

/* ---- the schedule ---- */

/* How many layers before this one use its weight block. */
static uint32_t pass_of(const model_weights *m, uint32_t layer) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < layer; i++) n += m->layers[i].block == m->layers[layer].block;
    return n;
}

static void add_use(ring *r, uint32_t record, uint32_t pass, const op *o) {
    uint32_t i = 0;
    while (i < r->n_uses && (r->uses[i].record != record || r->uses[i].pass != pass)) i++;
    if (i == r->n_uses)
        r->uses[r->n_uses++] = (layer_use){
            .record = record, .pass = pass, .layer = (uint32_t)o->layer, .first = o->stage};
    r->uses[i].last = o->stage; /* ops are in the order of stages */
}

static void add_matrix(ring *r, const op *o, const matrix *w) {
    const uint32_t record = r->record_of[tensor_of(r->weights, w)];
    if (record != NO_RECORD) add_use(r, record, pass_of(r->weights, (uint32_t)o->layer), o);
}

static void list_uses(ring *r, const plan *p) {
    for (uint32_t i = 0; i < p->n_ops; i++) {
        const op *o = &p->ops[i];
        for (uint32_t j = 0; j < o->n_pieces; j++) add_matrix(r, o, o->pieces[j].w);
        if (o->kind != OP_GATED) continue;
        if (o->gated.gate) add_matrix(r, o, o->gated.gate);
        add_matrix(r, o, o->gated.up);
    }
}

/* The most records that any stage needs at once. */
static uint32_t most_at_once(const ring *r) {
    uint32_t most = 0;
    for (uint32_t i = 0; i < r->n_uses; i++) {
        uint32_t n = 0;
        for (uint32_t j = 0; j < r->n_uses; j++)
            n += r->uses[j].first <= r->uses[i].first && r->uses[i].first <= r->uses[j].last;
        if (most < n) most = n;
    }
    return most;
}

/* 1 for n_kept of the records, evenly spread. */
static int is_kept(const ring *r, uint64_t record) {
    return (record + 1) * r->n_kept / r->n_records > record * r->n_kept / r->n_records;
}

static void drop_kept_uses(ring *r) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->n_uses; i++)
        if (!is_kept(r, r->uses[i].record)) r->uses[n++] = r->uses[i];
    r->n_uses = n;
}

cflow_status ring_schedule(ring *r, const plan *p, const cflow_model_options *options,
                           cflow_error *err) {
    const ull budget = options->weights_memory, n = budget / r->slot_bytes;
    r->uses = memory_zeroed((size_t)p->n_ops * MAX_PIECES, sizeof *r->uses);
    if (!r->uses)
        return fail(err, CFLOW_ENOMEM, "no memory for the uses of %u records", r->n_records);
    list_uses(r, p);
    r->n_passing = most_at_once(r) + (uint32_t)options->expert_reads;
    if (r->n_passing >= r->n_records) r->n_passing = r->n_records;
    if (n < r->n_passing)
        return fail(err, CFLOW_EINVAL,
                    "weights_memory of %llu bytes holds %llu records of %llu bytes; with %d reads "
                    "in flight it must hold %u: %llu bytes",
                    budget, n, (ull)r->slot_bytes, options->expert_reads, r->n_passing,
                    (ull)r->n_passing * r->slot_bytes);
    r->n_slots = n < r->n_records ? (uint32_t)n : r->n_records;
    r->n_kept = r->n_slots < r->n_records ? r->n_slots - r->n_passing : r->n_records;
    drop_kept_uses(r);
    return CFLOW_OK;
}

/* ---- loading ---- */

/* The tier's `placed`: points the record's matrices to its bytes. It runs under the tier's lock
 * while no caller has the record pinned, so a caller that pins it later sees the new places. */
static void place(void *arg, uint32_t record, const uint8_t *bytes) {
    const ring *r = arg;
    model_weights *m = r->weights;
    uint64_t start = 0;
    for (uint32_t i = 0; i < r->n_segments; i++)
        if (r->segments[i].record == record) start = r->segments[i].start;
    for (uint32_t i = 0; i < m->header.n_tensors; i++)
        if (r->record_of[i] == record)
            tensor_entry(m, &m->tensors[i])->data = bytes + (m->tensors[i].offset - start);
}

tier_result ring_pin(const ring *r, uint32_t record, const atomic_int *cancel) {
    uint32_t which;
    const uint8_t *bytes;
    return tier_acquire(r->tier, &record, 1, cancel, &which, &bytes);
}

/* Pins a record for good. */
static cflow_status keep_record(const ring *r, uint32_t record, cflow_error *err) {
    const tier_result result = ring_pin(r, record, NULL);
    uint32_t i = 0;
    if (!result) return CFLOW_OK;
    while (r->segments[i].record != record) i++;
    return fail(err, record_status(result), "resident bank, matrices of block %u: %s",
                r->segments[i].block, tier_result_text(result));
}

/* Reads the records that stay. They are never unpinned. */
static cflow_status read_kept(const ring *r, cflow_progress *p, cflow_error *err) {
    cflow_progress unwatched = {0};
    if (!p) p = &unwatched;
    for (uint32_t i = 0; i < r->n_records; i++) {
        if (!is_kept(r, i)) continue;
        __atomic_fetch_add(&p->total_bytes, r->records[i].bytes, __ATOMIC_RELAXED);
        tier_demand(r->tier, &i, 1, NULL);
    }
    for (uint32_t i = 0; i < r->n_records; i++) {
        if (!is_kept(r, i)) continue;
        if (__atomic_load_n(&p->cancel, __ATOMIC_RELAXED))
            return fail(err, CFLOW_ECANCELLED, "loading was cancelled");
        const cflow_status status = keep_record(r, i, err);
        if (status) return status;
        __atomic_fetch_add(&p->done_bytes, r->records[i].bytes, __ATOMIC_RELAXED);
    }
    return CFLOW_OK;
}

cflow_status ring_load(ring *r, const file *f, const tier_options *options,
                       cflow_progress *progress, cflow_error *err) {
    file own;
    cflow_status s = file_share(&own, f, err);
    if (s) return s;
    tier_options o = *options;
    o.budget_bytes = r->n_slots * r->slot_bytes;
    o.placed = place;
    o.placed_arg = r;
    s = tier_open(&r->tier, &own, r->records, r->n_records, &o, err);
    file_close(&own);
    return s ? s : read_kept(r, progress, err);
}

void ring_close(ring *r) {
    if (!r) return;
    tier_close(r->tier);
    memory_free(r->segments);
    memory_free(r->records);
    memory_free(r->record_of);
    memory_free(r->uses);
    memory_free(r);
}

tier_result ring_pin_tensor(const ring *r, uint32_t tensor) {
    const uint32_t record = r ? r->record_of[tensor] : NO_RECORD;
    return record == NO_RECORD ? TIER_OK : ring_pin(r, record, NULL);
}

void ring_unpin_tensor(const ring *r, uint32_t tensor) {
    const uint32_t record = r ? r->record_of[tensor] : NO_RECORD;
    if (record != NO_RECORD) tier_release(r->tier, record);
}
