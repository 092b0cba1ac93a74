/* Sampling in time linear in the vocabulary: nothing is sorted; top_k and top_p partition. */
#include "sample.h"

#include <math.h>
#include <string.h>

#define CHUNK 256 /* weights that are summed at once when no filter is on */

/* ---- random numbers ---- */

void philox(const uint32_t counter[4], uint64_t key, uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t)0xD2511F53 * c0, b = (uint64_t)0xCD9E8D57 * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* In [0, 1), 53 bits. */
static double uniform(const cflow_pick *pick) {
    const uint32_t counter[4] = {(uint32_t)pick->choice, (uint32_t)pick->index, 0, 0};
    uint32_t word[4];
    philox(counter, pick->seed, word);
    return (double)(((uint64_t)word[0] << 32 | word[1]) >> 11) * 0x1p-53;
}

/* ---- log-probabilities ---- */

/* ids (n,): those of the n largest, best first, of equals the smaller first. Returns how many. */
static int32_t find_top(const float *x, int32_t n_vocab, int32_t n, int32_t *ids) {
    int32_t found = 0;
    for (int32_t i = 0; n > 0 && i < n_vocab; i++) {
        if (found == n && x[i] <= x[ids[n - 1]]) continue;
        int32_t at = found < n ? found++ : n - 1;
        for (; at > 0 && x[ids[at - 1]] < x[i]; at--) ids[at] = ids[at - 1];
        ids[at] = i;
    }
    return found;
}

static int32_t count_above(const float *x, int32_t n, float bound) {
    int32_t count = 0;
    for (int32_t i = 0; i < n; i++) count += x[i] > bound;
    return count;
}

cflow_score no_score(void) {
    return (cflow_score){.token = -1, .rank = -1, .logprob = NAN};
}

void score_row(const kernels *k, const float *logits, int32_t n_vocab, int32_t target,
               int32_t n_top, cflow_score *out) {
    const float largest = k->max(logits, (uint32_t)n_vocab);
    *out = (cflow_score){.token = target, .logprob = NAN};
    if (!isfinite(largest)) return;
    const double log_sum =
        (double)largest + log((double)k->sum_exp(logits, (uint32_t)n_vocab, largest));
    out->logprob = (float)((double)logits[target] - log_sum);
    out->rank = count_above(logits, n_vocab, logits[target]);
    out->n_top = find_top(logits, n_vocab, n_top, out->top_tokens);
    for (int32_t i = 0; i < out->n_top; i++)
        out->top_logprobs[i] = (float)((double)logits[out->top_tokens[i]] - log_sum);
}

/* ---- penalties, bias and mask ---- */

/* count: (n_vocab,) scratch. */
static void penalise(const cflow_pick *p, float *x, int32_t n_vocab, int32_t *count) {
    if (p->repetition_penalty != 1) {
        memset(count, 0, (size_t)n_vocab * sizeof *count);
        for (int32_t i = 0; i < p->n_history; i++) {
            float *logit = &x[p->history[i]];
            if (count[p->history[i]]++) continue;
            *logit = *logit > 0 ? *logit / p->repetition_penalty : *logit * p->repetition_penalty;
        }
    }
    if (p->frequency_penalty != 0 || p->presence_penalty != 0) {
        memset(count, 0, (size_t)n_vocab * sizeof *count);
        for (int32_t i = p->n_prompt; i < p->n_history; i++) count[p->history[i]]++;
        for (int32_t i = p->n_prompt; i < p->n_history; i++) {
            const int32_t token = p->history[i];
            if (!count[token]) continue;
            x[token] -= p->frequency_penalty * (float)count[token] + p->presence_penalty;
            count[token] = 0;
        }
    }
}

static void add_bias(const cflow_pick *p, float *x) {
    for (int32_t i = 0; i < p->n_bias; i++) {
        float *logit = &x[p->bias_ids[i]];
        if (p->bias[i] <= -100)
            *logit = -INFINITY;
        else
            *logit += p->bias[i] < 100 ? p->bias[i] : 1000;
    }
}

