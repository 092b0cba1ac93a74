#include "plan.h"

#include <stdio.h>
#include <string.h>

#include "status.h"

enum { OPS_PER_LAYER = 18, VALUES_PER_LAYER = 32, TERMS_PER_LAYER = 6 };

typedef struct {
    uint32_t each, weights, late_each, late_weights, shared, shared_scale; /* values, or NO_VALUE */
} pending;

typedef struct {
    plan *p;
    const model_weights *m;
    plan_options options;
    term *terms; /* all of the plan's, handed out in order */
    uint32_t n_terms, max_ops, max_values;
    uint32_t *made_by; /* (n_values,) op */
    uint32_t *streams; /* (n_layers + 1,) x_in of each layer, then the last output */
    pending *experts;  /* (n_layers,) what each layer's experts add, until it is injected */
} builder;

/* ---- making ops and values ---- */

/* What comes after the layers is named without one. */
static void name_in_layer(const builder *b, char name[32], uint32_t layer, const char *what) {
    if (layer < b->m->header.n_layers)
        snprintf(name, 32, "L%u.%s", layer, what);
    else
        snprintf(name, 32, "%s", what);
}

static uint32_t new_value(builder *b, uint32_t layer, const char *what, uint32_t width) {
    value *v = &b->p->values[b->p->n_values];
    *v = (value){.width = width, .per_row = 1};
    name_in_layer(b, v->name, layer, what);
    return b->p->n_values++;
}

static op *new_op(builder *b, op_kind kind, op_part part, uint32_t layer, const char *what) {
    op *o = &b->p->ops[b->p->n_ops++];
    *o = (op){.kind = kind, .part = part, .layer = (int32_t)layer, .base = NO_VALUE};
    for (int i = 0; i < 4; i++) o->in[i] = NO_VALUE;
    for (int i = 0; i < 5; i++) o->out[i] = NO_VALUE;
    name_in_layer(b, o->name, layer, what);
    return o;
}

static uint32_t op_index(const builder *b, const op *o) {
    return (uint32_t)(o - b->p->ops);
}

static uint32_t made(builder *b, op *o, uint32_t v) {
    b->made_by[v] = op_index(b, o);
    return v;
}

/* A value that a matrix of this encoding multiplies must exist in the form it reads. */
static void read_by(builder *b, uint32_t v, const matrix *w) {
    if (w->encoding > CFLOW_BF16) b->p->values[v].quantized = 1;
}

static void add_piece(builder *b, op *o, const matrix *w, const matrix *bias, const char *what) {
    piece *one = &o->pieces[o->n_pieces++];
    one->w = w;
    one->bias = bias && bias->data ? bias : NULL;
    one->out = made(b, o, new_value(b, (uint32_t)o->layer, what, w->n_rows));
    o->bytes += matrix_bytes(w);
    read_by(b, o->in[0], w);
}

/* ---- the residual stream ---- */

static op *new_combine(builder *b, uint32_t layer, const char *what, uint32_t base) {
    op *o = new_op(b, OP_COMBINE, PART_STREAM, layer, what);
    o->base = base;
    o->terms = b->terms + b->n_terms;
    o->out[0] = made(b, o, new_value(b, layer, what, b->m->header.d_model));
    return o;
}

static term *add_term(builder *b, op *o, uint32_t v, float scale) {
    term *t = &o->terms[o->n_terms++];
    b->n_terms++;
    *t = (term){.value = v, .scale = scale, .weights = NO_VALUE, .sum = NO_VALUE, .gate = NO_VALUE};
    return t;
}

/* The normed form of a stream: made by the op that makes the stream, once per weight. */
static uint32_t norm_of(builder *b, uint32_t stream, const matrix *weight, float eps, float offset,
                        uint32_t layer, const char *what) {
    op *o = &b->p->ops[b->made_by[stream]];
    for (uint32_t i = 0; i < o->n_norms; i++)
        if (o->norms[i].weight == weight && o->norms[i].eps == eps && o->norms[i].offset == offset)
            return o->norms[i].out;
    const uint32_t v = made(b, o, new_value(b, layer, what, b->m->header.d_model));
    o->norms[o->n_norms++] = (norm){.weight = weight, .eps = eps, .offset = offset, .out = v};
    return v;
}

