/* The pool: every thread runs, and barriers order memory, with spinning and with sleeping threads.
 */
#include <sched.h>
#include <signal.h>
#include <string.h>

#include "expect.h"
#include "pool.h"

enum { MAX_THREADS = 64 };

/* Not atomic: only the barrier orders these. Each thread has its own cache line. */
typedef struct {
    pool *p;
    int n_rounds;
    long cells[MAX_THREADS][8];
    long sums[MAX_THREADS];
} rounds;

/* In every round each thread writes its cell, then adds up all cells. */
static void run_rounds(void *arg, int thread) {
    rounds *r = arg;
    const int n = pool_threads(r->p);
    for (int round = 0; round < r->n_rounds; round++) {
        r->cells[thread][0] = round + thread;
        pool_barrier(r->p);
        for (int i = 0; i < n; i++) r->sums[thread] += r->cells[i][0];
        pool_barrier(r->p);
    }
}

static void barriers_order_memory(int n_threads, int n_rounds) {
    rounds r = {.n_rounds = n_rounds};
    cflow_error err;
    CHECK(pool_open(&r.p, n_threads, &err) == CFLOW_OK, "%s", err.text);
    CHECK(pool_threads(r.p) == n_threads, "%d threads", pool_threads(r.p));
    pool_run(r.p, run_rounds, &r);
    const long n = n_threads, m = n_rounds;
    const long want = n * (m * (m - 1) / 2) + m * (n * (n - 1) / 2);
    for (int i = 0; i < n_threads; i++)
        CHECK(r.sums[i] == want, "%d threads: thread %d has %ld, want %ld", n_threads, i, r.sums[i],
              want);
    pool_close(r.p);
}

static void count_run(void *arg, int thread) {
    ((rounds *)arg)->cells[thread][0]++;
}

static void runs_every_thread_once_each_time(int n_threads, int n_runs) {
    rounds r = {0};
    cflow_error err;
    CHECK(pool_open(&r.p, n_threads, &err) == CFLOW_OK, "%s", err.text);
    for (int i = 0; i < n_runs; i++) {
        pool_run(r.p, count_run, &r);
        for (int t = 0; t < n_threads; t++)
            CHECK(r.cells[t][0] == i + 1, "thread %d ran %ld times, want %d", t, r.cells[t][0],
                  i + 1);
    }
    pool_close(r.p);
}

/* On one core the threads of a pool never spin: every wait is a sleep. */
static void sleeping_threads_wake(void) {
    cpu_set_t before, one;
    CHECK(!sched_getaffinity(0, sizeof before, &before), "affinity");
    int core = 0;
    while (!CPU_ISSET(core, &before)) core++;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    CHECK(!sched_setaffinity(0, sizeof one, &one), "affinity");
    barriers_order_memory(2, 1000);
    barriers_order_memory(32, 200);
    runs_every_thread_once_each_time(4, 500);
    CHECK(!sched_setaffinity(0, sizeof before, &before), "affinity");
}

static void refuses_absurd_counts(void) {
    pool *p;
    cflow_error err;
    CHECK(pool_open(&p, 0, &err) == CFLOW_EINVAL && !p, "0 threads");
    CHECK(pool_open(&p, 1 << 20, &err) == CFLOW_EINVAL && !p, "2^20 threads");
    CHECK(strstr(err.text, "1048576 threads"), "%s", err.text);
    pool_close(NULL);
}

static void block_mask(void *arg, int thread) {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    ((rounds *)arg)->cells[thread][0] = sigismember(&mask, SIGTERM);
}

static void signals_reach_the_caller_only(void) {
    rounds r = {0};
    CHECK(pool_open(&r.p, 2, NULL) == CFLOW_OK, "open");
    pool_run(r.p, block_mask, &r);
    CHECK(r.cells[0][0] == 0 && r.cells[1][0] == 1, "blocked: %ld here, %ld there", r.cells[0][0],
          r.cells[1][0]);
    pool_close(r.p);
}

int main(void) {
    barriers_order_memory(1, 1000);
    barriers_order_memory(2, 5000);
    barriers_order_memory(5, 1000);
    barriers_order_memory(32, 1000);
    runs_every_thread_once_each_time(2, 2000);
    runs_every_thread_once_each_time(32, 200);
    sleeping_threads_wake();
    refuses_absurd_counts();
    signals_reach_the_caller_only();
    printf(failed ? "pool: failed\n" : "pool: ok\n");
    return failed;
}
