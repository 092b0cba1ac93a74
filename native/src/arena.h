/* Memory, all of it: one huge-page-advised mapping per handle, handed out front to back. */
#ifndef CFLOW_ARENA_H
#define CFLOW_ARENA_H

#include <stddef.h>
#include <stdint.h>

#include "cflow.h"

typedef struct {
    uint8_t *base; /* 2 MiB-aligned, zeroed by the kernel at first touch */
    size_t bytes;
    size_t used;
} arena;

/* Maps `bytes` (rounded up to 2 MiB). ENOMEM says how many. */
cflow_status arena_open(arena *a, size_t bytes, const char *what, cflow_error *err);
void arena_close(arena *a); /* a closed or zeroed arena is a no-op */
/* The next `bytes`, 64-aligned. The caller sized the arena; NULL if it did so wrongly. */
void *arena_take(arena *a, size_t bytes);
/* What arena_take will use for `bytes`. */
size_t arena_size(size_t bytes);
/* Bytes of the mapping that huge pages back, from /proc/self/smaps; 0 if unknown. */
uint64_t arena_huge_bytes(const arena *a);

/* n * size bytes of zeroed plain memory, or NULL, also when the product overflows; freed by
 * memory_free. */
void *memory_zeroed(size_t n, size_t size);
void memory_free(void *p);

/* To the next multiple of `to`. */
static inline size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

#endif