static uint32_t layer_norm(builder *b, uint32_t stream, uint32_t layer, cflow_role role,
                           const char *what) {
    const cflow_layer *l = model_layer(b->m, layer);
    return norm_of(b, stream, model_matrix(b->m, layer, role), l->norm_eps, l->norm_offset, layer,
                   what);
}

/* ---- the parts of a layer; each returns the value it adds to the stream ---- */

static uint32_t build_attention(builder *b, uint32_t layer) {
    const cflow_layer *l = model_layer(b->m, layer);
    op *qkv = new_op(b, OP_MATMUL, PART_ATTENTION, layer, "qkv");
    qkv->in[0] = layer_norm(b, b->streams[layer], layer, CFLOW_NORM1, "norm1");
    add_piece(b, qkv, model_matrix(b->m, layer, CFLOW_Q), model_matrix(b->m, layer, CFLOW_Q_BIAS),
              "q");
    add_piece(b, qkv, model_matrix(b->m, layer, CFLOW_K), model_matrix(b->m, layer, CFLOW_K_BIAS),
              "k");
    add_piece(b, qkv, model_matrix(b->m, layer, CFLOW_V), model_matrix(b->m, layer, CFLOW_V_BIAS),
              "v");

    op *kv = new_op(b, OP_KV, PART_ATTENTION, layer, "kv");
    for (int i = 0; i < 3; i++) kv->in[i] = qkv->pieces[i].out;
    kv->out[0] = made(b, kv, new_value(b, layer, "q_rot", l->n_heads * l->head_dim));

    op *attend = new_op(b, OP_ATTEND, PART_ATTENTION, layer, "attend");
    attend->in[0] = kv->out[0];
    attend->out[0] = made(b, attend, new_value(b, layer, "attention", l->n_heads * l->head_dim));

    op *o = new_op(b, OP_MATMUL, PART_ATTENTION, layer, "o");
    o->in[0] = attend->out[0];
    add_piece(b, o, model_matrix(b->m, layer, CFLOW_O), model_matrix(b->m, layer, CFLOW_O_BIAS),
              "attention_out");
    return o->pieces[0].out;
}

static uint32_t build_ffn(builder *b, op_part part, uint32_t layer, uint32_t x,
                          const cflow_role roles[3], const char *const names[4]) {
    const matrix *gate = model_matrix(b->m, layer, roles[0]);
    op *gated = new_op(b, OP_GATED, part, layer, names[0]);
    gated->in[0] = x;
    gated->gate = gate;
    gated->up = model_matrix(b->m, layer, roles[1]);
    gated->out[0] = made(b, gated, new_value(b, layer, names[1], gate->n_rows));
    gated->bytes = matrix_bytes(gate) + matrix_bytes(gated->up);
    read_by(b, x, gate);
    read_by(b, x, gated->up);
    op *down = new_op(b, OP_MATMUL, part, layer, names[2]);
    down->in[0] = gated->out[0];
    add_piece(b, down, model_matrix(b->m, layer, roles[2]), NULL, names[3]);
    return down->pieces[0].out;
}

static uint32_t build_dense(builder *b, uint32_t layer, uint32_t stream) {
    static const cflow_role roles[] = {CFLOW_GATE, CFLOW_UP, CFLOW_DOWN};
    static const char *const names[] = {"gate_up", "hidden", "down", "dense_out"};
    return build_ffn(b, PART_DENSE, layer, layer_norm(b, stream, layer, CFLOW_NORM2, "norm2"),
                     roles, names);
}

static op *build_expert_op(builder *b, op_kind kind, uint32_t layer, const char *what, uint32_t x,
                           uint32_t groups, const char *out, uint32_t width) {
    op *o = new_op(b, kind, PART_EXPERTS, layer, what);
    o->in[0] = x;
    o->in[1] = groups;
    o->out[0] = made(b, o, new_value(b, layer, out, width));
    b->p->values[o->out[0]].per_row = model_layer(b->m, layer)->top_k;
    return o;
}

