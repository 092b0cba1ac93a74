#include "arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "status.h"

enum { LINE = 64, PAGE = 4096, HUGE_PAGE = 2 << 20 };

static cflow_status no_memory(size_t bytes, const char *what, cflow_error *err) {
    return fail(err, CFLOW_ENOMEM, "no memory for %s: %zu bytes (%.1f GB) could not be allocated",
                what, bytes, (double)bytes / 1e9);
}

/* An inaccessible page stays on either side: an overrun faults, and the kernel does not merge two
 * arenas into one mapping, so smaps counts each separately. */
cflow_status arena_open(arena *a, size_t bytes, const char *what, cflow_error *err) {
    *a = (arena){0};
    if (bytes > SIZE_MAX / 2) return no_memory(bytes, what, err);
    const size_t size = round_up(bytes ? bytes : 1, HUGE_PAGE);
    const size_t reserved = size + HUGE_PAGE + 2 * PAGE;
    uint8_t *start =
        mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return no_memory(bytes, what, err);
    const size_t before = round_up((size_t)start + PAGE, HUGE_PAGE) - (size_t)start;
    uint8_t *base = start + before, *after = base + size + PAGE;
    if (before > PAGE) munmap(start, before - PAGE);
    if (after < start + reserved) munmap(after, (size_t)(start + reserved - after));
    *a = (arena){.base = base, .bytes = size};
    if (mprotect(base, size, PROT_READ | PROT_WRITE)) {
        arena_close(a);
        return no_memory(bytes, what, err);
    }
    madvise(base, size, MADV_HUGEPAGE); /* only advice: see arena_huge_bytes */
    return CFLOW_OK;
}

void arena_close(arena *a) {
    if (a->base) munmap(a->base - PAGE, a->bytes + 2 * PAGE);
    *a = (arena){0};
}

size_t arena_size(size_t bytes) {
    return round_up(bytes, LINE);
}

void *arena_take(arena *a, size_t bytes) {
    if (bytes > a->bytes - a->used) return NULL;
    void *taken = a->base + a->used;
    a->used += arena_size(bytes); /* a->bytes is a multiple of LINE */
    return taken;
}

/* Bytes of [start, end) inside the arena. */
static uint64_t inside(const arena *a, uint64_t start, uint64_t end) {
    const uint64_t first = (uint64_t)(uintptr_t)a->base, last = first + a->bytes;
    if (start < first) start = first;
    if (end > last) end = last;
    return start < end ? end - start : 0;
}

uint64_t arena_huge_bytes(const arena *a) {
    FILE *smaps = a->base ? fopen("/proc/self/smaps", "re") : NULL;
    if (!smaps) return 0;
    char text[512];
    unsigned long long start, end, kib;
    uint64_t overlap = 0, huge = 0;
    while (fgets(text, sizeof text, smaps)) {
        if (sscanf(text, "%llx-%llx ", &start, &end) == 2)
            overlap = inside(a, start, end);
        else if (overlap && sscanf(text, "AnonHugePages: %llu kB", &kib) == 1)
            huge += kib * 1024 < overlap ? kib * 1024 : overlap;
    }
    fclose(smaps);
    return huge;
}

void *memory_zeroed(size_t n, size_t size) {
    if (size && n > SIZE_MAX / size) return NULL;
    return n && size ? calloc(n, size) : calloc(1, 1);
}

void memory_free(void *p) {
    free(p);
}
