/* The graph and its levels, against values by hand (docs/decisions/critical-path.md) for d = 512, L
 * = 6: per layer attention 0.5, dense 1.5, top-2 experts 0.75 MiB at half a byte a weight. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"
#include "kernels.h"
#include "plan.h"

enum { D = 512, MAX_LAYERS = 48 };

static cflow_layer layers[MAX_LAYERS];
static matrix blocks[MAX_LAYERS][CFLOW_N_ROLES];
static cflow_record records[8];
static const uint8_t *expert_data[MAX_LAYERS * 8];
static uint32_t first_record[MAX_LAYERS + 1];

static matrix weights(uint32_t rows, uint32_t cols) {
    matrix w = {
        .data = (const uint8_t *)64, .encoding = CFLOW_Q4_0, .n_rows = rows, .n_cols = cols};
    w.stripe_rows = 128;
    w.n_stripes = (rows + 127) / 128;
    w.n_blocks = n_column_blocks(w.encoding, cols);
    w.stripe_bytes = w.stripe_stride = stripe_bytes(w.encoding, w.stripe_rows, cols);
    return w;
}

static matrix vector(void) {
    return (matrix){.data = (const uint8_t *)64, .n_rows = 1, .n_cols = D};
}

/* A model of the paper's shape; the caller sets the layers' sources and delays. */
static model_weights shape(uint32_t n_layers) {
    model_weights m = {.header_only = 1, .layers = layers, .records = records};
    m.header.n_layers = m.header.n_blocks = n_layers;
    m.header.d_model = D;
    m.header.vocab_size = 50257;
    m.blocks = blocks;
    m.expert_data = expert_data;
    m.first_record = first_record;
    m.global[CFLOW_EMBEDDING] = m.global[CFLOW_HEAD] = weights(50257, D);
    m.global[CFLOW_FINAL_NORM] = vector();
    for (uint32_t i = 0; i < n_layers; i++) {
        cflow_layer *l = &layers[i];
        l->block = i;
        l->n_heads = l->n_kv_heads = 8;
        l->head_dim = 64;
        l->d_ff = 2048;
        l->n_experts = 8;
        l->top_k = 2;
        l->d_expert = 512;
        l->norms_shared = 1;
        l->residual_scale = l->expert_scale = 1;
        first_record[i + 1] = 8 * (i + 1);
        memset(blocks[i], 0, sizeof blocks[i]);
        blocks[i][CFLOW_NORM1] = blocks[i][CFLOW_NORM2] = vector();
        blocks[i][CFLOW_Q] = blocks[i][CFLOW_K] = blocks[i][CFLOW_V] = blocks[i][CFLOW_O] =
            weights(D, D);
        blocks[i][CFLOW_GATE] = blocks[i][CFLOW_UP] = weights(2048, D);
        blocks[i][CFLOW_DOWN] = weights(D, 2048);
        blocks[i][CFLOW_ROUTER] = weights(128, D);
        blocks[i][CFLOW_EXPERT_GATE] = blocks[i][CFLOW_EXPERT_UP] = weights(512, D);
        blocks[i][CFLOW_EXPERT_DOWN] = weights(D, 512);
    }
    return m;
}

static void arrange(uint32_t n_layers, uint32_t dense, uint32_t anchor, uint32_t delay) {
    memset(layers, 0, sizeof layers);
    for (uint32_t i = 0; i < n_layers; i++) {
        layers[i].dense_source = dense;
        layers[i].expert_anchor = anchor;
        layers[i].expert_delay = delay;
    }
}

/* MiB at half a byte a weight: q4_0 stores 18 bytes for 32. */
static double mib(double bytes) {
    return bytes * 16 / 18 / (1 << 20);
}

static plan *planned(const model_weights *m, graph_options options) {
    plan *p = NULL;
    cflow_error err = {{0}};
    if (plan_open(&p, m, options, &err) != CFLOW_OK) {
        printf("FAIL plan_open: %s\n", err.text);
        exit(1);
    }
    return p;
}

