/* The arena: alignment, bounds and errors. */
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "arena.h"
#include "expect.h"

static void hands_out_aligned_zeroed_memory(void) {
    arena a;
    CHECK(arena_open(&a, 3 << 20, "a test", NULL) == CFLOW_OK, "open");
    CHECK((uintptr_t)a.base % (2 << 20) == 0, "base %p", (void *)a.base);
    CHECK(a.bytes == 4 << 20, "%zu bytes", a.bytes);
    uint8_t *first = arena_take(&a, 1), *second = arena_take(&a, 100);
    CHECK(second == first + 64, "64-byte steps");
    CHECK(arena_take(&a, 0) == first + 192, "100 bytes take 128");
    for (size_t i = 0; i < 101; i++) CHECK(first[i] == 0, "byte %zu", i);
    arena_close(&a);
}

static void refuses_what_does_not_fit(void) {
    arena a;
    CHECK(arena_open(&a, 1, "a test", NULL) == CFLOW_OK, "open");
    CHECK(arena_take(&a, (2 << 20) + 1) == NULL, "one too many");
    CHECK(arena_take(&a, SIZE_MAX) == NULL, "all there is");
    uint8_t *all = arena_take(&a, 2 << 20);
    CHECK(all == a.base, "exactly the rest");
    memset(all, 1, 2 << 20);
    CHECK(arena_take(&a, 1) == NULL, "full");
    arena_close(&a);
}

/* mincore fails with ENOMEM on what is not mapped. */
static void closes_twice_and_leaves_nothing(void) {
    arena a;
    unsigned char resident[3];
    CHECK(arena_open(&a, 1, "a test", NULL) == CFLOW_OK, "open");
    uint8_t *base = a.base;
    arena_close(&a);
    CHECK(a.base == NULL, "not cleared");
    CHECK(mincore(base - 4096, 3 * 4096, resident) != 0, "still mapped");
    arena_close(&a);
}

static void names_the_bytes_that_it_cannot_allocate(void) {
    arena a;
    cflow_error err;
    CHECK(arena_open(&a, SIZE_MAX, "a test", &err) == CFLOW_ENOMEM, "SIZE_MAX");
    CHECK(arena_open(&a, (size_t)1 << 60, "a test", &err) == CFLOW_ENOMEM, "2^60");
    CHECK(strstr(err.text, "a test: 1152921504606846976 bytes"), "%s", err.text);
    CHECK(a.base == NULL, "left open");
}

/* Huge pages of two neighbouring arenas are counted separately. */
static void counts_huge_pages_of_its_own(void) {
    arena a, b;
    CHECK(arena_open(&a, 8 << 20, "a test", NULL) == CFLOW_OK, "open");
    CHECK(arena_open(&b, 8 << 20, "a test", NULL) == CFLOW_OK, "open");
    memset(a.base, 1, a.bytes);
    CHECK(arena_huge_bytes(&a) <= a.bytes, "%llu", (unsigned long long)arena_huge_bytes(&a));
    CHECK(arena_huge_bytes(&b) == 0, "untouched memory has none");
    arena_close(&a);
    arena_close(&b);
    CHECK(arena_huge_bytes(&a) == 0, "closed");
}

static void zeroed_memory_does_not_wrap(void) {
    CHECK(memory_zeroed(SIZE_MAX / 2, 3) == NULL, "the product wraps");
    void *nothing = memory_zeroed(0, 8);
    CHECK(nothing != NULL, "no elements are no failure");
    memory_free(nothing);
    memory_free(NULL);
}

int main(void) {
    hands_out_aligned_zeroed_memory();
    refuses_what_does_not_fit();
    closes_twice_and_leaves_nothing();
    names_the_bytes_that_it_cannot_allocate();
    counts_huge_pages_of_its_own();
    zeroed_memory_does_not_wrap();
    printf(failed ? "arena: failed\n" : "arena: ok\n");
    return failed;
}