static void apply_mask(const uint32_t *mask, float *x, int32_t n) {
    for (int32_t word = 0; word * 32 < n; word++) {
        if (mask[word] == UINT32_MAX) continue;
        for (int32_t i = word * 32; i < n && i < word * 32 + 32; i++)
            if (!(mask[word] >> (i % 32) & 1)) x[i] = -INFINITY;
    }
}

/* A NaN is not valid either. Ids are checked by the caller. */
static int is_valid(const cflow_pick *p) {
    return p->temperature >= 0 && isfinite(p->temperature) && p->min_p >= 0 && p->min_p <= 1 &&
           p->top_p >= 0 && p->n_prompt >= 0;
}

static int changes_logits(const cflow_pick *p) {
    return p->repetition_penalty != 1 || p->frequency_penalty != 0 || p->presence_penalty != 0 ||
           p->n_bias > 0 || p->mask;
}

/* ---- the choice ---- */

typedef struct {
    float *weight; /* (n,) exp of the scaled logit; the largest of the vocabulary has 1 */
    int32_t *id;   /* (n,) */
    int32_t n;
} candidates;

static void gather(const kernels *k, const float *y, int32_t n, float least, candidates *c) {
    int32_t found = 0;
    for (int32_t i = 0; i < n; i++) {
        c->weight[found] = y[i];
        c->id[found] = i;
        found += y[i] >= least;
    }
    k->exp_shifted(c->weight, (uint32_t)found, 0, c->weight);
    c->n = found;
}

static double mass(const candidates *c, int32_t first, int32_t end) {
    double sum = 0;
    for (int32_t i = first; i < end; i++) sum += (double)c->weight[i];
    return sum;
}

static int is_before(const candidates *c, int32_t a, int32_t b) {
    return c->weight[a] > c->weight[b] || (c->weight[a] == c->weight[b] && c->id[a] < c->id[b]);
}

static void swap(candidates *c, int32_t a, int32_t b) {
    const float weight = c->weight[a];
    const int32_t id = c->id[a];
    c->weight[a] = c->weight[b];
    c->id[a] = c->id[b];
    c->weight[b] = weight;
    c->id[b] = id;
}

/* Partitions [first, end) around the candidate in the middle. Returns its new place. */
static int32_t partition(candidates *c, int32_t first, int32_t end) {
    swap(c, first + (end - first) / 2, end - 1);
    int32_t at = first;
    for (int32_t i = first; i < end - 1; i++)
        if (is_before(c, i, end - 1)) swap(c, i, at++);
    swap(c, at, end - 1);
    return at;
}

/* Keeps the largest candidates: the fewest that have `wanted` weight, at most `count`, at least
 * one. */
static void keep_largest(candidates *c, int32_t count, double wanted) {
    int32_t first = 0, end = c->n; /* those before `first` are kept, those from `end` on dropped */
    double held = 0;               /* weight before `first` */
    while (first < end) {
        const int32_t pivot = partition(c, first, end);
        const double left = mass(c, first, pivot);
        if (pivot >= count || held + left >= wanted) {
            end = pivot;
            continue;
        }
        held += left + (double)c->weight[pivot];
        first = pivot + 1;
        if (held >= wanted) break;
    }
    c->n = first > 1 ? first : 1;
}

/* Gathers the candidates that min_p, top_k and top_p leave: first a superset, then these. */
static void filter(const kernels *k, const cflow_pick *p, const float *y, int32_t n,
                   candidates *c) {
    const float least = p->min_p > 0 ? (float)log((double)p->min_p) : -INFINITY;
    const int32_t count = p->top_k > 0 && p->top_k < n ? p->top_k : n;
    double wanted = INFINITY;
    if (count == n && least == -INFINITY && p->top_p < 1)
        wanted = (double)p->top_p * (double)k->sum_exp(y, (uint32_t)n, 0);
    /* Candidates near the best nearly always suffice; else reach farther. */
    for (float reach = 8;; reach *= 4) {
        const float bound = reach > 32 || -reach < least ? least : -reach;
        gather(k, y, n, bound, c);
        if (bound == least || c->n >= count || mass(c, 0, c->n) >= wanted) break;
    }
    if (count < n) keep_largest(c, count, INFINITY);
    if (wanted == INFINITY) wanted = (double)p->top_p * mass(c, 0, c->n);
    if (p->top_p < 1) keep_largest(c, c->n, wanted);
}

