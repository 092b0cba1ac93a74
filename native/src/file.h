/* An open model file: exact reads, past the page cache where the file system lets us. */
#ifndef CFLOW_FILE_H
#define CFLOW_FILE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "cflow.h"

enum { FILE_PAGE = 4096 }; /* what direct reads are aligned to, in file and memory */

typedef struct {
    int fd;
    int direct_fd;      /* -1: the file system has no direct reads */
    atomic_int refused; /* 1: a direct read was refused, so buffered ones took over */
    uint64_t bytes;
} file;

/* EIO if it cannot be opened, EFORMAT if it is not a regular file. */
cflow_status file_open(file *f, const char *path, cflow_error *err);
/* The same file, as a handle of its own. EIO. */
cflow_status file_share(file *out, const file *f, cflow_error *err);
void file_close(file *f);
/* Reads exactly n bytes. EIO with the system's reason, EFORMAT if the file ends before. */
cflow_status file_read(const file *f, void *out, uint64_t offset, size_t n, cflow_error *err);
/* The same by direct reads; out, offset and n are multiples of FILE_PAGE. */
cflow_status file_read_direct(file *f, void *out, uint64_t offset, size_t n, cflow_error *err);
/* 1 if direct reads are possible and none has been refused. */
int file_is_direct(const file *f);

#endif