static void check_path(const char *name, uint32_t n_layers, double path, double law) {
    const model_weights m = shape(n_layers);
    plan *p = planned(&m, (graph_options){0});
    const double got_path = mib((double)p->info.critical_path_bytes);
    const double got_law = mib(p->info.critical_path_closed_form_bytes);
    CHECK(got_path > path - 1e-9 && got_path < path + 1e-9, "%s: graph %.4f, want %.4f", name,
          got_path, path);
    CHECK(got_law > law - 1e-9 && got_law < law + 1e-9, "%s: law %.4f, want %.4f", name, got_law,
          law);
    plan_close(p);
}

static void critical_paths(void) {
    arrange(6, CFLOW_X_IN, CFLOW_X_IN, 0);
    check_path("undelayed parallel block", 6, 9.00, 9.00);
    arrange(6, CFLOW_X_IN_PREVIOUS, CFLOW_X_IN, 2);
    check_path("arch2_4_combined", 6, 5.25, 4.50);
    arrange(48, CFLOW_X_IN_PREVIOUS, CFLOW_X_IN, 2);
    check_path("arch2_4_combined, 48 layers", 48, 0.75 * 49, 36.0);
    arrange(6, CFLOW_POST_ATTENTION, CFLOW_X_IN, 2);
    check_path("arch4_async_experts", 6, 12.00, 9.00);
}

/* Every value is written before it is read, and no two live values share a slot. */
static void lives_are_sound(const plan *p, const char *name) {
    for (uint32_t i = 0; i < p->n_values; i++) {
        const value *a = &p->values[i];
        CHECK(a->first_stage <= a->last_stage, "%s: %s dies first", name, a->name);
        for (uint32_t j = 0; j < i; j++) {
            const value *b = &p->values[j];
            CHECK(a->slot != b->slot || a->last_stage < b->first_stage ||
                      b->last_stage < a->first_stage,
                  "%s: %s and %s share slot %u", name, a->name, b->name, a->slot);
        }
    }
    for (uint32_t i = 0; i < p->n_ops; i++)
        for (int k = 0; k < 4; k++)
            if (p->ops[i].in[k] != NO_VALUE)
                CHECK(p->values[p->ops[i].in[k]].first_stage < p->ops[i].stage,
                      "%s: %s reads %s too early", name, p->ops[i].name,
                      p->values[p->ops[i].in[k]].name);
}

static void slots_do_not_overlap(void) {
    for (uint32_t dense = CFLOW_POST_ATTENTION; dense <= CFLOW_X_IN_PREVIOUS; dense++)
        for (uint32_t anchor = CFLOW_POST_ATTENTION; anchor <= CFLOW_X_IN; anchor++)
            for (uint32_t delay = 0; delay < 8; delay++) {
                char name[64];
                snprintf(name, sizeof name, "dense %u anchor %u delay %u", dense, anchor, delay);
                arrange(6, dense, anchor, delay);
                const model_weights m = shape(6);
                plan *p =
                    planned(&m, (graph_options){.speculate = delay % 4 == 0, .defer = delay % 2});
                lives_are_sound(p, name);
                plan_close(p);
            }
}

static const op *find_op(const plan *p, const char *name) {
    for (uint32_t i = 0; i < p->n_ops; i++)
        if (!strcmp(p->ops[i].name, name)) return &p->ops[i];
    printf("FAIL no op %s\n", name);
    exit(1);
}

static void experts_run_late_and_routers_early(void) {
    arrange(6, CFLOW_X_IN_PREVIOUS, CFLOW_X_IN, 2);
    const model_weights m = shape(6);
    plan *p = planned(&m, (graph_options){0});
    const op *route = find_op(p, "L1.route"), *down = find_op(p, "L1.expert_down");
    const op *x_in1 = find_op(p, "L1.x_in"), *x_in4 = find_op(p, "L4.x_in");
    CHECK(route->stage == x_in1->stage + 1, "router in stage %u, its input in %u", route->stage,
          x_in1->stage);
    CHECK(p->first_op[route->stage + 1] - p->first_op[route->stage] == 1,
          "what begins reads waits for other ops of its stage");
    CHECK(&p->ops[p->first_op[route->stage + 1]] == find_op(p, "L1.select"),
          "the selection is not the first of its stage");
    CHECK(find_op(p, "L1.qkv")->stage == route->stage + 1, "attention waits for longer");
    CHECK(find_op(p, "L2.gate_up")->stage == route->stage + 1, "the next dense FFN waits longer");
    CHECK(down->stage + 1 == x_in4->stage, "experts end in stage %u, injected in %u", down->stage,
          x_in4->stage);
    CHECK(find_op(p, "L5.expert_down")->stage + 1 == find_op(p, "x_out")->stage,
          "the last layer does not flush");
    plan_close(p);
}

