/* Whether the small parts of a file are what they must be, before anything uses them. */
#ifndef CFLOW_CHECK_H
#define CFLOW_CHECK_H

#include "cflow.h"

/* Magic, version, checksum, sizes, ranges and the section table. file_bytes: what there is; a file
 * opened for its headers may lack its banks. */
cflow_status check_header(const cflow_header *h, uint64_t file_bytes, int header_only,
                          cflow_error *err);
/* Every field of one layer, by itself. */
cflow_status check_layer(const cflow_header *h, const cflow_layer *l, uint32_t index,
                         cflow_error *err);
/* The token-bytes section: well formed, one entry per token. */
cflow_status check_token_bytes(const cflow_header *h, const uint8_t *section, uint64_t bytes,
                               cflow_error *err);

const char *section_name(uint32_t section);
int section_is_bank(uint32_t section);
uint64_t n_runs(uint64_t bank_bytes);

enum { RUN_BYTES = 1 << 20, RECORD_ALIGN = 4096, MAX_EXPERTS = 4096 };

#endif
