/* A file that goes with the process, however that ends: its name is gone before anything is in it.
 */
#ifndef CFLOW_TEMPORARY_H
#define CFLOW_TEMPORARY_H

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Opens it for reading and writing. path: by which it can be opened again, cut and filled, for as
 * long as the descriptor is open. On /var/tmp: a disk, not memory, has direct reads. */
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
