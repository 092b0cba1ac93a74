#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "status.h"

/* 0 if the file system states that it needs more than our alignment. */
static int alignment_suffices(int fd) {
#ifdef STATX_DIOALIGN
    struct statx s;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &s) || !(s.stx_mask & STATX_DIOALIGN))
        return 1;
    return s.stx_dio_offset_align && s.stx_dio_offset_align <= FILE_PAGE &&
           s.stx_dio_mem_align <= FILE_PAGE;
#else
    (void)fd;
    return 1;
#endif
}

/* Opens fd's file again: its path may name another one by now. */
static int open_direct(int fd) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return alignment_suffices(fd) ? open(path, O_RDONLY | O_CLOEXEC | O_DIRECT) : -1;
}

cflow_status file_open(file *f, const char *path, cflow_error *err) {
    /* O_NONBLOCK: opening a pipe without a writer must not block. */
    *f = (file){.fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), .direct_fd = -1};
    struct stat s;
    if (f->fd < 0 || fstat(f->fd, &s)) {
        const int reason = errno;
        file_close(f);
        return fail(err, CFLOW_EIO, "cannot open %s: %s", path, strerror(reason));
    }
    if (!S_ISREG(s.st_mode)) {
        file_close(f);
        return fail(err, CFLOW_EFORMAT, "%s is not a regular file", path);
    }
    f->bytes = (uint64_t)s.st_size;
    f->direct_fd = open_direct(f->fd);
    return CFLOW_OK;
}

cflow_status file_share(file *out, const file *f, cflow_error *err) {
    *out = (file){.fd = fcntl(f->fd, F_DUPFD_CLOEXEC, 0), .direct_fd = -1, .bytes = f->bytes};
    if (out->fd < 0)
        return fail(err, CFLOW_EIO, "cannot open the model file again: %s", strerror(errno));
    out->direct_fd = open_direct(out->fd);
    return CFLOW_OK;
}

void file_close(file *f) {
    if (f->fd >= 0) close(f->fd);
    if (f->direct_fd >= 0) close(f->direct_fd);
    f->fd = f->direct_fd = -1;
}

cflow_status file_read(const file *f, void *out, uint64_t offset, size_t n, cflow_error *err) {
    for (size_t done = 0; done < n;) {
        const ssize_t got = pread(f->fd, (uint8_t *)out + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return fail(err, CFLOW_EIO, "cannot read %zu bytes at %llu: %s", n - done,
                        (unsigned long long)(offset + done), strerror(errno));
        if (got == 0)
            return fail(err, CFLOW_EFORMAT,
                        "the file ends at byte %llu; it became shorter while it was read",
                        (unsigned long long)(offset + done));
        done += (size_t)got;
    }
    return CFLOW_OK;
}

cflow_status file_read_direct(file *f, void *out, uint64_t offset, size_t n, cflow_error *err) {
    size_t done = 0;
    while (file_is_direct(f) && done < n && done % FILE_PAGE == 0) {
        const ssize_t got =
            pread(f->direct_fd, (uint8_t *)out + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EINVAL) atomic_store(&f->refused, 1);
        if (got <= 0) break;
        done += (size_t)got;
    }
    /* The rest after a short or failed direct read; file_read reports the errors. */
    return file_read(f, (uint8_t *)out + done, offset + done, n - done, err);
}

int file_is_direct(const file *f) {
    return f->direct_fd >= 0 && !atomic_load(&f->refused);
}
