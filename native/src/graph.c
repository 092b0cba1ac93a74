#include "graph.h"

#include <stdio.h>

enum { OPS_PER_LAYER = 18, VALUES_PER_LAYER = 34, TERMS_PER_LAYER = 6 };

typedef struct {      /* routed experts, as values */
    uint32_t each;    /* what each expert of a row yields; NO_VALUE: there are none */
    uint32_t weights; /* by rank */
} routed;

typedef struct { /* what a layer's experts make, until a stream adds it */
    routed now, late;
    uint32_t shared, shared_scale; /* values, or NO_VALUE */
} pending;

typedef struct {
    graph *g;
    const model_weights *m;
    graph_options options;
    uint32_t n_terms;
    uint32_t *streams; /* (n_layers + 1,) x_in of each layer, then the last output */
    pending *experts;  /* (n_layers,) */
} builder;

/* ---- making ops and values ---- */

/* "L3.what"; after the layers "what". */
static void name_in_layer(const builder *b, char name[32], uint32_t layer, const char *what) {
    if (layer < b->m->header.n_layers)
        snprintf(name, 32, "L%u.%s", layer, what);
    else
        snprintf(name, 32, "%s", what);
}

static op *new_op(builder *b, op_kind kind, op_part part, uint32_t layer, const char *what) {
    op *o = &b->g->ops[b->g->n_ops++];
    *o = (op){.kind = kind, .part = part, .layer = (int32_t)layer, .base = NO_VALUE};
    for (int i = 0; i < N_IN; i++) o->in[i] = NO_VALUE;
    for (int i = 0; i < N_OUT; i++) o->out[i] = NO_VALUE;
    name_in_layer(b, o->name, layer, what);
    return o;
}

/* A new value, made by o. */
static uint32_t make(builder *b, const op *o, uint32_t layer, const char *what, uint32_t width) {
    const uint32_t v = b->g->n_values++;
    b->g->values[v] = (value){.width = width, .per_row = 1};
    b->g->made_by[v] = (uint32_t)(o - b->g->ops);
    name_in_layer(b, b->g->values[v].name, layer, what);
    return v;
}

static op *maker(const builder *b, uint32_t v) {
    return &b->g->ops[b->g->made_by[v]];
}

/* Has value v kept in the form that w multiplies: as codes for quantised encodings. */
static void read_by(builder *b, uint32_t v, const matrix *w) {
    if (w->encoding > CFLOW_BF16) b->g->values[v].quantized = 1;
}

/* w, or NULL if the file has no such tensor. */
static const matrix *if_present(const matrix *w) {
    return w->n_cols ? w : NULL;
}

static void add_piece(builder *b, op *o, const matrix *w, const matrix *bias, const char *what) {
    piece *one = &o->pieces[o->n_pieces++];
    one->w = w;
    one->bias = bias ? if_present(bias) : NULL;
    one->out = make(b, o, (uint32_t)o->layer, what, w->n_rows);
    o->bytes += matrix_bytes(w);
    read_by(b, o->in[0], w);
}

/* ---- the residual stream ---- */

static op *new_combine(builder *b, uint32_t layer, const char *what, uint32_t base) {
    op *o = new_op(b, OP_COMBINE, PART_STREAM, layer, what);
    o->base = base;
    o->terms = b->g->terms + b->n_terms;
    o->out[0] = make(b, o, layer, what, b->m->header.d_model);
    return o;
}

/* To the newest combine. */
static term *add_term(builder *b, op *o, uint32_t v, float scale) {
    term *t = &o->terms[o->n_terms++];
    b->n_terms++;
    *t = (term){.value = v, .scale = scale, .weights = NO_VALUE, .sum = NO_VALUE, .gate = NO_VALUE};
    return t;
}

