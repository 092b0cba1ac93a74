/* Checks of a file's headers and small sections, before anything uses them. All report EFORMAT with
 * the field and its value, check_header also EUNSUPPORTED for another version. */
#ifndef CFLOW_CHECK_H
#define CFLOW_CHECK_H

#include "cflow.h"

/* Checks magic, version, checksum, ranges and the section table. file_bytes: the size of the file,
 * which may lack its banks if header_only. */
cflow_status check_header(const cflow_header *h, uint64_t file_bytes, int header_only,
                          cflow_error *err);
/* Checks every field of layer `index`. */
cflow_status check_layer(const cflow_header *h, const cflow_layer *l, uint32_t index,
                         cflow_error *err);
/* Checks that the token-bytes section is well formed and has one entry for each token. */
cflow_status check_token_bytes(const cflow_header *h, const uint8_t *section, uint64_t bytes,
                               cflow_error *err);

const char *section_name(uint32_t section);
int section_is_bank(uint32_t section);
/* Number of runs in the resident bank; each has a checksum. */
uint64_t n_runs(uint64_t bank_bytes);

enum { RUN_BYTES = 1 << 20, RECORD_ALIGN = 4096, MAX_EXPERTS = 4096 };

#endif