/* The last layer flushes what would fall past the end (docs/delays.md). */
static uint32_t injection_layer(const builder *b, uint32_t from, uint32_t later) {
    const uint64_t to = (uint64_t)from + model_layer(b->m, from)->expert_delay + later;
    const uint32_t last = b->m->header.n_layers - 1;
    return to < last ? (uint32_t)to : last;
}

/* The experts of `groups`, n a row; returns what each of them yields. names: both ops, both values.
 */
static uint32_t build_chosen(builder *b, uint32_t layer, uint32_t x, uint32_t groups, uint32_t n,
                             uint32_t lands, const char *const names[4]) {
    const matrix *gate = model_matrix(b->m, layer, CFLOW_EXPERT_GATE);
    const matrix *up = model_matrix(b->m, layer, CFLOW_EXPERT_UP);
    const matrix *down = model_matrix(b->m, layer, CFLOW_EXPERT_DOWN);
    op *gated = build_expert_op(b, OP_EXPERT_GATED, layer, names[0], x, groups, names[1],
                                model_layer(b->m, layer)->d_expert);
    gated->lands = lands;
    gated->bytes = n * (matrix_bytes(gate) + matrix_bytes(up));
    read_by(b, x, gate);
    read_by(b, x, up);
    read_by(b, gated->out[0], down);
    op *last = build_expert_op(b, OP_EXPERT_DOWN, layer, names[2], gated->out[0], groups, names[3],
                               b->m->header.d_model);
    last->bytes = n * matrix_bytes(down);
    return last->out[0];
}

static uint32_t new_groups(builder *b, op *select, const char *what) {
    const cflow_layer *l = model_layer(b->m, (uint32_t)select->layer);
    const uint32_t v = made(b, select, new_value(b, (uint32_t)select->layer, what, l->top_k));
    b->p->values[v].n_experts = l->n_experts;
    return v;
}

/* The experts that the next layer will choose, guessed from this one's stream. */
static void build_guess(builder *b, uint32_t layer, uint32_t stream) {
    const uint32_t next = layer + 1;
    if (!b->options.speculate || next == b->m->header.n_layers) return;
    const cflow_layer *l = model_layer(b->m, layer), *n = model_layer(b->m, next);
    if (!n->n_experts || n->expert_delay || n->expert_anchor != CFLOW_POST_ATTENTION ||
        l->expert_anchor != CFLOW_POST_ATTENTION)
        return;
    op *route = new_op(b, OP_MATMUL, PART_ROUTER, next, "guess_route");
    route->in[0] =
        layer_norm(b, stream, next, n->norms_shared ? CFLOW_NORM2 : CFLOW_NORM3, "guess_norm");
    add_piece(b, route, model_matrix(b->m, next, CFLOW_ROUTER), NULL, "guess_router");
    new_op(b, OP_GUESS, PART_ROUTER, next, "guess")->in[0] = route->pieces[0].out;
}