/* The norm of a stream: computed by the op that makes the stream, once per weight. */
static uint32_t norm_of(builder *b, uint32_t stream, norm_weights w, uint32_t layer,
                        const char *what) {
    op *o = maker(b, stream);
    for (uint32_t i = 0; i < o->n_norms; i++) {
        const norm_weights *made = &o->norms[i].weights;
        if (made->weight == w.weight && made->eps == w.eps && made->offset == w.offset)
            return o->norms[i].out;
    }
    const uint32_t v = make(b, o, layer, what, b->m->header.d_model);
    o->norms[o->n_norms++] = (norm){.weights = w, .out = v};
    return v;
}

/* The norm of role `weight`; no norm if the layer has none there. */
static norm_weights norm_in_layer(const builder *b, uint32_t layer, cflow_role weight) {
    const cflow_layer *l = model_layer(b->m, layer);
    norm_weights w = {.weight = if_present(model_matrix(b->m, layer, weight)),
                      .kind = (cflow_norm_kind)l->norm_kind,
                      .eps = l->norm_eps,
                      .offset = l->norm_offset};
    if (weight == CFLOW_NORM1) w.bias = if_present(model_matrix(b->m, layer, CFLOW_NORM1_BIAS));
    if (weight == CFLOW_NORM2) w.bias = if_present(model_matrix(b->m, layer, CFLOW_NORM2_BIAS));
    return w;
}

static uint32_t layer_norm(builder *b, uint32_t stream, uint32_t layer, cflow_role role,
                           const char *what) {
    return norm_of(b, stream, norm_in_layer(b, layer, role), layer, what);
}

static uint32_t expert_norm(builder *b, uint32_t stream, uint32_t layer, const char *what) {
    const int shared = (int)model_layer(b->m, layer)->norms_shared;
    return layer_norm(b, stream, layer, shared ? CFLOW_NORM2 : CFLOW_NORM3, what);
}

/* ---- attention and dense FFN; each returns the value that the stream adds ---- */

static uint32_t build_attention(builder *b, uint32_t layer) {
    static const struct {
        cflow_role weight, bias;
        const char *name;
    } inputs[] = {
        {CFLOW_Q, CFLOW_Q_BIAS, "q"}, {CFLOW_K, CFLOW_K_BIAS, "k"}, {CFLOW_V, CFLOW_V_BIAS, "v"}};
    const cflow_layer *l = model_layer(b->m, layer);
    op *qkv = new_op(b, OP_MATMUL, PART_ATTENTION, layer, "qkv");
    qkv->in[0] = layer_norm(b, b->streams[layer], layer, CFLOW_NORM1, "norm1");
    for (int i = 0; i < 3; i++)
        add_piece(b, qkv, model_matrix(b->m, layer, inputs[i].weight),
                  model_matrix(b->m, layer, inputs[i].bias), inputs[i].name);

    op *kv = new_op(b, OP_KV, PART_ATTENTION, layer, "kv");
    for (int i = 0; i < 3; i++) kv->in[i] = qkv->pieces[i].out;
    kv->out[0] = make(b, kv, layer, "q_rot", l->n_heads * l->head_dim);

    op *attend = new_op(b, OP_ATTEND, PART_ATTENTION, layer, "attend");
    attend->in[0] = kv->out[0];
    attend->out[0] = make(b, attend, layer, "attention", l->n_heads * l->head_dim);

    op *o = new_op(b, OP_MATMUL, PART_ATTENTION, layer, "o");
    o->in[0] = attend->out[0];
    add_piece(b, o, model_matrix(b->m, layer, CFLOW_O), model_matrix(b->m, layer, CFLOW_O_BIAS),
              "attention_out");
    return o->pieces[0].out;
}

/* Adds the output v of a sublayer, normed by `role` where the layer has one. */
static void add_sublayer(builder *b, op *o, uint32_t layer, uint32_t v, cflow_role role,
                         const char *what) {
    term *t = add_term(b, o, v, model_layer(b->m, layer)->residual_scale);
    t->norm = norm_in_layer(b, layer, role);
    if (t->norm.weight) t->sum = make(b, o, layer, what, b->m->header.d_model);
}

