"""Who gets which memory: the budget of a model, its KV blocks, and weights that stay on disk.

Server, plan, bench and perplexity all ask this room, so they agree about what fits. It computes
from a model's header, before any weight is read; the C library allocates. Imports: native, base.

    budget        how available memory is shared among all that follows
    capacity      KV blocks and context for a given amount of memory
    kv_blocks     which sequence owns which KV block; prefixes that sequences share
    layer_memory  weights other than experts, all or some of them in memory
    experts       experts, all or some of them in memory; the cache and its warm start
    expert_uses   how often each expert was used, kept in a file across restarts
"""
