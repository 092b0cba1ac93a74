/* Sampling against published vectors (Philox) and against plain double arithmetic over sorted
 * probabilities. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"
#include "sample.h"

enum { N = 1000, DRAWS = 8000 };

static kernels k;
static float logits[N];
static float scratch[3 * N];
static double probability[N]; /* what the reference gives each token */

static cflow_pick plain(void) {
    return (cflow_pick){
        .n_top = -1, .seed = 42, .temperature = 1, .top_p = 1, .repetition_penalty = 1};
}

static int32_t draw(const cflow_pick *pick, int32_t n_tokens) {
    cflow_choice out;
    const cflow_status status = sample_row(&k, logits, N, n_tokens, pick, scratch, &out);
    CHECK(status == CFLOW_OK, "status %d", status);
    return out.score.token;
}

static cflow_status status_of(const cflow_pick *pick, int32_t n_tokens) {
    cflow_choice out;
    const cflow_status status = sample_row(&k, logits, N, n_tokens, pick, scratch, &out);
    CHECK((status == CFLOW_OK) == (out.score.token >= 0), "token %d with status %d",
          out.score.token, status);
    return status;
}

/* Normal numbers of the given width, from the C library's generator. */
static void random_logits(unsigned seed, float width) {
    srand(seed);
    for (int i = 0; i < N; i++) {
        const double u = (rand() + 1.0) / (RAND_MAX + 2.0), v = rand() / (RAND_MAX + 1.0);
        logits[i] = width * (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
    }
}

/* ---- the reference: softmax, then the three filters over sorted probabilities ---- */

static int by_probability(const void *a, const void *b) {
    const int i = *(const int *)a, j = *(const int *)b;
    if (probability[i] != probability[j]) return probability[i] < probability[j] ? 1 : -1;
    return i - j;
}

static void normalise(void) {
    double sum = 0;
    for (int i = 0; i < N; i++) sum += probability[i];
    for (int i = 0; i < N; i++) probability[i] /= sum;
}

static void reference(const cflow_pick *p) {
    int order[N];
    double best = -INFINITY, held = 0;
    for (int i = 0; i < N; i++) best = fmax(best, logits[i]);
    for (int i = 0; i < N; i++) {
        order[i] = i;
        probability[i] = exp((logits[i] - best) / p->temperature);
        if (probability[i] < p->min_p) probability[i] = 0;
    }
    qsort(order, N, sizeof *order, by_probability);
    for (int i = p->top_k ? p->top_k : N; i < N; i++) probability[order[i]] = 0;
    normalise();
    for (int i = 0; i < N; i++) {
        if (i > 0 && held >= p->top_p) probability[order[i]] = 0;
        held += probability[order[i]];
    }
    normalise();
}

/* Pearson's statistic over tokens with an expected count of 5 or more, the rest pooled, as normal
 * deviations from its mean. */
static double deviation(const int *count) {
    double statistic = 0, rest = 0, rest_expected = 0;
    int cells = 0;
    for (int i = 0; i < N; i++) {
        const double expected = probability[i] * DRAWS;
        if (expected >= 5) {
            statistic += (count[i] - expected) * (count[i] - expected) / expected;
            cells++;
        } else {
            rest += count[i];
            rest_expected += expected;
        }
    }
    if (rest_expected >= 5) {
        statistic += (rest - rest_expected) * (rest - rest_expected) / rest_expected;
        cells++;
    }
    return cells > 1 ? (statistic - (cells - 1)) / sqrt(2.0 * (cells - 1)) : 0;
}

/* ---- tests ---- */

/* kat_vectors of Random123 1.14. */
static void philox_gives_the_published_vectors(void) {
    static const struct {
        uint32_t counter[4], key[2], expected[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint32_t out[4];
        philox(known[i].counter, (uint64_t)known[i].key[1] << 32 | known[i].key[0], out);
        CHECK(!memcmp(out, known[i].expected, sizeof out), "vector %zu: %08x %08x %08x %08x", i,
              out[0], out[1], out[2], out[3]);
    }
}

static void draws_follow_the_filtered_softmax(void) {
    static const struct {
        float temperature, min_p, top_p, width;
        int32_t top_k;
    } cases[] = {
        {1, 0, 1, 2, 0},         {0.7f, 0, 1, 3, 0},     {2, 0, 1, 1, 0},
        {1, 0, 0.9f, 2, 0},      {1, 0, 0.5f, 4, 0},     {1, 0, 0.999f, 0.1f, 0},
        {1, 0, 0, 2, 0},         {1, 0, 1, 2, 1},        {1, 0, 1, 2, 40},
        {1, 0, 1, 2, 700},       {1, 0, 1, 9, 999},      {1, 0, 1, 1, 5000},
        {1, 0.05f, 1, 2, 0},     {1, 1, 1, 2, 0},        {1, 1e-5f, 1, 9, 0},
        {1, 0.02f, 0.8f, 2, 30}, {0.8f, 0, 0.8f, 2, 20}, {1, 0.01f, 0.95f, 1.5f, 0},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        int count[N] = {0};
        random_logits((unsigned)c + 1, cases[c].width);
        cflow_pick pick = plain();
        pick.temperature = cases[c].temperature;
        pick.min_p = cases[c].min_p;
        pick.top_p = cases[c].top_p;
        pick.top_k = cases[c].top_k;
        reference(&pick);
        for (pick.index = 0; pick.index < DRAWS; pick.index++) count[draw(&pick, N)]++;
        for (int i = 0; i < N; i++) {
            CHECK(probability[i] > 0 || !count[i], "case %zu: %d was filtered out", c, i);
            CHECK(count[i] || probability[i] * DRAWS < 20, "case %zu: %d never came", c, i);
        }
        CHECK(fabs(deviation(count)) < 4, "case %zu: %.1f deviations", c, deviation(count));
    }
}

static void equal_logits_keep_the_smaller_ids(void) {
    for (int i = 0; i < N; i++) logits[i] = i % 2 ? 1.0f : 0.0f;
    cflow_pick pick = plain();
    pick.top_k = 3;
    int seen[N] = {0};
    for (pick.index = 0; pick.index < 200; pick.index++) seen[draw(&pick, N)] = 1;
    for (int i = 0; i < N; i++) CHECK(seen[i] == (i == 1 || i == 3 || i == 5), "id %d", i);
    pick.temperature = 0;
    CHECK(draw(&pick, N) == 1, "argmax takes the smallest id");
}

static void seed_choice_and_index_are_all_that_matters(void) {
    random_logits(7, 0.5f);
    cflow_pick pick = plain();
    int32_t first[64];
    int same_seed = 0, same_choice = 0;
    for (pick.index = 0; pick.index < 64; pick.index++) first[pick.index] = draw(&pick, N);
    for (pick.index = 63; pick.index >= 0; pick.index--) {
        pick.seed = 42, pick.choice = 0;
        CHECK(draw(&pick, N) == first[pick.index], "index %d came out differently", pick.index);
        pick.choice = 1;
        same_choice += draw(&pick, N) == first[pick.index];
        pick.choice = 0, pick.seed = 42ull << 32;
        same_seed += draw(&pick, N) == first[pick.index];
    }
    CHECK(same_choice < 8 && same_seed < 8, "choices or seeds repeat each other");
}

static void a_tiny_temperature_is_greedy(void) {
    random_logits(8, 1);
    cflow_pick pick = plain();
    pick.temperature = 0;
    const int32_t best = draw(&pick, N);
    pick.temperature = 1e-40f;
    for (pick.index = 0; pick.index < 50; pick.index++) CHECK(draw(&pick, N) == best, "not greedy");
}

/* The logit of `token` after penalties, read back through a bias that lifts it to `level`: the
 * choice flips where the sum passes another token's logit. */
static int wins(cflow_pick pick, int32_t token, float level) {
    const float bias = 50 - level;
    pick.temperature = 0;
    pick.n_bias = 1;
    pick.bias_ids = &token;
    pick.bias = &bias;
    return draw(&pick, N) == token;
}

static void check_logit(cflow_pick pick, int32_t token, float expected) {
    logits[0] = 50;
    CHECK(wins(pick, token, expected - 0.01f), "token %d is below %g", token, (double)expected);
    CHECK(!wins(pick, token, expected + 0.01f), "token %d is above %g", token, (double)expected);
}

static void penalties_count_prompt_and_output(void) {
    static const int32_t history[] = {10, 11, 11, 12, 10, 12, 12};
    memset(logits, 0, sizeof logits);
    logits[10] = 4, logits[11] = -4, logits[12] = 2, logits[13] = 3;
    cflow_pick pick = plain();
    pick.history = history;
    pick.n_history = 7;
    pick.n_prompt = 3;
    pick.repetition_penalty = 2;
    check_logit(pick, 10, 2);
    check_logit(pick, 11, -8);
    check_logit(pick, 12, 1);
    check_logit(pick, 13, 3);
    pick.frequency_penalty = 0.5f;
    pick.presence_penalty = 0.25f;
    check_logit(pick, 10, 2 - 0.75f);
    check_logit(pick, 11, -8); /* in the prompt only */
    check_logit(pick, 12, 1 - 3 * 0.5f - 0.25f);
    pick.repetition_penalty = 1;
    check_logit(pick, 12, 2 - 1.75f);
    pick.frequency_penalty = 0;
    pick.presence_penalty = -1;
    check_logit(pick, 12, 3);
}

static void bias_bans_and_forces(void) {
    static const int32_t ids[] = {5, 6};
    random_logits(9, 1);
    logits[6] = 90;
    logits[5] = -300;
    cflow_pick pick = plain();
    pick.n_bias = 2;
    pick.bias_ids = ids;
    pick.bias = (const float[]){100, -100};
    for (pick.index = 0; pick.index < 100; pick.index++) CHECK(draw(&pick, N) == 5, "not forced");
    pick.n_bias = 1;
    pick.bias_ids = ids + 1;
    pick.bias = (const float[]){-100};
    for (pick.index = 0; pick.index < 100; pick.index++) CHECK(draw(&pick, N) != 6, "not banned");
}

static void mask_and_tokenizer_bound_what_can_come(void) {
    uint32_t mask[(N + 31) / 32] = {0};
    static const int32_t ids[] = {64, 999};
    random_logits(10, 1);
    logits[999] = 60; /* past the tokenizer */
    logits[64] = 40;  /* not in the mask */
    mask[1] = 1u << 31 | 1u << 3;
    mask[N / 32] = UINT32_MAX;
    cflow_pick pick = plain();
    pick.mask = mask;
    pick.n_bias = 2;
    pick.bias_ids = ids;
    pick.bias = (const float[]){100, 100};
    for (pick.index = 0; pick.index < 100; pick.index++) {
        const int32_t token = draw(&pick, 990);
        CHECK(token == 35 || token == 63, "token %d is not allowed", token);
    }
    memset(mask, 0, sizeof mask);
    CHECK(status_of(&pick, 990) == CFLOW_EINVAL, "an empty mask allows something");
    mask[N / 32] = 1u << (995 % 32);
    CHECK(status_of(&pick, 990) == CFLOW_EINVAL, "the mask allows a token past the tokenizer");
}

static void parameters_out_of_range_are_refused(void) {
    const float temperatures[] = {-1, NAN, INFINITY}, shares[] = {-0.1f, 1.1f, NAN};
    random_logits(14, 1);
    for (int i = 0; i < 3; i++) {
        cflow_pick pick = plain();
        pick.temperature = temperatures[i];
        CHECK(status_of(&pick, N) == CFLOW_EINVAL, "temperature %g", (double)temperatures[i]);
        pick = plain();
        pick.min_p = shares[i];
        CHECK(status_of(&pick, N) == CFLOW_EINVAL, "min_p %g", (double)shares[i]);
        pick = plain();
        pick.top_p = shares[i];
        const cflow_status expected = shares[i] > 1 ? CFLOW_OK : CFLOW_EINVAL;
        CHECK(status_of(&pick, N) == expected, "top_p %g", (double)shares[i]);
    }
}

static void logits_that_are_not_finite_are_refused(void) {
    const cflow_pick pick = plain();
    random_logits(11, 1);
    logits[500] = NAN;
    CHECK(status_of(&pick, N) == CFLOW_ENUMERIC, "NaN passed");
    logits[500] = INFINITY;
    CHECK(status_of(&pick, N) == CFLOW_ENUMERIC, "infinity passed");
    logits[500] = -INFINITY;
    CHECK(status_of(&pick, N) == CFLOW_OK, "minus infinity is a probability of 0");
    for (int i = 0; i < N; i++) logits[i] = -INFINITY;
    CHECK(status_of(&pick, N) == CFLOW_ENUMERIC, "a row of nothing passed");
}

static void scores_are_log_probabilities(void) {
    cflow_score score;
    random_logits(12, 3);
    logits[700] = logits[70] = logits[7] = 20;
    double sum = 0;
    for (int i = 0; i < N; i++) sum += exp((double)logits[i]);
    for (int32_t target = 0; target < N; target += 37) {
        int32_t rank = 0;
        for (int i = 0; i < N; i++) rank += logits[i] > logits[target];
        score_row(&k, logits, N, target, 5, &score);
        CHECK(score.token == target && score.rank == rank, "rank %d of %d", score.rank, target);
        CHECK(fabs(score.logprob - (logits[target] - log(sum))) < 1e-5, "%g", score.logprob);
    }
    CHECK(score.n_top == 5 && score.top_tokens[0] == 7 && score.top_tokens[1] == 70 &&
              score.top_tokens[2] == 700,
          "equals come by id: %d %d %d", score.top_tokens[0], score.top_tokens[1],
          score.top_tokens[2]);
    for (int i = 0; i < 5; i++) {
        const double expected = logits[score.top_tokens[i]] - log(sum);
        CHECK(fabs(score.top_logprobs[i] - expected) < 1e-5, "top %d", i);
        CHECK(i == 0 || score.top_logprobs[i] <= score.top_logprobs[i - 1], "top %d out of order",
              i);
    }
    score_row(&k, logits, 3, 1, CFLOW_MAX_TOP, &score);
    CHECK(score.n_top == 3, "%d best of 3", score.n_top);
    logits[3] = NAN;
    score_row(&k, logits, N, 1, 0, &score);
    CHECK(isnan(score.logprob), "NaN passed");
}

/* Raw log-probabilities, whatever was done to the logits for the choice. */
static void a_choice_carries_its_raw_score(void) {
    cflow_choice out;
    cflow_score score;
    random_logits(13, 2);
    cflow_pick pick = plain();
    pick.temperature = 0.3f;
    pick.top_k = 2;
    pick.n_top = 4;
    CHECK(!sample_row(&k, logits, N, N, &pick, scratch, &out), "status");
    score_row(&k, logits, N, out.score.token, 4, &score);
    CHECK(!memcmp(&out.score, &score, sizeof score), "scores differ");
}

static void every_instruction_set_chooses_alike(void) {
    static const char *const sets[] = {"avx2", "avx512vnni"};
    for (int s = 0; s < 2; s++) {
        kernels other;
        if (kernels_select(&other, sets[s])) continue;
        cflow_pick pick = plain();
        pick.n_top = 3;
        for (pick.index = 0; pick.index < 300; pick.index++) {
            cflow_choice a = {0}, b = {0};
            random_logits((unsigned)pick.index, 1);
            pick.top_p = pick.index % 3 ? 1 : 0.9f;
            pick.top_k = pick.index % 2 ? 0 : 50;
            a.status = sample_row(&k, logits, N, N - 3, &pick, scratch, &a);
            b.status = sample_row(&other, logits, N, N - 3, &pick, scratch, &b);
            CHECK(!memcmp(&a, &b, sizeof a), "%s differs at %d", sets[s], pick.index);
        }
    }
}

int main(void) {
    if (sample_scratch(N) > sizeof scratch / sizeof *scratch || kernels_select(&k, "scalar"))
        return 1;
    philox_gives_the_published_vectors();
    draws_follow_the_filtered_softmax();
    equal_logits_keep_the_smaller_ids();
    seed_choice_and_index_are_all_that_matters();
    a_tiny_temperature_is_greedy();
    penalties_count_prompt_and_output();
    bias_bans_and_forces();
    mask_and_tokenizer_bound_what_can_come();
    parameters_out_of_range_are_refused();
    logits_that_are_not_finite_are_refused();
    scores_are_log_probabilities();
    a_choice_carries_its_raw_score();
    every_instruction_set_chooses_alike();
    printf(failed ? "sample: failed\n" : "sample: ok\n");
    return failed;
}
