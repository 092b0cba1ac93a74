/* 32 rows of a block of every encoding, between marks for llvm-mca. Never run.
 *
 * The build gives the instruction set's file as SOURCE. A region has 1 row of x or 3; the cost of
 * one more row is half of the difference.
 */
#include SOURCE

static INLINE void add_unit(chunk *p, uint32_t bytes, uint32_t rows, void (*add)(const chunk *)) {
    float *acc = p->acc;
    fetch(p->block, 2 * bytes, AHEAD);
#pragma GCC unroll 4
    for (p->lane = 0; p->lane < 32; p->lane += rows) {
        p->acc = acc + p->lane * p->m;
        add(p);
    }
}

#define REGION(encoding, bytes, rows)                                                              \
    void region_##encoding##_##rows(const uint8_t *block, const x_block *x, float *acc);           \
    void region_##encoding##_##rows(const uint8_t *block, const x_block *x, float *acc) {          \
        const matmul_args args = {.stripe_groups = 8};                                             \
        chunk p = {.args = &args, .head = block, .block = block, .m = rows, .x = x, .acc = acc};   \
        __asm__ volatile("# LLVM-MCA-BEGIN " #encoding " " #rows::: "memory");                     \
        add_unit(&p, bytes, CHUNK, add_##encoding);                                                \
        __asm__ volatile("# LLVM-MCA-END" ::: "memory");                                           \
    }

#define REGIONS(encoding, bytes)                                                                   \
    REGION(encoding, bytes, 1)                                                                     \
    REGION(encoding, bytes, 3)

REGIONS(q4_0, 288)
REGIONS(q4_1, 320)
REGIONS(q8_0, 544)
REGIONS(q4_k, 288)
REGIONS(q6_k, 416)