/* Router, selection, experts; their output waits for the combine that injects it. */
static void build_experts(builder *b, uint32_t layer, uint32_t stream, const char *norm_name) {
    static const cflow_role shared_roles[] = {CFLOW_SHARED_GATE, CFLOW_SHARED_UP,
                                              CFLOW_SHARED_DOWN};
    static const char *const shared_names[] = {"shared_gate_up", "shared_hidden", "shared_down",
                                               "shared_out"};
    static const char *const names[] = {"expert_gate_up", "expert_hidden", "expert_down",
                                        "expert_each"};
    static const char *const late_names[] = {"late_gate_up", "late_hidden", "late_down",
                                             "late_each"};
    const cflow_layer *l = model_layer(b->m, layer);
    const uint32_t x =
        layer_norm(b, stream, layer, l->norms_shared ? CFLOW_NORM2 : CFLOW_NORM3, norm_name);
    op *route = new_op(b, OP_MATMUL, PART_ROUTER, layer, "route");
    route->in[0] = x;
    b->p->ops[b->made_by[x]].is_routed = 1;
    add_piece(b, route, model_matrix(b->m, layer, CFLOW_ROUTER), NULL, "router");
    if (l->shared_gate)
        add_piece(b, route, model_matrix(b->m, layer, CFLOW_SHARED_SCALE), NULL, "shared_scale");

    op *select = new_op(b, OP_SELECT, PART_ROUTER, layer, "select");
    select->in[0] = route->pieces[0].out;
    select->out[0] = made(b, select, new_value(b, layer, "routed", l->top_k));
    select->out[1] = made(b, select, new_value(b, layer, "routed_weights", l->top_k));
    select->out[2] = new_groups(b, select, "groups");

    pending *out = &b->experts[layer];
    out->weights = select->out[1];
    if (l->shared_gate) out->shared_scale = route->pieces[1].out;
    if (l->d_shared) out->shared = build_ffn(b, PART_EXPERTS, layer, x, shared_roles, shared_names);

    const uint32_t n_late = layer + 1 < b->m->header.n_layers ? b->options.defer : 0;
    out->each = build_chosen(b, layer, x, select->out[2], l->top_k - n_late,
                             injection_layer(b, layer, 0), names);
    if (!n_late) return;
    out->late_weights = select->out[3] =
        made(b, select, new_value(b, layer, "late_weights", l->top_k));
    select->out[4] = new_groups(b, select, "late_groups");
    out->late_each =
        build_chosen(b, layer, x, select->out[4], n_late, injection_layer(b, layer, 1), late_names);
}

static void inject_chosen(builder *b, op *combine, uint32_t from, uint32_t each, uint32_t weights,
                          const char *what) {
    term *t = add_term(b, combine, each, 1.0f);
    t->weights = weights;
    t->sum = made(b, combine, new_value(b, from, what, b->m->header.d_model));
}

/* Adds what the experts of layer `from` computed. */
static void inject_experts(builder *b, op *combine, uint32_t from) {
    const pending *e = &b->experts[from];
    inject_chosen(b, combine, from, e->each, e->weights, "expert_out");
    if (e->shared != NO_VALUE) add_term(b, combine, e->shared, 1.0f)->gate = e->shared_scale;
}

static uint32_t source_stream(const builder *b, uint32_t layer, uint32_t source, uint32_t x_mid) {
    if (source == CFLOW_POST_ATTENTION) return x_mid;
    return b->streams[source == CFLOW_X_IN_PREVIOUS && layer ? layer - 1 : layer];
}

static void build_layer(builder *b, uint32_t layer) {
    const cflow_layer *l = model_layer(b->m, layer);
    const uint32_t attention = build_attention(b, layer);
    uint32_t x_mid = NO_VALUE;
    if ((l->d_ff && l->dense_source == CFLOW_POST_ATTENTION) ||
        (l->n_experts && l->expert_anchor == CFLOW_POST_ATTENTION)) {
        op *mid = new_combine(b, layer, "x_mid", b->streams[layer]);
        add_term(b, mid, attention, l->residual_scale);
        x_mid = mid->out[0];
    }
    const uint32_t dense_stream = source_stream(b, layer, l->dense_source, x_mid);
    const uint32_t anchor = source_stream(b, layer, l->expert_anchor, x_mid);
    const int one_norm = l->norms_shared && (!l->d_ff || anchor == dense_stream);
    if (l->n_experts) {
        build_experts(b, layer, anchor, one_norm ? "norm2" : "norm3");
        build_guess(b, layer, anchor);
    }
    const uint32_t dense = l->d_ff ? build_dense(b, layer, dense_stream) : NO_VALUE;

    const int last = layer + 1 == b->m->header.n_layers;
    op *out = new_combine(b, layer + 1, last ? "x_out" : "x_in",
                          x_mid == NO_VALUE ? b->streams[layer] : x_mid);
    if (x_mid == NO_VALUE) add_term(b, out, attention, l->residual_scale);
    if (dense != NO_VALUE) add_term(b, out, dense, l->residual_scale);
    for (uint32_t from = 0; from <= layer; from++) {
        const pending *e = &b->experts[from];
        if (e->each != NO_VALUE && injection_layer(b, from, 0) == layer)
            inject_experts(b, out, from);
        if (e->late_each != NO_VALUE && injection_layer(b, from, 1) == layer)
            inject_chosen(b, out, from, e->late_each, e->late_weights, "late_out");
    }
    b->streams[layer + 1] = out->out[0];
}