typedef struct { /* names of a gated FFN's two ops and of what they make */
    const char *gate_up, *hidden, *down, *out;
} ffn_names;

/* The part's matrix of a role, or NULL. */
static const matrix *find_matrix(const builder *b, uint32_t layer, cflow_role role) {
    return if_present(model_matrix(b->m, layer, role));
}

/* x: the FFN's input. down_bias: NULL for none. */
static uint32_t build_ffn(builder *b, op_part part, uint32_t layer, uint32_t x, gated_weights w,
                          const matrix *down, const matrix *down_bias, const ffn_names *names) {
    op *gated = new_op(b, OP_GATED, part, layer, names->gate_up);
    gated->in[0] = x;
    gated->gated = w;
    gated->out[0] = make(b, gated, layer, names->hidden, w.up->n_rows);
    gated->bytes = (w.gate ? matrix_bytes(w.gate) : 0) + matrix_bytes(w.up);
    if (w.gate) read_by(b, x, w.gate);
    read_by(b, x, w.up);
    op *last = new_op(b, OP_MATMUL, part, layer, names->down);
    last->in[0] = gated->out[0];
    add_piece(b, last, down, down_bias, names->out);
    return last->pieces[0].out;
}

static uint32_t build_dense(builder *b, uint32_t layer, uint32_t stream) {
    static const ffn_names names = {"gate_up", "hidden", "down", "dense_out"};
    const uint32_t x = layer_norm(b, stream, layer, CFLOW_NORM2, "norm2");
    const gated_weights w = {find_matrix(b, layer, CFLOW_GATE), find_matrix(b, layer, CFLOW_UP),
                             find_matrix(b, layer, CFLOW_GATE_BIAS),
                             find_matrix(b, layer, CFLOW_UP_BIAS)};
    return build_ffn(b, PART_DENSE, layer, x, w, model_matrix(b->m, layer, CFLOW_DOWN),
                     find_matrix(b, layer, CFLOW_DOWN_BIAS), &names);
}

static uint32_t build_shared(builder *b, uint32_t layer, uint32_t x) {
    static const ffn_names names = {"shared_gate_up", "shared_hidden", "shared_down", "shared_out"};
    const gated_weights w = {.gate = model_matrix(b->m, layer, CFLOW_SHARED_GATE),
                             .up = model_matrix(b->m, layer, CFLOW_SHARED_UP)};
    return build_ffn(b, PART_EXPERTS, layer, x, w, model_matrix(b->m, layer, CFLOW_SHARED_DOWN),
                     NULL, &names);
}

/* ---- experts ---- */

/* The layer whose output adds the experts of layer `from`, `late` layers behind their delay. The
 * last layer adds all that would land after it (docs/delays.md). */
static uint32_t landing_layer(const builder *b, uint32_t from, uint32_t late) {
    const uint64_t to = (uint64_t)from + model_layer(b->m, from)->expert_delay + late;
    const uint32_t last = b->m->header.n_layers - 1;
    return to < last ? (uint32_t)to : last;
}

/* The router of a layer applied to x. */
static op *build_router(builder *b, uint32_t layer, uint32_t x, const char *what,
                        const char *logits) {
    op *route = new_op(b, OP_MATMUL, PART_ROUTER, layer, what);
    route->in[0] = x;
    add_piece(b, route, model_matrix(b->m, layer, CFLOW_ROUTER), NULL, logits);
    return route;
}

static uint32_t make_groups(builder *b, const op *select, const char *what) {
    const uint32_t layer = (uint32_t)select->layer;
    const cflow_layer *l = model_layer(b->m, layer);
    const uint32_t v = make(b, select, layer, what, l->top_k);
    b->g->values[v].n_experts = l->n_experts;
    return v;
}

