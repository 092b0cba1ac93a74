/* Decodes one stream with layers from disk, from a cold start. Built with the engine's own kernels
 * (t0) and with those of hinted.c (t1, none).
 *
 *     streamed_HINT FILE MEMORY IO TOKENS THREADS LOGITS
 *
 * MEMORY: bytes for layers, or 0 to keep all in memory. IO: direct, or cached, through the page
 * cache, from which FILE is evicted first. Prints a line of JSON and writes the logits of all
 * tokens, as floats, to the file LOGITS.
 */
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "arms.h"

enum { READS_AT_ONCE = 2, MAX_TOKENS = 1024 };

#define TRY(call)                                                                                  \
    do {                                                                                           \
        cflow_error err;                                                                           \
        if ((call) != CFLOW_OK) FAIL("%s", err.text);                                              \
    } while (0)

/* Reads so far, from the file and, of those, from storage. */
typedef struct {
    unsigned long long reads, bytes, storage_bytes;
} counts;

static counts count(const cflow_model *model) {
    cflow_tier_stats tier;
    struct rusage usage;
    cflow_model_layer_tier(model, &tier);
    getrusage(RUSAGE_SELF, &usage);
    return (counts){tier.reads, tier.disk_bytes, 512ull * (unsigned long long)usage.ru_inblock};
}

static void empty_page_cache(const char *path) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED))
        FAIL("%s cannot be evicted from the page cache", path);
    close(fd);
}

static cflow_model *open_model(const char *path, const char *memory, const char *io, int threads) {
    char *end;
    cflow_model *model;
    cflow_model_options o = {.path = path,
                             .n_threads = threads,
                             .expert_reads = READS_AT_ONCE,
                             .expert_timeout_s = 30,
                             .weights_memory = strtoull(memory, &end, 10)};
    if (*memory == 0 || *end != 0) FAIL("MEMORY is %s: not a number of bytes", memory);
    if (strcmp(io, "cached") == 0)
        o.expert_io = CFLOW_IO_CACHED;
    else if (strcmp(io, "direct") != 0)
        FAIL("IO is %s: neither direct nor cached", io);
    TRY(cflow_model_open(&model, &o, &err));
    return model;
}

static cflow_ctx *open_stream(cflow_model *model, int tokens, int threads) {
    static int32_t blocks[MAX_TOKENS / CFLOW_KV_BLOCK];
    const int32_t n_blocks = (tokens + CFLOW_KV_BLOCK - 1) / CFLOW_KV_BLOCK;
    const cflow_ctx_options o = {.n_threads = threads,
                                 .max_rows = 1,
                                 .max_sequences = 1,
                                 .max_context = tokens,
                                 .n_kv_blocks = n_blocks};
    cflow_ctx *ctx;
    for (int32_t i = 0; i < n_blocks; i++) blocks[i] = i;
    TRY(cflow_ctx_open(&ctx, model, &o, &err));
    TRY(cflow_ctx_bind(ctx, 0, blocks, n_blocks, &err));
    return ctx;
}

/* Runs one step; returns its seconds. */
static double decode(cflow_ctx *ctx, const cflow_header *h, int position, FILE *logits) {
    const cflow_row row = {.token = (37 * position + 11) % (int)h->n_tokens,
                           .position = position,
                           .flags = CFLOW_ROW_LOGITS};
    int32_t status;
    cflow_error why;
    const double begin = now_s();
    TRY(cflow_ctx_step(ctx, &row, 1, &status, NULL, &err));
    const double seconds = now_s() - begin;
    cflow_ctx_row_error(ctx, 0, &why);
    if (status) FAIL("token %d: status %d, %s", position, status, why.text);
    if (fwrite(cflow_ctx_logits(ctx, 0), sizeof(float), h->vocab_size, logits) != h->vocab_size)
        FAIL("the logits cannot be written");
    return seconds;
}

static void print_counts(const char *name, counts from, counts to) {
    printf("\"%s\": {\"reads\": %llu, \"bytes\": %llu, \"storage_bytes\": %llu}, ", name,
           to.reads - from.reads, to.bytes - from.bytes, to.storage_bytes - from.storage_bytes);
}

int main(int argc, char **argv) {
    if (argc != 7) FAIL("%s FILE MEMORY IO TOKENS THREADS LOGITS", argv[0]);
    const int tokens = number(argv[4], "TOKENS", 2, MAX_TOKENS);
    const int threads = number(argv[5], "THREADS", 1, 1024);
    FILE *logits = fopen(argv[6], "wb");
    if (!logits) FAIL("%s cannot be written", argv[6]);
    empty_page_cache(argv[1]);
    const double begin = now_s();
    cflow_model *model = open_model(argv[1], argv[2], argv[3], threads);
    cflow_ctx *ctx = open_stream(model, tokens, threads);
    const cflow_header *h = cflow_model_header(model);
    const double load_s = now_s() - begin;
    const counts loaded = count(model);
    const double first_s = decode(ctx, h, 0, logits);
    const counts first = count(model);
    double rest_s = 0;
    for (int i = 1; i < tokens; i++) rest_s += decode(ctx, h, i, logits);
    const counts all = count(model);
    cflow_tier_stats tier;
    cflow_model_layer_tier(model, &tier);
    putchar('{');
    print_counts("loaded", (counts){0}, loaded);
    print_counts("first", loaded, first);
    print_counts("rest", first, all);
    printf("\"direct\": %s, \"load_s\": %.6f, \"first_s\": %.6f, \"tok_s\": %.6f}\n",
           tier.direct_io ? "true" : "false", load_s, first_s, (tokens - 1) / rest_s);
    cflow_ctx_close(ctx);
    cflow_model_close(model);
    if (fclose(logits)) FAIL("%s cannot be written", argv[6]);
    return 0;
}
