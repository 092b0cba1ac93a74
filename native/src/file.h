/* An open model file, read through the page cache or, where the file system allows it, past it. */
#ifndef CFLOW_FILE_H
#define CFLOW_FILE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "cflow.h"

enum { FILE_PAGE = 4096 }; /* alignment of direct reads, in the file and in memory */

typedef struct {
    int fd;
    int direct_fd;      /* for direct reads; -1: the file system has none */
    atomic_int refused; /* 1: a direct read was refused, so all later ones are buffered */
    uint64_t bytes;
} file;

/* Errors: EIO if it cannot be opened, EFORMAT if it is not a regular file. */
cflow_status file_open(file *f, const char *path, cflow_error *err);
/* A second handle for the same file, closed separately. Errors: EIO. */
cflow_status file_share(file *out, const file *f, cflow_error *err);
void file_close(file *f);
/* Reads exactly n bytes at offset into out. Errors: EIO with the system's reason, EFORMAT if the
 * file is too short. */
cflow_status file_read(const file *f, void *out, uint64_t offset, size_t n, cflow_error *err);
/* The same past the page cache where possible; out, offset and n are multiples of FILE_PAGE. */
cflow_status file_read_direct(file *f, void *out, uint64_t offset, size_t n, cflow_error *err);
/* 1 if direct reads are possible and none has been refused. */
int file_is_direct(const file *f);

#endif
