"""Divides memory among a model's weights, its KV blocks and caches of what stays on disk.

Server, plan, bench and perplexity call the same functions, so they agree on what fits. Sizes follow
from a model's header, before any weight is read; the C library allocates. Imports: native, base.

    budget        shares of the available memory: weights, KV blocks, scratch buffers, experts
    capacity      KV blocks and context for a given amount of memory
    kv_blocks     which sequence owns which KV block; prefixes that sequences share
    layer_memory  weights other than experts, all or some of them in memory
    experts       experts, all or some of them in memory; the cache and its warm start
    expert_uses   how often each expert was used, kept in a file across restarts
"""