static op *build_select(builder *b, uint32_t layer, uint32_t logits) {
    const uint32_t top_k = model_layer(b->m, layer)->top_k;
    op *select = new_op(b, OP_SELECT, PART_ROUTER, layer, "select");
    select->in[0] = logits;
    select->out[SELECT_IDS] = make(b, select, layer, "routed", top_k);
    select->out[SELECT_WEIGHTS] = make(b, select, layer, "routed_weights", top_k);
    select->out[SELECT_GROUPS] = make_groups(b, select, "groups");
    return select;
}

static void select_late(builder *b, op *select) {
    const uint32_t layer = (uint32_t)select->layer;
    const uint32_t top_k = model_layer(b->m, layer)->top_k;
    select->out[SELECT_LATE_WEIGHTS] = make(b, select, layer, "late_weights", top_k);
    select->out[SELECT_LATE_GROUPS] = make_groups(b, select, "late_groups");
}

static op *build_expert_op(builder *b, op_kind kind, uint32_t layer, const char *what, uint32_t x,
                           uint32_t groups, const char *out, uint32_t width) {
    op *o = new_op(b, kind, PART_EXPERTS, layer, what);
    o->in[0] = x;
    o->in[1] = groups;
    o->out[0] = make(b, o, layer, out, width);
    b->g->values[o->out[0]].per_row = model_layer(b->m, layer)->top_k;
    return o;
}

/* The experts that `select` chose, n for each row, or those that it deferred; x: their input. */
static routed build_chosen(builder *b, const op *select, int is_late, uint32_t x, uint32_t n) {
    static const ffn_names all_names[] = {
        {"expert_gate_up", "expert_hidden", "expert_down", "expert_each"},
        {"late_gate_up", "late_hidden", "late_down", "late_each"}};
    const ffn_names *names = &all_names[is_late];
    const uint32_t layer = (uint32_t)select->layer;
    const uint32_t groups = select->out[is_late ? SELECT_LATE_GROUPS : SELECT_GROUPS];
    const matrix *gate = model_matrix(b->m, layer, CFLOW_EXPERT_GATE);
    const matrix *up = model_matrix(b->m, layer, CFLOW_EXPERT_UP);
    const matrix *down = model_matrix(b->m, layer, CFLOW_EXPERT_DOWN);
    op *gated = build_expert_op(b, OP_EXPERT_GATED, layer, names->gate_up, x, groups, names->hidden,
                                model_layer(b->m, layer)->d_expert);
    gated->lands = landing_layer(b, layer, (uint32_t)is_late);
    gated->bytes = n * (matrix_bytes(gate) + matrix_bytes(up));
    read_by(b, x, gate);
    read_by(b, x, up);
    read_by(b, gated->out[0], down);
    op *last = build_expert_op(b, OP_EXPERT_DOWN, layer, names->down, gated->out[0], groups,
                               names->out, b->m->header.d_model);
    last->bytes = n * matrix_bytes(down);
    return (routed){last->out[0], select->out[is_late ? SELECT_LATE_WEIGHTS : SELECT_WEIGHTS]};
}

/* Router, selection, shared and routed experts of a layer that reads `stream`. */
static void build_experts(builder *b, uint32_t layer, uint32_t stream, const char *norm_name) {
    const cflow_layer *l = model_layer(b->m, layer);
    const uint32_t n_late = layer + 1 < b->m->header.n_layers ? b->options.defer : 0;
    const uint32_t x = expert_norm(b, stream, layer, norm_name);
    pending *made = &b->experts[layer];
    maker(b, x)->is_routed = 1;
    op *route = build_router(b, layer, x, "route", "router");
    if (l->shared_gate) {
        add_piece(b, route, model_matrix(b->m, layer, CFLOW_SHARED_SCALE), NULL, "shared_scale");
        made->shared_scale = route->pieces[1].out;
    }
    op *select = build_select(b, layer, route->pieces[0].out);
    if (l->d_shared) made->shared = build_shared(b, layer, x);
    made->now = build_chosen(b, select, 0, x, l->top_k - n_late);
    if (!n_late) return;
    select_late(b, select);
    made->late = build_chosen(b, select, 1, x, n_late);
}

