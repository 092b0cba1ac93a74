/* A pool of threads that run one function together, the caller as thread 0. */
#ifndef CFLOW_POOL_H
#define CFLOW_POOL_H

#include "cflow.h"

typedef struct pool pool;
typedef void (*pool_fn)(void *arg, int thread);

/* Starts n_threads - 1 threads. A thread without work spins briefly, then sleeps; if there are more
 * threads than usable cores, it sleeps at once. Errors: EINVAL, ENOMEM. */
cflow_status pool_open(pool **out, int n_threads, cflow_error *err);
void pool_close(pool *p);
int pool_threads(const pool *p);
/* Runs fn(arg, t) on every thread t and returns once all have returned. For one caller at a time.
 */
void pool_run(pool *p, pool_fn fn, void *arg);
/* For all threads of the running fn: blocks until every one has called it. */
void pool_barrier(pool *p);
/* A counter, the turn, on which the threads of the running fn wait. pool_wait returns once it is no
 * longer `seen`; pool_pass adds one to it and wakes the threads that wait. */
unsigned pool_turn(const pool *p);
void pool_wait(pool *p, unsigned seen);
void pool_pass(pool *p);

#endif
