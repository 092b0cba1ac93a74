/* Temporary files that leave nothing behind, however the process ends: they have no name. */
#ifndef CFLOW_TEMPORARY_H
#define CFLOW_TEMPORARY_H

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Opens one for reading and writing. path: a name for it that is valid while the descriptor is
 * open. In /var/tmp, which is a disk: a file system in memory has no direct reads. */
static inline int temporary_file(char path[64]) {
    snprintf(path, 64, "/var/tmp/cflow-test-XXXXXX");
    const int fd = mkstemp(path);
    if (fd < 0) {
        perror(path);
        exit(1);
    }
    unlink(path);
    snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

#endif
