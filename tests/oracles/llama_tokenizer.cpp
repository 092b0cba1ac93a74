// llama.cpp's tokenizer as a filter: tokenizer MODEL PRE. Reads texts, each behind its u32 length in
// bytes; writes a line of ids for each. Special tokens are neither added nor looked for.

#include "gguf.h"
#include "llama-arch.h"
#include "llama-model-loader.h"
#include "llama-vocab.h"

#include <cstdio>
#include <string>
#include <vector>

// Of split models; this program reads none.
extern "C" int llama_split_path(char *, size_t, const char *, int32_t, int32_t) { return 0; }
extern "C" int llama_split_prefix(char *, size_t, const char *, int32_t, int32_t) { return 0; }

int main(int argc, char ** argv) {
    if (argc != 3) return 2;
    gguf_context * file = gguf_init_from_file(argv[1], {true, nullptr});
    if (!file) return 1;
    if (*argv[2]) gguf_set_val_str(file, "tokenizer.ggml.pre", argv[2]);
    std::vector<std::string> splits;
    llama_model_loader loader(file, nullptr, nullptr, "", splits, nullptr, LLAMA_LOAD_MODE_NONE,
                              false, true, false, nullptr, nullptr);
    llama_vocab vocab;
    vocab.load(loader, LLM_KV(LLM_ARCH_LLAMA));
    uint32_t n;
    while (fread(&n, sizeof n, 1, stdin) == 1) {
        std::string text(n, 0);
        if (n && fread(&text[0], 1, n, stdin) != n) return 1;
        for (auto id : vocab.tokenize(text, false, false)) printf("%d ", id);
        printf("\n");
    }
}