static void build_graph(builder *b) {
    const cflow_header *h = &b->m->header;
    b->streams[0] = new_combine(b, 0, "x_in", NO_VALUE)->out[0];
    for (uint32_t layer = 0; layer < h->n_layers; layer++) build_layer(b, layer);
    b->p->final_norm = norm_of(b, b->streams[h->n_layers], &b->m->global[CFLOW_FINAL_NORM],
                               h->final_norm_eps, h->final_norm_offset, h->n_layers, "final_norm");
    read_by(b, b->p->final_norm, head_matrix(b->m));
}

/* ---- edges: what an op reads and writes, by index ---- */

static uint32_t n_inputs(const op *o) {
    return 5 + 3 * o->n_terms;
}
static uint32_t input(const op *o, uint32_t i) {
    if (i < 4) return o->in[i];
    if (i == 4) return o->base;
    const term *t = &o->terms[(i - 5) / 3];
    return (i - 5) % 3 == 0 ? t->value : (i - 5) % 3 == 1 ? t->weights : t->gate;
}

static uint32_t n_outputs(const op *o) {
    return 5 + o->n_pieces + o->n_norms + o->n_terms;
}
static uint32_t output(const op *o, uint32_t i) {
    if (i < 5) return o->out[i];
    if ((i -= 5) < o->n_pieces) return o->pieces[i].out;
    if ((i -= o->n_pieces) < o->n_norms) return o->norms[i].out;
    return o->terms[i - o->n_norms].sum;
}

/* ---- levelling ---- */

static int is_expert_op(const op *o) {
    return o->kind == OP_EXPERT_GATED || o->kind == OP_EXPERT_DOWN;
}

/* The stage after the op that makes one of its inputs. A router has that stage for itself: it is
 * short, and what it says begins reads. Other matrices of the same stream follow. */
static uint32_t earliest_stage(const op *o, const op *maker) {
    return maker->stage + (maker->is_routed && o->bytes && o->part != PART_ROUTER ? 2 : 1);
}

/* Everything as early as it can be; then expert ops as late as their readers allow, so that reads
 * issued when the router has spoken have the whole delay window. */
static void level(builder *b) {
    plan *p = b->p;
    for (uint32_t i = 0; i < p->n_ops; i++) {
        op *o = &p->ops[i];
        for (uint32_t k = 0; k < n_inputs(o); k++) {
            if (input(o, k) == NO_VALUE) continue;
            const uint32_t after = earliest_stage(o, &p->ops[b->made_by[input(o, k)]]);
            if (o->stage < after) o->stage = after;
        }
        if (p->n_stages < o->stage + 1) p->n_stages = o->stage + 1;
    }
    for (uint32_t i = p->n_ops; i-- > 0;) {
        const op *reader = &p->ops[i];
        for (uint32_t k = 0; k < n_inputs(reader); k++) {
            if (input(reader, k) == NO_VALUE) continue;
            op *o = &p->ops[b->made_by[input(reader, k)]];
            if (!is_expert_op(o)) continue;
            o->stage = reader->stage - 1; /* each has one reader */
        }
    }
}

/* Longest path through the layers in weight bytes. */
static uint64_t critical_path(builder *b, uint64_t *longest) {
    uint64_t best = 0;
    for (uint32_t i = 0; i < b->p->n_ops; i++) {
        const op *o = &b->p->ops[i];
        uint64_t before = 0;
        for (uint32_t k = 0; k < n_inputs(o); k++) {
            if (input(o, k) == NO_VALUE) continue;
            const uint64_t path = longest[b->made_by[input(o, k)]];
            if (before < path) before = path;
        }
        longest[i] = before + (o->part == PART_ROUTER ? 0 : o->bytes);
        if (best < longest[i]) best = longest[i];
    }
    return best;
}

