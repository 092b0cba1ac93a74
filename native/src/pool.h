/* Threads that run one function together, with a barrier inside. The caller is thread 0. */
#ifndef CFLOW_POOL_H
#define CFLOW_POOL_H

#include "cflow.h"

typedef struct pool pool;
typedef void (*pool_fn)(void *arg, int thread);

/* Starts n_threads - 1 threads. They spin briefly, then sleep; with more threads than usable cores
 * they do not spin at all. */
cflow_status pool_open(pool **out, int n_threads, cflow_error *err);
void pool_close(pool *p);
int pool_threads(const pool *p);
/* Runs fn(arg, t) on every thread t and returns when all have returned. */
void pool_run(pool *p, pool_fn fn, void *arg);
/* All threads of the running fn meet here. */
void pool_barrier(pool *p);
/* A counter the threads of the running fn wait on: pool_wait returns once it is no longer `seen`,
 * pool_pass moves it on by one and wakes who sleeps. */
unsigned pool_turn(const pool *p);
void pool_wait(pool *p, unsigned seen);
void pool_pass(pool *p);

#endif