/* The next layer's router applied to the stream that this layer's experts read: its choice is read
 * ahead. For stock layers only, whose experts have no delay that could hide the reads. */
static void build_speculation(builder *b, uint32_t layer, uint32_t stream) {
    const uint32_t next = layer + 1;
    if (!b->options.speculate || next == b->m->header.n_layers) return;
    const cflow_layer *l = model_layer(b->m, layer), *n = model_layer(b->m, next);
    if (!n->n_experts || n->expert_delay || n->expert_anchor != CFLOW_POST_ATTENTION ||
        l->expert_anchor != CFLOW_POST_ATTENTION)
        return;
    const uint32_t x = expert_norm(b, stream, next, "ahead_norm");
    const op *route = build_router(b, next, x, "ahead_route", "ahead_router");
    new_op(b, OP_SPECULATE, PART_ROUTER, next, "speculate")->in[0] = route->pieces[0].out;
}

/* ---- layers ---- */

static void add_routed(builder *b, op *combine, uint32_t from, routed experts, const char *what) {
    term *t = add_term(b, combine, experts.each, 1.0f);
    t->weights = experts.weights;
    t->sum = make(b, combine, from, what, b->m->header.d_model);
}

/* Adds the experts of layer `from` that land in `layer`. */
static void add_experts(builder *b, op *combine, uint32_t from, uint32_t layer) {
    const pending *e = &b->experts[from];
    if (e->now.each != NO_VALUE && landing_layer(b, from, 0) == layer) {
        add_routed(b, combine, from, e->now, "expert_out");
        if (e->shared != NO_VALUE) add_term(b, combine, e->shared, 1.0f)->gate = e->shared_scale;
    }
    if (e->late.each != NO_VALUE && landing_layer(b, from, 1) == layer)
        add_routed(b, combine, from, e->late, "late_out");
}

/* x_in + attention, where the FFN or the experts read it; else NO_VALUE. */
static uint32_t build_mid(builder *b, uint32_t layer, uint32_t attention) {
    const cflow_layer *l = model_layer(b->m, layer);
    const int dense_reads = l->d_ff && l->dense_source == CFLOW_POST_ATTENTION;
    const int experts_read = l->n_experts && l->expert_anchor == CFLOW_POST_ATTENTION;
    if (!dense_reads && !experts_read) return NO_VALUE;
    op *mid = new_combine(b, layer, "x_mid", b->streams[layer]);
    add_sublayer(b, mid, layer, attention, CFLOW_POST_NORM1, "post_norm1");
    return mid->out[0];
}

static uint32_t source_stream(const builder *b, uint32_t layer, uint32_t source, uint32_t x_mid) {
    if (source == CFLOW_POST_ATTENTION) return x_mid;
    return b->streams[source == CFLOW_X_IN_PREVIOUS && layer ? layer - 1 : layer];
}

/* The layer's output: its stream, attention unless x_mid has it, dense output, landing experts. */
static uint32_t build_output(builder *b, uint32_t layer, uint32_t x_mid, uint32_t attention,
                             uint32_t dense) {
    const int is_last = layer + 1 == b->m->header.n_layers;
    op *out = new_combine(b, layer + 1, is_last ? "x_out" : "x_in",
                          x_mid == NO_VALUE ? b->streams[layer] : x_mid);
    if (x_mid == NO_VALUE) add_sublayer(b, out, layer, attention, CFLOW_POST_NORM1, "post_norm1");
    if (dense != NO_VALUE) add_sublayer(b, out, layer, dense, CFLOW_POST_NORM2, "post_norm2");
    for (uint32_t from = 0; from <= layer; from++) add_experts(b, out, from, layer);
    return out->out[0];
}

