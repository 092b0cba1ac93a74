/* All memory of a handle: one mapping, of huge pages where the kernel has them, handed out from
 * front to back and freed as a whole. Also the plain allocations for tables. */
#ifndef CFLOW_ARENA_H
#define CFLOW_ARENA_H

#include <stddef.h>
#include <stdint.h>

#include "cflow.h"

typedef struct {
    uint8_t *base; /* 2 MiB-aligned, zeroed by the kernel at first touch */
    size_t bytes;  /* a multiple of 2 MiB */
    size_t used;   /* handed out so far */
} arena;

/* Maps `bytes`, rounded up to 2 MiB. ENOMEM names `what` and how many bytes. */
cflow_status arena_open(arena *a, size_t bytes, const char *what, cflow_error *err);
/* Unmaps it. Does nothing for a closed or zeroed arena. */
void arena_close(arena *a);
/* The next `bytes`, 64-aligned; NULL if the arena was opened with too few. */
void *arena_take(arena *a, size_t bytes);
/* The bytes of the arena that arena_take(a, bytes) uses. */
size_t arena_size(size_t bytes);
/* Bytes of the mapping that are backed by huge pages, from /proc/self/smaps; 0 if unknown. */
uint64_t arena_huge_bytes(const arena *a);

/* n * size zeroed bytes, to be freed by memory_free. NULL if the allocation fails or the product
 * overflows. */
void *memory_zeroed(size_t n, size_t size);
void memory_free(void *p);

/* n rounded up to a multiple of `to`. */
static inline size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

#endif
