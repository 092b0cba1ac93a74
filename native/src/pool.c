/* Every wait, for work, for a turn or at a barrier, is for a counter that another thread changes.
 */
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "arena.h"
#include "status.h"

/* SPINS: a thread looks at the counter this often before it sleeps, for 20 to 100 us depending on
 * the processor, which is longer than the threads of a stage differ. YIELD_AT: after this many
 * looks it yields its core once, since the thread that it waits for may be queued behind it: two
 * threads on one core then meet in 4 us instead of 50. Yielding more often gives their time to
 * other processes (measured on 2 cores of a Zen 5 beside two busy processes). */
enum { SPINS = 2000, YIELD_AT = 64, MAX_THREADS = 1024, LINE = 64 };

typedef struct {
    atomic_uint value;
    atomic_uint sleepers;
    char rest_of_line[LINE - 2 * sizeof(atomic_uint)]; /* no other data shares the cache line */
} turn;

typedef struct {
    pool *pool;
    pthread_t thread;
    int index;
} seat;

struct pool {
    turn work;           /* changes when there is a function to run, or the pool closes */
    turn inside;         /* the running fn's: pool_turn, pool_wait, pool_pass */
    turn end;            /* changes when all threads have arrived at the barrier */
    atomic_uint arrived; /* at the barrier */
    pool_fn fn;
    void *arg;
    int n_threads;
    int n_started; /* seats with a running thread, without the caller's */
    int spins;     /* SPINS, or 0 */
    int closing;
    seat *seats; /* (n_threads,) seat 0, the caller's, is not used */
};

static void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void futex(atomic_uint *word, int op, unsigned value) {
    syscall(SYS_futex, word, op, value, NULL, NULL, 0);
}

/* No wake-up is lost: a waiter counts itself as a sleeper before it reads the value again,
 * turn_pass reads the sleepers after it has changed the value. These operations are sequentially
 * consistent, so at least one side sees the other. */
static void turn_wait(turn *t, unsigned seen, int spins) {
    for (int i = 0; i < spins; i++) {
        if (atomic_load_explicit(&t->value, memory_order_acquire) != seen) return;
        if (i == YIELD_AT)
            sched_yield();
        else
            pause_core();
    }
    atomic_fetch_add(&t->sleepers, 1);
    while (atomic_load(&t->value) == seen) futex(&t->value, FUTEX_WAIT_PRIVATE, seen);
    atomic_fetch_sub(&t->sleepers, 1);
}

static void turn_pass(turn *t) {
    atomic_fetch_add(&t->value, 1);
    if (atomic_load(&t->sleepers)) futex(&t->value, FUTEX_WAKE_PRIVATE, INT32_MAX);
}

unsigned pool_turn(const pool *p) {
    return atomic_load_explicit(&p->inside.value, memory_order_acquire);
}

void pool_wait(pool *p, unsigned seen) {
    turn_wait(&p->inside, seen, p->spins);
}

void pool_pass(pool *p) {
    turn_pass(&p->inside);
}

void pool_barrier(pool *p) {
    const unsigned seen = atomic_load(&p->end.value); /* cannot change before this thread arrives */
    if (atomic_fetch_add(&p->arrived, 1) + 1 < (unsigned)p->n_threads) {
        turn_wait(&p->end, seen, p->spins);
        return;
    }
    atomic_store(&p->arrived, 0);
    turn_pass(&p->end);
}

static void *work(void *arg) {
    const seat *s = arg;
    pool *p = s->pool;
    for (unsigned seen = 0;; seen++) {
        turn_wait(&p->work, seen, p->spins);
        if (p->closing) return NULL;
        p->fn(p->arg, s->index);
        pool_barrier(p);
    }
}

void pool_run(pool *p, pool_fn fn, void *arg) {
    p->fn = fn;
    p->arg = arg;
    turn_pass(&p->work);
    fn(arg, 0);
    pool_barrier(p);
}

static int usable_cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set))
        return CPU_SETSIZE; /* more cores than the set holds */
    return CPU_COUNT(&set);
}

/* Pool threads block all signals: these are for the caller's threads, whose waits they interrupt.
 */
static cflow_status start_threads(pool *p, cflow_error *err) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = 0;
    for (int i = 1; i < p->n_threads && !code; i++) {
        p->seats[i] = (seat){.pool = p, .index = i};
        code = pthread_create(&p->seats[i].thread, NULL, work, &p->seats[i]);
        if (!code) p->n_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!code) return CFLOW_OK;
    return fail(err, CFLOW_ENOMEM, "cannot start thread %d of %d: %s", p->n_started + 1,
                p->n_threads, strerror(code));
}

cflow_status pool_open(pool **out, int n_threads, cflow_error *err) {
    *out = NULL;
    if (n_threads < 1 || n_threads > MAX_THREADS)
        return fail(err, CFLOW_EINVAL, "%d threads; there must be 1 to %d", n_threads, MAX_THREADS);
    pool *p = memory_zeroed(1, sizeof *p);
    seat *seats = memory_zeroed((size_t)n_threads, sizeof *seats);
    if (!p || !seats) {
        memory_free(p);
        memory_free(seats);
        return fail(err, CFLOW_ENOMEM, "no memory for %d threads", n_threads);
    }
    p->seats = seats;
    p->n_threads = n_threads;
    p->spins = n_threads <= usable_cores() ? SPINS : 0;
    const cflow_status status = start_threads(p, err);
    if (status != CFLOW_OK) {
        pool_close(p);
        return status;
    }
    *out = p;
    return CFLOW_OK;
}

void pool_close(pool *p) {
    if (!p) return;
    p->closing = 1;
    turn_pass(&p->work);
    for (int i = 1; i <= p->n_started; i++) pthread_join(p->seats[i].thread, NULL);
    memory_free(p->seats);
    memory_free(p);
}

int pool_threads(const pool *p) {
    return p->n_threads;
}