/* A stock layer: combine, qkv, kv, attend, o, combine, gate_up, down, one after the other. */
static void stock_layers_take_eight_stages(void) {
    memset(layers, 0, sizeof layers);
    const model_weights m = shape(3);
    for (int i = 0; i < 3; i++) layers[i].n_experts = 0;
    plan *p = planned(&m, (graph_options){0});
    CHECK(p->n_stages == 3 * 8 + 1, "%u stages", p->n_stages);
    CHECK(p->info.layer_bytes == 3ull * (4 * D * D + 3 * D * 2048) * 18 / 32, "layer bytes");
    lives_are_sound(p, "stock");
    plan_close(p);
}

/* All norms that can read one stream: norm1, norm2 and norm3 of its layer, norm2 of the next.
 * With all parts that a layer can have. The sanitizers check the bounds of the plan's arrays. */
static void the_fullest_layers_fit(void) {
    memset(layers, 0, sizeof layers);
    const model_weights m = shape(6);
    for (uint32_t i = 0; i < 6; i++) {
        layers[i].dense_source = i % 2 ? CFLOW_X_IN_PREVIOUS : CFLOW_X_IN;
        layers[i].expert_anchor = i % 2 ? CFLOW_POST_ATTENTION : CFLOW_X_IN;
        layers[i].expert_delay = 1024;
        layers[i].norms_shared = 0;
        layers[i].d_shared = 128;
        layers[i].shared_gate = 1;
        blocks[i][CFLOW_NORM3] = vector();
        blocks[i][CFLOW_SHARED_GATE] = blocks[i][CFLOW_SHARED_UP] = weights(128, D);
        blocks[i][CFLOW_SHARED_DOWN] = weights(D, 128);
        blocks[i][CFLOW_SHARED_SCALE] = weights(1, D);
    }
    plan *p = planned(&m, (graph_options){0});
    CHECK(find_op(p, "L0.x_in")->n_norms == 4, "%u norms", find_op(p, "L0.x_in")->n_norms);
    CHECK(find_op(p, "x_out")->n_terms == 1 + 2 * 6, "%u terms", find_op(p, "x_out")->n_terms);
    lives_are_sound(p, "full");
    plan_close(p);
    const graph_options both = {.speculate = 1, .defer = 1};
    p = planned(&m, both);
    CHECK(find_op(p, "x_out")->n_terms == 1 + 2 * 6 + 5, "%u terms", find_op(p, "x_out")->n_terms);
    lives_are_sound(p, "full, deferred");
    plan_close(p);
    for (uint32_t i = 0; i < 6; i++) {
        layers[i].dense_source = layers[i].expert_anchor = CFLOW_POST_ATTENTION;
        layers[i].expert_delay = 0;
    }
    p = planned(&m, both);
    CHECK(find_op(p, "L1.speculate")->stage == find_op(p, "L0.select")->stage,
          "speculated too late");
    CHECK(find_op(p, "L0.late_down")->stage == find_op(p, "L1.expert_down")->stage,
          "deferred experts do not run with those of the next layer");
    CHECK(find_op(p, "L0.x_mid")->n_norms == 3, "%u norms", find_op(p, "L0.x_mid")->n_norms);
    lives_are_sound(p, "full, stock");
    plan_close(p);
}

int main(void) {
    critical_paths();
    slots_do_not_overlap();
    experts_run_late_and_routers_early();
    stock_layers_take_eight_stages();
    the_fullest_layers_fit();
    printf(failed ? "plan: failed\n" : "plan: ok\n");
    return failed;
}
