#include "plan.h"

#include <stdio.h>
#include <string.h>

#include "status.h"

/* ---- stages ---- */

static int is_expert_op(const op *o) {
    return o->kind == OP_EXPERT_GATED || o->kind == OP_EXPERT_DOWN;
}

/* The op that makes input i of o, or NULL. */
static op *input_maker(const graph *g, const op *o, uint32_t i) {
    const uint32_t v = op_input(o, i);
    return v == NO_VALUE ? NULL : &g->ops[g->made_by[v]];
}

/* The stage after the op that makes an input of o. A router has that stage to itself: it is short,
 * and its result starts reads. Other matrices that read the same stream take the stage after. */
static uint32_t earliest_stage(const op *o, const op *maker) {
    return maker->stage + (maker->is_routed && o->bytes && o->part != PART_ROUTER ? 2 : 1);
}

/* Puts every op into the earliest stage possible. Returns the number of stages. */
static uint32_t level_early(graph *g) {
    uint32_t n_stages = 0;
    for (op *o = g->ops; o < g->ops + g->n_ops; o++) {
        for (uint32_t i = 0; i < op_n_inputs(o); i++) {
            const op *maker = input_maker(g, o, i);
            if (maker && o->stage < earliest_stage(o, maker)) o->stage = earliest_stage(o, maker);
        }
        if (n_stages < o->stage + 1) n_stages = o->stage + 1;
    }
    return n_stages;
}

/* Moves expert ops to the stage before their only reader, so that the whole delay hides the reads
 * that begin once the router has chosen. */
static void delay_experts(graph *g) {
    for (uint32_t i = g->n_ops; i-- > 0;) {
        const op *reader = &g->ops[i];
        for (uint32_t k = 0; k < op_n_inputs(reader); k++) {
            op *o = input_maker(g, reader, k);
            if (o && is_expert_op(o)) o->stage = reader->stage - 1;
        }
    }
}

/* Copies the ops by stage; in a stage routers and selections first, else as in the graph. */
static void sort_ops(plan *p, const graph *g) {
    for (uint32_t stage = 0; stage < p->n_stages; stage++) {
        p->first_op[stage] = p->n_ops;
        for (int is_router = 1; is_router >= 0; is_router--)
            for (const op *o = g->ops; o < g->ops + g->n_ops; o++)
                if (o->stage == stage && (o->part == PART_ROUTER) == is_router)
                    p->ops[p->n_ops++] = *o;
    }
    p->first_op[p->n_stages] = p->n_ops;
}

/* ---- slots ---- */

static void find_lives(const graph *g) {
    for (uint32_t v = 0; v < g->n_values; v++) {
        const op *o = &g->ops[g->made_by[v]];
        g->values[v].first_stage = g->values[v].last_stage = o->stage;
        /* Waves of the stage before run it too. */
        if (o->kind == OP_EXPERT_DOWN) g->values[v].first_stage--;
    }
    for (const op *o = g->ops; o < g->ops + g->n_ops; o++)
        for (uint32_t i = 0; i < op_n_inputs(o); i++) {
            const uint32_t v = op_input(o, i);
            if (v != NO_VALUE && g->values[v].last_stage < o->stage)
                g->values[v].last_stage = o->stage;
        }
    g->values[g->final_norm].last_stage = UINT32_MAX; /* the head reads it after the last stage */
}

static int fits(const slot *s, const value *v) {
    return s->width == v->width && s->per_row == v->per_row && s->quantized == v->quantized &&
           s->n_experts == v->n_experts && s->free_after < v->first_stage;
}

static void take_slot(plan *p, value *v) {
    v->slot = 0;
    while (v->slot < p->n_slots && !fits(&p->slots[v->slot], v)) v->slot++;
    if (v->slot == p->n_slots) p->n_slots++;
    p->slots[v->slot] = slot_for(v);
}

/* Values by first stage; each takes the first slot of its shape that is free. */
static void assign_slots(plan *p, const graph *g) {
    for (uint32_t stage = 0; stage < p->n_stages; stage++)
        for (uint32_t v = 0; v < g->n_values; v++)
            if (g->values[v].first_stage == stage) take_slot(p, &g->values[v]);
}

/* ---- cflow_plan_info ---- */

/* The longest path through the layers, in weight bytes. longest (n_ops,): of paths that end with
 * each op; zeroed. */
static uint64_t critical_path(const graph *g, uint64_t *longest) {
    uint64_t best = 0;
    for (uint32_t i = 0; i < g->n_ops; i++) {
        const op *o = &g->ops[i];
        for (uint32_t k = 0; k < op_n_inputs(o); k++) {
            const op *maker = input_maker(g, o, k);
            if (maker && longest[i] < longest[maker - g->ops]) longest[i] = longest[maker - g->ops];
        }
        if (o->part != PART_ROUTER) longest[i] += o->bytes;
        if (best < longest[i]) best = longest[i];
    }
    return best;
}

static double larger(double a, double b) {
    return a > b ? a : b;
}