static void build_layer(builder *b, uint32_t layer) {
    const cflow_layer *l = model_layer(b->m, layer);
    const uint32_t attention = build_attention(b, layer);
    const uint32_t x_mid = build_mid(b, layer, attention);
    const uint32_t dense_stream = source_stream(b, layer, l->dense_source, x_mid);
    const uint32_t expert_stream = source_stream(b, layer, l->expert_anchor, x_mid);
    uint32_t dense = NO_VALUE;
    if (l->n_experts) {
        /* A weight that norms two streams makes two values, so they need two names. */
        const int one_norm = l->norms_shared && (!l->d_ff || expert_stream == dense_stream);
        build_experts(b, layer, expert_stream, one_norm ? "norm2" : "norm3");
        build_speculation(b, layer, expert_stream);
    }
    if (l->d_ff) dense = build_dense(b, layer, dense_stream);
    b->streams[layer + 1] = build_output(b, layer, x_mid, attention, dense);
}

static void build_layers(builder *b) {
    const cflow_header *h = &b->m->header;
    b->streams[0] = new_combine(b, 0, "x_in", NO_VALUE)->out[0];
    for (uint32_t layer = 0; layer < h->n_layers; layer++) build_layer(b, layer);
    const norm_weights final = {.weight = &b->m->global[CFLOW_FINAL_NORM],
                                .bias = if_present(&b->m->global[CFLOW_FINAL_NORM_BIAS]),
                                .kind = (cflow_norm_kind)h->final_norm_kind,
                                .eps = h->final_norm_eps,
                                .offset = h->final_norm_offset};
    b->g->final_norm = norm_of(b, b->streams[h->n_layers], final, h->n_layers, "final_norm");
    read_by(b, b->g->final_norm, head_matrix(b->m));
}

/* ---- life ---- */

static int take_memory(builder *b) {
    const size_t layers = b->m->header.n_layers, values = layers * VALUES_PER_LAYER + 2;
    graph *g = b->g;
    g->ops = memory_zeroed(layers * OPS_PER_LAYER + 1, sizeof *g->ops);
    g->values = memory_zeroed(values, sizeof *g->values);
    g->terms = memory_zeroed(layers * TERMS_PER_LAYER + 1, sizeof *g->terms);
    g->made_by = memory_zeroed(values, sizeof *g->made_by);
    b->streams = memory_zeroed(layers + 1, sizeof *b->streams);
    b->experts = memory_zeroed(layers, sizeof *b->experts);
    return g->ops && g->values && g->terms && g->made_by && b->streams && b->experts;
}

int graph_build(graph *g, const model_weights *m, graph_options options) {
    *g = (graph){0};
    builder b = {.g = g, .m = m, .options = options};
    const int ok = take_memory(&b);
    if (ok) {
        for (uint32_t i = 0; i < m->header.n_layers; i++)
            b.experts[i] =
                (pending){{NO_VALUE, NO_VALUE}, {NO_VALUE, NO_VALUE}, NO_VALUE, NO_VALUE};
        build_layers(&b);
    }
    memory_free(b.streams);
    memory_free(b.experts);
    return ok;
}

void graph_close(graph *g) {
    memory_free(g->ops);
    memory_free(g->values);
    memory_free(g->terms);
    memory_free(g->made_by);
}

/* ---- edges: in and base, then three of each term; out, then those of pieces, norms, terms ---- */

uint32_t op_n_inputs(const op *o) {
    return N_IN + 1 + 3 * o->n_terms;
}

uint32_t op_input(const op *o, uint32_t i) {
    if (i < N_IN) return o->in[i];
    if ((i -= N_IN) == 0) return o->base;
    const term *t = &o->terms[(i - 1) / 3];
    const uint32_t of_term[] = {t->value, t->weights, t->gate};
    return of_term[(i - 1) % 3];
}

uint32_t op_n_outputs(const op *o) {
    return N_OUT + o->n_pieces + o->n_norms + o->n_terms;
}

uint32_t op_output(const op *o, uint32_t i) {
    if (i < N_OUT) return o->out[i];
    if ((i -= N_OUT) < o->n_pieces) return o->pieces[i].out;
    if ((i -= o->n_pieces) < o->n_norms) return o->norms[i].out;
    return o->terms[i - o->n_norms].sum;
}