/* The index at which the running sum of the weights exceeds `target`; never one of weight 0. */
static int32_t find(const float *weight, int32_t n, double target) {
    int32_t last = 0;
    double sum = 0;
    for (int32_t i = 0; i < n && sum <= target; i++) {
        if (weight[i] == 0) continue;
        sum += (double)weight[i];
        last = i;
    }
    return last;
}

/* Draws from the whole vocabulary. Only the weights of the chosen chunk are computed singly. */
static int32_t draw_any(const kernels *k, const float *y, int32_t n, double u, float *sums) {
    double total = 0, before = 0;
    for (int32_t at = 0; at < n; at += CHUNK) {
        sums[at / CHUNK] = k->sum_exp(y + at, (uint32_t)(n - at < CHUNK ? n - at : CHUNK), 0);
        total += (double)sums[at / CHUNK];
    }
    int32_t chunk = 0; /* the loop ends in time: the sums add up to `total` exactly */
    for (; before + (double)sums[chunk] <= u * total; chunk++) before += (double)sums[chunk];
    const int32_t at = chunk * CHUNK, in_chunk = n - at < CHUNK ? n - at : CHUNK;
    float weight[CHUNK];
    k->exp_shifted(y + at, (uint32_t)in_chunk, 0, weight);
    return at + find(weight, in_chunk, u * total - before);
}

/* x: (n,) with `best` its largest; y: (n,) scratch, may be x. */
static int32_t choose(const kernels *k, const cflow_pick *p, const float *x, int32_t n, float best,
                      float *y, candidates *c) {
    if (p->temperature == 0) {
        int32_t token = 0;
        while (x[token] != best) token++;
        return token;
    }
    for (int32_t i = 0; i < n; i++) y[i] = (x[i] - best) / p->temperature;
    const double u = uniform(p);
    if (p->min_p <= 0 && p->top_k <= 0 && p->top_p >= 1) return draw_any(k, y, n, u, c->weight);
    filter(k, p, y, n, c);
    return c->id[find(c->weight, c->n, u * mass(c, 0, c->n))];
}

size_t sample_scratch(int32_t n_vocab) {
    return 3 * (size_t)n_vocab;
}

cflow_status sample_row(const kernels *k, const float *logits, int32_t n_vocab, int32_t n_tokens,
                        const cflow_pick *pick, float *scratch, cflow_choice *out) {
    candidates c = {.weight = scratch + n_vocab, .id = (int32_t *)(scratch + 2 * (size_t)n_vocab)};
    const float *x = logits;
    out->score = (cflow_score){.token = -1};
    if (!is_valid(pick)) return CFLOW_EINVAL;
    if (!isfinite(k->max(logits, (uint32_t)n_vocab))) return CFLOW_ENUMERIC;
    if (changes_logits(pick)) {
        memcpy(scratch, logits, (size_t)n_vocab * sizeof *scratch);
        penalise(pick, scratch, n_vocab, c.id);
        add_bias(pick, scratch);
        if (pick->mask) apply_mask(pick->mask, scratch, n_tokens);
        x = scratch;
    }
    const float best = k->max(x, (uint32_t)n_tokens);
    if (best == -INFINITY) return CFLOW_EINVAL;
    if (!isfinite(best)) return CFLOW_ENUMERIC;
    const int32_t token = choose(k, pick, x, n_tokens, best, scratch, &c);
    if (pick->n_top >= 0)
        score_row(k, logits, n_vocab, token, pick->n_top, &out->score);
    else
        out->score.token = token;
    return CFLOW_OK;
}
