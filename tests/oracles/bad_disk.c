/* A disk that misbehaves as bad_disk.py tells it to. Preloaded, it wraps pread for one file. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { WELL, FAILS, IS_CUT, ALTERS, WAITS, HANGS };

typedef struct { /* shared with the test, which changes it while we run */
    uint64_t device, inode;
    uint64_t begin, end;   /* strikes reads that start in this range */
    _Atomic int64_t times; /* strikes left; below 0: no limit */
    _Atomic int64_t n_struck, n_hanging;
    _Atomic int32_t kind;
    int32_t value; /* FAILS: errno; WAITS: milliseconds */
    /* Of all reads, in percent: */
    int32_t interrupted, short_, delayed;
    int32_t delay_ms; /* at most */
} moods;

static moods *m;
static ssize_t (*read_at)(int, void *, size_t, off_t);
static _Thread_local uint64_t generator;

__attribute__((constructor)) static void begin(void) {
    read_at = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread64");
    const int fd = open(getenv("BAD_DISK"), O_RDWR | O_CLOEXEC);
    m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || m == MAP_FAILED) abort();
    close(fd);
}

static void sleep_ms(int ms) {
    const struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

static uint64_t draw(uint64_t n) {
    if (!generator) generator = (uint64_t)(uintptr_t)&generator | 1;
    generator = generator * 6364136223846793005u + 1442695040888963407u;
    return (generator >> 33) % n;
}

static int happens(int percent) {
    const int does = percent && draw(100) < (uint64_t)percent;
    m->n_struck += does;
    return does;
}

static int strikes(uint64_t at) {
    if (m->kind == WELL || at < m->begin || at >= m->end) return WELL;
    int64_t left = m->times;
    while (left > 0 && !atomic_compare_exchange_weak(&m->times, &left, left - 1)) {
    }
    if (!left) return WELL;
    m->n_struck++;
    return m->kind;
}

static ssize_t fall_ill(int kind, int fd, void *out, size_t n, off_t at) {
    if (kind == WAITS) sleep_ms(m->value);
    if (kind == HANGS) {
        m->n_hanging++;
        while (m->kind == HANGS) sleep_ms(2);
        m->n_hanging--;
    }
    if (kind == FAILS) errno = m->value;
    if (kind == FAILS || kind == IS_CUT) return kind == FAILS ? -1 : 0;
    const ssize_t got = read_at(fd, out, n, at);
    if (kind == ALTERS && got > 0) ((uint8_t *)out)[draw((uint64_t)got)] ^= 0x40;
    return got;
}

static ssize_t read_badly(int fd, void *out, size_t n, off_t at) {
    if (happens(m->delayed)) sleep_ms((int)draw((uint64_t)m->delay_ms + 1));
    if (happens(m->interrupted)) {
        errno = EINTR;
        return -1;
    }
    const int kind = strikes((uint64_t)at);
    const ssize_t got = kind ? fall_ill(kind, fd, out, n, at) : read_at(fd, out, n, at);
    if (got <= 1 || !happens(m->short_)) return got;
    /* Half of it or any part, in whole pages or not; behind it lies what nobody may use. */
    const ssize_t most = draw(2) ? got / 2 : 1 + (ssize_t)draw((uint64_t)got - 1);
    const ssize_t part = most > 4096 && draw(2) ? most / 4096 * 4096 : most;
    memset((uint8_t *)out + part, 0xA5, (size_t)(got - part));
    return part;
}

ssize_t pread64(int fd, void *out, size_t n, off_t at) {
    struct stat s;
    if (!m || fstat(fd, &s) || s.st_dev != m->device || s.st_ino != m->inode)
        return read_at(fd, out, n, at);
    return read_badly(fd, out, n, at);
}

ssize_t pread(int fd, void *out, size_t n, off_t at) {
    return pread64(fd, out, n, at);
}