/* sum over layers of max(B_attn, B_dense / (dense_delay + 1), B_expert / (expert_delay + 1)). */
static double closed_form(const builder *b) {
    double sum = 0;
    for (uint32_t layer = 0; layer < b->m->header.n_layers; layer++) {
        const cflow_layer *l = model_layer(b->m, layer);
        double bytes[N_PARTS] = {0};
        for (uint32_t i = 0; i < b->p->n_ops; i++)
            if (b->p->ops[i].layer == (int32_t)layer)
                bytes[b->p->ops[i].part] += (double)b->p->ops[i].bytes;
        const double dense = bytes[PART_DENSE] / (l->dense_source == CFLOW_X_IN_PREVIOUS ? 2 : 1);
        const double experts = bytes[PART_EXPERTS] / ((double)l->expert_delay + 1);
        const double most = dense > experts ? dense : experts;
        sum += most > bytes[PART_ATTENTION] ? most : bytes[PART_ATTENTION];
    }
    return sum;
}

static void find_lives(builder *b) {
    plan *p = b->p;
    for (uint32_t v = 0; v < p->n_values; v++) {
        const op *o = &p->ops[b->made_by[v]];
        p->values[v].first_stage = p->values[v].last_stage = o->stage;
        if (o->kind == OP_EXPERT_DOWN) p->values[v].first_stage--; /* its first waves are early */
    }
    for (uint32_t i = 0; i < p->n_ops; i++)
        for (uint32_t k = 0; k < n_inputs(&p->ops[i]); k++) {
            const uint32_t v = input(&p->ops[i], k);
            if (v != NO_VALUE && p->values[v].last_stage < p->ops[i].stage)
                p->values[v].last_stage = p->ops[i].stage;
        }
    p->values[p->final_norm].last_stage = UINT32_MAX; /* the head reads it after the last stage */
}

/* A value takes the first slot of its shape that is free in its first stage; values by first stage.
 */
static void assign_slots(plan *p) {
    for (uint32_t stage = 0; stage < p->n_stages; stage++)
        for (uint32_t i = 0; i < p->n_values; i++) {
            value *v = &p->values[i];
            if (v->first_stage != stage) continue;
            uint32_t s = 0;
            for (; s < p->n_slots; s++) {
                const slot *c = &p->slots[s];
                if (c->width == v->width && c->per_row == v->per_row &&
                    c->quantized == v->quantized && c->n_experts == v->n_experts &&
                    c->free_after < stage)
                    break;
            }
            if (s == p->n_slots) p->n_slots++;
            p->slots[s] = (slot){.width = v->width,
                                 .per_row = v->per_row,
                                 .n_experts = v->n_experts,
                                 .quantized = v->quantized,
                                 .free_after = v->last_stage};
            v->slot = s;
        }
}

/* Orders ops by stage; in one those that begin reads first, else as they were built. */
static void sort_ops(plan *p, op *sorted) {
    uint32_t n = 0;
    for (uint32_t stage = 0; stage < p->n_stages; stage++) {
        p->first_op[stage] = n;
        for (int is_router = 1; is_router >= 0; is_router--)
            for (uint32_t i = 0; i < p->n_ops; i++)
                if (p->ops[i].stage == stage && (p->ops[i].part == PART_ROUTER) == is_router)
                    sorted[n++] = p->ops[i];
    }
    p->first_op[p->n_stages] = n;
    memcpy(p->ops, sorted, n * sizeof *sorted);
}

static void fill_info(builder *b, uint64_t *longest) {
    plan *p = b->p;
    const cflow_header *h = &b->m->header;
    cflow_plan_info *info = &p->info;
    info->n_stages = info->n_barriers = p->n_stages;
    info->n_ops = p->n_ops;
    info->n_values = p->n_slots;
    for (uint32_t i = 0; i < p->n_ops; i++) info->layer_bytes += p->ops[i].bytes;
    info->bytes_per_token = info->layer_bytes + matrix_bytes(head_matrix(b->m));
    info->critical_path_bytes = critical_path(b, longest);
    info->critical_path_closed_form_bytes = closed_form(b);
    for (uint32_t l = 0; l < h->n_layers; l++)
        info->kv_bytes_per_token +=
            4ull * model_layer(b->m, l)->n_kv_heads * model_layer(b->m, l)->head_dim;
}

