/* KV blocks, and the table of each sequence's blocks. */
#include <string.h>

#include "ctx.h"
#include "status.h"

static int is_block(const cflow_ctx *ctx, int32_t block) {
    return block >= 0 && block < ctx->options.n_kv_blocks;
}

cflow_status cflow_ctx_bind(cflow_ctx *ctx, int32_t sequence, const int32_t *blocks,
                            int32_t n_blocks, cflow_error *err) {
    if (sequence < 0 || sequence >= ctx->options.max_sequences)
        return fail(err, CFLOW_EINVAL, "sequence %d; the context has %d", sequence,
                    ctx->options.max_sequences);
    if (n_blocks < 0 || n_blocks > ctx->max_blocks)
        return fail(err, CFLOW_EINVAL, "%d blocks; a sequence has at most %d", n_blocks,
                    ctx->max_blocks);
    for (int32_t i = 0; i < n_blocks; i++)
        if (!is_block(ctx, blocks[i]))
            return fail(err, CFLOW_EINVAL, "block %d; the context has %d", blocks[i],
                        ctx->options.n_kv_blocks);
    if (n_blocks)
        memcpy(ctx->tables + (size_t)sequence * (size_t)ctx->max_blocks, blocks,
               (size_t)n_blocks * sizeof *blocks);
    ctx->table_size[sequence] = n_blocks;
    return CFLOW_OK;
}

cflow_status cflow_ctx_copy_block(cflow_ctx *ctx, int32_t from, int32_t to, cflow_error *err) {
    if (!is_block(ctx, from) || !is_block(ctx, to) || from == to)
        return fail(err, CFLOW_EINVAL, "cannot copy block %d to %d; the context has %d", from, to,
                    ctx->options.n_kv_blocks);
    memcpy(ctx->kv + (size_t)to * ctx->block_bytes, ctx->kv + (size_t)from * ctx->block_bytes,
           ctx->block_bytes);
    return CFLOW_OK;
}

cflow_status cflow_ctx_clear_block(cflow_ctx *ctx, int32_t block, cflow_error *err) {
    if (!is_block(ctx, block))
        return fail(err, CFLOW_EINVAL, "block %d; the context has %d", block,
                    ctx->options.n_kv_blocks);
    memset(ctx->kv + (size_t)block * ctx->block_bytes, 0, ctx->block_bytes);
    return CFLOW_OK;
}
