/* From a row's logits to the next token and to log-probabilities. */
#ifndef CFLOW_SAMPLE_H
#define CFLOW_SAMPLE_H

#include "kernels.h"

/* Philox4x32-10 (Salmon et al., SC 2011): four words that depend on counter and key alone. */
void philox(const uint32_t counter[4], uint64_t key, uint32_t out[4]);

/* Log-probabilities under softmax of the raw logits (n_vocab,): of `target` and of the n_top best,
 * at most CFLOW_MAX_TOP. Logits that are not finite give a logprob of NaN. */
void score_row(const kernels *k, const float *logits, int32_t n_vocab, int32_t target,
               int32_t n_top, cflow_score *out);

/* The score of a row that has none. */
cflow_score no_score(void);

/* Floats of scratch that sample_row needs. */
size_t sample_scratch(int32_t n_vocab);

/* Chooses a token below n_tokens as cflow_pick says, in this order:
 * - repetition penalty over prompt and output: logits above 0 divided, others multiplied
 * - frequency and presence penalties over the output
 * - bias: -100 and below bans; 100 and above adds 1000, which wins over any unbiased token
 * - mask, which no bias overrules
 * - temperature 0: the largest logit, of equals the smallest id; otherwise logits / temperature
 * - softmax weights; those below min_p times the largest go
 * - top_k: the k largest stay, of equals the smaller ids
 * - top_p: the fewest that hold top_p of what is left stay, at least one
 * - the inverse of the cumulative weights at a 53-bit uniform number from
 *   philox((choice, index, 0, 0), seed)
 *
 * n_bias ids and n_history tokens are below n_vocab. Returns ENUMERIC where the largest logit is
 * not finite, EINVAL where nothing is allowed or temperature, top_p or min_p are out of range; the
 * token is then -1. */
cflow_status sample_row(const kernels *k, const float *logits, int32_t n_vocab, int32_t n_tokens,
                        const cflow_pick *pick, float *scratch, cflow_choice *out);

#endif