/* ---- life ---- */

static int take_memory(builder *b) {
    plan *p = b->p;
    const uint32_t layers = b->m->header.n_layers;
    b->max_ops = layers * OPS_PER_LAYER + 1;
    b->max_values = layers * VALUES_PER_LAYER + 2;
    p->ops = memory_zeroed(b->max_ops, sizeof *p->ops);
    p->values = memory_zeroed(b->max_values, sizeof *p->values);
    p->slots = memory_zeroed(b->max_values, sizeof *p->slots);
    p->terms = memory_zeroed((size_t)layers * TERMS_PER_LAYER + 1, sizeof *p->terms);
    p->first_op = memory_zeroed(b->max_ops + 1, sizeof *p->first_op);
    b->terms = p->terms;
    b->made_by = memory_zeroed(b->max_values, sizeof *b->made_by);
    b->streams = memory_zeroed((size_t)layers + 1, sizeof *b->streams);
    b->experts = memory_zeroed(layers, sizeof *b->experts);
    if (!p->ops || !p->values || !p->slots || !p->terms || !p->first_op || !b->made_by ||
        !b->streams || !b->experts)
        return 0;
    for (uint32_t i = 0; i < layers; i++)
        b->experts[i] = (pending){NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE, NO_VALUE};
    return 1;
}

static cflow_status build(builder *b) {
    if (!take_memory(b)) return CFLOW_ENOMEM;
    op *sorted = memory_zeroed(b->max_ops, sizeof *sorted);
    uint64_t *longest = memory_zeroed(b->max_ops, sizeof *longest);
    if (sorted && longest) {
        build_graph(b);
        level(b);
        find_lives(b);
        assign_slots(b->p);
        fill_info(b, longest);
        sort_ops(b->p, sorted);
    }
    const int ok = sorted && longest;
    memory_free(sorted);
    memory_free(longest);
    return ok ? CFLOW_OK : CFLOW_ENOMEM;
}

cflow_status plan_open(plan **out, const model_weights *m, plan_options options, cflow_error *err) {
    *out = NULL;
    builder b = {.m = m, .options = options, .p = memory_zeroed(1, sizeof *b.p)};
    cflow_status status = b.p ? build(&b) : CFLOW_ENOMEM;
    memory_free(b.made_by);
    memory_free(b.streams);
    memory_free(b.experts);
    if (status != CFLOW_OK) {
        plan_close(b.p);
        return fail(err, status, "no memory for the plan of %u layers", m->header.n_layers);
    }
    b.p->defer = options.defer;
    *out = b.p;
    return CFLOW_OK;
}

void plan_close(plan *p) {
    if (!p) return;
    memory_free(p->ops);
    memory_free(p->values);
    memory_free(p->slots);
    memory_free(p->terms);
    memory_free(p->first_op);
    memory_free(p);
}

/* ---- accounts ---- */

static void append_name(char *list, size_t size, const plan *p, uint32_t v) {
    if (v == NO_VALUE) return;
    const size_t used = strlen(list);
    snprintf(list + used, size - used, "%s%s", used ? " " : "", p->values[v].name);
}

cflow_status plan_describe(const plan *p, uint32_t index, cflow_op_info *out, cflow_error *err) {
    if (index >= p->n_ops)
        return fail(err, CFLOW_EINVAL, "op %u: the plan has %u", index, p->n_ops);
    const op *o = &p->ops[index];
    *out = (cflow_op_info){.stage = o->stage, .layer = o->layer, .bytes = o->bytes};
    snprintf(out->name, sizeof out->name, "%s", o->name);
    for (uint32_t i = 0; i < n_inputs(o); i++)
        append_name(out->reads, sizeof out->reads, p, input(o, i));
    for (uint32_t i = 0; i < n_outputs(o); i++)
        append_name(out->writes, sizeof out->writes, p, output(o, i));
    return CFLOW_OK;
}