/* Sum over layers of max(B_attn, B_dense / (dense_delay + 1), B_expert / (expert_delay + 1)), the
 * law of docs/delays.md. */
static double closed_form(const graph *g, const model_weights *m) {
    double sum = 0;
    for (uint32_t layer = 0; layer < m->header.n_layers; layer++) {
        const cflow_layer *l = model_layer(m, layer);
        const double dense_delay = l->dense_source == CFLOW_X_IN_PREVIOUS;
        double bytes[N_PARTS] = {0};
        for (const op *o = g->ops; o < g->ops + g->n_ops; o++)
            if (o->layer == (int32_t)layer) bytes[o->part] += (double)o->bytes;
        const double dense = bytes[PART_DENSE] / (dense_delay + 1);
        const double experts = bytes[PART_EXPERTS] / ((double)l->expert_delay + 1);
        sum += larger(bytes[PART_ATTENTION], larger(dense, experts));
    }
    return sum;
}

static void fill_info(plan *p, const graph *g, const model_weights *m, uint64_t *longest) {
    cflow_plan_info *info = &p->info;
    info->n_stages = info->n_barriers = p->n_stages;
    info->n_ops = g->n_ops;
    info->n_values = p->n_slots;
    for (uint32_t i = 0; i < g->n_ops; i++) info->layer_bytes += g->ops[i].bytes;
    info->bytes_per_token = info->layer_bytes + matrix_bytes(head_matrix(m));
    info->critical_path_bytes = critical_path(g, longest);
    info->critical_path_closed_form_bytes = closed_form(g, m);
    for (uint32_t i = 0; i < m->header.n_layers; i++) {
        const cflow_layer *l = model_layer(m, i);
        info->kv_bytes_per_token += 4ull * l->n_kv_heads * l->head_dim; /* K and V in f16 */
    }
}

/* ---- life ---- */

/* Levels the graph and takes over its values and terms. 0: no memory. */
static int plan_graph(plan *p, graph *g, const model_weights *m) {
    uint64_t *longest = memory_zeroed(g->n_ops, sizeof *longest);
    p->ops = memory_zeroed(g->n_ops, sizeof *p->ops);
    p->first_op = memory_zeroed((size_t)g->n_ops + 1, sizeof *p->first_op);
    p->slots = memory_zeroed(g->n_values, sizeof *p->slots);
    const int ok = longest && p->ops && p->first_op && p->slots;
    if (ok) {
        p->n_stages = level_early(g);
        delay_experts(g);
        sort_ops(p, g);
        find_lives(g);
        assign_slots(p, g);
        fill_info(p, g, m, longest);
        p->values = g->values;
        p->n_values = g->n_values;
        p->terms = g->terms;
        p->final_norm = g->final_norm;
        g->values = NULL;
        g->terms = NULL;
    }
    memory_free(longest);
    return ok;
}

/* Lists the groups that each OP_SELECT demands. 0: no memory. */
static int plan_demands(plan *p, cflow_window window) {
    uint32_t n = 0;
    p->is_synchronous = window == CFLOW_WINDOW_NONE;
    p->demands = memory_zeroed(p->n_ops + 1, sizeof *p->demands);
    if (!p->demands) return 0;
    for (op *s = p->ops; s < p->ops + p->n_ops; s++) {
        if (s->kind != OP_SELECT) continue;
        s->first_demand = n;
        for (const op *e = p->ops; e < p->ops + p->n_ops; e++) {
            if (e->kind != OP_EXPERT_GATED) continue;
            const uint32_t layer = window == CFLOW_WINDOW_LAYER ? e->lands : (uint32_t)e->layer;
            if (!p->is_synchronous && layer == (uint32_t)s->layer) p->demands[n++] = e->in[1];
        }
        s->n_demands = n - s->first_demand;
    }
    return 1;
}

cflow_status plan_open(plan **out, const model_weights *m, graph_options options,
                       cflow_error *err) {
    graph g;
    plan *p = memory_zeroed(1, sizeof *p);
    const int ok =
        graph_build(&g, m, options) && p && plan_graph(p, &g, m) && plan_demands(p, options.window);
    graph_close(&g);
    *out = NULL;
    if (!ok) {
        plan_close(p);
        return fail(err, CFLOW_ENOMEM, "no memory for the plan of %u layers", m->header.n_layers);
    }
    p->defer = options.defer;
    *out = p;
    return CFLOW_OK;
}

void plan_close(plan *p) {
    if (!p) return;
    memory_free(p->ops);
    memory_free(p->values);
    memory_free(p->slots);
    memory_free(p->terms);
    memory_free(p->first_op);
    memory_free(p->demands);
    memory_free(p);
}

/* ---- description ---- */

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
    for (uint32_t i = 0; i < op_n_inputs(o); i++)
        append_name(out->reads, sizeof out->reads, p, op_input(o, i));
    for (uint32_t i = 0; i < op_n_outputs(o); i++)
        append_name(out->writes, sizeof out->writes, p, op_output(o, i));
    return CFLOW_OK;
}
