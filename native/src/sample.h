/* Sampling: from the logits of a row to its next token and log-probabilities. */
#ifndef CFLOW_SAMPLE_H
#define CFLOW_SAMPLE_H

#include "kernels.h"

/* Philox4x32-10 (Salmon et al., SC 2011): four random words, a function of counter and key. */
void philox(const uint32_t counter[4], uint64_t key, uint32_t out[4]);

/* The log-probabilities of `target` and of the n_top best tokens (at most CFLOW_MAX_TOP), under the
 * softmax of the raw logits (n_vocab,). The logprob is NaN if the largest logit is not finite. */
void score_row(const kernels *k, const float *logits, int32_t n_vocab, int32_t target,
               int32_t n_top, cflow_score *out);

/* The score of a row that has none. */
cflow_score no_score(void);

/* Floats of scratch for sample_row. */
size_t sample_scratch(int32_t n_vocab);

/* Chooses a token below n_tokens as `pick` says. Applied in this order:
 * - repetition penalty over prompt and output: divides logits above 0, multiplies the others
 * - frequency and presence penalties over the output
 * - bias: -100 or less bans a token; 100 or more adds 1000, more than any token without a bias has
 * - mask: bans tokens, whatever their bias
 * - temperature: divides the logits; 0 chooses the largest logit, of equals the smallest id
 * - softmax, then min_p: drops weights below min_p times the largest
 * - top_k: keeps the k largest, of equals the smaller ids
 * - top_p: keeps the fewest that have top_p of the remaining weight, at least one
 * - draws from the rest with a 53-bit uniform number from philox((choice, index, 0, 0), seed)
 *
 * The tokens of the history and the ids of the bias are below n_vocab. Errors, with the token -1:
 * ENUMERIC if the largest logit is not finite; EINVAL if no token is allowed, or temperature, top_p
 * or min_p is out of range. */
cflow_status sample_row(const kernels *k, const float *logits, int32_t n_vocab, int32_t n_tokens,
                        const cflow_pick *pick, float *scratch, cflow_choice *out);

#endif
